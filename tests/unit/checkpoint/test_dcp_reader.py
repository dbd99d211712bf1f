"""DCP loads parts of saved pieces through our reader: whichever part, through however many windows, and from where."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from shade.checkpoint._format.manifest import CHUNK_BYTES
from shade.checkpoint._integrations import dcp_reader
from shade.checkpoint.dcp import ShadeReader, ShadeWriter
from tests.support.counted_reads import counted_reads

RUN = f"run-{os.getpid()}"
"""A run id is locked on the machine, and pytest-xdist runs tests in several processes."""

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Part = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and lengths."""


class PartsPlanner(DefaultLoadPlanner):
    """Loads the same part of each saved tensor that it stands in."""

    def __init__(self, parts: dict[str, list[Part]]) -> None:
        super().__init__()
        self._parts = parts

    def create_local_plan(self) -> LoadPlan:
        items = []
        for name, parts in self._parts.items():
            for offsets, lengths in parts:
                piece = MetadataIndex(name, torch.Size([0] * len(offsets)))
                where = torch.Size(offsets)
                items.append(ReadItem(LoadItemType.TENSOR, piece, where, piece, where, torch.Size(lengths)))
        return LoadPlan(items)


def some_part(shape: torch.Size, dice: random.Random) -> Part:
    offsets = tuple(dice.randrange(size) for size in shape)
    return offsets, tuple(dice.randint(1, size - offset) for size, offset in zip(shape, offsets, strict=True))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def slices(part: Part) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + length) for offset, length in zip(*part, strict=True))


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("seed", range(4))
def test_any_parts_through_small_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, codec: str
) -> None:
    monkeypatch.setattr(dcp_reader, "WINDOW_CHUNKS", 2)
    torch.manual_seed(seed)
    dice = random.Random(seed)
    items = CHUNK_BYTES // 4
    saved = {
        "rows": torch.rand(5, items // 2 + 3),
        "columns": torch.rand(items // 64, 129),
        "cube": torch.rand(40, 300, 170).to(torch.bfloat16),
        "odd": torch.rand(10_001, dtype=torch.float64),  # so that the pairs lie where their type may not be written
        "pairs": torch.randn(9, items // 40, dtype=torch.complex128),
        "bytes": torch.randint(0, 255, (3 * CHUNK_BYTES + 11,), dtype=torch.uint8).view(torch.float8_e4m3fnuz),
        "number": torch.tensor(2.5, dtype=torch.float64),
    }
    with ShadeWriter(persist_to=tmp_path, run=RUN, codec=codec) as writer:
        dcp.save(saved, storage_writer=writer, checkpoint_id="1")
    parts = {name: [some_part(tensor.shape, dice) for _ in range(3)] for name, tensor in saved.items()}
    parts["rows"].append(((2, 5), (0, 7)))
    loaded: dict[str, Any] = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    expected = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    for name, chosen in parts.items():
        for part in chosen:
            expected[name][slices(part)] = saved[name][slices(part)]
    with ShadeReader(persist_to=tmp_path, run=RUN) as reader:
        dcp.load(loaded, storage_reader=reader, planner=PartsPlanner(parts))
    for name, tensor in expected.items():
        assert torch.equal(as_bytes(loaded[name]), as_bytes(tensor)), name


def test_pieces_that_several_ranks_read_come_through_the_page_cache_and_others_past_it(tmp_path: Path) -> None:
    saved = {"everybody": torch.rand(3 * CHUNK_BYTES // 4), "mine": torch.rand(5 * CHUNK_BYTES // 4)}
    with ShadeWriter(persist_to=tmp_path, run=RUN) as writer:
        dcp.save(saved, storage_writer=writer, checkpoint_id="1")
    loaded: dict[str, Any] = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    planner = DefaultLoadPlanner()
    with ShadeReader(persist_to=tmp_path, run=RUN) as reader:
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        planner.set_up_planner(loaded, metadata, is_coordinator=True)
        mine = reader.prepare_local_plan(planner.create_local_plan())
        other = replace(mine, items=[item for item in mine.items if item.storage_index.fqn == "everybody"])
        plan, _ = reader.prepare_global_plan([mine, other])
        with counted_reads() as read:
            reader.read_data(plan, planner).wait()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    assert read == {"read_into": 3 * CHUNK_BYTES, "read_directly": 5 * CHUNK_BYTES}
