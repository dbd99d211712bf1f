"""Bytes are copied whole and nowhere else, whatever the addresses and lengths, by either way."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest

from shade.checkpoint._buffer import tensor_copy

LENGTHS = [0, 1, 63, 64, 65, 255, 256, 2**18 - 1, 2**18, 2**18 + 1, 2**18 + 255, 2**18 + 4097, 2**20 + 77]


@pytest.fixture(scope="module")
def compiled() -> Callable[[int, int, int], None]:
    pytest.importorskip("numba")
    return tensor_copy._compile()


@pytest.mark.parametrize("way", ["library", "stream"])
@pytest.mark.parametrize("num_bytes", LENGTHS)
def test_every_byte_and_no_other(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, way: str, num_bytes: int
) -> None:
    stream = request.getfixturevalue("compiled") if way == "stream" else None
    monkeypatch.setattr(tensor_copy, "_stream", stream)
    rng = np.random.default_rng(num_bytes)
    source = rng.integers(0, 256, num_bytes + 128, dtype=np.uint8)
    for at, of in ((0, 0), (1, 0), (0, 7), (63, 33), (64, 1)):
        target = np.full(num_bytes + 256, 7, dtype=np.uint8)
        tensor_copy.copy_bytes(target.ctypes.data + at, source.ctypes.data + of, num_bytes)
        assert (target[at : at + num_bytes] == source[of : of + num_bytes]).all()
        assert (target[:at] == 7).all()
        assert (target[at + num_bytes :] == 7).all()


def test_without_a_compiler_the_c_library_copies(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)  # type: ignore[arg-type]
    monkeypatch.setattr(tensor_copy, "_is_prepared", False)
    monkeypatch.setattr(tensor_copy, "_stream", None)
    with caplog.at_level("INFO"):
        tensor_copy.prepare()
    assert "by the C library" in caplog.text
    assert tensor_copy._stream is None


def test_the_faster_way_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(target: int, source: int, num_bytes: int) -> None:
        for _ in range(20):
            tensor_copy.ctypes.memmove(target, source, num_bytes)

    monkeypatch.setattr(tensor_copy, "_is_prepared", False)
    monkeypatch.setattr(tensor_copy, "_compile", lambda: slow)
    monkeypatch.setattr(tensor_copy, "_stream", None)
    tensor_copy.prepare()
    assert tensor_copy._stream is None
