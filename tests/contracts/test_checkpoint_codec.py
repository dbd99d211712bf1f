"""What every checkpoint codec promises, whichever name it has: chunks come back, exactly or as near as it is told.

A codec is registered and runs all of this unasked.
"""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shade.checkpoint._capture.flatten import flatten
from shade.checkpoint._capture.layout import TensorSpec, bytes_of, lay_out
from shade.checkpoint._codecs.base import CODECS, Piece, Span, Standalone, standalone_codec
from shade.checkpoint._codecs.delta import Delta
from shade.checkpoint._commit.protocol import agree, store
from shade.checkpoint._format.manifest import EXACT_CODECS, TensorEntry
from shade.checkpoint._restore.reader import Reader
from shade.checkpoint._restore.restore import ReadSnapshot, read_newest
from shade.checkpoint._save import packing
from shade.checkpoint._save.packing import PackedShard, Packer
from shade.checkpoint._tiers.storage import StorageTier
from shade.errors import ConfigError, CorruptCheckpointError
from shade.rank_group import SingleProcessGroup as OneRank
from shade.storage.base import open_volume

CHUNK_BYTES = 2**16
ALONE = [name for name in CODECS if issubclass(CODECS.get(name), Standalone)]
DELTAS = [name for name in CODECS if issubclass(CODECS.get(name), Delta)]
ROUGH = [name for name in DELTAS if not CODECS.get(name).is_exact]


