"""Tells how much processor time saves take: what their threads work, to the microsecond.

What a save costs a training also shows in the length of its steps, but no two of those are alike: of a single save it
tells little. What its threads have worked is known exactly. Linux keeps a clock for each thread, numbered as
pthread_getcpuclockid(3) does it; asking takes a microsecond, and one that has ended is an error and no crash. Where the
system has no such clocks, everything here is 0.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Final

_WORKERS: Final = ("shade-copy", "shade-courier", "shade-memory-tier")
"""How the names of threads begin that copy, hash, send and write."""


def processor_ns(thread: int) -> int:
    """Processor time of a thread of this process.

    Args:
        thread: As the system numbers it (`threading.Thread.native_id`).

    Returns:
        Nanoseconds; 0 of one that has ended.
    """
    if sys.platform != "linux":
        return 0
    try:
        return time.clock_gettime_ns(~thread << 3 | 6)
    except OSError:
        return 0


def cpu_seconds() -> float:
    """Processor time of all threads that work for saves, since they began; of those that are there."""
    workers = [each.native_id for each in threading.enumerate() if each.name.startswith(_WORKERS)]
    return sum(processor_ns(each) for each in workers if each is not None) / 1e9
