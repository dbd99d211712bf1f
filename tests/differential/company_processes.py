"""Runs combined scripts in processes of their own, forked from one that has imported all: each ends as Python ends.

`Nursery` starts ``python -m tests.differential.company_processes`` and tells it, line by line, what to fork. A child
leaves the module at its end, so that exit handlers, threads and static destructors run as in a user's script.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import shade

LONGEST_SECONDS = 180.0
"""After this a life hangs: its stacks are written down, and it is ended."""
LEAVING_SECONDS = 5.0
"""For what a script has started to see that it is gone."""
IMPORTED = (
    "torch.distributed",
    "torch._dynamo",  # which an optimizer's first step imports
    "torchvision.datasets",
    "torchdata.stateful_dataloader",
    "datasets",
    "pyarrow.parquet",
    "tests.differential.company",
)
ALSO_IMPORTED = ("accelerate",)


class Nursery:
    """The process that forks, and what it answers; a context manager."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", __spec__.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            text=True,
        )

    def run(self, ranks: int, folder: Path, **arguments: Any) -> dict[str, Any]:
        """Runs one life of a script, `company.live`, on every rank.

        Returns:
            ``statuses``: by rank, as `subprocess.Popen.returncode` has it, None of one that hung; ``left``: what
            processes of the script were still there afterwards.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"ranks": ranks, "folder": str(folder), "arguments": arguments}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return dict(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def of_group(group: int) -> list[int]:
    """Processes of a process group that live."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            _, _, rest = path.read_text().rpartition(") ")
            state, _, process_group = rest.split()[:3]
            if int(process_group) == group and state != "Z":
                found.append(int(path.parent.name))
    return found


def with_folder(folder: str) -> list[str]:
    """Commands of processes that were started with this folder as TMPDIR."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"TMPDIR={folder}".encode() in path.read_bytes().split(b"\0"):
                found.append((path.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:80])
    return found


def wait_for(children: list[int], folder: Path) -> list[int | None]:
    """Waits for processes; writes the stacks of one that hangs, and ends it with its group."""
    statuses: dict[int, int | None] = {}
    deadline = time.monotonic() + LONGEST_SECONDS
    while len(statuses) < len(children):
        for child in children:
            if child in statuses:
                continue
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                statuses[child] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(child, signal.SIGUSR1)
                time.sleep(0.5)
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                statuses[child] = None
        time.sleep(0.005)
    return [statuses[child] for child in children]


def what_is_left(children: list[int], folder: str) -> list[str]:
    """Processes that their script has left behind, after a while; they are ended."""
    deadline = time.monotonic() + LEAVING_SECONDS
    while True:
        left = [str(process) for child in children for process in of_group(child)] + with_folder(folder)
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    return left


def serve() -> dict[str, Any]:
    """Forks what it is told to; returns in a child, with the child's request, and in the parent at the end."""
    for name in (*IMPORTED, *filter(find_spec, ALSO_IMPORTED)):
        importlib.import_module(name)
    for name in shade.__all__:
        getattr(shade, name)  # imports what stands behind it
    gc.freeze()  # or the first collection of a child copies all pages
    for line in sys.stdin:
        request = json.loads(line)
        children = []
        for rank in range(request["ranks"]):
            child = os.fork()
            if child == 0:
                os.setpgid(0, 0)
                return {**request, "rank": rank}
            with contextlib.suppress(OSError):
                os.setpgid(child, child)
            children.append(child)
        statuses = wait_for(children, Path(request["folder"]))
        answer = {"statuses": statuses, "left": what_is_left(children, request["folder"])}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    return {}


def become(request: dict[str, Any]) -> None:
    """Makes this process a script's own."""
    folder = Path(request["folder"])
    number = request["arguments"]["life"]
    sys.stdin.close()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    log = os.open(folder / f"log-{number}-{request['rank']}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["TMPDIR"] = str(folder)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


if __name__ == "__main__":
    request = serve()
    if request:
        become(request)
        from tests.differential import company

        company.live(Path(request["folder"]), request["rank"], **request["arguments"])
