"""Waits until nobody in this process can be in the middle of writing to a tensor, having got no further for a while.

Whether a tensor changed while it was copied shows when whoever writes to it goes on, or ends. A thread that was
interrupted in the middle of an operation does neither, for as long as others want its processor: tens of milliseconds
on a busy machine. So each other thread is waited for until it has been asleep, which none is in the middle of writing
memory, or has run for long enough to be seen. Which ones sleep costs ten microseconds each to ask for, how long one has
run, one.

Story: a virtual machine's processor was taken by its host for two milliseconds. Its kernel cannot know, so the clock of
the thread on it went on, and a snapshot of half a write was committed: three times in a thousand saves beside a writer.
So a thread's time counts only between two moments, close to each other, at which every processor of this process was
seen to execute: membarrier(2) interrupts each and returns when all have answered. Decision 0008 has the measurement.

No look lets go of the interpreter, for each would wait for it again, up to 5 ms beside a thread that is all Python: so
the system is called by ctypes, a burst of looks at a time.

Where the system does not tell (only Linux does), a fixed rest must do.

Compares tensors with their copies: in places, and in full once somebody was caught changing them uncounted.

PyTorch counts every in-place change of a tensor, but those through ``.data`` or a numpy view. Comparing all bytes would
find these too, at the price of another copy; so a few places must do, chosen where a copy that is old in one part and
new in the next can hide (what is no longer than the distance between two of them is compared in full). A writer fills a
tensor from front to back while somebody copies it:

* The copy overtakes it and stays ahead: all is old from there on. One word every 32 KiB, and both ends, show that.
* The copy overtakes it and pauses, to be overtaken in turn: what is old ends where the pause was, and so a word is
  compared before each.
* Several threads fill a part each: what is old ends where a part does, and a word is compared there, too.

What is left is a copy that was interrupted within 32 KiB of overtaking a writer. It takes one that writes uncounted,
and all the time, to meet that: so whoever was found out once, anywhere in a state, is not trusted again.

Measured: decision 0008.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
import time
from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from shade.checkpoint._pacing.cpu_time import processor_ns

REST_SECONDS: Final = 0.0005
"""Enough processor time to write 32 KiB at the pace of the slowest of operations."""
LONGEST_SECONDS: Final = 5.0
"""A thread that gets no processor for so long is given up. A quarter of a second was seen once in a thousand saves,
with four threads to a core."""
_BURST_SECONDS: Final = 0.001
"""The interpreter is held for so long, at most: who runs at all has run for `REST_SECONDS` by then."""
_GLANCE_MICROSECONDS: Final = 25
"""Between two looks, this thread's processor is free for another; the system makes three times as much of it."""
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.0005, 0.004
"""Between two bursts, the first and the later ones: whoever waits for the interpreter, or this processor, has it."""
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

    Twice: a thread that slept may have been called to work by one that had begun to write, and was interrupted between
    the two, as the threads of one PyTorch operation are. So who slept is looked at again when all others have run.

    Returns:
        Whether it is so; false: after `LONGEST_SECONDS` one still has not, and may be in the middle of anything.
    """
    if sys.platform != "linux":
        time.sleep(REST_SECONDS)
        return True
    deadline = time.monotonic() + LONGEST_SECONDS
    seen = _Seen()
    return all(seen.wait(deadline) for _ in range(2))


class _Seen:
    """What was seen of the other threads, time and again."""

    def __init__(self) -> None:
        self._me = threading.get_native_id()
        self._run_ns: dict[int, int] = {}
        """How long each has certainly run."""

    def wait(self, deadline: float) -> bool:
        """Returns when each thread that is there now, and has not run for long enough, has or sleeps.

        Args:
            deadline: When to give up, as `time.monotonic` counts.

        Returns:
            False: it has come to that.
        """
        others = [int(name) for name in os.listdir(_THREADS) if int(name) != self._me]
        left, pause_seconds = [each for each in self._look(others) if _may_be_writing(each)], _PAUSE_SECONDS
        while left:
            self._burst(left)
            # Now, not after the pause: whoever the pause has let into the interpreter would be seen leaving it.
            left = [each for each in self._look(left) if _may_be_writing(each)]
            if left and time.monotonic() > deadline:
                return False
            if left:
                time.sleep(pause_seconds)
                pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)
        return True

    def _look(self, threads: list[int]) -> list[int]:
        """Those that have not run for long enough."""
        return [each for each in threads if self._run_ns.get(each, 0) < REST_SECONDS * 1e9]

    def _burst(self, threads: list[int]) -> None:
        """Sees threads run, for a moment."""
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
    state = _told(thread, "stat").rpartition(b")")[2][1:2]
    return state == b"R" or (state == b"D" and _told(thread, "syscall").startswith(b"-1"))


def _told(thread: int, what: str) -> bytes:
    """What the system says of a thread; nothing of one that has ended, or where it does not tell."""
    descriptor = _libc.open(f"{_THREADS}/{thread}/{what}".encode(), os.O_RDONLY | os.O_CLOEXEC)
    if descriptor < 0:
        return b""
    content = ctypes.create_string_buffer(_STAT_BYTES)
    length = _libc.read(descriptor, content, _STAT_BYTES)
    _libc.close(descriptor)
    return content.raw[: max(length, 0)]


def _touch_processors() -> None:
    """Returns when each processor that runs a thread of this process has executed something since the call.

    Where the system has no such call (Linux before 4.14, a sandbox that forbids it), at once: clocks are believed then.
    """
    number = _MEMBARRIER.get(platform.machine())
    if number is not None and _libc.syscall(number, _PRIVATE_EXPEDITED, 0, 0) != 0:
        _libc.syscall(number, _REGISTER, 0, 0)  # once a process; a child made by fork begins anew
        _libc.syscall(number, _PRIVATE_EXPEDITED, 0, 0)


_PLACES: Final = 4
_PLACE_BYTES: Final = 64
"""Compared in each tensor, its ends included."""
_SMALL_BYTES: Final = 2**18
"""Of a tensor below this the two ends are compared."""
_STRIDE_BYTES: Final = 32 * 2**10
"""Between further places, of a word each, in tensors that are longer."""
_WORD_BYTES: Final = 8
_GRAIN: Final = 2**15
"""ATen gives a thread at least so many elements (at::internal::GRAIN_SIZE)."""
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Comparison:
    """What one run's tensors are compared by, save after save."""

    def __init__(self) -> None:
        self.in_full = False
        """Whether every byte is: something has differed before."""

    def agrees(self, tensor: torch.Tensor, buffer: torch.Tensor, start: int, pauses: Iterable[int] = ()) -> bool:
        """Compares a tensor with its copy, bit for bit, where it is looked at.

        Args:
            tensor: Contiguous, on the CPU.
            buffer: uint8, contiguous; holds the copy.
            start: Where in it.
            pauses: Offsets in bytes, in the tensor, at which copying was interrupted.

        Returns:
            Whether they are the same.
        """
        live, copied, length = tensor.data_ptr(), buffer.data_ptr() + start, tensor.nbytes
        if self.in_full or length <= _STRIDE_BYTES:
            same = bool(_memcmp(live, copied, length) == 0)
        else:
            words = _same_words(tensor, buffer.numpy()[start : start + length])
            places = _places(length) + _words_before([*pauses, *_ends_of_parts(tensor, torch.get_num_threads())])
            same = words and all(_memcmp(live + offset, copied + offset, width) == 0 for offset, width in places)
        self.in_full |= not same
        return same


