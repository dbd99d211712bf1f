"""How long does a stop-and-copy stop the training, against a memcpy of the same bytes by one thread?

Question
    `copy` promises a stall of one copy of the state. Does every save keep that, in every process, with the training's
    cores to itself and beside a process that keeps one core busy? What does each part of the design contribute?

Method
    A run is a process of its own, forked from one that has imported all libraries and compiled the copy. It trains 12
    transformer layers of GPT-2's width with Adam: 85 M parameters, 973 MiB of state in 576 tensors. The first step
    trains all of it. Later steps train the last layer, on all cores, so that a step is short and the threads of PyTorch
    are as they are behind any step. Saves begin when the buffer is made, as in a run that saves every 30 seconds. Then
    six times: a step, a memcpy of as many bytes; a step, a save; now this first, now that. Snapshots stay in shared
    memory; a save begins when the one before is hashed and committed there. Rows and situations take turns, in a new
    random order each round, with new processes.

    memcpy      the C library's, one thread, from one private buffer to another, both written to before, in two pieces
                of half the state. Its own p99 over its median says what the machine does to a copy that nobody can
                improve.
    stall       what a save makes the training thread wait: the call, and what is waited for before the next step. The
                first save of a process counts as any other.
    ratio       stall over the median memcpy of the same process. p50, p99 and the largest are of all saves of a row;
                the range is that of the processes' medians.
    work        CPU time of all threads of the process during the stall, over the median memcpy's. It is what the
                ratio would be on one core, and hardly depends on what else runs.
    without a   of a stall, the part in which the training thread could have run and had no processor, as the kernel
    core        counts it (/proc/self/task/…/schedstat): a median and a 99th percentile.
    busy        beside a process that computes without end, at the same priority; quiet: without it. What else ran on
                the machine is in neither's control: its load is in the file.

    Rows that change one thing each: `one thread` copies without a helper; `small pages` leaves the pages of the buffers
    small; `at once` saves while the buffer is made and the copy is compiled; `C library` copies without streaming
    stores; `interpreter` copies and compares row by row from Python; `storage` writes snapshots to the disk as well,
    and a save begins when the one before is durable; `flush beside` does not wait for that (two buffers); `Python
    thread` has a thread beside the training that computes in the interpreter, as a loader's does. `before` is the
    checkout of another commit, and `before, Python thread` the same beside such a thread.

Rule
    Written before the results. The bar is a ratio of at most 1.2 at the 99th percentile, over all saves of ten
    processes or more, quiet and busy: the smallest ratio that 99 % of the saves do not exceed. No save is left out.

Command
    python benchmarks/bench_stall.py --out benchmarks/results                 (10 processes of `copy`)
    python benchmarks/bench_stall.py --processes 3 --rows before "one thread" --before CHECKOUT --out benchmarks/results
        more rows. Processes are added to OUT/stall.jsonl; the same command continues where it was interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from measures import Log, commit, percentile, processors

BAR: Final = 1.2
ENOUGH: Final = 10
"""Processes, for the bar."""
ROOT: Final = Path(__file__).resolve().parent.parent


# ── one run, in a process of its own ────────────────────────────────────────────────────────────────────────────────


class Memcpy:
    """The floor: one thread, warm private pages.

    Args:
        num_bytes: Length of the copy.
    """

    def __init__(self, num_bytes: int) -> None:
        self._piece_bytes = num_bytes // 2
        self._maps = [mmap.mmap(-1, self._piece_bytes) for _ in range(2)]
        self._views = [(ctypes.c_char * self._piece_bytes).from_buffer(each) for each in self._maps]
        for view in self._views:
            ctypes.memset(view, 1, self._piece_bytes)  # a page that was never written to is read from the cache

    def copy(self, found: dict[str, list[float]]) -> None:
        """Copies once, and notes the seconds."""
        worked, begun = time.process_time(), time.perf_counter()
        for _ in range(2):
            ctypes.memmove(self._views[1], self._views[0], self._piece_bytes)
        found["memcpys"].append(time.perf_counter() - begun)
        found["memcpy_work"].append(time.process_time() - worked)


def waited_seconds() -> float:
    """Returns how long this thread could have run and had no processor; 0 where the system does not count it."""
    path = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    return int(path.read_text().split()[1]) / 1e9 if path.exists() else 0.0


def save(found: dict[str, list[float]], checkpointer: Any) -> None:
    """Saves once, and notes what that stalls."""
    waited, worked, begun = waited_seconds(), time.process_time(), time.perf_counter()
    checkpointer.save()
    checkpointer.wait_copy_complete()
    found["stalls"].append(time.perf_counter() - begun)
    found["stall_work"].append(time.process_time() - worked)
    found["waited"].append(waited_seconds() - waited)


def child(row: str, num_saves: int, folder: Path) -> dict[str, Any]:
    """Trains and saves; the seconds of each stall and memcpy."""
    import torch

    from shade import Checkpointer
    from shade.checkpoint._buffer.shared_memory_folder import own_folder

    settings: dict[str, Any] = {"strategy": "copy", "every": "never"}
    ROWS[row](settings, folder)
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(768, 12, 3072, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    batch = torch.randn(1, 64, 768)
    floor = Memcpy(3 * sum(each.nbytes for each in model.parameters()))
    found: dict[str, list[float]] = {name: [] for name in ("stalls", "memcpys", "waited", "stall_work", "memcpy_work")}

    def step(trained: torch.nn.Module) -> None:
        trained(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.step()

    run = f"stall-{os.getpid()}"
    with contextlib.ExitStack() as stack:
        stack.callback(
            lambda: shutil.rmtree(own_folder(run), ignore_errors=True)
        )  # a run's end leaves its only snapshot
        checkpointer = stack.enter_context(Checkpointer(run=run, **settings))
        checkpointer.attach(model=model, optimizer=optimizer)
        step(model)
        if not row.startswith("at once"):
            for thread in threading.enumerate():
                if thread.name == "shade-prepare":
                    thread.join()
            for thread in threading.enumerate():
                if thread.name == "shade-huge-pages":
                    thread.join()
        last = model.layers[-1]
        for number in range(num_saves):
            for is_save in (True, False) if number % 2 else (False, True):
                step(last)
                if is_save:
                    save(found, checkpointer)
                else:
                    floor.copy(found)
            step(last)
            if row != "flush beside":
                checkpointer.wait_committed()
    return {**found, "torch": torch.__version__}


def _as_it_is(settings: dict[str, Any], folder: Path) -> None:
    """Changes nothing."""


def _one_thread(settings: dict[str, Any], folder: Path) -> None:
    from shade.checkpoint._buffer.tensor_copy import Copying

    whole = Copying.finish
    Copying.finish = lambda self, helper=None: whole(self)  # type: ignore[method-assign]


def _small_pages(settings: dict[str, Any], folder: Path) -> None:
    from shade.checkpoint._buffer import shared_memory_tier

    shared_memory_tier.make_huge = lambda *_: True


def _c_library(settings: dict[str, Any], folder: Path) -> None:
    from shade.checkpoint._buffer import copy_and_compare

    copy_and_compare.LEAST_BYTES = 2**62  # type: ignore[misc] # no row is long enough
    copy_and_compare._loops = copy_and_compare._compile()


def _interpreter(settings: dict[str, Any], folder: Path) -> None:
    from shade.checkpoint._buffer import copy_and_compare

    copy_and_compare._loops = None


def _at_once(settings: dict[str, Any], folder: Path) -> None:
    from shade.checkpoint._buffer import copy_and_compare

    copy_and_compare._loops, copy_and_compare._is_prepared = None, False


def _storage(settings: dict[str, Any], folder: Path) -> None:
    settings["persist_to"] = str(folder)


def _python_thread(settings: dict[str, Any], folder: Path) -> None:
    def compute() -> None:
        while True:
            sum(range(1000))

    threading.Thread(target=compute, daemon=True).start()


def _flush_beside(settings: dict[str, Any], folder: Path) -> None:
    _storage(settings, folder)
    settings["in_flight"] = 2


def _before(settings: dict[str, Any], folder: Path) -> None:
    """Decides anew whether to stream, as each process did."""
    from shade.checkpoint._buffer import tensor_copy

    tensor_copy._stream, tensor_copy._is_prepared = None, False  # type: ignore[attr-defined]
    tensor_copy.prepare()  # type: ignore[attr-defined]


def _before_with_python_thread(settings: dict[str, Any], folder: Path) -> None:
    _before(settings, folder)
    _python_thread(settings, folder)


ROWS: Final[dict[str, Callable[[dict[str, Any], Path], None]]] = {
    "copy": _as_it_is,
    "before": _before,
    "one thread": _one_thread,
    "small pages": _small_pages,
    "C library": _c_library,
    "interpreter": _interpreter,
    "storage": _storage,
    "flush beside": _flush_beside,
    "at once": _at_once,
    "Python thread": _python_thread,
    "before, Python thread": _before_with_python_thread,
}
"""By name, what a row changes in its process."""


# ── rounds and the report ───────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def busy_core(is_busy: bool) -> Iterator[None]:
    """A process that computes without end."""
    if not is_busy:
        yield
        return
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


class Parent:
    """A process that has imported a checkout's package and compiled its copy, and forks a process for each run.

    Args:
        checkout: Where the package is.
    """

    def __init__(self, checkout: Path) -> None:
        environment = os.environ | {"PYTHONPATH": str(checkout)}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, row: str, num_saves: int, folder: Path) -> dict[str, Any]:
        """Returns the figures of one process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([row, num_saves, str(folder)]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer.startswith("{"):
            raise RuntimeError(f"expected the figures of {row!r}, got {answer!r}: see above")
        figures: dict[str, Any] = json.loads(answer)
        return figures

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()


def serve() -> None:
    """Forks a process for each line of the input, which prints its figures."""
    import torch  # noqa: F401 - for all children

    from shade import Checkpointer  # noqa: F401
    from shade.checkpoint._save.save import prepare  # type: ignore[attr-defined]

    prepare()
    for line in sys.stdin:
        row, num_saves, folder = json.loads(line)
        process = os.fork()
        if process == 0:
            print(json.dumps(child(row, num_saves, Path(folder))), flush=True)
            os._exit(0)
        if os.waitpid(process, 0)[1] != 0:
            print("failed", flush=True)


def measure(given: argparse.Namespace, log: Log) -> None:
    """Runs what the log lacks."""
    checkouts = {False: ROOT} | ({True: given.before} if given.before else {})
    parents = {is_before: Parent(checkout) for is_before, checkout in checkouts.items()}
    for number in range(given.processes):
        turns = [(row, is_busy) for row in given.rows for is_busy in (False, True)]
        for row, is_busy in random.Random(number).sample(turns, len(turns)):
            key = {"round": number, "row": row, "busy": is_busy}
            if any(key.items() <= each.items() for each in log.rows):
                continue
            load = os.getloadavg()[0]
            made = {"commit": commit(), "processors": processors(), "load": load}
            parent = parents[row.startswith("before")]
            with tempfile.TemporaryDirectory(dir=given.folder) as folder, busy_core(is_busy):
                figures = parent.run(row, given.saves, Path(folder))
            log.add(key | made | figures)
            print(f"round {number}: {row}{', busy' * is_busy}: {described(log.rows[-1])}", file=sys.stderr, flush=True)
    for parent in parents.values():
        parent.close()


def ratios(row: dict[str, Any]) -> list[float]:
    """Each stall of a process over its median memcpy."""
    floor = statistics.median(row["memcpys"])
    return [stall / floor for stall in row["stalls"]]


def described(row: dict[str, Any]) -> str:
    """A line on a process."""
    found = ratios(row)
    floor = statistics.median(row["memcpys"])
    work = statistics.median(row["stall_work"]) / statistics.median(row["memcpy_work"])
    return f"memcpy {floor:.3f} s, median {statistics.median(found):.2f}, largest {max(found):.2f}, work {work:.2f}"


COLUMNS: Final = (
    "way", "machine", "processes", "saves", "memcpy p50", "its p99 / p50", "stall p50", "ratio p50", "of processes",
    "p99", "largest", "first save", "work p50, p99", "without a core p50, p99",
)  # fmt: skip


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Markdown: a row for each way and situation."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for name in ROWS:
        for is_busy in (False, True):
            found = [row for row in rows if row["row"] == name and row["busy"] is is_busy]
            if not found:
                continue
            every = [ratio for row in found for ratio in ratios(row)]
            medians = [statistics.median(ratios(row)) for row in found]
            floors = [each / statistics.median(row["memcpys"]) for row in found for each in row["memcpys"]]
            memcpy = statistics.median(each for row in found for each in row["memcpys"])
            stall = statistics.median(each for row in found for each in row["stalls"])
            waited = [each for row in found for each in row["waited"]]
            work = [each / statistics.median(row["memcpy_work"]) for row in found for each in row["stall_work"]]
            cells = [
                name, "busy" if is_busy else "quiet", str(len(found)), str(len(every)), f"{1e3 * memcpy:.0f} ms",
                f"{percentile(floors, 0.99):.2f}", f"{1e3 * stall:.0f} ms", f"{statistics.median(every):.2f}",
                f"{min(medians):.2f} to {max(medians):.2f}", f"{percentile(every, 0.99):.2f}", f"{max(every):.2f}",
                f"{statistics.median(ratios(row)[0] for row in found):.2f}",
                f"{statistics.median(work):.2f}, {percentile(work, 0.99):.2f}",
                f"{1e3 * statistics.median(waited):.0f}, {1e3 * percentile(waited, 0.99):.0f} ms",
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def verdict(rows: list[dict[str, Any]]) -> str:
    """Returns a sentence that says whether the bar is met."""
    told, too_few = [], f" so far: the rule asks for {ENOUGH}"
    for is_busy, name in ((False, "quiet"), (True, "busy")):
        found = [row for row in rows if row["row"] == "copy" and row["busy"] is is_busy]
        if found:
            worst = percentile([ratio for row in found for ratio in ratios(row)], 0.99)
            told.append(
                f"{name}, {len(found)} processes: {worst:.2f}, {'met' if worst <= BAR else 'missed'}"
                + too_few * (len(found) < ENOUGH)
            )
    return f"The bar of {BAR} at the 99th percentile: {'; '.join(told) or 'not measured'}."


def page(rows: list[dict[str, Any]]) -> str:
    """The report."""
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    loads = [row["load"] for row in rows]
    where = (
        f"commit {commits}; torch {rows[0]['torch']}, {rows[0]['processors']}, load {min(loads):.1f} to "
        f"{max(loads):.1f} as the processes began"
    )
    return "\n".join([where, "", *table(rows), "", verdict(rows), ""])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="How long a stop-and-copy stalls; see the top of the file.")
    parser.add_argument("--processes", type=int, default=10)
    parser.add_argument("--saves", type=int, default=6)
    parser.add_argument("--rows", nargs="+", default=["copy"], choices=list(ROWS))
    parser.add_argument("--before", type=Path, help="a checkout of another commit, for the row `before`")
    parser.add_argument("--out", type=Path, help="folder for stall.jsonl and stall.md")
    parser.add_argument("--folder", type=Path, help="where to save; default: a temporary folder")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve()
        return
    if any(row.startswith("before") for row in given.rows) and given.before is None:
        parser.error("the rows `before` need --before CHECKOUT")
    log = Log(None if given.out is None else given.out / "stall.jsonl")
    measure(given, log)
    text = page(log.rows)
    print(text)
    if given.out is not None:
        (given.out / "stall.md").write_text(text)


if __name__ == "__main__":
    main()
