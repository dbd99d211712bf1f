"""Writes the golden files: one of each format that shade keeps or sends, as small as it can be.

    python -m tests.golden.make            writes all of them anew; look at `git diff --stat` before you commit that

`tests/integration/test_golden.py` reads each and compares what is in it, and compares the bytes with those written now
where no other library decides them. From the first tag on a golden file is never written anew: a format that changes
gets a new version and a new file beside it.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from shade import GradientEngine, ShadeDataset, ShadeLoader, ShadeSampler, SparseSGD
from shade.cache.entry import FORMAT_ENCODED, FORMAT_ITEM, FORMAT_PICTURE, seal
from shade.checkpoint._capture.flatten import flatten
from shade.checkpoint._capture.layout import TensorSpec, bytes_of, lay_out
from shade.checkpoint._codecs.base import CODECS, Piece, Span, standalone_codec
from shade.checkpoint._codecs.delta import Delta
from shade.checkpoint._format.digest import digest_of
from shade.checkpoint._format.manifest import ChunkEntry, Commit, Manifest, TensorEntry
from shade.checkpoint._interchange.export import save_state
from shade.checkpoint._tiers.erasure import ErasureCode
from shade.checkpoint._tiers.slot_table import SlotLayout, SlotTable
from shade.checkpoint._tiers.storage import StorageTier
from shade.checkpoint._tiers.tier import Shard
from shade.control import message as telemetry
from shade.control.profile import Profile
from shade.control.study import Point, Space, Study, run
from shade.data import MixtureSampler, PackedDataset
from shade.data._decode.cached_format import pack_picture
from shade.data._source import item_codec
from shade.gradient._comm.message import MessageHeader, pack
from shade.gradient._compress.compressor import Sparse
from shade.gradient._compress.quantiser import QUANTISERS
from shade.policy.trace import Trace
from shade.storage import open_volume
from shade.trajectory import LossRecorder, Samples
from shade.types import Decision, StepReport

GOLDEN = Path(__file__).resolve().parent
INDEX = 7
"""The sample of the cache entries."""
REPORT = StepReport(5, 1, 32, 0.25, 0.03, 0.125, 0.0625, 0.0, 4096, 8192, 0.01, 1.5)
DECISION = Decision(0.02, (48, 16), 8, "the link waits")
PICTURE_HWC = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
ITEM = {"x": torch.arange(6, dtype=torch.int16).reshape(2, 3), "y": 3, "words": ["a", "b"]}
SPARSE = Sparse(np.array([3, 300, 70_000], np.uint32), np.array([0.5, -2.0, 1.25], np.float32), 100_000)
HEADER = MessageHeader(2, 9, 0, 100_000, 3, 64.0, "bf16")
PROFILE = Profile(
    (32, 64), (0.001, 0.1), ((0.8, 0.9), (0.7, 0.95)), False, ({"batch": 32, "density": 0.1},), {"seed": 0}
)
STUDY = Study(Space((8, 64), (0.001, 0.1), 8), num_evaluations=5, num_first=4)
LOSS_N = np.array([0.5, np.nan, 2.0], np.float32)
DELTAS = ("dedup", "xor-zstd", "topk-delta", "int8-delta", "excp")


def state() -> dict[str, Any]:
    """The state in the snapshot and the export."""
    weight = torch.arange(12, dtype=torch.float32).reshape(3, 4) / 8
    scores = np.array([1.5, 2.5])
    return {
        "model": {"weight": weight, "tied": weight, "half": torch.tensor([0.5, 2.0]).half()},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "lr": 1e-3, "betas": (0.9, 0.999)},
        "misc": {"name": "é", "far": float("inf"), "large": 2**70, "scores": scores, "blob": b"\x00\x01"},
    }


def chunks() -> tuple[np.ndarray, np.ndarray, Piece]:
    """A chunk of float32, that of its base, and its content."""
    rng = np.random.default_rng(0)
    base_N = rng.standard_normal(1200).astype(np.float32)
    change_N = np.where(rng.random(1200) < 0.02, rng.standard_normal(1200), 0).astype(np.float32)
    piece = Piece(4, (Span("weight", 0, 4800, 0, True),))
    return (base_N + change_N).view(np.uint8), base_N.view(np.uint8), piece


def snapshot() -> dict[str, bytes]:
    """The files of a snapshot of one rank, codec ``none``."""
    tree, tensors = flatten(state())
    layout = lay_out({name: TensorSpec.of(tensor) for name, tensor in tensors.items()}, 0, 1)
    data = b"".join(bytes_of(tensors[name].contiguous()).numpy().tobytes() for name in layout.entries)
    entry = ChunkEntry(len(data), digest_of(data))
    manifest = Manifest("golden", 120, 0, 1, "none", len(data), layout.entries, (entry,), tree)
    with tempfile.TemporaryDirectory() as folder:
        tier = StorageTier(open_volume(folder), "golden")
        place = tier.prepare(120, [len(data)])
        tier.put(place, Shard(manifest, [data]))
        metrics = {"val_loss": 0.1, "bad": float("nan")}
        tier.commit(place, Commit("golden", 120, 7, 1, (manifest.digest,), len(data), 1.5e9, metrics))
        tier.close()
        files = sorted(Path(folder, "golden").glob("step-*/*"))
        return {f"snapshot/{path.name}": path.read_bytes() for path in files}


def parity() -> bytes:
    """One row of parity over three chunks."""
    row = np.zeros(64, np.uint8)
    ErasureCode(3, 1).encode([bytes(range(64)), b"shade" * 12, b""], [row])
    return row.tobytes()


def exported(form: str) -> bytes:
    """The export of the state."""
    with tempfile.TemporaryDirectory() as folder:
        save_state(state(), Path(folder, "whole"), form)
        return Path(folder, "whole").read_bytes()


def losses() -> dict[str, bytes]:
    """The losses of an epoch, with the names of the samples."""
    with tempfile.TemporaryDirectory() as folder:
        samples = Samples(("a.png", "b.png", "c.png"), (0, 1, 0))
        LossRecorder(Path(folder), lambda: samples).end_epoch(0, LOSS_N)
        return {f"losses/{path.name}": path.read_bytes() for path in sorted(Path(folder).iterdir())}


def saved(save: Callable[[Path], Any]) -> bytes:
    """What a function writes to a path."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file")
        save(path)
        return path.read_bytes()


