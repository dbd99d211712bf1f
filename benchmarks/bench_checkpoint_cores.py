"""What do snapshots in a Redis server's memory cost a training, where the server has a core of its own?

Question
    `bench_checkpoint` has the server, the flusher and the training share two cores, and the run takes as long as with a
    blocking save. What is left where server and flusher are on another machine, as they are meant to be?

Method
    GPT-2 (124 M parameters) with Adam, 1.49 GB of state, trains on core 0 with one thread; the server and the flusher
    run on core 1, as on a memory node, or on core 0 too. A run is a process of its own: four steps with two saves that
    are not measured, then 15 steps with a save at three of them, 5 steps apart, until `close` returns: the last
    snapshot is committed in the server's memory then, and the flusher brings it to the disk without the training. Each
    round takes the rows in a new random order.

    run     from the first step until `close` returns, over that of the run without saves in the same round.
    work    CPU time of the training's process, kernel included, over that of the run without saves. A run on a core
            that nothing else uses takes that long, and what it waits: it hardly depends on what else this machine does.
    stall   what a save makes the training thread wait.

Rows
    own core    over a unix socket; own core, TCP: over TCP on the loopback device, whose receiving side the kernel also
    runs on the sender's core; same core: all on core 0; storage: no server, the training writes to the disk itself.

Rule
    The bar is a run of at most 1.15 times as long with the server on its own core (median of the rounds).

Command
    python benchmarks/bench_checkpoint_cores.py --rounds 3 --out benchmarks/results        (two to four minutes a round)
        Rows are added to OUT/checkpoint-cores.jsonl; the same command continues where it was interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from measures import Kept, publish

TRAINING_CORE, SERVER_CORE = 0, 1
WARM_UP, STEPS, SAVES = 4, 15, (2, 7, 12)
ROWS: Final = ("none", "own core", "own core, TCP", "same core", "storage")
FLUSH_SECONDS: Final = 120.0


# ── one run, in a process of its own ────────────────────────────────────────────────────────────────────────────────


def train(store: str, folder: str, run: str) -> dict[str, Any]:
    """Trains and saves; the figures."""
    from bench_checkpoint import build

    from shade import Checkpointer

    model, optimizer, tokens = build()
    checkpointer = None

    def step(save: bool) -> None:
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if checkpointer is not None:
            checkpointer.step()
            if save:
                handles.append(checkpointer.save())

    handles: list[Any] = []
    step(False)
    if folder:
        checkpointer = Checkpointer(store or None, persist_to=folder, run=run, every="never")
        checkpointer.attach(model=model, optimizer=optimizer)
    for number in range(WARM_UP):
        step(number in (1, 3))
    if checkpointer is not None:
        checkpointer.wait_committed()
    handles.clear()
    begun, worked, switched = time.perf_counter(), os.times(), resource.getrusage(resource.RUSAGE_SELF)
    for number in range(STEPS):
        step(number in SAVES)
    if checkpointer is not None:
        checkpointer.close()
    took, after, since = time.perf_counter() - begun, os.times(), resource.getrusage(resource.RUSAGE_SELF)
    return {
        "run": took,
        "user": after.user - worked.user,
        "system": after.system - worked.system,
        "switches": since.ru_nvcsw + since.ru_nivcsw - switched.ru_nvcsw - switched.ru_nivcsw,
        "stalls": [each.blocked_seconds for each in handles],
        "committed": [each.commit_seconds for each in handles],
    }


# ── rows and rounds ─────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def on_core(core: int) -> Iterator[None]:
    """Starts processes on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def server(row: str, folder: str, run: str) -> Iterator[str]:
    """A server and a flusher, where the row wants them; the server's URL, or nothing."""
    if row in ("none", "storage"):
        yield ""
        return
    from shade.checkpoint._flush.service import start_flusher
    from shade.process import is_running
    from shade.store._servers.local_cluster import free_ports
    from shade.store._servers.server import LocalServer

    (port,) = free_ports(1)
    made = LocalServer(settings={"port": str(port)})
    with on_core(TRAINING_CORE if row == "same core" else SERVER_CORE), contextlib.ExitStack() as stack:
        made.start()
        stack.callback(made.stop)
        url = f"redis://127.0.0.1:{port}" if row.endswith("TCP") else made.url.reveal()
        flusher = start_flusher(url, folder, run)
        yield url
        deadline = time.monotonic() + FLUSH_SECONDS
        while is_running(flusher) and time.monotonic() < deadline:
            time.sleep(0.1)


