"""Every format that shade keeps or sends: its golden file is read as what it was made of, and is written so today."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shade.cache.entry import FORMAT_ENCODED, FORMAT_ITEM, FORMAT_PICTURE, unseal
from shade.checkpoint._capture.flatten import unflatten
from shade.checkpoint._codecs.base import CODECS
from shade.checkpoint._format.digest import digest_of
from shade.checkpoint._interchange.export import load_state
from shade.checkpoint._restore.reader import Reader
from shade.checkpoint._restore.restore import read_newest
from shade.checkpoint._tiers.erasure import ErasureCode
from shade.checkpoint._tiers.slot_table import SlotLayout, SlotTable
from shade.checkpoint._tiers.storage import StorageTier
from shade.control import message as telemetry
from shade.control.profile import Profile
from shade.control.study import read_journal, run
from shade.data._decode.cached_format import picture_of
from shade.data._source import item_codec
from shade.gradient._comm.message import unpack
from shade.policy.trace import Trace
from shade.rank_group import SingleProcessGroup
from shade.storage import open_volume
from shade.trajectory import Trajectory
from tests.golden import make
from tests.golden.make import GOLDEN, STATES
from tests.support.format_reader import read_snapshot


def golden(name: str) -> bytes:
    return (GOLDEN / name).read_bytes()


def same(found: Any, saved: Any) -> bool:
    """Equal bit for bit, in structure and dtype too."""
    if isinstance(saved, torch.Tensor | np.ndarray):
        one, other = np.asarray(found), np.asarray(saved)
        return found.dtype == saved.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(saved, dict):
        return found.keys() == saved.keys() and all(same(found[key], saved[key]) for key in saved)
    if isinstance(saved, list | tuple):
        return len(found) == len(saved) and all(same(one, other) for one, other in zip(found, saved, strict=True))
    return type(found) is type(saved) and repr(found) == repr(saved)  # NaN is NaN here


def test_what_is_written_now_has_the_same_bytes() -> None:
    found = make.written()
    assert [name for name, content in found.items() if content != golden(name)] == []


def test_every_golden_file_is_of_a_format_that_is_tested_here() -> None:
    files = {path.relative_to(GOLDEN) for path in GOLDEN.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    # What other programs have written is tested in tests/unit/data/test_shards_writers.py.
    names = {str(path) for path in files if path.parts[0] != "shards"}
    others = {"make.py", "chunks.json", "export.pt", "trace.npz", "evaluations.jsonl"}
    assert names == {*make.written(), *make.compressed(), *make.losses(), *(f"{name}.pt" for name in STATES), *others}


# ── snapshots and exports ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_snapshot_is_restored(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "snapshot", tmp_path / "golden" / "step-0000000120")
    tier = StorageTier(open_volume(str(tmp_path)), "golden")
    found = read_newest(Reader([tier]), SingleProcessGroup())
    tier.close()
    assert found is not None
    record = found.record
    assert (record.step, record.sequence, record.saved_at) == (120, 7, 1.5e9)
    assert same(unflatten(found.tree, dict(found.tensors)), make.state())


def test_a_reader_that_imports_nothing_of_ours_reads_it() -> None:
    record, (state,), _ = read_snapshot(GOLDEN / "snapshot")
    assert record["metrics"] == {"val_loss": 0.1, "bad": None}
    assert state["model"]["weight"].tolist() == make.state()["model"]["weight"].tolist()


@pytest.mark.parametrize(("name", "form"), [("export.safetensors", "safetensors"), ("export.pt", "torch")])
def test_an_export_is_imported(name: str, form: str) -> None:
    found = load_state(GOLDEN / name, form)
    expected = make.state()
    assert same(found["model"], expected["model"])
    assert same(found["optimizer"], expected["optimizer"])


@pytest.mark.parametrize("name", ["zstd", *make.DELTAS])
def test_a_chunk_is_decoded(name: str) -> None:
    data, base, _ = make.chunks()
    found = make.decoded(name, golden(f"chunk.{name}"))
    if CODECS.get(name).is_exact:
        assert found == (base if name == "dedup" else data).tobytes()
    else:
        assert digest_of(found) == json.loads(golden("chunks.json"))[name]
        near, exact, before = (np.frombuffer(each, np.float32) for each in (found, data, base))
        assert np.linalg.norm(near - exact) < np.linalg.norm(before - exact)
    stored = golden("chunk.dedup") if name == "dedup" else make.compressed()[f"chunk.{name}"]
    assert make.decoded(name, stored) == found, "what is encoded now decodes to the same"


def test_a_table_of_slots_is_read() -> None:
    table = SlotTable.parse(golden("table.json"))
    assert table is not None
    slot = table.slots[1]
    assert (table.generation, slot.number, slot.step, slot.shard_bytes) == (1, 1, 120, (4096, 100))
    assert slot.layout == SlotLayout(("a", "b", "c"), 1, grouped=True)


def test_a_lost_chunk_is_rebuilt_from_parity() -> None:
    pieces = {1: b"shade" * 12, 2: b"", 3: golden("parity.bin")}
    assert ErasureCode(3, 1).rebuild(0, pieces, 64).tobytes() == bytes(range(64))


# ── samples ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_entries_of_the_cache_are_read() -> None:
    assert bytes(unseal(make.INDEX, golden("entry.encoded"), FORMAT_ENCODED)) == b"the bytes of a file"
    picture_HWC = picture_of(unseal(make.INDEX, golden("entry.picture"), FORMAT_PICTURE))
    assert picture_HWC is not None
    assert same(picture_HWC, make.PICTURE_HWC)
    item = item_codec.decode(unseal(make.INDEX, golden("entry.item"), FORMAT_ITEM))
    assert same(item, make.ITEM)


@pytest.mark.parametrize("name", STATES)
def test_a_state_is_written_as_it_was_and_continues(name: str) -> None:
    saved = torch.load(io.BytesIO(golden(f"{name}.pt")), weights_only=True)
    whole, now = make.play(STATES[name])
    assert len(whole) == STATES[name].num_steps
    assert same(torch.load(io.BytesIO(now), weights_only=True), saved)
    rest, _ = make.play(STATES[name], saved)
    assert rest == whole[STATES[name].at :]


# ── a run's files, and what is sent ─────────────────────────────────────────────────────────────────────────────────


def test_a_trace_and_the_losses_are_read() -> None:
    trace = Trace.load(GOLDEN / "trace.npz")
    assert [order.tolist() for order in trace.orders] == [[0, 2, 1], [1, 1, 2]]
    assert (trace.size_bytes_N.tolist(), trace.global_batch) == ([10, 20, 30], 2)
    found = Trajectory.load(GOLDEN / "losses")
    assert found.samples.names == ("a.png", "b.png", "c.png")
    np.testing.assert_array_equal(next(iter(found.losses())), make.LOSS_N)


def test_a_message_of_gradients_is_read() -> None:
    header, sparse = unpack(golden("message.bin"), 100_000)
    assert header == make.HEADER
    assert sparse.indices_K.tolist() == make.SPARSE.indices_K.tolist()
    assert sparse.values_K.tolist() == make.SPARSE.values_K.tolist()


def test_telemetry_is_read() -> None:
    assert [telemetry.read(line) for line in golden("telemetry.jsonl").splitlines()] == [make.REPORT, make.DECISION]


def test_a_study_is_resumed_and_its_profile_read(tmp_path: Path) -> None:
    assert Profile.load(GOLDEN / "profile.json") == make.PROFILE
    shutil.copy(GOLDEN / "evaluations.jsonl", tmp_path)
    before = read_journal(GOLDEN / "evaluations.jsonl", make.STUDY)
    assert len(before) == 5
    assert list(run(make.STUDY, make.quality, tmp_path / "evaluations.jsonl")) == before, "nothing is left to do"
    assert [make.quality(each.point) for each in before] == [each.quality for each in before]
