"""Loops that threads share: each row once, whoever takes it; nobody waits for a thread without a core."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shade.checkpoint._buffer import copy_and_compare
from shade.checkpoint._buffer.copy_and_compare import END_BYTES, PIECE_BYTES, STRIDE_BYTES, SharedComparison, SharedCopy

LENGTHS = [0, 1, 63, 64, 65, 255, 256, 2**18 - 1, 2**18, 2**18 + 1, 2**18 + 255, 2**18 + 4097, 2**20 + 77]
WAYS = ["library", "compiled"]


@pytest.fixture(scope="module")
def loops() -> Any:
    pytest.importorskip("numba")
    return copy_and_compare._compile()


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use(request, monkeypatch, request.param)
    return str(request.param)


def use(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(copy_and_compare, "_loops", None if way == "library" else request.getfixturevalue("loops"))


@pytest.fixture
def helper() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.mark.parametrize("num_bytes", LENGTHS)
def test_every_byte_and_no_other(way: str, num_bytes: int) -> None:
    rng = np.random.default_rng(num_bytes)
    source = rng.integers(0, 256, num_bytes + 128, dtype=np.uint8)
    for at, of in ((0, 0), (1, 0), (0, 7), (63, 33), (64, 1)):
        target = np.full(num_bytes + 256, 7, dtype=np.uint8)
        copy_and_compare.copy_bytes(target.ctypes.data + at, source.ctypes.data + of, num_bytes)
        assert (target[at : at + num_bytes] == source[of : of + num_bytes]).all()
        assert (target[:at] == 7).all()
        assert (target[at + num_bytes :] == 7).all()


def ranges_of(
    target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8], lengths: list[int]
) -> list[tuple[int, int, int]]:
    starts = np.cumsum([0, *lengths])
    return [
        (target.ctypes.data + int(start), source.ctypes.data + int(start), length)
        for start, length in zip(starts, lengths, strict=False)
    ]


def test_two_threads_copy_all_ranges(way: str, helper: ThreadPoolExecutor) -> None:
    lengths = [3, 0, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES - 5, 2**18 + 9, 64, 11]
    source = np.random.default_rng(0).integers(0, 256, sum(lengths), dtype=np.uint8)
    target = np.zeros_like(source)
    SharedCopy(ranges_of(target, source, lengths)).run(helper)
    assert (target == source).all()


def test_a_helper_that_has_not_begun_is_not_waited_for(way: str, helper: ThreadPoolExecutor) -> None:
    may_end = threading.Event()
    helper.submit(may_end.wait)
    source = np.ones(3 * PIECE_BYTES, dtype=np.uint8)
    target = np.zeros_like(source)
    try:
        SharedCopy(ranges_of(target, source, [len(source)])).run(helper)
        assert (target == source).all()
    finally:
        may_end.set()
    assert helper.submit(lambda: True).result(), "what was called off does not come later"


def test_a_helper_that_is_held_up_keeps_one_row(monkeypatch: pytest.MonkeyPatch, helper: ThreadPoolExecutor) -> None:
    """The library's way, where a test can hold a thread up within a row."""
    monkeypatch.setattr(copy_and_compare, "_loops", None)
    source = np.ones(6 * PIECE_BYTES, dtype=np.uint8)
    target = np.zeros_like(source)
    me, is_held, may_go, mine = threading.get_ident(), threading.Event(), threading.Event(), []

    class Library:
        @staticmethod
        def memmove(to: int, of: int, num_bytes: int) -> None:
            if threading.get_ident() != me:
                is_held.set()
                assert may_go.wait(60)
            else:
                assert is_held.wait(60)
                mine.append(num_bytes)
                if len(mine) == 5:
                    may_go.set()
            ctypes.memmove(to, of, num_bytes)

    monkeypatch.setattr(copy_and_compare, "ctypes", Library)
    SharedCopy(ranges_of(target, source, [len(source)])).run(helper)
    assert len(mine) == 5
    assert (target == source).all()


@pytest.mark.parametrize("way", ["compiled"], indirect=True)
def test_rows_are_copied_while_another_thread_keeps_the_interpreter(way: str, helper: ThreadPoolExecutor) -> None:
    source = np.ones(64 * PIECE_BYTES, dtype=np.uint8)
    target = np.zeros_like(source)
    copy = SharedCopy(ranges_of(target, source, [len(source)]))
    copied = helper.submit(copy.run)
    deadline = time.monotonic() + 60
    while not copy._num_taken[0]:
        assert time.monotonic() < deadline
    ctypes.PyDLL(None).usleep(2_000_000)  # with the interpreter's lock
    num_taken = int(copy._num_taken[0])
    copied.result()
    assert num_taken > 64


@pytest.mark.parametrize("way", ["compiled"], indirect=True)
def test_the_last_bytes_of_a_row_are_copied_before_those_in_its_middle(way: str, helper: ThreadPoolExecutor) -> None:
    num_bytes = 2**28
    source = np.ones(num_bytes, dtype=np.uint8)
    target = np.zeros_like(source)
    row_13 = np.array([[target.ctypes.data + 1, source.ctypes.data, num_bytes - 2]], dtype=np.uintp)
    taken = np.zeros(1, dtype=np.int64)
    looped = helper.submit(copy_and_compare._loops[0], row_13, taken.ctypes.data)
    looks = []
    while not looped.done():
        in_the_middle = bool(target[num_bytes // 2])
        looks.append((in_the_middle, bool(target[-2])))
    assert (True, False) not in looks


@pytest.mark.parametrize("num_bytes", [0, 1, 7, 8, 63, 64, 65, STRIDE_BYTES, STRIDE_BYTES + 1, 2**18 + 3])
def test_a_difference_is_found_in_every_place_that_is_compared(way: str, num_bytes: int) -> None:
    first = np.zeros(num_bytes, dtype=np.uint8)
    second = first.copy()
    rows = np.array([(first.ctypes.data, second.ctypes.data, num_bytes)], dtype=np.uintp)
    places = set(range(num_bytes))
    if num_bytes > STRIDE_BYTES:
        words = {place + each for place in range(0, num_bytes - 7, STRIDE_BYTES) for each in range(8)}
        places = words | set(range(END_BYTES)) | set(range(num_bytes - END_BYTES, num_bytes))
    draw = np.random.default_rng(1)
    for place in draw.permutation(sorted(places))[:200]:
        second[place] = 1
        comparison = SharedComparison(rows)
        comparison.run()
        assert comparison.differing == [0], place
        second[place] = 0
    comparison = SharedComparison(rows)
    comparison.run()
    assert comparison.differing == []


def test_the_ranges_that_differ_are_named(way: str, helper: ThreadPoolExecutor) -> None:
    lengths = [5, 0, STRIDE_BYTES * 3, 17, STRIDE_BYTES * 2 + 1]
    first = np.zeros(sum(lengths), dtype=np.uint8)
    second = first.copy()
    second[4] = second[-1] = second[5 + STRIDE_BYTES] = 1
    comparison = SharedComparison(np.array(ranges_of(first, second, lengths), dtype=np.uintp))
    comparison.run(helper)
    assert comparison.differing == [0, 2, 4]


def test_without_a_compiler_the_c_library_copies(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)  # type: ignore[arg-type]
    monkeypatch.setattr(copy_and_compare, "_is_prepared", False)
    monkeypatch.setattr(copy_and_compare, "_loops", None)
    with caplog.at_level("INFO"):
        copy_and_compare.prepare()
    assert "by the C library" in caplog.text
    assert copy_and_compare._loops is None
