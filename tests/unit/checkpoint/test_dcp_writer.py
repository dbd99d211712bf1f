"""DCP saves through our writer and loads through our reader, in one process: what comes back, and what is refused."""

from __future__ import annotations

import inspect
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import ReadItem, WriteItem

from shade.checkpoint._format.manifest import CHUNK_BYTES
from shade.checkpoint._restore.reader import Reader
from shade.checkpoint._session.checkpointer import Checkpointer
from shade.checkpoint._tiers.memory import MemoryTier
from shade.checkpoint._tiers.storage import StorageTier
from shade.checkpoint._tiers.tier import Shard
from shade.checkpoint.dcp import ShadeReader, ShadeWriter
from shade.cli import main
from shade.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpointError,
    RunInUseError,
    ShadeError,
    StoreFullError,
    TornSnapshotError,
)
from shade.storage import open_volume
from shade.store import open_store
from tests.support.format_reader import read_snapshot

RUN = f"run-{os.getpid()}"
"""A run id is locked on the machine, and pytest-xdist runs tests in several processes."""

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated:UserWarning"
)


def state_of(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.BatchNorm1d(33), torch.nn.Linear(33, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 7)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "kinds": {
            "bf16": torch.randn(5).to(torch.bfloat16),
            "turned": torch.randn(4, 6).t(),
            "complex": torch.randn(3, 2, dtype=torch.complex128),
            "empty": torch.empty(0, 3),
            "flags": torch.rand(9) > 0.5,
            "sharded with @ and / and %": torch.arange(seed, seed + 3),
        },
        "objects": {
            "none": None,
            "rows": [1, (2.5, b"x")],
            "many": [float(seed)] * 300,
            "inf": float("inf"),
            "s": seed,
        },
    }


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from leaves(each, f"{path}/{key}")
    else:
        yield path, value


def is_same(one: Any, other: Any) -> bool:
    pairs = list(zip(leaves(one), leaves(other), strict=True))
    return all(
        path == place and (torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b)
        for (path, a), (place, b) in pairs
    )


def reason(failure: pytest.ExceptionInfo[CheckpointException]) -> BaseException:
    (wrapped,) = failure.value.failures.values()
    return wrapped[0]


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[ShadeWriter]:
    with ShadeWriter(persist_to=tmp_path, run=RUN) as made:
        yield made


def reader_of(tmp_path: Path, step: int | None = None) -> ShadeReader:
    return ShadeReader(persist_to=tmp_path, run=RUN, step=step)


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_what_was_saved_comes_back_bit_for_bit(tmp_path: Path, codec: str) -> None:
    saved, loaded = state_of(1), state_of(2)
    with ShadeWriter(persist_to=str(tmp_path), run=RUN, step=4, codec=codec) as writer:
        dcp.save(saved, storage_writer=writer)
        writer.wait_durable(0.0)
    assert not is_same(saved, loaded)
    with reader_of(tmp_path) as reader:
        dcp.load(loaded, storage_reader=reader)
    assert is_same(state_of(1), loaded)


