"""Processes that we start: most must not outlive the one that started them, a few must.

A launcher that is killed outright cannot tidy up, so its children ask the kernel to be told. Linux only; elsewhere
children of a killed launcher have to be ended by hand. Servers and flushers are started by a shell that ends at once,
in a session of their own: they are nobody's children, and no terminal's end reaches them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_PR_SET_PDEATHSIG = 1
_ENDED = ("Z", "X")
"""States of which nothing comes any more."""
_LAUNCH = '"$@" >/dev/null & echo "$!"'


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


def start_detached(command: Sequence[str], log: IO[bytes], environment: Mapping[str, str] | None = None) -> int:
    """Starts a process that outlives this one; its id is known before it does anything.

    Args:
        command: Program and arguments.
        log: Where its standard error goes.
        environment: Its variables; None: as here.

    Returns:
        Its process id.
    """
    launched = subprocess.run(
        ["/bin/sh", "-c", _LAUNCH, "shade-launch", *command],
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log,
        env=environment,
        start_new_session=True,
    )
    return int(launched.stdout)


def this_machine() -> str:
    """What two processes have in common that can see each other; empty where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def start_of(process_id: int) -> str | None:
    """When a live process of this machine started, as the kernel counts; None where there is none.

    Args:
        process_id: Its id.

    Returns:
        Something that another process with that id would not have.
    """
    told = _told(process_id)
    return None if told is None or told[0] in _ENDED else told[19]


def is_running(process_id: int) -> bool:
    """True while a process does, or could do, anything: a zombie cannot."""
    if not _exists(process_id):
        return False
    told = _told(process_id)
    if told is None:  # gone since it was asked for; or a system that does not show it
        return _exists(process_id)
    return told[0] not in _ENDED


def _told(process_id: int) -> list[str] | None:
    """What proc(5) has of a process from its state on; None where there is no process, or no proc."""
    try:
        status = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return status.rpartition(")")[2].split()


def _exists(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True