def _same_words(tensor: torch.Tensor, copied: npt.NDArray[np.uint8]) -> bool:
    """Whether those at regular distances are."""
    whole, step = len(copied) // _WORD_BYTES * _WORD_BYTES, _STRIDE_BYTES // _WORD_BYTES
    here = tensor.view(-1).view(torch.uint8).numpy()[:whole].view(np.uint64)[::step]
    return np.array_equal(here, copied[:whole].view(np.uint64)[::step])


def _places(length: int) -> list[tuple[int, int]]:
    """Offset and width of both ends, and of what lies evenly between them."""
    width = min(_PLACE_BYTES, length)
    last = (_PLACES if length > _SMALL_BYTES else 2) - 1
    return [((length - width) * place // last, width) for place in range(last + 1)]


def _words_before(ends: list[int]) -> list[tuple[int, int]]:
    """Offset and width of the last word before each."""
    return [(max(0, end - _WORD_BYTES), min(_WORD_BYTES, end)) for end in ends]


def _ends_of_parts(tensor: torch.Tensor, num_threads: int) -> range:
    """Offsets in bytes at which ATen divides a contiguous tensor among threads."""
    num_elements, item_bytes = tensor.numel(), tensor.itemsize
    if num_elements <= _GRAIN:
        return range(0)
    part = -(-num_elements // min(num_threads, -(-num_elements // _GRAIN)))
    return range(part * item_bytes, num_elements * item_bytes, part * item_bytes)
