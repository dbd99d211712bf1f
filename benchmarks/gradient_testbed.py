"""Starts the ranks of `train_gradient` on the hosts of `scripts/testbed`, as often as a benchmark wants.

Ranks are forked from this process, which has imported everything and computed nothing, and enter their host's network
namespace: importing torch for eight ranks takes as long as a small training does. So `prepare` comes first. It starts
this program anew with one thread a rank and the allocator's settings that the launcher gives to ranks, which are read
when a process starts.

Needs root, for the namespaces.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import train_gradient

from shade.launch.run import ALLOCATOR

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "scripts" / "testbed"
PATIENCE_SECONDS = 3600
_CLONE_NEWNET = 0x40000000
_RANKS = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", **ALLOCATOR}
Rows = list[dict[str, Any]]


def prepare() -> None:
    """Gives this process the environment of ranks; if it has another one, the program starts anew."""
    if any(os.environ.get(name) != value for name, value in _RANKS.items()):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | _RANKS)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the hosts go away then, too


class Testbed:
    """Hosts of their own name, joined by a network."""

    def __init__(self) -> None:
        self.name = f"bench{os.getpid()}"

    def __call__(self, verb: str, *words: str) -> None:
        """Calls a verb of scripts/testbed; its complaint ends this program."""
        command = [sys.executable, str(PROGRAM), verb, "--name", self.name, *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{Path(sys.argv[0]).stem}: {done.stderr.strip()}")

    def run(self, num_ranks: int, *flags: str, trace: Path | None = None) -> Rows:
        """Trains, one rank on each of the first hosts.

        Args:
            num_ranks: W.
            *flags: Of `train_gradient`.
            trace: Of the link; it begins when the training is about to.

        Returns:
            What rank 0 printed.

        Raises:
            RuntimeError: A rank failed, with the end of what each of them printed.
        """
        context = multiprocessing.get_context("fork")
        reading, writing = os.pipe()
        with contextlib.ExitStack() as stack:
            complaints = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(num_ranks)]
            ranks = []
            for rank, complaint in enumerate(complaints):
                words = (f"shade.{self.name}.{rank}", rank, num_ranks, writing, complaint, flags)
                ranks.append(context.Process(target=_train, args=words))
                ranks[-1].start()
                stack.callback(ranks[-1].join)
                stack.callback(ranks[-1].kill)
            os.close(writing)
            rows: Rows = []
            for line in stack.enter_context(open(reading)):
                rows.append(json.loads(line))
                if rows[-1]["kind"] == "setup" and trace is not None:
                    self("rate", "--trace", str(trace))
            for each in ranks:
                each.join()
            if any(each.exitcode for each in ranks) or not rows or rows[-1]["kind"] != "end":
                printed = [complaint.seek(0) or complaint.read()[-1500:] for complaint in complaints]
                raise RuntimeError(f"{' '.join(flags)}: " + "\n".join(printed))
        return rows


@contextlib.contextmanager
def testbed(num_hosts: int) -> Iterator[Testbed]:
    """Makes hosts that go away in the end."""
    bed = Testbed()
    bed("up", "--hosts", str(num_hosts), "--rate", "unlimited")
    try:
        yield bed
    finally:
        bed("down")


def pick(rows: Rows, kind: str) -> Rows:
    """Returns the rows of one kind."""
    return [row for row in rows if row["kind"] == kind]


def _train(namespace: str, rank: int, num_ranks: int, writing: int, complaint: IO[str], flags: tuple[str, ...]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.alarm(PATIENCE_SECONDS)
    os.dup2(os.open(os.devnull, os.O_WRONLY) if rank else writing, 1)
    os.close(writing)
    os.dup2(complaint.fileno(), 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    with open(f"/run/netns/{namespace}") as entered:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(entered.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network of {namespace}")
    os.environ.update({
        "RANK": str(rank), "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": "eth0",
    })  # fmt: skip
    train_gradient.main(list(flags))