def test_nothing_is_pickled_and_nothing_unpickled(
    tmp_path: Path, writer: ShadeWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("somebody pickles")

    for module, name in ((torch, "save"), (torch, "load"), (pickle, "loads"), (pickle, "load"), (pickle, "dumps")):
        monkeypatch.setattr(module, name, refuse)
    loaded = state_of(2)
    dcp.save(state_of(1), storage_writer=writer, checkpoint_id="4")
    dcp.load(loaded, storage_reader=reader_of(tmp_path))
    assert is_same(state_of(1), loaded)
    stored = b"".join(path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file())
    assert b"\x80\x02" not in stored[:8]
    assert b"torch._utils" not in stored


def test_a_reader_made_from_the_page_of_the_format_finds_all_of_it(tmp_path: Path, writer: ShadeWriter) -> None:
    flat, paths = flatten_state_dict(state_of(1))
    dcp.save(state_of(1), storage_writer=writer, checkpoint_id="4")
    _, (tree,), _ = read_snapshot(*tmp_path.glob(f"{RUN}/step-*"))
    assert (list(tree), tree["dcp"], tree["planner_data"]) == (["dcp", "state", "planner_data"], 2, paths)
    assert tree["state"].keys() == flat.keys()
    for name, value in flat.items():
        if not isinstance(value, torch.Tensor):
            assert tree["state"][name] == (value,)
        elif value.dtype is not torch.bfloat16:
            assert np.array_equal(tree["state"][name], value.numpy())


def test_two_saves_of_one_run_and_the_newest_unless_asked(tmp_path: Path, writer: ShadeWriter) -> None:
    for step in (10, 11):
        dcp.save(state_of(step), storage_writer=writer, checkpoint_id=f"somewhere/step-{step}")
    with reader_of(tmp_path) as reader:
        assert reader.steps() == [11, 10]
    for asked, step in ((None, 11), (10, 10), (11, 11)):
        loaded = state_of(2)
        dcp.load(loaded, storage_reader=reader_of(tmp_path, asked))
        assert is_same(state_of(step), loaded)
    loaded = state_of(2)
    dcp.load(loaded, checkpoint_id="10", storage_reader=reader_of(tmp_path))
    assert is_same(state_of(10), loaded)


def test_keep_rules_hold(tmp_path: Path, writer: ShadeWriter) -> None:
    for step in (1, 2, 3):
        dcp.save(state_of(step), storage_writer=writer, checkpoint_id=str(step))
    assert reader_of(tmp_path).steps() == [3, 2]


def test_the_tools_see_it_like_any_other(
    tmp_path: Path, writer: ShadeWriter, capsys: pytest.CaptureFixture[str]
) -> None:
    dcp.save(state_of(1), storage_writer=writer, checkpoint_id="4")
    writer.close()
    assert main(["checkpoint", "list", "--persist-to", str(tmp_path)]) == 0
    assert " 4 " in capsys.readouterr().out
    assert main(["checkpoint", "verify", "4", "--persist-to", str(tmp_path)]) == 0
    spoil(tmp_path)
    assert main(["checkpoint", "verify", "4", "--persist-to", str(tmp_path)]) == 1


def spoil(folder: Path, rank: int = 0) -> None:
    """Flips one bit in the middle of a rank's data."""
    (path,) = folder.rglob(f"rank-{rank}.safetensors")
    content = bytearray(path.read_bytes())
    content[-8] ^= 1
    path.write_bytes(content)


def test_a_flipped_bit_is_never_loaded(tmp_path: Path, writer: ShadeWriter) -> None:
    dcp.save(state_of(1), storage_writer=writer, checkpoint_id="4")
    spoil(tmp_path)
    with pytest.raises(CheckpointException) as failure:
        dcp.load(state_of(2), storage_reader=reader_of(tmp_path))
    assert isinstance(reason(failure), CorruptCheckpointError)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_only_what_is_asked_for_is_read(tmp_path: Path, writer: ShadeWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    num_rows, row = 40, CHUNK_BYTES // 16
    big = torch.arange(num_rows * row // 4, dtype=torch.float32).view(num_rows, -1)
    dcp.save({"a": big, "b": torch.ones(3)}, storage_writer=writer, checkpoint_id="4")
    asked: list[int] = []
    before = StorageTier.read_chunks_into

    def counting(self: StorageTier, place: str, manifest: Any, numbers: Any, *rest: Any) -> Any:
        asked.extend(numbers)
        return before(self, place, manifest, numbers, *rest)

    monkeypatch.setattr(StorageTier, "read_chunks_into", counting)
    loaded = {"b": torch.zeros(3)}
    dcp.load(loaded, storage_reader=reader_of(tmp_path), planner=DefaultLoadPlanner(allow_partial_load=True))
    assert torch.equal(loaded["b"], torch.ones(3))
    assert len(asked) == 1


@pytest.mark.parametrize("where", ["write", "finish"])
def test_a_crash_before_the_record_leaves_nothing_to_see(
    tmp_path: Path, writer: ShadeWriter, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    dcp.save(state_of(1), storage_writer=writer, checkpoint_id="4")

    def crash(*_: Any) -> None:
        raise KeyboardInterrupt

    target = (StorageTier, "put") if where == "write" else (StorageTier, "commit")
    with monkeypatch.context() as patched:
        patched.setattr(*target, crash)
        with pytest.raises(CheckpointException):
            dcp.save(state_of(2), storage_writer=writer, checkpoint_id="5")
    assert reader_of(tmp_path).steps() == [4]
    dcp.save(state_of(3), storage_writer=writer, checkpoint_id="5")
    loaded = state_of(2)
    dcp.load(loaded, storage_reader=reader_of(tmp_path))
    assert is_same(state_of(3), loaded)


def test_what_changes_while_it_is_saved_is_not_saved(
    tmp_path: Path, writer: ShadeWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_of(1)
    before = StorageTier.put

    def meanwhile(self: StorageTier, *rest: Any) -> None:
        before(self, *rest)
        state["model"]["0.weight"].numpy()[3, 3] += 1

    monkeypatch.setattr(StorageTier, "put", meanwhile)
    with pytest.raises(CheckpointException) as failure:
        dcp.save(state, storage_writer=writer, checkpoint_id="4")
    assert isinstance(reason(failure), TornSnapshotError)
    assert "model.0.weight" in str(reason(failure))
    assert reader_of(tmp_path).steps() == []


def test_planners_of_ones_own(tmp_path: Path, writer: ShadeWriter) -> None:
    class Saving(DefaultSavePlanner):
        def transform_object(self, write_item: WriteItem, object: Any) -> Any:
            raise AssertionError("objects are taken before they are made bytes, tensors are not transformed")

        def resolve_data(self, write_item: WriteItem) -> Any:
            return self.lookup_object(write_item.index)

    class Loading(DefaultLoadPlanner):
        seen = 0

        def load_bytes(self, read_item: ReadItem, value: Any) -> None:
            self.seen += 1
            super().load_bytes(read_item, value)

    loaded, planner = state_of(2), Loading()
    dcp.save(state_of(1), storage_writer=writer, checkpoint_id="4", planner=Saving())
    dcp.load(loaded, storage_reader=reader_of(tmp_path), planner=planner)
    assert is_same(state_of(1), loaded)
    assert planner.seen > 0


def test_a_plan_of_an_earlier_save_is_refused(tmp_path: Path, writer: ShadeWriter) -> None:
    state = state_of(1)
    dcp.save(state, storage_writer=writer, checkpoint_id="4", planner=DefaultSavePlanner(enable_plan_caching=True))
    with pytest.raises(CheckpointException) as failure:
        dcp.save(state, storage_writer=writer, checkpoint_id="5", planner=DefaultSavePlanner(enable_plan_caching=True))
    assert "enable_plan_caching" in str(reason(failure))
    assert reader_of(tmp_path).steps() == [4]


def test_what_cannot_be_saved_is_named(writer: ShadeWriter) -> None:
    with pytest.raises(CheckpointException) as failure:
        dcp.save({"odd": {"thing": object()}}, storage_writer=writer, checkpoint_id="4")
    assert isinstance(reason(failure), ConfigError)
    assert "odd.thing" in str(reason(failure))


def test_the_wrong_shape_names_the_tensor(tmp_path: Path, writer: ShadeWriter) -> None:
    dcp.save({"a": torch.zeros(3, 4)}, storage_writer=writer, checkpoint_id="4")
    with pytest.raises(CheckpointException, match="for a"):
        dcp.load({"a": torch.zeros(4, 4)}, storage_reader=reader_of(tmp_path))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda path: ShadeWriter(run=RUN), "persist_to"),
        (lambda path: ShadeReader(run=RUN), "persist_to"),
        (lambda path: ShadeWriter(persist_to=path, run="a/b"), "run id"),
        (lambda path: ShadeReader(persist_to=path, run="a/b"), "run id"),
        (lambda path: ShadeWriter(persist_to=path, codec="zst"), "zstd"),
        (lambda path: ShadeWriter(persist_to=path, keep="best"), "last=N"),
        (lambda path: ShadeWriter(persist_to=path).reset("latest"), "'120'"),
    ],
)
def test_arguments_that_cannot_be(tmp_path: Path, make: Callable[[str], Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        make(str(tmp_path))


def test_a_save_without_a_step_and_without_agreement(writer: ShadeWriter) -> None:
    with pytest.raises(CheckpointException) as failure:
        dcp.save({"a": torch.zeros(3)}, storage_writer=writer)
    assert "checkpoint_id" in str(reason(failure))
    if "use_collectives" not in inspect.signature(dcp.save).parameters:
        return  # in PyTorch 2.8 a save always agrees
    with pytest.raises(ConfigError, match="use_collectives"):
        dcp.save({"a": torch.zeros(3)}, storage_writer=writer, checkpoint_id="4", use_collectives=False)


def test_a_store_that_does_not_answer_is_found_by_the_first_save() -> None:
    with ShadeWriter("redis://127.0.0.1:1", run=RUN, step=1) as writer, pytest.raises(CheckpointException) as failure:
        dcp.save({"a": torch.zeros(3)}, storage_writer=writer)
    assert isinstance(reason(failure), ConfigError)


def test_no_snapshot_and_one_of_another_kind(tmp_path: Path) -> None:
    for asked in (None, 4):
        with pytest.raises(CheckpointException, match="saved through DCP") as failure:
            dcp.load(state_of(2), storage_reader=reader_of(tmp_path, asked))
        assert isinstance(reason(failure), CheckpointError)  # and no AssertionError of DCP's that quotes it
    with Checkpointer(persist_to=str(tmp_path), run=RUN) as checkpointer:
        checkpointer.attach(model=torch.nn.Linear(2, 2))
        checkpointer.save()
        with pytest.raises(RunInUseError), ShadeWriter(persist_to=str(tmp_path), run=RUN, step=1) as writer:
            raise inner(lambda: dcp.save({"a": torch.zeros(3)}, storage_writer=writer))
    with pytest.raises(CheckpointException, match="saved through DCP"):
        dcp.load(state_of(2), storage_reader=reader_of(tmp_path))


def inner(action: Callable[[], Any]) -> BaseException:
    with pytest.raises(CheckpointException) as failure:
        action()
    return reason(failure)


def test_a_checkpointer_says_that_it_is_not_its_own(tmp_path: Path, writer: ShadeWriter) -> None:
    dcp.save(state_of(1), storage_writer=writer, checkpoint_id="4")
    writer.close()
    with Checkpointer(persist_to=str(tmp_path), run=RUN) as checkpointer:
        checkpointer.attach(model=torch.nn.Linear(2, 2))
        with pytest.raises(ShadeError, match="dcp"):
            checkpointer.restore_latest()


@pytest.mark.multiprocess
@pytest.mark.redis
def test_a_failed_tier_is_passed_over_and_told_once(
    tmp_path: Path, get_place: Callable[[str], Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> str:
        raise StoreFullError("no room")

    monkeypatch.setattr(MemoryTier, "prepare", full)
    monkeypatch.setattr("shade.checkpoint._session.open_tiers._ensure_flusher", lambda *_: None)
    with ShadeWriter(get_place("unix").url, persist_to=str(tmp_path), run=RUN) as writer:
        for step in ("1", "2"):
            dcp.save(state_of(1), storage_writer=writer, checkpoint_id=step)
        writer.wait_durable(0.0)
    assert [record.message for record in caplog.records if "saves go to storage" in record.message] == [
        "cluster memory fails; saves go to storage: no room"
    ]


@pytest.mark.redis
def test_damage_in_one_tier_is_read_from_the_other(tmp_path: Path, get_place: Callable[[str], Any]) -> None:
    url, saved = get_place("unix").url, state_of(1)
    with ShadeWriter(url, run=RUN) as writer:
        dcp.save(saved, storage_writer=writer, checkpoint_id="4")
    with ShadeReader(url, run=RUN) as reader, open_volume(str(tmp_path)) as volume:
        (length,) = {len(chunk) for chunk in carry(reader, StorageTier(volume, RUN))}
    memory, storage = {"store": url}, {"persist_to": str(tmp_path)}

    def load(**places: str) -> dict[str, Any]:
        loaded = state_of(2)
        dcp.load(loaded, storage_reader=ShadeReader(**places, run=RUN))
        return loaded

    assert is_same(saved, load(**memory))
    assert is_same(saved, load(**storage))
    with open_store(url) as store:
        keys = [key for key in store.scan(f"shade:checkpoint:{RUN}:") if len(store.get_many([key])[0] or b"") == length]
        assert store.set_many({key: bytes(length) for key in keys}) == [True]
    assert is_same(saved, load(**memory, **storage))
    assert isinstance(inner(lambda: load(**memory)), CorruptCheckpointError)
    spoil(tmp_path)
    assert isinstance(inner(lambda: load(**memory, **storage)), CorruptCheckpointError)


def carry(reader: ShadeReader, tier: StorageTier) -> list[bytes]:
    """Takes the newest snapshot to another tier, as a flusher does; rank 0's chunks."""
    reader.steps()
    tiers = reader._reader
    assert isinstance(tiers, Reader)
    snapshot = tiers.snapshots()[0]
    manifests = [tiers.manifest(snapshot, rank) for rank in range(snapshot.record.world_size)]
    place = tier.prepare(snapshot.record.step, [manifest.stored_bytes for manifest in manifests])
    for manifest in manifests:
        tier.put(place, Shard(manifest, (content for _, content in tiers.chunks(snapshot, manifest))))
    tier.commit(place, snapshot.record)
    return [bytes(content) for _, content in tiers.chunks(snapshot, manifests[0])]
