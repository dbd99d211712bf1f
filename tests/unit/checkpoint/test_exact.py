"""The codecs ``none`` and ``zstd``: what they store, and that nothing that anybody stores does harm.

What every codec promises is in tests/contracts/test_checkpoint_codec.py.
"""

from __future__ import annotations

import random
import sys
import tracemalloc

import numpy as np
import pytest
import zstandard

from shade.checkpoint._codecs.base import CODECS, standalone_codec
from shade.errors import ConfigError, CorruptCheckpointError, UnknownNameError


def test_no_codec_copies_nothing() -> None:
    data = memoryview(b"abc")
    codec = standalone_codec("none")
    assert codec.encode(data, 4) is data
    assert codec.decode(data, 3, 4) is data


def test_grouping_bytes_makes_weights_smaller() -> None:
    weights = np.random.default_rng(0).normal(0, 0.02, 2**18).astype(np.float32)
    data = memoryview(weights.view(np.uint8))
    codec = standalone_codec("zstd")
    grouped, mixed = len(codec.encode(data, 4)), len(codec.encode(data, 1))
    assert grouped < 0.9 * len(data)
    assert grouped < 0.95 * mixed


@pytest.mark.parametrize("name", ["none", "zstd"])
def test_damaged_chunks_are_refused_or_have_the_right_length(name: str) -> None:
    rng = random.Random(0)
    codec = standalone_codec(name)
    data = np.arange(2000, dtype=np.float32).tobytes()
    stored = bytes(codec.encode(memoryview(data), 4))
    refused = 0
    for _ in range(2000):
        wrong = bytearray(stored)
        for _ in range(rng.randrange(1, 4)):
            wrong[rng.randrange(len(wrong))] ^= 1 << rng.randrange(8)
        if rng.random() < 0.3:
            wrong = wrong[: rng.randrange(len(wrong))]
        if rng.random() < 0.1:
            wrong += rng.randbytes(rng.randrange(1, 50))
        try:
            assert len(codec.decode(wrong, len(data), 4)) == len(data)
        except CorruptCheckpointError:
            refused += 1
    assert refused > 200


@pytest.mark.parametrize("stored", [b"", b"x", bytes(1000), zstandard.ZstdCompressor().compress(b"other length")])
def test_what_is_no_frame_of_that_length_is_refused(stored: bytes) -> None:
    with pytest.raises(CorruptCheckpointError):
        standalone_codec("zstd").decode(stored, 100, 4)


def test_a_frame_that_promises_the_world_allocates_nothing() -> None:
    bombs = [
        zstandard.ZstdCompressor(level=1).compress(bytes(2**26)),
        zstandard.ZstdCompressor(level=1, write_content_size=False).compress(bytes(2**26)),
        b"\x28\xb5\x2f\xfd\xe0" + b"\xff" * 8 + b"\x01\x00\x00",
    ]
    codec = standalone_codec("zstd")
    tracemalloc.start()
    try:
        for bomb in bombs:
            with pytest.raises(CorruptCheckpointError):
                codec.decode(bomb, 1000, 4)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize("name", ["zstd", "xor-zstd", "topk-delta", "int8-delta", "excp"])
def test_a_missing_package_is_an_extra_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match=r"shade\[checkpoint\]"):
        CODECS.get(name)()
    with pytest.raises(UnknownNameError, match="zstd"):
        CODECS.get("zsdt")