def written() -> dict[str, bytes]:
    """Every file whose bytes shade alone decides."""
    layout = SlotLayout(("a", "b", "c"), 1, grouped=True)
    _, base, piece = chunks()
    dedup: Any = CODECS.get("dedup")()
    return {
        **snapshot(),
        "table.json": SlotTable(0, {}).with_slot(1, 120, layout, (4096, 100)).to_bytes(),
        "parity.bin": parity(),
        "chunk.dedup": bytes(dedup.encode(base.data, base.data, piece)),
        "entry.encoded": seal(INDEX, b"the bytes of a file", FORMAT_ENCODED),
        "entry.picture": seal(INDEX, pack_picture(PICTURE_HWC), FORMAT_PICTURE),
        "entry.item": seal(INDEX, item_codec.encode(ITEM), FORMAT_ITEM),
        "message.bin": pack(HEADER, SPARSE, QUANTISERS.get("bf16")()).tobytes(),
        "telemetry.jsonl": telemetry.line(REPORT) + telemetry.line(DECISION),
        "profile.json": saved(PROFILE.save),
        "export.safetensors": exported("safetensors"),
    }


def compressed() -> dict[str, bytes]:
    """A stored chunk of each codec whose bytes zstandard decides, too."""
    data, base, piece = chunks()
    found = {"chunk.zstd": bytes(standalone_codec("zstd").encode(data.data, 4))}
    for name in DELTAS[1:]:
        codec: Any = CODECS.get(name)()
        codec.survey(data.data, base.data, {"weight": TensorEntry("F32", (1200,), 0, 4800)}, {"tensor": "weight"})
        stored = codec.encode(data.data, base.data, piece)
        assert stored is not None
        found[f"chunk.{name}"] = bytes(stored)
    return found


def decoded(name: str, stored: bytes) -> bytes:
    """The chunk again, or something near."""
    data, base, piece = chunks()
    if name == "zstd":
        return bytes(standalone_codec(name).decode(stored, data.size, 4))
    codec = CODECS.get(name)()
    assert isinstance(codec, Delta)
    return bytes(codec.decode(stored, base.data, piece))


# ── states: an object that has done some steps, and goes on from its state ──────────────────────────────────────────


