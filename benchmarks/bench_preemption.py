"""How much training survives on a machine that is taken away again and again?

Question
    A cheaper save pays twice: it costs less, so it can be made more often, and less is lost. What does that come to for
    shade's default strategy, DCP's async_save and torchsnapshot, each at the interval that is best for it?

Method
    ResNet-50 with momentum (205 MB of state) trains on all cores and saves into a folder on disk. A *flight* is a wall
    time in which the training's process is ended at the moments of a trace. The trace is drawn from a seed by `trace`:
    moments of a Poisson process, of which two in three are a SIGKILL without notice, and one in three is a spot notice:
    SIGTERM, and SIGKILL 30 seconds later to a process that has not ended by itself. As soon as the process has ended a
    new one builds the model, restores the newest whole snapshot and trains on. All methods meet the same traces, in a
    new random order each round, beside one flight that neither saves nor is ended.

    On a notice each method ends its step, saves, waits until that is durable, and exits. shade does so by `watch`; the
    other two have no such thing, and get a handler from this program that does the same for them.

    Shared memory is removed whenever a process has ended, since a machine takes its memory along. The page cache stays,
    which favours a method that does not sync. New processes are forked from one that has imported everything: an import
    costs all methods alike.

    interval    Young's and Daly's, exactly (`best_cycle` of `_pacing.schedule`), from each method's own measured cost
                of a save and the mean time between kills without notice; and never shorter than a save takes. Cost:
                K steps behind a save over K steps without one, K long enough for the save to become durable, medians.
    goodput     the step that a last new process restores when the flight is over, over the steps of the undisturbed
                flight of the same round. So what was trained after the last whole snapshot does not count.
    lost        steps done again, for each kill, and for each notice.
    back after  from the kill or the notice to the first new step.

Rule
    Written before the first result. The figure of a method is the mean of its goodput over the rounds. A method is
    ahead of another if it is so in every round. No flight is left out; one that fails is a row that says so.

Command
    python benchmarks/bench_preemption.py --out benchmarks/results        (27 minutes: 3 in a flight, 4 flights a round)
        A flight is added to OUT/preemption.jsonl as it ends; the same command continues where it was interrupted.
    python benchmarks/bench_preemption.py --quick                         (two minutes, a tiny network: does it work?)
    pip install torchsnapshot                                             for its row

Reading
    With one failure in 30 seconds a restart weighs more than a save: `back after` is mostly building the model and
    restoring. On a machine that fails once an hour all three come close to 1, and the differences are those of
    decision 0048's formula.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from measures import Kept, in_child, publish

from shade.config import RunConfig

MODEL: Final = "resnet"
METHODS: Final = ("shade", "dcp-async", "torchsnapshot-package")
UNDISTURBED: Final = "undisturbed"
RECORDS: Final = {"dcp-async": ".metadata", "torchsnapshot-package": ".snapshot_metadata"}
"""The file that makes a snapshot whole, by method."""
KEPT: Final = 2
NOTICED: Final = 1 / 3
"""Share of the ends that come with a notice."""
NOTICE_SECONDS: Final = 30.0
EXIT_CODE: Final = 143
"""A process that ends on a notice has this one."""
POLL_SECONDS: Final = 0.005
START_SECONDS: Final = 120.0
WARM_UP_STEPS, LEAST_PAIRS, MOST_PAIRS, PAIR_SECONDS = 5, 4, 40, 20.0
End = tuple[float, bool]
"""Seconds from a flight's begin, and whether a notice comes then, or a kill."""
_fork = multiprocessing.get_context("fork")


def trace(seed: int, seconds: float, mtbf_seconds: float) -> list[End]:
    """Draws the ends of a flight from a Poisson process; the last one lies well before the flight's own end."""
    dice, moment, found = random.Random(seed), 0.0, []
    while (moment := moment + dice.expovariate(1 / mtbf_seconds)) < seconds - mtbf_seconds / 4:
        found.append((round(moment, 2), dice.random() < NOTICED))
    return found


# ── what a save costs ───────────────────────────────────────────────────────────────────────────────────────────────


