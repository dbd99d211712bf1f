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
from shade.checkpoint._buffer import copy_and_compare
from shade.gradient._kernels import build

LONGEST_SECONDS = 600.0
"""After this a life hangs: its stacks are written down, and it is ended."""
IDLE_SECONDS = 12.0
"""So does one whose threads, in so long, have hardly computed, and hardly waited for a core of a busy machine."""
COMPUTED_SECONDS, QUEUED_SECONDS = 0.12, 5.0
LEAVING_SECONDS = 5.0
"""For what a script has started to see that it is gone."""
IMPORTED = (
    "torch.distributed",
    "torch._dynamo",  # which an optimizer's first step imports
    "torchvision.datasets",
    "torchdata.stateful_dataloader",
    "datasets",
    "pyarrow.parquet",
    "fsspec.implementations.http",
    "tests.differential.company",
)
ALSO_IMPORTED = ("accelerate", "lmdb")


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


def of_groups(groups: list[int]) -> list[int]:
    """Processes of these groups that live."""
    return [process for process, state in states_in(groups).items() if state != "Z"]


def states_in(groups: list[int]) -> dict[int, str]:
    """Processes of these groups, and the state of each one's first thread, as ``/proc`` has it."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group, *_ = path.read_text().rpartition(") ")[2].split()
            if int(group) in groups:
                found[int(path.parent.name)] = state
    return found


def is_any_runnable(groups: list[int]) -> bool:
    """Whether a thread of these groups has a core or queues for one, which `computed_by` hears of when it got it. The
    first thread of a process that ends is a zombie while the others still end."""
    for process in states_in(groups):
        for path in Path(f"/proc/{process}/task").glob("*/stat"):
            with contextlib.suppress(OSError):
                if path.read_text().rpartition(") ")[2][0] in "RD":
                    return True
    return False


def computed_by(processes: list[int]) -> tuple[float, float]:
    """The seconds that the threads of processes have computed, and waited for a core."""
    computed = queued = 0.0
    for process in processes:
        for path in Path(f"/proc/{process}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):
                nanoseconds = path.read_text().split()
                computed, queued = computed + int(nanoseconds[0]) / 1e9, queued + int(nanoseconds[1]) / 1e9
    return computed, queued


def with_folder(folder: str) -> list[str]:
    """Commands of processes that were started with this folder as TMPDIR."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"TMPDIR={folder}".encode() in path.read_bytes().split(b"\0"):
                found.append((path.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:80])
    return found


class Idleness:
    """Whether processes have done nothing for long."""

    def __init__(self, groups: list[int]) -> None:
        self._groups, self._begun = groups, time.monotonic()
        self._looked, self._known = self._begun, (0.0, 0.0)

    def is_long(self) -> bool:
        """Looks from time to time."""
        now = time.monotonic()
        if now - self._begun > LONGEST_SECONDS:
            return True
        if now - self._looked < IDLE_SECONDS:
            return False
        before, self._known, self._looked = self._known, computed_by(of_groups(self._groups)), now
        # A process that has ended takes its seconds with it.
        computed, queued = (abs(mine - other) for mine, other in zip(self._known, before, strict=True))
        return computed < COMPUTED_SECONDS and queued < QUEUED_SECONDS and not is_any_runnable(self._groups)


def wait_for(children: list[int]) -> list[int | None]:
    """Waits for processes; if they hang, writes the stacks of those that live, and ends them with their groups."""
    statuses: dict[int, int | None] = {}
    idleness = Idleness(children)
    while len(statuses) < len(children):
        hangs = idleness.is_long()
        for child in children:
            if child in statuses:
                continue
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                statuses[child] = os.waitstatus_to_exitcode(status)
            elif hangs:
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
        left = [*map(str, of_groups(children)), *with_folder(folder)]
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    return left


LOOPS = ("loops", "index_loops", "step_loops")


def compile_loops() -> None:
    """Compiles what each script would compile or load."""
    copy_and_compare.prepare()
    for name in LOOPS:
        build.build(name)


def forget_loops(folder: Path) -> None:
    """Makes this process one that has compiled nothing, on a machine that has no builds either."""
    import numba

    numba.config.CACHE_DIR = str(folder / "numba")
    copy_and_compare._is_prepared, copy_and_compare._loops = False, None
    build._built.clear()
    for name in [name for name in sys.modules if name.startswith("shade.gradient._kernels.") and "build" not in name]:
        del sys.modules[name]


def serve() -> dict[str, Any]:
    """Forks what it is told to; returns in a child, with the child's request, and in the parent at the end."""
    for name in (*IMPORTED, *filter(find_spec, ALSO_IMPORTED)):
        importlib.import_module(name)
    for name in shade.__all__:
        getattr(shade, name)  # imports what stands behind it
    compile_loops()
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
        statuses = wait_for(children)
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
