"""Manifests and commit records: what was written is read; what was not is refused, whatever it is."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shade.checkpoint.manifest import ChunkEntry, Commit, Manifest, TensorEntry, digest_of
from shade.errors import CheckpointError, CorruptCheckpointError
from tests.unit.checkpoint.mutation import mutants

DIGEST = "0" * 32
MANIFEST = Manifest(
    run="run-1",
    step=120,
    rank=1,
    world_size=2,
    codec="none",
    num_bytes=100,
    tensors={
        "model/w": TensorEntry("F32", (4, 5), 0, 80),
        "model/empty": TensorEntry("F32", (0, 3), 80, 80),
        "model/é☃": TensorEntry("BF16", (10,), 80, 100),
    },
    chunks=(ChunkEntry(64, DIGEST), ChunkEntry(36, DIGEST)),
    tree={"dict": [["model"], [{"tensor": "model/w"}]]},
    chunk_bytes=64,
)
COMMIT = Commit("run-1", 120, 7, 2, (DIGEST, "f" * 32), 200, 1.5e9, {"val_loss": 0.25})


def canonical(body: Any) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


def parse_manifest(body: Any) -> Manifest:
    content = canonical(body)
    return Manifest.parse(content, digest_of(content))


def parse_commit(body: Any) -> Commit:
    if isinstance(body, dict):
        body = {name: value for name, value in body.items() if name != "digest"}
        body["digest"] = digest_of(canonical(body))
    return Commit.parse(canonical(body))


def body_of(record: Manifest | Commit) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(record.to_bytes())
    return made


def test_records_come_back() -> None:
    assert Manifest.parse(MANIFEST.to_bytes(), MANIFEST.digest) == MANIFEST
    assert Manifest.parse(memoryview(MANIFEST.to_bytes()), MANIFEST.digest).to_bytes() == MANIFEST.to_bytes()
    assert Commit.parse(COMMIT.to_bytes()) == COMMIT
    assert Commit.parse(bytearray(COMMIT.to_bytes())).digest == COMMIT.digest
    empty = replace(MANIFEST, num_bytes=0, tensors={}, chunks=())
    assert Manifest.parse(empty.to_bytes(), empty.digest) == empty
    assert replace(MANIFEST, step=121).digest != MANIFEST.digest


def test_the_order_of_tensors_makes_no_difference_to_the_bytes() -> None:
    turned = replace(MANIFEST, tensors=dict(reversed(list(MANIFEST.tensors.items()))))
    assert turned.to_bytes() == MANIFEST.to_bytes()
    assert list(Manifest.parse(turned.to_bytes(), turned.digest).tensors) == list(MANIFEST.tensors)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_no_number_stays_json(value: float) -> None:
    record = replace(COMMIT, metrics={"val_loss": value, "accuracy": 0.5})
    again = Commit.parse(record.to_bytes())
    assert math.isnan(again.metrics["val_loss"])
    assert again.metrics["accuracy"] == 0.5
    assert (again.to_bytes(), again.digest) == (record.to_bytes(), record.digest)
    json.loads(record.to_bytes(), parse_constant=pytest.fail)


@pytest.mark.parametrize("record", [MANIFEST, COMMIT], ids=["manifest", "commit"])
def test_every_flipped_bit_and_every_truncation_is_seen(record: Manifest | Commit) -> None:
    content = record.to_bytes()
    read = (lambda wrong: Manifest.parse(wrong, MANIFEST.digest)) if record is MANIFEST else Commit.parse
    for place in range(len(content)):
        for bit in range(8):
            wrong = bytearray(content)
            wrong[place] ^= 1 << bit
            with pytest.raises(CorruptCheckpointError):
                read(wrong)
        with pytest.raises(CorruptCheckpointError):
            read(content[:place])


def test_another_version_is_not_read() -> None:
    for change in ({"version": 2}, {"format": "other"}, {"version": "1"}, {"version": None}):
        with pytest.raises(CorruptCheckpointError, match="version 1"):
            parse_manifest({**body_of(MANIFEST), **change})
        with pytest.raises(CorruptCheckpointError, match="version 1"):
            parse_commit({**body_of(COMMIT), **change})


TENSOR = {"dtype": "F32", "shape": [4, 5], "start": 0, "stop": 80}
REST = {"dtype": "F32", "shape": [5], "start": 80, "stop": 100}


@pytest.mark.parametrize(
    "change",
    [
        {"run": ""},
        {"run": ".."},
        {"run": "a/b"},
        {"run": "a\\b"},
        {"run": "a\x00"},
        {"run": "a" * 200},
        {"run": 5},
        {"step": -1},
        {"step": True},
        {"step": 1.0},
        {"step": 2**63},
        {"rank": 2},
        {"rank": -1},
        {"world_size": 0},
        {"world_size": 10**9},
        {"codec": "../x"},
        {"codec": None},
        {"num_bytes": 99},
        {"num_bytes": 2**62},
        {"chunk_bytes": 0},
        {"chunk_bytes": -64},
        {"chunk_bytes": 2**40},
        {"chunk_bytes": 128},
        {"chunks": []},
        {"chunks": {}},
        {"chunks": [{"num_bytes": 64, "digest": DIGEST}, {"num_bytes": 37, "digest": DIGEST}]},
        {"chunks": [{"num_bytes": 64, "digest": DIGEST}, {"num_bytes": 36, "digest": "X" * 32}]},
        {"chunks": [{"num_bytes": 64, "digest": DIGEST}, {"num_bytes": 36}]},
        {"chunks": [{"num_bytes": 64, "digest": DIGEST}, {"num_bytes": 36, "digest": DIGEST, "more": 1}]},
        {"codec": "zstd", "chunks": [{"num_bytes": 2**50, "digest": DIGEST}, {"num_bytes": 36, "digest": DIGEST}]},
        {"tensors": []},
        {"tensors": {}},
        {"unknown": 1},
        *({"tensors": {"a": {**TENSOR, **wrong}, "b": REST}} for wrong in (
            {"dtype": "F33"},
            {"dtype": ["F32"]},
            {"dtype": None},
            {"shape": [4, -5]},
            {"shape": [4.0, 5]},
            {"shape": [True, 20]},
            {"shape": [2**62, 2**62]},
            {"shape": 20},
            {"shape": [1] * 100 + [20]},
            {"start": -8, "stop": 72},
            {"start": 8, "stop": 88},
            {"stop": 79},
            {"start": 80, "stop": 0},
            {"start": "0"},
            {"more": 1},
        )),
        {"tensors": {"a": TENSOR, "b": TENSOR}},
        {"tensors": {"a": TENSOR, "b": {**TENSOR, "shape": [4], "start": 84, "stop": 100}}},
        {"tensors": {"a": {"dtype": "U8", "shape": [2], "start": 0, "stop": 2},
                     "b": {"dtype": "BF16", "shape": [49], "start": 2, "stop": 100},
                     "c": {"dtype": "F32", "shape": [0], "start": 2, "stop": 2}}},
        {"tensors": {"__metadata__": TENSOR, "b": REST}},
        {"tensors": {"\ud800": TENSOR, "b": REST}},
        {"tree": "\ud800"},
        {"tree": math.nan},
    ],
    ids=lambda change: repr(change)[:60].encode("ascii", "replace").decode(),
)  # fmt: skip
def test_a_wrong_manifest_is_refused_though_its_digest_is_right(change: dict[str, Any]) -> None:
    assert parse_manifest(body_of(MANIFEST)) == MANIFEST
    with pytest.raises(CorruptCheckpointError):
        parse_manifest({**body_of(MANIFEST), **change})


@pytest.mark.parametrize(
    "change",
    [
        {"run": "../.."},
        {"step": -1},
        {"step": "1"},
        {"sequence": 0.5},
        {"sequence": 2**64},
        {"world_size": 3},
        {"world_size": 0, "manifests": []},
        {"manifests": [DIGEST, "f" * 31]},
        {"manifests": [DIGEST, None]},
        {"manifests": DIGEST},
        {"num_bytes": -1},
        {"saved_at": None},
        {"saved_at": math.inf},
        {"saved_at": True},
        {"metrics": []},
        {"metrics": {"a": "b"}},
        {"metrics": {"a": True}},
        {"more": 1},
        {"run": "\ud800"},
    ],
    ids=lambda change: repr(change).encode("ascii", "replace").decode(),
)
def test_a_wrong_record_is_refused_though_its_digest_is_right(change: dict[str, Any]) -> None:
    assert parse_commit(body_of(COMMIT)) == COMMIT
    with pytest.raises(CorruptCheckpointError):
        parse_commit({**body_of(COMMIT), **change})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"1" * 10_000,
        b"null",
        b"[]",
        b'"x"',
        MANIFEST.to_bytes().replace(b'"rank":1,', b'"rank":1,"rank":1,'),
        MANIFEST.to_bytes().replace(b'"rank":1,', b'"rank": 1,'),
        MANIFEST.to_bytes() + b" ",
        MANIFEST.to_bytes().replace(b'"model/w":', b'"model/w":{},"model/w":'),
        MANIFEST.to_bytes().replace(b'{"dict"', b'{"dict":' * 3000 + b"1" + b"}" * 3000 + b'{"dict"'),
    ],
    ids=range(13),
)
def test_what_is_no_canonical_json_is_refused(content: bytes) -> None:
    with pytest.raises(CorruptCheckpointError):
        Manifest.parse(content, digest_of(content))
    with pytest.raises(CorruptCheckpointError):
        Commit.parse(content)


def test_a_bottomless_tree_is_refused() -> None:
    deep = b'{"tuple":[' * 3000 + b"1" + b"]}" * 3000
    content = MANIFEST.to_bytes().replace(b'{"tensor":"model/w"}', deep)
    assert content != MANIFEST.to_bytes()
    with pytest.raises(CorruptCheckpointError):
        Manifest.parse(content, digest_of(content))


@pytest.mark.parametrize("record", [MANIFEST, COMMIT], ids=["manifest", "commit"])
def test_mutants_are_refused_or_say_what_they_are(record: Manifest | Commit) -> None:
    parse = parse_manifest if record is MANIFEST else parse_commit
    refused = 0
    for mutant in mutants(body_of(record), random.Random(0), 5000):
        try:
            read = parse(mutant)
        except CorruptCheckpointError:
            refused += 1
        else:  # a step, a metric or a name that could have been: it is read as it stands
            again: Any = body_of(read)
            assert {**again, "digest": 0} == {**mutant, "digest": 0}
    assert refused > 2000


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(CheckpointError):
        Manifest.parse(content, digest_of(content))
    with pytest.raises(CheckpointError):
        Commit.parse(content)