@pytest.fixture(scope="module", autouse=True)
def small_chunks() -> Iterator[None]:
    """Chunks of 64 KiB, to be quick."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "CHUNK_BYTES", CHUNK_BYTES)
        yield


def delta(name: str) -> Delta:
    codec = CODECS.get(name)()
    assert isinstance(codec, Delta)
    return codec


def chunk(seed: int, num_items: int = 3000, size: float = 0.01) -> tuple[memoryview, memoryview, Piece]:
    """Weights, what they were before, and what they consist of: something exact on both sides of the rough items."""
    rng = np.random.default_rng(seed)
    before = rng.normal(0, 1, num_items).astype(np.float32)
    after = before + rng.normal(0, size, num_items).astype(np.float32)
    spans = (
        Span("step", 0, 4, 0, may_be_lossy=False),
        Span("weight", 4, 4 * num_items, 0, may_be_lossy=True),
        Span("count", 4 * num_items, 4 * num_items + 3, 0, may_be_lossy=False),
    )
    tail = [rng.bytes(3), rng.bytes(3)]
    return (
        memoryview(after.tobytes() + tail[0]),
        memoryview(before.tobytes() + tail[1]),
        Piece(4, spans),
    )


def survey(codec: Delta, data: memoryview, base: memoryview, piece: Piece) -> None:
    weight = next(span for span in piece.spans if span.may_be_lossy)
    entries = {
        span.name: TensorEntry("F32" if span is weight else "U8", (), span.start, span.stop) for span in piece.spans
    }
    codec.survey(data, base, entries, {"dict": [["w"], [{"tensor": "weight"}]]})


def encoded(name: str, seed: int = 0) -> tuple[Delta, bytes, memoryview, memoryview, Piece]:
    codec = delta(name)
    data, base, piece = chunk(seed)
    if name == "dedup":
        data = base
    survey(codec, data, base, piece)
    stored = codec.encode(data, base, piece)
    assert stored is not None
    return codec, bytes(stored), data, base, piece


# ── alone ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ALONE)
@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=1, max_size=2000), st.sampled_from([1, 2, 4, 8, 3]))
def test_a_chunk_that_stands_alone_comes_back(name: str, data: bytes, item_bytes: int) -> None:
    codec = standalone_codec(name)
    for view in (memoryview(data), memoryview(np.frombuffer(data, dtype=np.uint8))):
        assert bytes(codec.decode(codec.encode(view, item_bytes), len(data), item_bytes)) == data


# ── differences ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", DELTAS)
def test_a_difference_comes_back_and_is_the_smaller_part(name: str) -> None:
    codec, stored, data, base, piece = encoded(name)
    kept = bytes(base)
    back = codec.decode(stored, base, piece)
    assert len(stored) < 0.9 * len(data)
    assert len(back) == len(data)
    assert bytes(base) == kept, "the base belongs to somebody else"
    assert bytes(back[:4]) == bytes(data[:4])
    assert bytes(back[-3:]) == bytes(data[-3:]), "what may not be rough is exact"
    if codec.is_exact:
        assert bytes(back) == bytes(data)
    else:
        off = np.frombuffer(data[4:-3], np.float32) - np.frombuffer(back[4:-3], np.float32)
        before = np.frombuffer(data[4:-3], np.float32) - np.frombuffer(base[4:-3], np.float32)
        assert 0 < np.linalg.norm(off) < np.linalg.norm(before), "nearer than what the base had"


@pytest.mark.parametrize("name", DELTAS)
def test_what_is_decoded_twice_is_the_same_twice(name: str) -> None:
    codec, stored, _, base, piece = encoded(name)
    other = delta(name)
    assert bytes(codec.decode(stored, base, piece)) == bytes(other.decode(stored, base, piece))


@pytest.mark.parametrize("name", DELTAS)
def test_damaged_differences_are_refused_or_have_the_right_length(name: str) -> None:
    dice = random.Random(0)
    codec, stored, data, base, piece = encoded(name)
    refused = 0
    for _ in range(1000):
        wrong = bytearray(stored)
        for _ in range(dice.randrange(1, 4)):
            wrong[dice.randrange(len(wrong))] ^= 1 << dice.randrange(8)
        if dice.random() < 0.3:
            wrong = wrong[: dice.randrange(len(wrong))]
        if dice.random() < 0.1:
            wrong += dice.randbytes(dice.randrange(1, 50))
        try:
            assert len(codec.decode(bytes(wrong), base, piece)) == len(data)
        except CorruptCheckpointError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize("name", DELTAS)
def test_what_was_made_for_another_chunk_asks_for_no_memory(name: str) -> None:
    import zstandard

    codec, _, _, base, piece = encoded(name)
    bombs = [
        b"",
        b"x",
        zstandard.ZstdCompressor(level=1).compress(bytes(2**26)),
        zstandard.ZstdCompressor(level=1, write_content_size=False).compress(bytes(2**26)),
        b"\x28\xb5\x2f\xfd\xe0" + b"\xff" * 8 + b"\x01\x00\x00",
    ]
    tracemalloc.start()
    try:
        for bomb in bombs:
            with pytest.raises(CorruptCheckpointError):
                codec.decode(bomb, base, piece)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ROUGH)
@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_what_is_not_finite_stands_alone(name: str, bad: float) -> None:
    codec = delta(name)
    data, base, piece = chunk(1)
    items = np.frombuffer(bytearray(data), np.uint8)
    items[4:-3].view("<f4")[[7, 11]] = bad, -bad
    other = np.frombuffer(bytearray(base), np.uint8)
    other[4:-3].view("<f4")[[7, 11]] = -3e38, 3e38
    survey(codec, items.data, other.data, piece)
    stored = codec.encode(items.data, other.data, piece)
    if stored is not None:  # a moment, say, is stored for itself: then it has to come back finite
        assert np.isfinite(np.frombuffer(codec.decode(stored, other.data, piece)[4:-3], np.float32)).all()


@pytest.mark.parametrize("name", ROUGH)
def test_a_chunk_without_items_for_it_stands_alone(name: str) -> None:
    codec = delta(name)
    data = memoryview(bytes(range(200)))
    piece = Piece(1, (Span("flags", 0, 200, 0, may_be_lossy=False),))
    assert codec.encode(data, data, piece) is None
    cut = Piece(4, (Span("weight", 2, 198, 0, may_be_lossy=True), Span("flags", 198, 200, 0, may_be_lossy=False)))
    assert codec.encode(data, data, cut) is None, "its items are cut by the chunk's edge"


def test_the_manifest_knows_which_codecs_are_exact() -> None:
    assert {name for name in CODECS if CODECS.get(name).is_exact} == EXACT_CODECS


@pytest.mark.parametrize("name", DELTAS)
def test_whoever_has_no_base_is_told_what_to_choose(name: str) -> None:
    with pytest.raises(ConfigError, match="none, zstd"):
        standalone_codec(name)


# ── all the way: packed, stored, read, put together ─────────────────────────────────────────────────────────────────


class Run:
    """A small training of one rank, its snapshots in a folder."""

    def __init__(self, folder: Path, codec: str, **more: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        size = CHUNK_BYTES // 4
        self.state: dict[str, Any] = {
            "model": {
                "weight": torch.randn(size // 2 + 77, generator=generator),
                "bias": torch.randn(10, generator=generator),
                "frozen": torch.randn(2 * size, generator=generator),
                "half": torch.randn(3000, generator=generator).half(),
            },
            "optimizer": {
                "state": {
                    0: {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros(size // 2 + 77),
                        "exp_avg_sq": torch.zeros(size // 2 + 77),
                    }
                }
            },
            "random": {"torch": torch.zeros(5000, dtype=torch.uint8)},
        }
        self.generator = generator
        self.tier = StorageTier(open_volume(str(folder)), "run")
        self.packer = Packer("run", 0, 1, codec, **more)
        self.sequence = 0
        self.packed: PackedShard | None = None

    def train(self) -> None:
        weight, moments = self.state["model"]["weight"], self.state["optimizer"]["state"][0]
        gradient = torch.randn(weight.shape, generator=self.generator)
        moments["step"] += 1
        moments["exp_avg"].lerp_(gradient, 0.1)
        moments["exp_avg_sq"].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        weight -= 1e-3 * moments["exp_avg"] / (moments["exp_avg_sq"].sqrt() + 1e-3)
        self.state["model"]["bias"] += 0.01
        self.state["model"]["half"] += 0.01
        self.state["random"]["torch"].random_(0, 256, generator=self.generator)

    def save(self) -> str | None:
        """Its base."""
        self.sequence += 1
        tree, tensors = flatten(self.state)
        layout = lay_out({name: TensorSpec.of(tensor) for name, tensor in tensors.items()}, 0, 1)
        buffer = torch.cat([bytes_of(tensors[name]) for name in layout.entries])
        packed = self.packed = self.packer.pack(self.sequence, buffer, layout.num_bytes, layout.entries, tree)
        group, at = OneRank(), float(self.sequence)
        record, shard_bytes, _ = agree(
            group, packed.manifest, None, sequence=self.sequence, saved_at=at, base=packed.base
        )
        store(self.tier, group, record, shard_bytes, packed.manifest, lambda: packed.chunks)
        self.packer.committed(packed, record.digest, buffer)
        return packed.base

    def restored(self) -> ReadSnapshot:
        found = read_newest(Reader([self.tier]), OneRank())
        assert found is not None
        assert found.record.sequence == self.sequence
        return found

    def check(self) -> dict[str, float]:
        """Compares what comes back with what was to be saved; what is off, by tensor."""
        found, off = self.restored(), {}
        _, tensors = flatten(self.state)
        assert found.tensors.keys() == tensors.keys()
        for name, tensor in tensors.items():
            if torch.equal(found.tensors[name], tensor):
                continue
            bound = found.bounds[name]
            difference = (found.tensors[name].double() - tensor.double()).abs()
            off[name] = float(difference.norm() / tensor.double().norm())
            assert float(difference.max()) <= bound.max_abs
            assert off[name] <= bound.relative * (1 + 1e-12)
        assert set(found.bounds) <= set(tensors)
        return off


def weights(run: Run) -> npt.NDArray[np.float32]:
    found: npt.NDArray[np.float32] = run.restored().tensors["model/weight"].numpy()
    return found


@pytest.mark.parametrize("name", list(CODECS))
def test_a_run_comes_back_as_its_codec_promises(name: str, tmp_path: Path) -> None:
    run = Run(tmp_path, name, keyframe_every=3)
    bases = []
    for _ in range(5):
        run.train()
        bases.append(run.save())
        off = run.check()
        is_keyframe = bases[-1] is None
        if CODECS.get(name).is_exact or is_keyframe:
            assert off == {}
            assert run.restored().bounds == {}
        else:
            assert set(off) <= {"model/weight", "optimizer/state/0/exp_avg", "optimizer/state/0/exp_avg_sq"}
            assert "model/weight" in off
    if name in DELTAS:
        assert [base is None for base in bases] == [True, False, False, True, False]
        assert (bases[1] == bases[2]) is not delta(name).follows_previous
    else:
        assert bases == [None] * 5


@pytest.mark.parametrize("name", DELTAS)
def test_what_stands_still_costs_next_to_nothing(name: str, tmp_path: Path) -> None:
    run = Run(tmp_path, name)
    run.train()
    run.save()
    run.save()
    assert run.packed is not None
    assert run.packed.manifest.stored_bytes == 16 * len(run.packed.manifest.chunks)
    run.train()
    run.save()
    assert sum(entry.codec == "dedup" for entry in run.packed.manifest.chunks) >= 1, "the frozen layer"
    assert run.check().keys() <= {"model/weight", "optimizer/state/0/exp_avg", "optimizer/state/0/exp_avg_sq"}


@pytest.mark.parametrize("name", ROUGH)
@pytest.mark.parametrize("limit", [0.0, 1e-4, 1e-3])
def test_beyond_the_limit_it_is_exact(name: str, limit: float, tmp_path: Path) -> None:
    run = Run(tmp_path, name, max_error=limit)
    for _ in range(4):
        run.train()
        run.save()
        assert all(value <= limit for value in run.check().values())
        assert all(bound.relative <= limit for bound in run.restored().bounds.values())


@pytest.mark.parametrize("name", ROUGH)
def test_what_was_not_sent_is_not_forgotten(name: str, tmp_path: Path) -> None:
    """Error feedback: a state that comes to rest is reached, nearer with every snapshot."""
    if name == "excp":
        pytest.skip("ExCP drops what it prunes and has no feedback for moments; weights are looked at below")
    run = Run(tmp_path, name, keyframe_every=1000, max_error=1.0)
    run.train()
    run.save()
    for _ in range(3):
        run.train()
    run.save()
    far = run.check()["model/weight"]
    for _ in range(5):
        run.state["random"]["torch"].add_(1)
        run.save()
    assert run.check().get("model/weight", 0.0) < (0.98 if name == "topk-delta" else 0.01) * far


def test_weights_of_excp_come_nearer_too(tmp_path: Path) -> None:
    run = Run(tmp_path, "excp", keyframe_every=1000)
    run.train()
    run.save()
    for _ in range(3):
        run.train()
    run.save()
    far = run.check()["model/weight"]
    for _ in range(3):
        run.save()
    assert run.check()["model/weight"] < 0.9 * far
