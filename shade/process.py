"""One habit of every process that we start: not to outlive the one that started it.

A launcher that is killed outright cannot tidy up, so its children ask the kernel to be told. Linux only; elsewhere
children of a killed launcher have to be ended by hand.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, by: int = signal.SIGTERM) -> None:
    """Asks to be sent a signal when the parent (strictly: the thread of it that started us) ends.

    Args:
        parent_pid: Who is expected to be the parent; if that one has died already, this process ends at once.
        by: The signal.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(by), 0, 0, 0)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), by)
