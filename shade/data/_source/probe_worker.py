"""Runs what has to be known of a data set before training in a process of its own, as a worker of DataLoader would.

The user's objects are read there, and stay in this process as they were. A data set opens its archive at the first read
so that each worker has a handle of its own; one that this process had opened would be shared by all workers that it
forks, which then move each other's position, and could not be sent to those that it spawns.

The forked process has positions of its own in the open files, and none of the connections: a data set that opened them
when it was made is used as if it was never read. What does not work in it (CUDA, threads that are not there) runs in
this process instead, and so does everything where there is no fork.

Price: the fork, about 10 ms and more with much memory, and what the first read opens is opened again.
"""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import os
import signal
import socket
import stat
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
from torch.utils.data._utils import worker as torch_worker

from shade.process import die_with_parent

logger = logging.getLogger("shade.data")

_LOOK_SECONDS = 1.0
_MOST_IDLE_SECONDS = 30
"""After so long without any computing the process waits for what does not come, such as a lock that a thread held."""
_END_SECONDS = 5.0

Found = TypeVar("Found")


def in_probe_worker(work: Callable[[], Found], dataset: Any) -> Found:
    """Runs work that reads a data set, and changes nothing here.

    Args:
        work: What to do; it is forked, and its result is pickled.
        dataset: What ``get_worker_info()`` has.

    Returns:
        Its result. If it raised in the worker, it is done here, and what it raises here comes out.
    """
    if sys.platform != "linux" or multiprocessing.current_process().daemon:
        return work()
    receiving, sending = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_run, args=(work, dataset, sending, os.getpid()), name="shade-probe", daemon=True)
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of a fork beside threads.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
    except OSError as error:
        logger.debug("no process to probe the data set in: %s", error)
        sending.close()
        receiving.close()
        return work()
    sending.close()
    try:
        if _answers(receiving, process.pid or 0):
            # Nothing comes of one that failed, or was killed.
            with suppress(EOFError, OSError):
                found: Found = receiving.recv()
                process.join(_END_SECONDS)
                return found
    finally:
        receiving.close()
        process.kill()
        process.join()
        process.close()
    return work()


def _answers(receiving: Connection, pid: int) -> bool:
    """Waits for the result or the end of a process; returns False for one that neither computes nor answers."""
    idle, before = 0.0, -1
    while not receiving.poll(_LOOK_SECONDS):
        now = _computed(pid)
        idle, before = (idle + _LOOK_SECONDS if now == before else 0.0), now
        if idle >= _MOST_IDLE_SECONDS:
            logger.warning(
                "the process that probes the data set did nothing for %s s, so it is probed in this process; open "
                "files and connections at the first read of a worker, not before",
                _MOST_IDLE_SECONDS,
            )
            return False
    return True


def _computed(pid: int) -> int:
    """Returns how long a process has computed, in clock ticks; 0 for one that has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as status:
            fields = status.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def _run(work: Callable[[], Any], dataset: Any, sending: Connection, parent_pid: int) -> None:
    die_with_parent(parent_pid, signal.SIGKILL)
    # The handlers are those of the training process.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    _part_from_parent(sending.fileno())
    info = torch_worker.WorkerInfo(id=0, num_workers=1, seed=torch.initial_seed(), dataset=dataset)
    torch_worker._worker_info = info
    try:
        sending.send(work())
    except Exception as error:  # noqa: BLE001 - the user's code; it is run again where its errors can be seen
        logger.debug("the data set is probed again in the training process: %r", error)


def _part_from_parent(kept: int) -> None:
    """Gives this process positions of its own in open files, and takes it off all connections but one."""
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number <= 2 or number == kept:
            continue
        with suppress(OSError):
            mode = os.fstat(number).st_mode
            if stat.S_ISREG(mode):
                flags = fcntl.fcntl(number, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_APPEND)
                other = os.open(f"/proc/self/fd/{number}", flags)
                os.lseek(other, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
            elif stat.S_ISSOCK(mode):
                ours, peer = socket.socketpair()
                peer.close()
                other = ours.detach()
            else:
                continue
            os.dup2(other, number, inheritable=False)
            os.close(other)