class Sampling:
    """A sampler that learns from losses; a step is a batch."""

    num_steps, at = 24, 9

    def __init__(self) -> None:
        dataset = ShadeDataset(TensorDataset(torch.arange(32.0)), cache=None)
        self.target = ShadeSampler(dataset, batch_size=4, seed=1, num_replicas=1, rank=0, epochs=3)

    def steps(self) -> Any:
        """Yields each batch of what is left."""
        for epoch in range(self.target.epoch, 3):
            self.target.set_epoch(epoch)
            rest = iter(self.target)
            for _ in range(self.target.num_steps - self.target.state_dict()["steps_done"]):
                batch = [int(next(rest)) for _ in range(4)]
                index_B = torch.tensor(batch)
                self.target.report(index_B, 1.0 + index_B % 5)
                yield batch

    def close(self) -> None:
        self.target.close()


class Mixing:
    """A mixture of two sources; a step is a batch of packed sequences."""

    num_steps, at = 8, 3

    def __init__(self) -> None:
        lengths = {"web": (5, 9, 12, 4, 7), "code": (20, 3, 8)}
        sources = {
            name: (np.arange(sum(each), dtype=np.uint32), np.cumsum([0, *each])) for name, each in lengths.items()
        }
        dataset = PackedDataset(sources, length=16)
        weights = {"web": 3.0, "code": 1.0}
        self.target = MixtureSampler(
            dataset, weights=weights, batch_size=2, round_sequences=8, seed=5, num_replicas=1, rank=0
        )

    def steps(self) -> Any:
        for _ in range(2):
            taken = iter(self.target)
            for first in taken:
                yield repr((first, next(taken)))

    def close(self) -> None:
        pass


class Loading:
    """A loader with its own order; a step is a batch."""

    num_steps, at = 8, 3

    def __init__(self) -> None:
        dataset = ShadeDataset(TensorDataset(torch.arange(32.0)), cache=None)
        order = torch.Generator().manual_seed(3)
        self.dataset = dataset
        self.target = ShadeLoader(dataset, batch_size=4, shuffle=True, num_workers=0, generator=order)

    def steps(self) -> Any:
        for values, _ in self.target:
            yield values.tolist()

    def close(self) -> None:
        self.dataset.close()


class Exchanging(nn.Module):
    """A gradient engine with residuals and a sparse optimizer with momentum; a step is an optimizer's step."""

    num_steps, at = 8, 5

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4))
        self.optimizer = SparseSGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.engine = GradientEngine(self.model, self.optimizer, density=0.05, bucket_bytes=4000)
        self.target = self

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "engine": self.engine}
        return {name: part.state_dict() for name, part in parts.items()}

    def load_state_dict(self, state: Any, *_: Any, **__: Any) -> None:  # type: ignore[override]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.engine.load_state_dict(state["engine"])

    def steps(self) -> Any:
        for step in range(self.engine.step_count, self.num_steps):
            torch.manual_seed(100 + step)  # a gradient that is the same on every processor
            products = [(parameter * torch.randn(parameter.shape)).sum() for parameter in self.model.parameters()]
            torch.stack(products).sum().backward()
            self.engine.step()
            yield [parameter.sum().item() for parameter in self.model.parameters()]

    def close(self) -> None:
        self.engine.close()


STATES: dict[str, type[Any]] = {"sampler": Sampling, "mixture": Mixing, "loader": Loading, "engine": Exchanging}


def play(kind: type[Any], state: Any = None) -> tuple[list[Any], Any]:
    """Takes the steps from a state to the end; returns what each gave, and the state after `at` steps from 0."""
    one, given, kept = kind(), [], None
    try:
        if state is not None:
            one.target.load_state_dict(state)
        for result in one.steps():
            given.append(result)
            if state is None and len(given) == kind.at:
                stream = io.BytesIO()
                torch.save(one.target.state_dict(), stream)
                kept = stream.getvalue()
    finally:
        one.close()
    return given, kept


def quality(point: Point) -> float:
    """What the study searches for."""
    return 1.0 / point.batch + point.density


def main() -> int:
    """Writes all files."""
    files = written() | compressed() | losses() | {"export.pt": exported("torch")}
    files |= {f"{name}.pt": play(kind)[1] for name, kind in STATES.items()}
    trace = Trace(np.array([10, 20, 30]), (np.array([0, 2, 1]), np.array([1, 1, 2])), 2)
    files["trace.npz"] = saved(lambda path: trace.save(path))
    files["evaluations.jsonl"] = saved(lambda path: list(run(STUDY, quality, path)))
    near = {name: digest_of(decoded(name, files[f"chunk.{name}"])) for name in ("zstd", *DELTAS[1:])}
    files["chunks.json"] = json.dumps(near, indent=1).encode() + b"\n"
    for name, content in files.items():
        path = GOLDEN / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    sys.stdout.write(f"{len(files)} files, {sum(map(len, files.values())):,} bytes\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