def costs(name: str, size: str, place: Path | None) -> dict[str, float]:
    """Measures a step, and what a save adds to the steps beside it."""
    import strategy_run

    kinds = strategy_run.METHODS
    training = strategy_run.Training(kinds["none"], MODEL, size, None)
    with tempfile.TemporaryDirectory(dir=place, ignore_cleanup_errors=True) as folder:
        kind = kinds[RunConfig.checkpoint_strategy if name == "shade" else name]
        method = kind(training.model, training.optimizer, Path(folder))
        turn = strategy_run.Turn(training, method, True)
        turn.steps(WARM_UP_STEPS, save=False)
        step = turn.steps(WARM_UP_STEPS, save=False) / WARM_UP_STEPS
        _, saved = (turn.steps(1, save=True) for _ in range(2))  # the first makes its buffers
        turn.forget()
        count = max(2, math.ceil(1.5 * saved / step))
        num_pairs = min(max(int(PAIR_SECONDS / (2 * count * step)), LEAST_PAIRS), MOST_PAIRS)
        pairs = [(turn.steps(count, save=True), turn.steps(count, save=False)) for _ in range(num_pairs)]
        durable = statistics.median(method.durable_seconds)
        if hasattr(method, "close"):
            method.close()
    stall = statistics.median(turn.stalls)
    return {
        "step": statistics.median(without for _, without in pairs) / count,
        "cost": max(stall, statistics.median(behind - without for behind, without in pairs)),
        "stall": stall,
        "durable": durable,
    }


def best_interval(found: dict[str, float], mtbf_seconds: float) -> int:
    """Steps between two saves; a noticed end loses nothing, so it does not count as a failure."""
    from shade.checkpoint._pacing.schedule import best_cycle

    cycle = best_cycle(found["cost"], mtbf_seconds / (1 - NOTICED))
    return max(1, round(max(cycle - found["cost"], found["durable"]) / found["step"]))


# ── the training, in processes that are ended ───────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Job:
    """The settings that each process of a flight is started with."""

    name: str
    size: str
    every: int
    folder: Path
    run: str
    done: Any
    """Shared: the step that the model is at."""
    restored: Any
    """Shared: the step that this process began with; -1 before it has restored."""

    def restored_at(self, number: int) -> int:
        """Notes the step that this process begins with, and returns it."""
        self.done.value = self.restored.value = number
        return number


def train(job: Job) -> None:
    """Restores and trains until the process is ended."""
    import strategy_run

    warnings.simplefilter("ignore")  # DCP warns at each save that it is not distributed
    training = strategy_run.Training(strategy_run.METHODS["none"], MODEL, job.size, None)
    (_train_with_shade if job.name == "shade" else _train_with_others)(job, training)


def _train_with_shade(job: Job, training: Any) -> None:
    import strategy_run

    from shade import Checkpointer

    nothing = strategy_run.METHODS["none"](training.model, training.optimizer, job.folder)
    with Checkpointer(persist_to=job.folder, run=job.run, every=job.every, keep=f"last={KEPT}") as checkpointer:
        checkpointer.attach(model=training.model, optimizer=training.optimizer)
        checkpointer.watch("SIGTERM", grace_seconds=NOTICE_SECONDS, exit_code=EXIT_CODE)
        number = job.restored_at(checkpointer.restore_latest().step)
        while True:
            training.step(nothing)
            number += 1
            job.done.value = number
            checkpointer.step()


def _train_with_others(job: Job, training: Any) -> None:
    import strategy_run
    from strategy_methods import last

    is_noticed = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: is_noticed.set())
    kind = strategy_run.METHODS["none" if job.name == UNDISTURBED else job.name]
    number = 0
    for path in job.folder.glob("[0-9]*"):
        if not (path / RECORDS[job.name]).exists():
            shutil.rmtree(path)
    if any(job.folder.glob("[0-9]*")):
        kind.restore(training.model, training.optimizer, job.folder)
        number = int(last(job.folder, "[0-9]*").name)
    job.restored_at(number)
    method = kind(training.model, training.optimizer, job.folder)
    while True:
        training.step(method)
        number += 1
        job.done.value = number
        if job.name != UNDISTURBED and (is_noticed.is_set() or number % job.every == 0):
            method.begin(number)  # returns when the save before is whole
            for old in sorted(job.folder.glob("[0-9]*"), key=lambda path: int(path.name))[: -KEPT - 1]:
                shutil.rmtree(old)
        if is_noticed.is_set():
            method.may_change()
            method.finish()
            sys.exit(EXIT_CODE)


