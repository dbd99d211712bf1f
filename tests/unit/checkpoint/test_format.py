"""What docs/format.md says is what is written: a reader made from that page alone reads our checkpoints."""

from __future__ import annotations

import ast
import re
from collections import Counter, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from shade.checkpoint._capture.flatten import _MAKERS, FACTORIES, VIEWED, flatten
from shade.checkpoint._capture.layout import TensorSpec, bytes_of, lay_out
from shade.checkpoint._codecs.base import CODECS, standalone_codec
from shade.checkpoint._commit.protocol import agree, store
from shade.checkpoint._format.digest import digest_of
from shade.checkpoint._format.manifest import ITEM_BYTES, VERSION, ChunkEntry, Commit, Manifest
from shade.checkpoint._save import packing
from shade.checkpoint._save.packing import Packer
from shade.checkpoint._tiers.storage import StorageTier
from shade.checkpoint._tiers.tier import Shard
from shade.rank_group import SingleProcessGroup
from shade.storage.base import open_volume
from tests.support import format_reader
from tests.support.format_reader import read_snapshot

WORLD_SIZE = 3


def state_of(rank: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 7, generator=generator)
    return {
        "model": {
            "weight": weight,
            "tied": weight,
            "half": torch.randn(9, generator=generator).half(),
            "brain": torch.randn(5, generator=generator).bfloat16(),
            "mask": torch.tensor([True, False, True]),
            "count": torch.tensor(2**40),
            "empty": torch.empty(0, 4),
            "complex": torch.randn(3, dtype=torch.complex128, generator=generator),
            "é/☃@%": torch.arange(4).to(torch.uint16),
        },
        "optimizer": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(40, 7)}}, "lr": 1e-3},
        "random": {"torch": torch.full((11,), rank, dtype=torch.uint8), "rank": rank},
        "misc": {
            "scores": [0.5, float("inf")] * 500,
            "words": np.array(["a", "bc"]),
            "scalar": np.float32(0.1),
            "moments": Counter("abca"),
            "recent": deque([1, 2], 5),
            "pair": (None, True, -(2**70), float("-inf")),
            "blob": bytes(range(256)) * 3,
            "short": b"\x00\x01",
        },
    }


def write(folder: Path, codec_name: str) -> None:
    """Saves the states of three ranks through the storage tier."""
    tier = StorageTier(open_volume(str(folder)), "run-1")
    codec = standalone_codec(codec_name)
    place = tier.prepare(120, [0] * WORLD_SIZE)
    manifests = []
    for rank in range(WORLD_SIZE):
        tree, tensors = flatten(state_of(rank), rank=rank, is_own=lambda path: path.startswith("random/"))
        layout = lay_out({name: TensorSpec.of(tensor) for name, tensor in tensors.items()}, rank, WORLD_SIZE)
        data = b"".join(bytes(bytes_of(tensors[name].contiguous()).numpy().tobytes()) for name in layout.entries)
        draft = Manifest("run-1", 120, rank, WORLD_SIZE, codec_name, len(data), layout.entries, (), tree, 500)
        stored = [
            codec.encode(memoryview(data)[start:stop], draft.item_bytes) for start, stop in layout.chunk_spans(500)
        ]
        entries = tuple(ChunkEntry(len(chunk), digest_of(chunk)) for chunk in stored)
        manifest = Manifest("run-1", 120, rank, WORLD_SIZE, codec_name, len(data), layout.entries, entries, tree, 500)
        tier.put(place, Shard(manifest, stored))
        manifests.append(manifest)
    total_bytes = sum(manifest.num_bytes for manifest in manifests)
    digests = tuple(manifest.digest for manifest in manifests)
    metrics = {"val_loss": 0.1, "bad": float("nan")}
    tier.commit(place, Commit("run-1", 120, 7, WORLD_SIZE, digests, total_bytes, 1.5e9, metrics))
    tier.close()


