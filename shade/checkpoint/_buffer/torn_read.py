"""Detects torn reads: waits until no thread can be in the middle of a write, then compares tensors with copies.

*Waiting.* A change during the copy shows when its writer continues, or ends. A thread that was interrupted in the
middle of an operation does neither, for as long as others want its processor: tens of milliseconds on a busy machine.
So `wait_for_others` waits for each other thread until it has slept, since no thread sleeps in the middle of writing
memory, or has run for `REST_SECONDS`. Asking whether a thread sleeps costs ten microseconds, how long it has run, one.
The looks are bursts of ctypes calls that keep the interpreter's lock: to get it back each time could take 5 ms. Where
the system cannot say (only Linux can), a fixed pause must do.

A virtual machine's processor was once taken by its host for two milliseconds. Its kernel cannot know, so the clock of
the thread on it continued, and a snapshot of half a write was committed: three times in a thousand saves beside a
writer. So a thread's time counts only between two moments, close to each other, at which every processor of this
process was seen to execute: membarrier(2) interrupts each and returns when all have answered.

*Comparing.* PyTorch counts every in-place change but those through ``.data`` or a numpy view. To find these, comparing
all bytes would cost another copy; so `Comparison` compares a few places, where a copy that is old in one part and new
in the next can hide, while a writer fills a tensor from front to back. A copy that overtakes it and stays ahead is old
from there on: one word every 32 KiB, and both ends, show that. A copy that is overtaken in a pause is old up to there:
a word is compared before each pause. If several threads write a part each, the word at the end of each part shows it.
Pieces of a tensor that several threads copy begin and end at compared words. There remains a copy that was interrupted
within 32 KiB of overtaking an uncounted writer; to meet that takes a writer that writes all the time, so after the
first difference found anywhere in a state, every byte is compared. Decision 0008 has the measurements.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from shade.checkpoint._buffer.shared_loops import PIECE_BYTES, STRIDE_BYTES, SharedComparison, cut
from shade.checkpoint._pacing.schedule import processor_ns

REST_SECONDS: Final = 0.0005
"""Enough CPU time to write 32 KiB at the pace of the slowest operation."""
LONGEST_SECONDS: Final = 5.0
"""Longest wait for a thread that gets no processor. A quarter of a second was seen once in a thousand saves, with four
threads to a core."""
_BURST_SECONDS: Final = 0.001
"""Longest time that a burst keeps the interpreter's lock: a thread that runs has run for `REST_SECONDS` by then."""
_GLANCE_MICROSECONDS: Final = 25
"""Sleep between two looks, in which another thread may use this processor; the system makes it three times as long."""
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.0005, 0.004
"""First and longest pause between two bursts, for threads that wait for the interpreter's lock or this processor."""
_CLOSE_SECONDS: Final = 0.00025
"""Two moments closer than this leave a host no time to take a processor and give it back."""
_THREADS: Final = "/proc/self/task"
_STAT_BYTES: Final = 512
_MEMBARRIER: Final = {"x86_64": 324, "aarch64": 283}
"""Number of the system call, by architecture."""
_REGISTER, _PRIVATE_EXPEDITED = 1 << 4, 1 << 3
_libc = ctypes.PyDLL(None)
_libc.read.restype = ctypes.c_ssize_t


def wait_for_others() -> bool:
    """Returns when each other thread of this process has slept, ended, or run for `REST_SECONDS` since the call.

    Returns False after `LONGEST_SECONDS`: one thread has not, and may be in the middle of a write.
    """
    if sys.platform != "linux":
        time.sleep(REST_SECONDS)
        return True
    deadline = time.monotonic() + LONGEST_SECONDS
    seen = _SeenThreads()
    # Twice: a sleeping thread may have been woken by one that had begun to write, and was interrupted between the two,
    # as the threads of one PyTorch operation are. So the sleepers are looked at again when all others have run.
    return all(seen.wait(deadline) for _ in range(2))


class _SeenThreads:
    """How long each other thread was seen to run."""

    def __init__(self) -> None:
        self._me = threading.get_native_id()
        self._run_ns: dict[int, int] = {}
        """By thread, how long it has certainly run."""

    def wait(self, deadline: float) -> bool:
        """Waits until each thread that exists now has run for long enough, or sleeps; False if the deadline passes."""
        others = [int(name) for name in os.listdir(_THREADS) if int(name) != self._me]
        left, pause_seconds = [each for each in self._look(others) if _may_be_writing(each)], _PAUSE_SECONDS
        while left:
            self._burst(left)
            # Now, not after the pause: a thread that got the interpreter's lock in the pause would be seen releasing
            # it.
            left = [each for each in self._look(left) if _may_be_writing(each)]
            if left and time.monotonic() > deadline:
                return False
            if left:
                time.sleep(pause_seconds)
                pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)
        return True

    def _look(self, threads: list[int]) -> list[int]:
        """Returns the threads that have not run for long enough."""
        return [each for each in threads if self._run_ns.get(each, 0) < REST_SECONDS * 1e9]

    def _burst(self, threads: list[int]) -> None:
        """Adds up how long threads run, for a moment."""
        begun_ns = looked_ns = time.monotonic_ns()
        _touch_processors()
        clocks_ns = {thread: processor_ns(thread) for thread in threads}
        while looked_ns - begun_ns < _BURST_SECONDS * 1e9 and self._look(threads):
            _libc.usleep(_GLANCE_MICROSECONDS)
            before_ns, looked_ns = looked_ns, time.monotonic_ns()
            _touch_processors()
            counts = time.monotonic_ns() - before_ns < _CLOSE_SECONDS * 1e9
            for thread, clock_ns in clocks_ns.items():
                clocks_ns[thread] = processor_ns(thread)
                if counts:
                    self._run_ns[thread] = self._run_ns.get(thread, 0) + clocks_ns[thread] - clock_ns


