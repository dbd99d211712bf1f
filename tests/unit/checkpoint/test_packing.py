"""Which chunks are stored how, what the next one builds on, and what the buffer holds afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from shade.checkpoint._format.digest import digest_of
from shade.checkpoint._format.manifest import Manifest, TensorEntry
from shade.checkpoint._save import packing
from shade.checkpoint._save.packing import PackedShard, Packer
from shade.errors import ConfigError, UnknownNameError

CHUNK_BYTES = 2**16
NUM_BYTES = 2 * CHUNK_BYTES + 8192
ENTRIES = {
    "weight": TensorEntry("F32", (CHUNK_BYTES // 4,), 0, CHUNK_BYTES),
    "other": TensorEntry("F32", (CHUNK_BYTES // 4 + 2048,), CHUNK_BYTES, NUM_BYTES),
}


@pytest.fixture(scope="module", autouse=True)
def small_chunks() -> Iterator[None]:
    """Chunks of 64 KiB, to be quick."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "CHUNK_BYTES", CHUNK_BYTES)
        yield


def state(seed: int = 0) -> torch.Tensor:
    items = np.random.default_rng(seed).normal(0, 1, NUM_BYTES // 4).astype(np.float32)
    return torch.from_numpy(items.view(np.uint8))


def moved(buffer: torch.Tensor, size: float = 1e-3, start: int = 0, stop: int = NUM_BYTES) -> torch.Tensor:
    made = buffer.clone()
    items = made[start:stop].view(torch.float32)
    items += torch.randn(items.shape, generator=torch.Generator().manual_seed(1)) * size
    return made


def pack(packer: Packer, buffer: torch.Tensor, entries: dict[str, TensorEntry] = ENTRIES) -> PackedShard:
    return packer.pack(1, buffer, NUM_BYTES, entries, None)


def land(packer: Packer, buffer: torch.Tensor) -> PackedShard:
    packed = pack(packer, buffer)
    packer.committed(packed, digest_of(packed.manifest.to_bytes()), buffer)
    return packed


def codecs(packed: PackedShard) -> list[str]:
    return [packed.manifest.chunk_codec(number) for number in range(3)]


def check(packed: PackedShard, buffer: torch.Tensor) -> None:
    """What must hold of every shard: it can be parsed, and the buffer is what will come back."""
    manifest = packed.manifest
    assert Manifest.parse(manifest.to_bytes(), manifest.digest) == manifest
    data = memoryview(buffer.numpy().data)
    for number, (entry, stored) in enumerate(zip(manifest.chunks, packed.chunks, strict=True)):
        assert (entry.num_bytes, entry.digest) == (len(stored), digest_of(stored))
        if manifest.version == 2:
            assert entry.plain == digest_of(data[number * CHUNK_BYTES :][: manifest.data_length(number)])


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_what_stands_alone_is_written_as_version_1(codec: str) -> None:
    packer, buffer = Packer("run", 0, 1, codec), state()
    for _ in range(3):
        packed = land(packer, buffer)
        assert (packed.manifest.version, packed.base, packed.manifest.codec) == (1, None, codec)
        check(packed, buffer)
        assert b"plain" not in packed.manifest.to_bytes()


@pytest.mark.parametrize(
    ("codec", "alone"), [("dedup", "none"), ("xor-zstd", "zstd"), ("topk-delta", "none"), ("int8-delta", "none")]
)
def test_a_keyframe_comes_first_and_every_so_many_saves(codec: str, alone: str) -> None:
    packer, buffer = Packer("run", 0, 1, codec, keyframe_every=3), state()
    bases = []
    for _ in range(7):
        buffer = moved(buffer)
        packed = land(packer, buffer)
        check(packed, buffer)
        bases.append(packed.base)
        if packed.base is None:
            assert codecs(packed) == [alone] * 3
            assert packed.manifest.bounds == {}
        else:
            assert codecs(packed) == [codec if codec != "dedup" else "none"] * 3
    assert [base is None for base in bases] == [True, False, False, True, False, False, True]


def test_chunks_that_stand_still_are_not_stored_again() -> None:
    packer, buffer = Packer("run", 0, 1, "dedup"), state()
    land(packer, buffer)
    packed = land(packer, moved(buffer, start=CHUNK_BYTES, stop=CHUNK_BYTES + 4096))
    assert codecs(packed) == ["dedup", "none", "dedup"]
    assert packed.manifest.stored_bytes == CHUNK_BYTES + 32


def test_a_save_that_fails_is_no_base() -> None:
    packer, buffer = Packer("run", 0, 1, "xor-zstd"), state()
    first = land(packer, buffer)
    failed = pack(packer, moved(buffer))
    assert failed.base == packer.base == digest_of(first.manifest.to_bytes())
    packer.forget()
    assert packer.base is None
    assert pack(packer, moved(buffer)).base is None


def test_tensors_that_come_or_go_stand_alone() -> None:
    packer, buffer = Packer("run", 0, 1, "xor-zstd"), state()
    first = land(packer, buffer)
    entries = {"weight": ENTRIES["weight"], "new": ENTRIES["other"]}
    packed = pack(packer, buffer, entries)
    assert codecs(packed) == ["zstd"] * 3
    assert packed.base == digest_of(first.manifest.to_bytes()), "other ranks may have changed nothing"
    check(packed, buffer)


def test_the_base_is_what_was_landed_whatever_becomes_of_the_buffer() -> None:
    packer, buffer = Packer("run", 0, 1, "xor-zstd"), state()
    land(packer, buffer)
    kept = buffer.clone()
    buffer.zero_()
    packed = pack(packer, kept)
    assert codecs(packed) == ["dedup"] * 3


@pytest.mark.parametrize("codec", ["topk-delta", "int8-delta"])
def test_the_buffer_becomes_what_comes_back_and_the_bound_says_how_far_it_is(codec: str) -> None:
    packer, before = Packer("run", 0, 1, codec), state()
    land(packer, before)
    wanted = moved(before)
    buffer = wanted.clone()
    packed = pack(packer, buffer)
    check(packed, buffer)
    assert packed.manifest.bounds.keys() == ENTRIES.keys()
    for name, entry in ENTRIES.items():
        saved, back = (each[entry.start : entry.stop].view(torch.float32).double() for each in (wanted, buffer))
        bound = packed.manifest.bounds[name]
        assert bound.max_abs == float((saved - back).abs().max())
        assert bound.relative == pytest.approx(float((saved - back).norm() / saved.norm()), rel=1e-9)
        assert 0 < bound.relative < 0.01


@pytest.mark.parametrize("codec", ["topk-delta", "int8-delta"])
def test_a_tensor_beyond_the_limit_is_exact_and_its_neighbours_are_not(codec: str) -> None:
    packer, before = Packer("run", 0, 1, codec, max_error=0.003), state()
    land(packer, before)
    wanted = moved(moved(before), size=30.0, start=CHUNK_BYTES, stop=2 * CHUNK_BYTES)
    buffer = wanted.clone()
    packed = pack(packer, buffer)
    check(packed, buffer)
    assert codecs(packed) == [codec, "none", "none"]
    assert torch.equal(buffer[CHUNK_BYTES:], wanted[CHUNK_BYTES:])
    assert packed.manifest.bounds.keys() == {"weight"}
    packer.committed(packed, "0" * 32, buffer)
    again = pack(packer, moved(buffer))
    assert codecs(again) == [codec, "none", "none"], "it is not tried again before the next keyframe"


def test_what_was_packed_with_loss_stands_alone_with_the_same_bounds() -> None:
    """Where the base is gone by now: what was lost is lost, and is reported."""
    packer, before = Packer("run", 0, 1, "topk-delta"), state()
    land(packer, before)
    buffer = moved(before)
    packed = pack(packer, buffer)
    again = packer.alone(packed, buffer)
    check(again, buffer)
    assert again.base is None
    assert codecs(again) == ["none"] * 3
    assert again.manifest.bounds == packed.manifest.bounds != {}
    assert packer.base is None


def test_no_memory_for_a_base_is_no_failure(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    packer, buffer = Packer("run", 0, 1, "xor-zstd"), state()

    def refuse(self: Packer, *of: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(Packer, "_copied", refuse)
    land(packer, buffer)
    assert packer.base is None
    assert "stands alone" in caplog.text


# ── asked for speed ─────────────────────────────────────────────────────────────────────────────────────────────────


def disk(bytes_per_second: float, latency: float = 1e-4) -> Callable[[int], float]:
    return lambda num_bytes: latency + num_bytes / bytes_per_second


@pytest.mark.parametrize("codec", ["zstd", "xor-zstd", "topk-delta", "int8-delta"])
def test_a_fast_disk_gets_everything_as_it_is(codec: str) -> None:
    packer = Packer("run", 0, 1, codec, compress="if-faster", time_write=disk(1e12, 0.0))
    buffer = state()
    for _ in range(3):
        buffer = moved(buffer)
        packed = land(packer, buffer)
        check(packed, buffer)
        assert codecs(packed) == ["none"] * 3
        assert packed.manifest.bounds == {}


@pytest.mark.parametrize(
    ("codec", "first"), [("zstd", "zstd"), ("xor-zstd", "zstd"), ("topk-delta", "none"), ("int8-delta", "none")]
)
def test_a_slow_disk_gets_everything_compressed(codec: str, first: str) -> None:
    packer = Packer("run", 0, 1, codec, compress="if-faster", time_write=disk(1e6))
    buffer = state()
    assert codecs(land(packer, buffer)) == [first] * 3
    buffer = moved(buffer)
    packed = land(packer, buffer)
    assert codecs(packed) == [codec] * 3
    check(packed, buffer)


def test_what_stands_still_needs_no_verdict() -> None:
    packer, buffer = Packer("run", 0, 1, "xor-zstd", compress="if-faster", time_write=disk(1e12)), state()
    land(packer, buffer)
    assert codecs(land(packer, buffer)) == ["dedup"] * 3


@pytest.mark.parametrize(
    ("given", "error", "named"),
    [
        ({"codec": "brotli"}, UnknownNameError, "brotli"),
        ({"codec": "same"}, UnknownNameError, "xor-zstd"),
        ({"keyframe_every": 0}, ConfigError, "keyframe"),
        ({"keyframe_every": 10**6}, ConfigError, "keyframe"),
        ({"max_error": -1.0}, ConfigError, "relative error"),
        ({"max_error": float("nan")}, ConfigError, "relative error"),
        ({"compress": "sometimes"}, ConfigError, "if-faster"),
    ],
)
def test_what_cannot_be_is_named(given: dict[str, Any], error: type[Exception], named: str) -> None:
    arguments = {"codec": "xor-zstd", **given}
    with pytest.raises(error, match=named):
        Packer("run", 0, 1, **arguments)
