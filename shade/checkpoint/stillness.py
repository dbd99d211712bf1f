"""Waits until nobody in this process can be in the middle of writing to a tensor, having got no further for a while.

Whether a tensor changed while it was copied shows when whoever writes to it goes on, or ends. A thread that was
interrupted in the middle of an operation does neither, for as long as others want its processor: tens of milliseconds
on a busy machine. So each other thread is waited for until it has been asleep, which none is in the middle of writing
memory, or has run for long enough to be seen. A thread's processor time costs a microsecond to ask for; which ones
sleep, ten.

Story: a virtual machine's processor was taken by its host for two milliseconds. Its kernel cannot know, so the clock of
the thread on it went on, and a snapshot of half a write was committed: three times in a thousand saves beside a writer.
So a thread's time counts only between two moments, close to each other, at which every processor of this process was
seen to execute: membarrier(2) interrupts each and returns when all have answered. Decision 0008 has the measurement.

Where the system does not tell (only Linux does), a fixed rest must do.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
import threading
import time
from pathlib import Path
from typing import Final

REST_SECONDS: Final = 0.0005
"""Enough processor time to write 32 KiB at the pace of the slowest of operations."""
LONGEST_SECONDS: Final = 5.0
"""A thread that gets no processor for so long is given up. A quarter of a second was seen once in a thousand saves,
with four threads to a core."""
_GLANCE_SECONDS: Final = 0.00005
"""Between two looks; the system makes two or three times as much of it."""
_CLOSE_SECONDS: Final = 0.00025
"""Two moments closer than this leave a host no time to take a processor and give it back."""
_THREADS: Final = Path("/proc/self/task")
_MEMBARRIER: Final = {"x86_64": 324, "aarch64": 283}
"""Number of the system call, by architecture."""
_REGISTER, _PRIVATE_EXPEDITED = 1 << 4, 1 << 3
_libc = ctypes.CDLL(None)


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
    glances = _Glances()
    return all(glances.wait(deadline) for _ in range(2))


class _Glances:
    """What was seen of the other threads, time and again."""

    def __init__(self) -> None:
        self._me = threading.get_native_id()
        self._seen_ns: dict[int, int] = {}
        """Processor time of each, at the last look."""
        self._run_ns: dict[int, int] = {}
        """What of it counts."""
        self._looked_ns = time.monotonic_ns()

    def wait(self, deadline: float) -> bool:
        """Returns when each thread that is there now, and has not run for long enough, has or sleeps.

        Args:
            deadline: When to give up, as `time.monotonic` counts.

        Returns:
            False: it has come to that.
        """
        left = self._threads()
        while left:
            if time.monotonic() > deadline:
                return False
            time.sleep(_GLANCE_SECONDS)
            before_ns, self._looked_ns = self._looked_ns, time.monotonic_ns()
            _touch_processors()
            counts = time.monotonic_ns() - before_ns < _CLOSE_SECONDS * 1e9
            left = [thread for thread in left if self._may_be_stuck(thread, counts)]
        return True

    def _threads(self) -> list[int]:
        """All that have not run for long enough."""
        self._looked_ns = time.monotonic_ns()
        _touch_processors()
        threads = [int(name) for name in os.listdir(_THREADS)]
        for thread in threads:
            with contextlib.suppress(OSError):
                self._seen_ns[thread] = _processor_ns(thread)
        return [each for each in threads if each != self._me and self._run_ns.get(each, 0) < REST_SECONDS * 1e9]

    def _may_be_stuck(self, thread: int, counts: bool) -> bool:
        """Looks at a thread.

        Args:
            thread: Its number in the system.
            counts: Whether what it has run since the last look has certainly been run.
        """
        try:
            now_ns = _processor_ns(thread)
            if counts:
                self._run_ns[thread] = self._run_ns.get(thread, 0) + now_ns - self._seen_ns[thread]
                if self._run_ns[thread] >= REST_SECONDS * 1e9:
                    return False
            self._seen_ns[thread] = now_ns
            state = (_THREADS / str(thread) / "stat").read_bytes().rpartition(b")")[2].split()[0]
            return state == b"R" or (state == b"D" and _waits_for_a_page(thread))
        except (OSError, KeyError):  # it has ended
            return False


def _waits_for_a_page(thread: int) -> bool:
    """Whether a thread in a wait that nothing interrupts has come there by touching memory, not by a system call."""
    try:
        return (_THREADS / str(thread) / "syscall").read_bytes().startswith(b"-1")
    except OSError:  # it has ended, or the system does not tell
        return False


def _processor_ns(thread: int) -> int:
    """Processor time of a thread, by its own clock, as pthread_getcpuclockid(3) numbers it."""
    return time.clock_gettime_ns(~thread << 3 | 6)


def _touch_processors() -> None:
    """Returns when each processor that runs a thread of this process has executed something since the call.

    Where the system has no such call (Linux before 4.14, a sandbox that forbids it), at once: clocks are believed then.
    """
    number = _MEMBARRIER.get(platform.machine())
    if number is not None and _libc.syscall(number, _PRIVATE_EXPEDITED, 0, 0) != 0:
        _libc.syscall(number, _REGISTER, 0, 0)  # once a process; a child made by fork begins anew
        _libc.syscall(number, _PRIVATE_EXPEDITED, 0, 0)