# ── a flight ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Flight:
    """Plays a trace to one method.

    Args:
        job: Of its processes.
        ends: The trace.
        seconds: Length of the flight.
    """

    def __init__(self, job: Job, ends: list[End], seconds: float) -> None:
        self._job, self._ends, self._seconds = job, ends, seconds
        self.lost: dict[str, list[int]] = {"kill": [], "notice": []}
        self.back: list[float] = []

    def fly(self) -> dict[str, Any]:
        """Returns the steps that survive, those lost at each end, and the seconds until training was back."""
        begun = time.monotonic()
        how, since, before = "", 0.0, 0
        for moment, is_noticed in [*self._ends, (self._seconds, False)]:
            with self._process() as process:
                is_back = self._watch(process, begun + moment, how, since, before)
                if is_back:  # else the training is still away since the end before
                    how, since = "notice" if is_noticed else "kill", time.monotonic()
                if is_noticed:
                    process.terminate()
                    process.join(NOTICE_SECONDS)
            before = self._job.done.value if is_back else max(before, self._job.done.value)
        steps = before if self._job.name == UNDISTURBED else self._survived()
        return {"steps": steps, "lost": self.lost, "back": self.back}

    @contextlib.contextmanager
    def _process(self) -> Iterator[Any]:
        """A new process, which is killed in the end, its machine's memory with it."""
        from shade.checkpoint._buffer.shared_memory_folder import own_folder

        self._job.restored.value = -1
        process = _fork.Process(target=train, args=(self._job,))
        process.start()
        try:
            yield process
        finally:
            process.kill()
            process.join()
            shutil.rmtree(own_folder(self._job.run), ignore_errors=True)

    def _watch(self, process: Any, until: float, how: str, since: float, before: int) -> bool:
        """Waits for the moment of the next end, and notes when training is back after the one before; returns whether
        it is."""
        is_back = not how
        while time.monotonic() < until:
            time.sleep(POLL_SECONDS)
            if not process.is_alive():
                raise RuntimeError(f"{self._job.name}: the training ended with exit code {process.exitcode}")
            if not is_back and 0 <= self._job.restored.value < self._job.done.value:
                is_back = True
                self.back.append(time.monotonic() - since)
                self.lost[how].append(before - self._job.restored.value)
        return is_back

    def _survived(self) -> int:
        """Returns the step that a last new process restores."""
        deadline = time.monotonic() + START_SECONDS
        with self._process() as process:
            while self._job.restored.value < 0:
                time.sleep(POLL_SECONDS)
                if not process.is_alive() or time.monotonic() > deadline:
                    raise RuntimeError(f"{self._job.name}: no restore after the flight, exit code {process.exitcode}")
            return int(self._job.restored.value)


def fly(name: str, every: int, ends: list[End], given: argparse.Namespace) -> dict[str, Any]:
    """Plays a trace to a method. What this process imports costs its children nothing."""
    import strategy_run  # noqa: F401

    if name == "torchsnapshot-package":
        import torchsnapshot  # noqa: F401
    with tempfile.TemporaryDirectory(dir=given.folder, ignore_cleanup_errors=True) as folder:
        done, restored = _fork.Value("q", 0), _fork.Value("q", -1)
        job = Job(name, given.size, every, Path(folder), f"preemption-{os.getpid()}", done, restored)
        return Flight(job, ends, given.seconds).fly() | {"every": every, "ends": ends}


# ── the report ──────────────────────────────────────────────────────────────────────────────────────────────────────


