"""Runs a part of a script in forked processes, which may be killed, and may be the ranks of torch.distributed."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LONGEST_SECONDS = 60.0
Say = Callable[[Any], None]


class ChildFailed(Exception):
    """A process ended otherwise than by SIGKILL or in order, or not in time."""


def in_processes(num: int, act: Callable[[int, Say], None], meeting: Path | None = None) -> list[Any]:
    """Runs an action in forked processes.

    Args:
        num: How many.
        act: The action: takes the rank, and a function that gives this process a value.
        meeting: Where the ranks of torch.distributed meet, a path that is not there yet; None: they do not.

    Returns:
        The last value of each; None of one that gave none.

    Raises:
        ChildFailed: One has raised, or has not ended in time.
    """
    children = [_fork(rank, num, act, meeting) for rank in range(num)]
    found: list[list[Any]] = [[] for _ in children]
    readers = [
        threading.Thread(target=_read, args=(pipe, said), daemon=True)
        for (_, pipe), said in zip(children, found, strict=True)
    ]
    for reader in readers:
        reader.start()
    deadline = time.monotonic() + LONGEST_SECONDS
    for (process_id, _), reader in zip(children, readers, strict=True):
        reader.join(max(0.0, deadline - time.monotonic()))
        if reader.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
            reader.join()
            found[0].append(ChildFailed(f"not ended after {LONGEST_SECONDS:g} s"))
        os.waitpid(process_id, 0)
    for said in found:
        for each in said:
            if isinstance(each, Exception):
                raise each
    return [said[-1] if said else None for said in found]


def _read(pipe: int, said: list[Any]) -> None:
    with open(pipe, "rb") as stream, contextlib.suppress(EOFError, pickle.UnpicklingError):
        while True:
            said.append(pickle.load(stream))


def _fork(rank: int, num: int, act: Callable[[int, Say], None], meeting: Path | None) -> tuple[int, int]:
    reading, writing = os.pipe()
    process_id = os.fork()
    if process_id:
        os.close(writing)
        return process_id, reading
    os.close(reading)
    torch.set_num_threads(1)  # threads of the parent do not survive the fork, and OpenMP would wait for them

    def say(value: Any) -> None:
        content = pickle.dumps(value)
        while content:
            content = content[os.write(writing, content) :]

    try:
        if meeting is not None:
            dist.init_process_group(
                "gloo", init_method=f"file://{meeting}", rank=rank, world_size=num, timeout=timedelta(seconds=20)
            )
        act(rank, say)
        if meeting is not None:
            dist.barrier()
    except BaseException as error:  # noqa: BLE001 - told to the parent
        try:
            say(error)
        except Exception:  # noqa: BLE001 - it cannot be pickled
            say(ChildFailed("".join(traceback.format_exception(error))))
    finally:
        os._exit(0)
