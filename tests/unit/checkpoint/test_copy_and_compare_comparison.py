"""Where a copy that is old in one part and new in the next can hide, it is looked at; after a find, everywhere."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from shade.checkpoint._buffer.copy_and_compare import Comparison, _ends_of_parts
from shade.checkpoint._buffer.tensor_copy import Copying
from shade.checkpoint._capture.layout import TensorSpec, lay_out
from shade.errors import TornSnapshotError

NUM_ITEMS = 300_000
BETWEEN = 20_000
"""An item that no rule looks at."""


def copying_of(live: torch.Tensor, comparison: Comparison | None = None) -> Copying:
    layout = lay_out({"x": TensorSpec.of(live)}, 0, 1)
    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    return Copying({"x": live}, layout.entries, buffer, comparison=comparison)


@pytest.mark.parametrize("num_bytes", [64, 64 * 1001, 64 * 9371, 1_199_936])
def test_a_writer_that_went_by_while_the_copy_paused(num_bytes: int) -> None:
    live = torch.zeros(NUM_ITEMS)
    copying = copying_of(live)
    assert copying.advance(num_bytes) == num_bytes
    live.data[num_bytes // 4 - 2 :] = 1  # overtaken two items before the pause
    with pytest.raises(TornSnapshotError, match="'x'"):
        copying.finish()


LAYOUTS = {
    "channels last": lambda: torch.randn(8, 16, 5, 5).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(40, 30).t(),
    "strided": lambda: torch.randn(40, 30)[:, ::2],
    "expanded": lambda: torch.randn(40, 1).expand(40, 30),
    "negated": lambda: torch.randn(40, 30, dtype=torch.complex64).t().conj().imag,
    "bfloat16": lambda: torch.randn(40, 30).bfloat16().t(),
    "bool": lambda: (torch.randn(40, 30) > 0).t(),
    "float8": lambda: torch.randn(40, 30).to(torch.float8_e4m3fn).t(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("before", [True, False], ids=["before its copy", "after its copy"])
def test_an_uncounted_write_to_any_layout_is_found(layout: str, before: bool) -> None:
    """A tensor that is not contiguous is compared in full: a single element is enough."""
    live = LAYOUTS[layout]()
    assert not live.is_contiguous()
    copying_of(live).finish()
    copying = copying_of(live)
    if not before:
        copying.copy("x")
    memory = torch.empty(0, dtype=torch.uint8).set_(live.untyped_storage())
    memory[live.storage_offset() * live.itemsize] ^= 1
    with pytest.raises(TornSnapshotError, match="'x'"):
        copying.finish()


def test_what_is_not_a_number_equals_its_copy() -> None:
    live = torch.full((40, 30), torch.nan).t()
    live[3, 4], live[5, 6] = -0.0, torch.inf
    copying_of(live).finish()


@pytest.mark.parametrize("num_threads", [2, 3, 7])
@pytest.mark.parametrize("num_items", [NUM_ITEMS, NUM_ITEMS + 1, 70_001])
def test_one_of_several_threads_that_was_overtaken_at_the_end_of_its_part(
    monkeypatch: pytest.MonkeyPatch, num_threads: int, num_items: int
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    part = -(-num_items // min(num_threads, -(-num_items // 2**15)))
    for end in range(part, num_items, part):
        live = torch.ones(num_items)
        live[end - 2 : end] = 0
        copying = copying_of(live)
        copying.copy("x")
        live.data[end - 2 : end] = 1
        with pytest.raises(TornSnapshotError, match="'x'"):
            copying.finish()


def test_aten_divides_a_tensor_as_is_thought() -> None:
    """Seen from aside: an item that ends a part is still old when the one after it is new."""
    live = torch.zeros(4_000_001)
    (end,) = (offset // 4 for offset in _ends_of_parts(live, 2))
    ended = threading.Event()

    def write() -> None:
        torch.set_num_threads(2)
        number = 0
        while not ended.is_set():
            number += 1
            live.data.fill_(number)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        looked, deadline = live.numpy(), time.monotonic() + 60
        while not looked[end] > looked[end - 1]:  # in this order: who goes from front to back is never seen so
            assert time.monotonic() < deadline
    finally:
        ended.set()
        writer.join()


def test_what_has_differed_once_is_compared_in_full_from_then_on() -> None:
    live, comparison = torch.zeros(NUM_ITEMS), Comparison()

    def change(place: int) -> Copying:
        copying = copying_of(live, comparison)
        copying.copy("x")
        live.data[place] += 1
        return copying

    change(BETWEEN).finish()  # the price of samples
    with pytest.raises(TornSnapshotError):
        change(0).finish()
    with pytest.raises(TornSnapshotError):
        change(BETWEEN).finish()
    copying_of(live, comparison).finish()


def test_a_copy_of_a_torn_snapshot_is_compared_in_full() -> None:
    live = torch.zeros(NUM_ITEMS)
    torn = copying_of(live)
    torn.copy("x")
    live.data[0] = 1
    with pytest.raises(TornSnapshotError):
        torn.finish()
    again = torn.again()
    again.copy("x")
    live.data[BETWEEN] = 1
    with pytest.raises(TornSnapshotError):
        again.finish()


def test_a_counted_change_is_no_reason_to_compare_in_full() -> None:
    live, comparison = torch.zeros(NUM_ITEMS), Comparison()
    copying = copying_of(live, comparison)
    copying.copy("x")
    live[0] = 1
    with pytest.raises(TornSnapshotError):
        copying.finish()
    assert not comparison.in_full


@pytest.mark.parametrize("num_bytes", [0, 1, 7, 8, 63, 64, 65, 2**15, 2**15 + 1, 2**18 + 3])
@pytest.mark.parametrize("in_full", [False, True])
def test_what_is_the_same_agrees_and_either_end_counts(num_bytes: int, in_full: bool) -> None:
    live = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    buffer = torch.zeros(num_bytes + 192, dtype=torch.uint8)
    buffer[64 : 64 + num_bytes] = live
    pauses = [end for end in (1, 9, 64) if end < num_bytes]

    def compared() -> bool:
        comparison = Comparison()
        comparison.in_full = in_full
        return comparison.first_torn({"x": (live, buffer.data_ptr() + 64)}, {"x": pauses}) is None

    assert compared()
    for place in (0, num_bytes - 1) if num_bytes else ():
        live[place] ^= 1
        assert not compared()
        live[place] ^= 1