def attempted(act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns figures, or why there are none."""
    try:
        return act()
    except RuntimeError as error:
        return {"why": str(error).splitlines()[-1].replace("|", "/")[:160]}


def table(known: dict[str, dict[str, Any]], rounds: list[dict[str, dict[str, Any]]]) -> list[str]:
    """Markdown: a row a method."""
    lines = [
        "| method | a save every | adds | stall | durable after | goodput | by round | lost a kill | a notice "
        "| back after |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in METHODS:
        found, flights = known[name], [each[name] for each in rounds if name in each]
        why = next((each["why"] for each in (found, *flights) if "why" in each), None)
        if why is not None or not flights:
            lines.append(f"| {name} | {why or 'not measured'} | | | | | | | | |")
            continue
        shares = [each[name]["steps"] / each[UNDISTURBED]["steps"] for each in rounds]
        back = [seconds for each in flights for seconds in each["back"]]
        lines.append(
            f"| {name} | {flights[0]['every']} steps | {found['cost']:.3f} s | {found['stall']:.3f} s | "
            f"{found['durable']:.2f} s | {statistics.mean(shares):.3f} | "
            f"{', '.join(f'{each:.3f}' for each in shares)} | {_lost(flights, 'kill')} | {_lost(flights, 'notice')} | "
            f"{statistics.median(back or [0.0]):.2f} s |"
        )
    quiet = [each[UNDISTURBED]["steps"] for each in rounds]
    return [*lines, "", f"Undisturbed flights: {', '.join(map(str, quiet))} steps."]


def _lost(flights: list[dict[str, Any]], how: str) -> str:
    lost = [steps for each in flights for steps in each["lost"][how]]
    return f"{statistics.mean(lost):.1f} steps ({len(lost)})" if lost else ""


def measure(given: argparse.Namespace, kept: Kept) -> tuple[dict[str, dict[str, Any]], list[dict[str, dict[str, Any]]]]:
    """Measures what is not kept yet: costs by method, and flights by round and method."""
    setting = f"{given.size} {given.seconds:g} {given.mtbf:g}"
    known: dict[str, dict[str, Any]] = {}
    for name in METHODS:
        if name == "torchsnapshot-package" and importlib.util.find_spec("torchsnapshot") is None:
            known[name] = {"why": "not installed"}
            continue
        measured = lambda name=name: attempted(lambda: in_child(costs, name, given.size, given.folder))  # noqa: E731
        known[name] = kept(f"cost {given.size} {name}", measured)
        print(f"cost: {name}: {known[name]}", file=sys.stderr, flush=True)
    rounds: list[dict[str, dict[str, Any]]] = []
    for number in range(given.rounds):
        rounds.append({})
        ends = trace(number, given.seconds, given.mtbf)
        names = [UNDISTURBED, *(name for name in METHODS if "why" not in known[name])]
        for name in random.Random(number).sample(names, len(names)):
            every = 0 if name == UNDISTURBED else best_interval(known[name], given.mtbf)
            own = [] if name == UNDISTURBED else ends
            flight = lambda name=name, every=every, own=own: attempted(lambda: fly(name, every, own, given))  # noqa: E731
            rounds[-1][name] = kept(f"{number} {name} {setting}", flight)
            print(f"round {number}: {name}: {rounds[-1][name]}", file=sys.stderr, flush=True)
    return known, rounds


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Goodput on a trace of preemptions; see the top of the file.")
    parser.add_argument("--seconds", type=float, default=180.0, help="of a flight (180)")
    parser.add_argument("--mtbf", type=float, default=30.0, help="seconds between two ends, on average (30)")
    parser.add_argument("--rounds", type=int, default=2, help="traces, each with a seed of its own (2)")
    parser.add_argument("--size", default="base", help="of the network: tiny, base or large (base)")
    parser.add_argument("--quick", action="store_true", help="a tiny network, one round of 20 seconds")
    parser.add_argument("--out", type=Path, help="folder for preemption.jsonl and .md")
    parser.add_argument("--folder", type=Path, help="where to save; default: a temporary folder")
    given = parser.parse_args()
    if given.quick:
        given.size, given.seconds, given.mtbf, given.rounds = "tiny", 20.0, 5.0, 1
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # else tiny steps are waits of one thread for the other
    kept = Kept(None if given.out is None else given.out / "preemption.jsonl")
    known, rounds = measure(given, kept)
    shown = [f"round {number}: {_shown(trace(number, given.seconds, given.mtbf))}" for number in range(given.rounds)]
    setting = (
        f"commits {kept.commits}; ResNet, {given.size}; flights of {given.seconds:g} s, an end in {given.mtbf:g} s on "
        "average; the interval is Young's and Daly's from the measured cost"
    )
    lines = [setting, "", *table(known, rounds), "", "Ends, in seconds:", "", *(f"* {each}" for each in shown)]
    publish("preemption", "Goodput on a trace of preemptions", lines, given.out)


def _shown(ends: list[End]) -> str:
    return ", ".join(f"{'notice' if is_noticed else 'kill'} {moment:.0f}" for moment, is_noticed in ends)


if __name__ == "__main__":
    main()