def measure(row: str, run: str, place: Path | None) -> dict[str, Any]:
    """One run of a row."""
    with tempfile.TemporaryDirectory(dir=place) as folder, server(row, folder, run) as url:
        words = [sys.executable, __file__, "--train", url, folder if row != "none" else "", run]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        with on_core(TRAINING_CORE):
            done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{row}: {done.stderr[-2000:]}")
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found


def table(rounds: list[dict[str, dict[str, Any]]]) -> list[str]:
    """Markdown: a row a place of the server."""
    lines = [
        "| server | run | rounds | work | user / system | stall p50 | committed after |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in [name for name in ROWS[1:] if name in rounds[0]]:
        ratios = [each[row]["run"] / each["none"]["run"] for each in rounds]
        work = [_cpu(each[row]) / _cpu(each["none"]) for each in rounds]
        user = statistics.median((each[row]["user"] - each["none"]["user"]) / len(SAVES) for each in rounds)
        system = statistics.median((each[row]["system"] - each["none"]["system"]) / len(SAVES) for each in rounds)
        stalls = [stall for each in rounds for stall in each[row]["stalls"]]
        committed = [seconds for each in rounds for seconds in each[row]["committed"]]
        lines.append(
            f"| {row} | {statistics.median(ratios):.3f} | {', '.join(f'{each:.3f}' for each in ratios)} | "
            f"{statistics.median(work):.3f} | {user:.2f} s / {system:.2f} s | {statistics.median(stalls):.3f} s | "
            f"{statistics.median(committed):.2f} s |"
        )
    quiet = statistics.median(each["none"]["run"] for each in rounds)
    worked = statistics.median(_cpu(each["none"]) / each["none"]["run"] for each in rounds)
    return [
        *lines,
        "",
        "user / system: CPU time of the training's process for one save, above the run without saves.",
        f"Without saves a run takes {quiet:.1f} s, of which its process has the core for {100 * worked:.0f} %: "
        "what is missing, other processes had.",
    ]


def _cpu(figures: dict[str, Any]) -> float:
    return float(figures["user"] + figures["system"])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="A server on a core of its own; see the top of the file.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", nargs="*", default=list(ROWS[1:]), help="beside the one without saves (all)")
    parser.add_argument("--out", type=Path, help="folder for checkpoint-cores.jsonl and .md")
    parser.add_argument("--folder", type=Path, help="where to save; default: a temporary folder")
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        print(json.dumps(train(*given.train)))
        return
    if not {TRAINING_CORE, SERVER_CORE} <= os.sched_getaffinity(0):
        sys.exit("bench_checkpoint_cores: expected two cores, 0 and 1, for the training and the server")
    kept = Kept(None if given.out is None else given.out / "checkpoint-cores.jsonl")
    rounds: list[dict[str, dict[str, Any]]] = []
    for number in range(given.rounds):
        rounds.append({})
        rows = ["none", *given.rows]
        for row in random.Random(number).sample(rows, len(rows)):
            run = f"cores-{os.getpid()}-{number}-{ROWS.index(row)}"
            rounds[-1][row] = kept(f"{number} {row}", lambda row=row, run=run: measure(row, run, given.folder))  # type: ignore[misc]
            print(f"round {number}: {row}: {rounds[-1][row]['run']:.1f} s", file=sys.stderr, flush=True)
    title = "Snapshots by way of a Redis server on a core of its own"
    publish("checkpoint-cores", title, [f"commits {kept.commits}", "", *table(rounds)], given.out)


if __name__ == "__main__":
    main()
