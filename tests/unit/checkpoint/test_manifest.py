"""Manifests and commit records: what was written is read; what was not is refused, whatever it is."""

from __future__ import annotations

import json
import math
import random
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from shade.checkpoint._format.digest import digest_of
from shade.checkpoint._format.manifest import Bound, ChunkEntry, Commit, Manifest, TensorEntry
from shade.errors import CheckpointError, CorruptCheckpointError, NewerSnapshotError
from tests.support.mutation import mutants

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
    changes = (
        {"version": 3},
        {"version": 0},
        {"version": True},
        {"format": "other"},
        {"version": "1"},
        {"version": None},
    )
    for change in changes:
        with pytest.raises(CorruptCheckpointError, match="version 1"):
            parse_manifest({**body_of(MANIFEST), **change})
        is_newer = change == {"version": 3}  # with the digest of what it says
        with pytest.raises(NewerSnapshotError if is_newer else CorruptCheckpointError, match="version 1"):
            parse_commit({**body_of(COMMIT), **change})
    damaged = COMMIT.to_bytes().replace(b'"version":1', b'"version":3')
    with pytest.raises(CorruptCheckpointError, match="version 1"):
        Commit.parse(damaged)


# ── version 2 ───────────────────────────────────────────────────────────────────────────────────────────────────────

LOSSY = Manifest(
    run="run-1",
    step=120,
    rank=1,
    world_size=2,
    codec="topk-delta",
    num_bytes=8192,
    tensors={"w": TensorEntry("F32", (1024,), 0, 4096), "v": TensorEntry("F32", (1023,), 4096, 8188)}
    | {"u": TensorEntry("U8", (4,), 8188, 8192)},
    chunks=(ChunkEntry(10, DIGEST, "topk-delta", DIGEST), ChunkEntry(2192, DIGEST, "none", DIGEST)),
    tree=None,
    chunk_bytes=6000,
    bounds={"w": Bound(0.5, 1e-3)},
    version=2,
)
BUILT = replace(COMMIT, base=DIGEST, version=2)


def test_records_of_version_2_come_back() -> None:
    assert Manifest.parse(LOSSY.to_bytes(), LOSSY.digest) == LOSSY
    assert Commit.parse(BUILT.to_bytes()) == BUILT
    keyframe = replace(BUILT, base=None)
    assert Commit.parse(keyframe.to_bytes()) == keyframe
    assert LOSSY.chunk_codec(0) == "topk-delta"
    assert MANIFEST.chunk_codec(0) == "none"
    assert (MANIFEST.plain_digest(0), replace(MANIFEST, codec="zstd").plain_digest(0)) == (DIGEST, None)


def test_what_stands_alone_is_written_as_it_always_was() -> None:
    assert set(body_of(COMMIT)) == set(body_of(BUILT)) - {"base"}
    assert set(body_of(MANIFEST)) == set(body_of(LOSSY)) - {"bounds"}
    assert body_of(MANIFEST)["chunks"][0].keys() == {"num_bytes", "digest"}
    assert (body_of(COMMIT)["version"], body_of(BUILT)["version"]) == (1, 2)


def test_a_reader_of_version_1_is_told_clearly() -> None:
    """As version 1 was written: it compares the number before anything else, and names both."""
    for record in (LOSSY, BUILT):
        told = body_of(record)
        assert (told["format"], told["version"]) != ("shade-checkpoint", 1)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 1},
        {"bounds": {}},
        {"bounds": {"v": {"max_abs": 0.5, "relative": 0.1}}},
        {"bounds": {"w": {"max_abs": 0.5, "relative": 0.1}, "x": {"max_abs": 0.5, "relative": 0.1}}},
        {"bounds": {"w": {"max_abs": -0.5, "relative": 0.1}}},
        {"bounds": {"w": {"max_abs": 0.5}}},
        {"bounds": {"w": [0.5, 0.1]}},
        {"bounds": None},
        {"codec": "none"},
        {"chunks": [{"num_bytes": 10, "digest": DIGEST}, {"num_bytes": 2192, "digest": DIGEST}]},
        {"chunks": [{"num_bytes": 10, "digest": DIGEST, "codec": "../x", "plain": DIGEST}] * 2},
        {"chunks": [{"num_bytes": 10, "digest": DIGEST, "codec": "topk-delta", "plain": "x"}] * 2},
        {"chunks": [{"num_bytes": 0, "digest": DIGEST, "codec": "dedup", "plain": DIGEST}] * 2},
        {"chunks": [{"num_bytes": 5, "digest": DIGEST, "codec": "none", "plain": DIGEST}] * 2},
    ],
)
def test_a_manifest_of_version_2_that_cannot_be_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(CorruptCheckpointError):
        parse_manifest({**body_of(LOSSY), **change})


@pytest.mark.parametrize("change", [{"base": "x"}, {"base": 5}, {"base": DIGEST.upper() + "G"}, {"version": 1}])
def test_a_record_of_version_2_that_cannot_be_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(CorruptCheckpointError):
        parse_commit({**body_of(BUILT), **change})


def test_an_unknown_codec_counts_as_one_that_is_not_exact() -> None:
    unknown = replace(LOSSY, chunks=(ChunkEntry(10, DIGEST, "lossy-from-2030", DIGEST), LOSSY.chunks[1]))
    assert parse_manifest(body_of(unknown)) == unknown
    with pytest.raises(CorruptCheckpointError, match="'w'"):
        parse_manifest({**body_of(unknown), "bounds": {}})


def test_tensors_are_found_by_where_they_lie() -> None:
    for first, last in [(0, 1), (0, 80), (79, 81), (80, 100), (99, 100), (0, 100)]:
        expected = [
            name
            for name, entry in MANIFEST.tensors.items()
            if entry.start < entry.stop and entry.start < last and entry.stop > first
        ]
        assert [name for name, _ in MANIFEST.tensors_between(first, last)] == expected


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
        except (CorruptCheckpointError, NewerSnapshotError):
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


def test_hashing_lets_others_run() -> None:
    """Whoever hashes a snapshot holds nothing that a training needs."""
    content, counted, ended = bytes(256 * 2**20), [0], threading.Event()

    def count() -> None:
        while not ended.is_set():
            counted[0] += 1
            time.sleep(0)

    counting = threading.Thread(target=count)
    counting.start()
    try:
        while not counted[0]:
            time.sleep(0.001)
        before = counted[0]
        state = digest_of(content)
        while_hashing = counted[0] - before
    finally:
        ended.set()
        counting.join()
    assert state == xxhash.xxh3_128_hexdigest(content)
    assert while_hashing > 100
