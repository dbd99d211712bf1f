"""Waits until nobody in this process can be in the middle of writing to a tensor, having got no further for a while.

Whether a tensor changed while it was copied shows when whoever writes to it goes on, or ends. A thread that the system
has interrupted in the middle of an operation does neither, for as long as others want its processor: tens of
milliseconds on a busy machine. So each other thread is waited for until it has been asleep, which none is in the
middle of writing memory, or has had the processor for long enough to be seen. A thread's processor time costs a
microsecond to ask for; which ones sleep, ten.

Where the system does not tell (only Linux does), a fixed rest must do.
"""

from __future__ import annotations

import contextlib
import os
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
_THREADS: Final = Path("/proc/self/task")


class Others:
    """The other threads of this process, from now on."""

    def __init__(self) -> None:
        self._begun_ns: dict[int, int] = {}
        if sys.platform == "linux":
            me = threading.get_native_id()
            with contextlib.suppress(OSError):
                for name in os.listdir(_THREADS):
                    if int(name) != me:
                        self._begun_ns[int(name)] = _processor_ns(int(name))

    def wait(self) -> bool:
        """Returns when each has slept, ended, or run for `REST_SECONDS`.

        Returns:
            Whether it is so; false: after `LONGEST_SECONDS` one still has not, and may be in the middle of anything.
        """
        deadline = time.monotonic() + LONGEST_SECONDS
        time.sleep(REST_SECONDS)
        left = list(self._begun_ns)
        while left := [thread for thread in left if self._may_be_stuck(thread)]:
            if time.monotonic() > deadline:
                return False
            time.sleep(REST_SECONDS)
        return True

    def _may_be_stuck(self, thread: int) -> bool:
        try:
            if _processor_ns(thread) - self._begun_ns[thread] >= REST_SECONDS * 1e9:
                return False
            return (_THREADS / str(thread) / "stat").read_bytes().rpartition(b")")[2].split()[0] == b"R"
        except OSError:  # it has ended
            return False


def _processor_ns(thread: int) -> int:
    """Processor time of a thread, by its own clock, as pthread_getcpuclockid(3) numbers it."""
    return time.clock_gettime_ns(~thread << 3 | 6)