def assert_same(found: Any, expected: Any) -> None:
    """Equal, with tensors as arrays, and containers as the plain ones they are like."""
    if isinstance(expected, torch.Tensor):
        if expected.dtype is torch.bfloat16:
            expected = bytes_of(expected)
        assert_same(found, expected.numpy())
    elif isinstance(expected, np.ndarray | np.generic):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.tobytes() == expected.tobytes()
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, deque):
        assert found == list(expected)
    else:
        assert (type(found), found) == (type(expected), expected)


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_reader_made_from_the_document_reads_what_is_stored(codec: str, tmp_path: Path) -> None:
    write(tmp_path, codec)
    record, states, tensors = read_snapshot(tmp_path / "run-1" / "step-0000000120")
    assert (record["step"], record["sequence"], record["saved_at"]) == (120, 7, 1.5e9)
    assert record["metrics"] == {"val_loss": 0.1, "bad": None}
    for rank, state in enumerate(states):
        assert_same(state, state_of(rank))
        assert state["model"]["tied"] is state["model"]["weight"]
    assert {"model/weight", "model/é%2F☃%40%25", "optimizer/state/0/exp_avg", "random/torch@rank2"} <= tensors.keys()
    assert "model/tied" not in tensors


@pytest.mark.parametrize("codec", ["dedup", "xor-zstd", "topk-delta", "int8-delta", "excp"])
def test_it_reads_chains_too(codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "CHUNK_BYTES", 10_000)
    tier, packer = StorageTier(open_volume(str(tmp_path)), "run-1"), Packer("run-1", 0, 1, codec)
    generator = torch.Generator().manual_seed(0)
    weight, moment, frozen = (torch.randn(size, generator=generator) for size in (3000, 3000, 9000))
    for step in (1, 2, 3):
        weight += 1e-3 * torch.randn(3000, generator=generator)
        moment.mul_(0.999)
        state = {
            "model": {
                "weight": weight,
                "frozen": frozen,
                "bias": torch.full((7,), float(step)),
                "half": weight[:9].half(),
            },
            "optimizer": {"state": {0: {"exp_avg": moment, "exp_avg_sq": moment.square(), "step": torch.tensor(step)}}},
        }
        tree, tensors = flatten(state)
        layout = lay_out({name: TensorSpec.of(tensor) for name, tensor in tensors.items()}, 0, 1)
        buffer = torch.cat([bytes_of(tensors[name].contiguous()) for name in layout.entries])
        packed = packer.pack(step, buffer, layout.num_bytes, layout.entries, tree)
        record, shard_bytes, _ = agree(
            SingleProcessGroup(), packed.manifest, None, sequence=step, saved_at=1.5e9, base=packed.base
        )
        assert (
            store(tier, SingleProcessGroup(), record, shard_bytes, packed.manifest, lambda chunks=packed.chunks: chunks)
            is not None
        )
        packer.committed(packed, record.digest, buffer)
        kept = buffer.numpy().tobytes()
        record, _, found = read_snapshot(tmp_path / "run-1" / f"step-{step:010d}")
        assert (record["base"] is None) is (step == 1)
        for name, entry in layout.entries.items():
            assert found[name].tobytes() == kept[entry.start : entry.stop], "the buffer is what comes back"
    used = {entry.codec for entry in packed.manifest.chunks}
    assert codec in used


def test_the_safetensors_library_reads_the_files(tmp_path: Path) -> None:
    write(tmp_path, "none")
    found: dict[str, torch.Tensor] = {}
    for rank in range(WORLD_SIZE):
        found |= safetensors.torch.load_file(tmp_path / "run-1" / "step-0000000120" / f"rank-{rank}.safetensors")
    expected = state_of(0)["model"]
    assert torch.equal(found["model/weight"], expected["weight"])
    assert torch.equal(found["model/brain"], expected["brain"])
    assert found["model/empty"].shape == (0, 4)


def test_the_document_lists_every_kind_of_node_and_type() -> None:
    text = (Path(__file__).parents[3] / "docs" / "format.md").read_text(encoding="utf-8")
    assert f"version {VERSION}" in text.splitlines()[0]
    assert [kind for kind in _MAKERS if f'{{"{kind}": ' not in text] == []
    assert set(re.findall(r'`\{"(\w+)": ', text.partition("## 6.")[2])) == set(_MAKERS)
    assert [name for name in (*ITEM_BYTES, *FACTORIES, *CODECS) if f"`{name}`" not in text] == []
    assert [dtype for dtype in VIEWED if str(dtype).removeprefix("torch.") not in text] == []
    assert dict(ITEM_BYTES) == format_reader.WIDTHS


def test_the_reader_is_independent() -> None:
    tree = ast.parse(Path(format_reader.__file__).read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names == {"json", "struct", "numpy", "xxhash", "zstandard", "pathlib", "typing", "__future__"}