def _may_be_writing(thread: int) -> bool:
    """Whether a thread runs, wants to, or waits for a page of memory that it has touched."""
    state = _proc_file(thread, "stat").rpartition(b")")[2][1:2]
    return state == b"R" or (state == b"D" and _proc_file(thread, "syscall").startswith(b"-1"))


def _proc_file(thread: int, what: str) -> bytes:
    """Returns a file of a thread in /proc; nothing if the thread has ended, or the file cannot be read."""
    descriptor = _libc.open(f"{_THREADS}/{thread}/{what}".encode(), os.O_RDONLY | os.O_CLOEXEC)
    if descriptor < 0:
        return b""
    content = ctypes.create_string_buffer(_STAT_BYTES)
    length = _libc.read(descriptor, content, _STAT_BYTES)
    _libc.close(descriptor)
    return content.raw[: max(length, 0)]


def _touch_processors() -> None:
    """Returns when each processor that runs a thread of this process has executed something since the call.

    Returns at once where the system lacks the call (Linux before 4.14) or forbids it (a sandbox): clocks are then
    believed as they are.
    """
    number = _MEMBARRIER.get(platform.machine())
    if number is not None and _libc.syscall(number, _PRIVATE_EXPEDITED, 0, 0) != 0:
        _libc.syscall(number, _REGISTER, 0, 0)  # once a process; a child made by fork begins anew
        _libc.syscall(number, _PRIVATE_EXPEDITED, 0, 0)


_GRAIN: Final = 2**15
"""Least number of elements that ATen gives to a thread (at::internal::GRAIN_SIZE)."""
_WORD_BYTES: Final = 8
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Comparison:
    """How the tensors of one run are compared with their copies, save after save."""

    def __init__(self) -> None:
        self.in_full = False
        """Whether every byte is compared: a tensor has differed before."""

    def first_torn(
        self,
        copies: Mapping[str, tuple[torch.Tensor, int]],
        pauses: Mapping[str, Sequence[int]],
        helper: Executor | None = None,
    ) -> str | None:
        """Compares contiguous CPU tensors with their copies, bit for bit, in the places that are compared.

        Args:
            copies: Tensors and the addresses of their copies, by name.
            pauses: Offsets in bytes at which the copy of a tensor was interrupted, by name.
            helper: Compares a part of them.

        Returns:
            The name of the first tensor that differs; None if all agree.
        """
        range_N3 = np.array(
            [(each.data_ptr(), copied, each.nbytes) for each, copied in copies.values()], dtype=np.uintp
        ).reshape(-1, 3)
        if self.in_full:
            number_P, range_P3 = cut(range_N3, STRIDE_BYTES)
        else:
            words = [
                (number, end)
                for number, (name, (tensor, _)) in enumerate(copies.items())
                for end in (*pauses.get(name, ()), *_ends_of_parts(tensor, torch.get_num_threads()))
            ]
            number_P, range_P3 = self._with_words(range_N3, np.array(words, dtype=np.int64).reshape(-1, 2))
        compared = SharedComparison(range_P3)
        compared.run(helper)
        names = list(copies)
        torn = [names[number_P[row]] for row in compared.differing]
        self.in_full |= bool(torn)
        return min(torn, key=names.index, default=None)

    def _with_words(
        self, range_N3: npt.NDArray[np.uintp], end_W2: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uintp]]:
        """Returns the ranges, and the words before some offsets in them and before each end of a piece; with the number
        of the range that each belongs to."""
        number_P, piece_P3 = cut(range_N3, PIECE_BYTES)
        last_N = range_N3[number_P, 0] + range_N3[number_P, 2]
        is_inner_P = piece_P3[:, 0] + piece_P3[:, 2] < last_N
        piece_end_P = (piece_P3[:, 0] + piece_P3[:, 2] - range_N3[number_P, 0]).astype(np.int64)
        number_W = np.concatenate([end_W2[:, 0], number_P[is_inner_P]])
        end_W = np.concatenate([end_W2[:, 1], piece_end_P[is_inner_P]])
        begin_W = np.maximum(0, end_W - _WORD_BYTES).astype(np.uintp)
        width_W = np.minimum(end_W, _WORD_BYTES).astype(np.uintp)
        word_W3 = np.stack([range_N3[number_W, 0] + begin_W, range_N3[number_W, 1] + begin_W, width_W], axis=1)
        return np.concatenate([np.arange(len(range_N3)), number_W]), np.concatenate([range_N3, word_W3])

    def agrees_in_full(self, tensor: torch.Tensor, copied: torch.Tensor) -> bool:
        """Whether a CPU tensor of any layout equals its copy, bit for bit."""
        same = torch.equal(_bits(tensor), _bits(copied))
        self.in_full |= not same
        return same


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a CPU tensor's bits as integers, so that NaN equals itself and -0 does not equal 0."""
    return tensor.detach().resolve_neg().view(_INTEGERS[tensor.itemsize])


def _ends_of_parts(tensor: torch.Tensor, num_threads: int) -> range:
    """Returns the offsets in bytes at which ATen divides a contiguous tensor among threads."""
    num_elements, item_bytes = tensor.numel(), tensor.itemsize
    if num_elements <= _GRAIN:
        return range(0)
    part = -(-num_elements // min(num_threads, -(-num_elements // _GRAIN)))
    return range(part * item_bytes, num_elements * item_bytes, part * item_bytes)
