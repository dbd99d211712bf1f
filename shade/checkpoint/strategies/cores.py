"""How many processor cores a training leaves alone: what may be done beside it, and what had better not.

Linux counts for each core how long nobody ran on it (``/proc/stat``, proc(5)). Threads of PyTorch that wait for each
other do not rest, they spin, and count as working; rightly so, since whoever takes their core keeps the others waiting.
"""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path
from typing import Final

_STAT: Final = Path("/proc/stat")
_IDLE_COLUMNS: Final = slice(4, 6)
"""Idle, and waiting for a disk."""
_PAUSE_SECONDS: Final = 1.0
"""After a measurement: asking takes a millisecond where there are many cores, and steps may take ten."""


class CoresLeft:
    """Measured between `begin` and `end`, of the cores that this process may use.

    Args:
        num_remembered: Measurements that count; more would be of another time.
    """

    def __init__(self, num_remembered: int) -> None:
        self._measured: deque[tuple[float, float]] = deque(maxlen=num_remembered)
        self._begun: tuple[float, float] | None = None
        self._next = 0.0

    def begin(self) -> None:
        """From now on; unless it was measured a moment ago."""
        self._begun = _now() if time.perf_counter() >= self._next else None

    def end(self) -> None:
        """Until now, where it was begun."""
        begun, self._begun = self._begun, None
        ended = None if begun is None else _now()
        if begun is not None and ended is not None:
            self._measured.append((ended[0] - begun[0], ended[1] - begun[1]))
            self._next = ended[1] + _PAUSE_SECONDS

    def number(self) -> int | None:
        """Cores that nobody used, on average, rounded.

        Returns:
            None: nothing has been measured, or the system does not tell.
        """
        seconds = sum(length for _, length in self._measured)
        return round(sum(idle for idle, _ in self._measured) / seconds) if seconds > 0 else None


def _now() -> tuple[float, float] | None:
    """Seconds that our cores have been idle, together, and the time."""
    try:
        ours = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        lines = [line.split() for line in _STAT.read_text().splitlines() if line.startswith("cpu")]
    except (OSError, AttributeError):  # no Linux
        return None
    ticks = sum(int(ticks) for line in lines if line[0] in ours for ticks in line[_IDLE_COLUMNS])
    return ticks / os.sysconf("SC_CLK_TCK"), time.perf_counter()
