"""How much of the time is training that counts, on a machine that is taken away again and again?

Question
    A cheaper save pays twice: it costs less, and so it is made more often, and less is lost. What does that come to,
    for shade's default, DCP's async_save and torchsnapshot, each at the interval that is best for it?

Method
    ResNet-50 with momentum (205 MB of state) trains on all cores. First each method's cost of a save and its time until
    the save is durable are measured, as in `bench_strategies`, and its best interval follows: `best_cycle` of
    `_pacing.schedule`, for the trace's mean time between failures, and no shorter than a save takes. Then each method
    flies the same trace: a list of moments, drawn from a Poisson process with a seed, at which the training's process
    is killed. A new process builds the model, restores the newest whole snapshot in storage and trains on from there.
    Shared memory is removed at each kill, since a machine that is taken away takes its memory along; the page cache
    stays, which favours methods that do not sync. New processes are forked from one that has imported everything.

    goodput     steps that the training has done at the end, those done again left out, times the length of a step
                without saves, over the time.
    lost        steps done again, or never counted, for each kill.
    back after  from a kill to the first new step.

Command
    python benchmarks/bench_preemption.py --out benchmarks/results       (six minutes; --seconds 40 for a look)
        A flight is added to OUT/preemption.jsonl as it ends; the same command continues where it was interrupted.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from measures import Child, Kept, publish

MODEL, SIZE = "resnet", "base"
METHODS: Final = ("shade", "dcp-async", "torchsnapshot-package", "none")
DEFAULT: Final = "overlap"
RECORDS: Final = {"dcp-async": ".metadata", "torchsnapshot-package": ".snapshot_metadata"}
"""The file that makes a snapshot whole, by method."""
KEPT: Final = 2
FIRST_STEPS = 5
_fork = multiprocessing.get_context("fork")


# ── what a save costs ───────────────────────────────────────────────────────────────────────────────────────────────


def costs(name: str, place: Path | None) -> dict[str, Any]:
    """Measures a method's saves: pairs of steps behind a save and without one, and seconds until it is durable."""
    import strategy_run

    given = argparse.Namespace(model=MODEL, size=SIZE, every=2, saves=8, data=None)
    method = DEFAULT if name == "shade" else name
    with tempfile.TemporaryDirectory(dir=place, ignore_cleanup_errors=True) as folder:
        training = Child(strategy_run.Turns, given, strategy_run.METHODS["none"])
        try:
            found = training.call("take", method, Path(folder), None)
        finally:
            training.close()
    quiet = statistics.median(without for _, without in found["pairs"])
    return {
        "step": quiet / given.every,
        "cost": max(1e-3, statistics.median(behind for behind, _ in found["pairs"]) - quiet) if found["stalls"] else 0.0,
        "stall": statistics.median(found["stalls"] or [0.0]),
        "durable": statistics.median(found["durable"] or [0.0]),
    }


def best_interval(found: dict[str, Any], mtbf_seconds: float) -> int:
    """Steps between two saves."""
    from shade.checkpoint._pacing.schedule import best_cycle

    seconds = max(best_cycle(found["cost"], mtbf_seconds) - found["cost"], found["durable"])
    return max(1, round(seconds / found["step"]))


# ── a flight ────────────────────────────────────────────────────────────────────────────────────────────────────────


def train(name: str, every: int, folder: Path, run: str, done: Any, restored: Any) -> None:
    """Restores and trains until the process is killed; `done` has the step, `restored` the one begun from."""
    import strategy_run
    from strategy_methods import METHODS as KNOWN
    from strategy_methods import last

    from shade import Checkpointer

    training = strategy_run.Training(KNOWN["none"], MODEL, SIZE, None)
    nothing = KNOWN["none"](training.model, training.optimizer, folder)
    number = 0
    if name == "shade":
        checkpointer = Checkpointer(persist_to=folder, run=run, every=every)
        checkpointer.attach(model=training.model, optimizer=training.optimizer)
        number = restored.value = done.value = checkpointer.restore_latest().step
        while True:
            training.step(nothing)
            checkpointer.step()
            number += 1
            done.value = number
    if name != "none":
        for path in folder.glob("[0-9]*"):
            if not (path / RECORDS[name]).exists():
                shutil.rmtree(path)
        if any(folder.glob("[0-9]*")):
            KNOWN[name].restore(training.model, training.optimizer, folder)
            number = int(last(folder, "[0-9]*").name)
    restored.value = done.value = number
    method = KNOWN[name](training.model, training.optimizer, folder)
    while True:
        training.step(method)
        number += 1
        done.value = number
        if name != "none" and number % every == 0:
            method.begin(number)  # returns when the save before is whole
            whole = sorted((int(path.name) for path in folder.glob("[0-9]*")), reverse=True)[1:]
            for old in whole[KEPT:]:
                shutil.rmtree(folder / str(old))


def fly(name: str, every: int, kills: list[float], seconds: float, place: Path | None) -> dict[str, Any]:
    """Plays a trace: the steps done at its end, those lost, and the seconds from each kill to the next step."""
    import torch  # noqa: F401 - what this process has imported costs its children nothing
    from strategy_methods import METHODS as _known  # noqa: F401

    from shade.checkpoint._buffer.shared_memory_folder import own_folder

    run = f"preemption-{os.getpid()}"
    done, restored = _fork.Value("q", 0), _fork.Value("q", 0)
    lost, back = [], []
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(dir=place, ignore_cleanup_errors=True) as folder:
        for end in [*kills, seconds]:
            before, born = done.value, time.monotonic()
            restored.value = -1
            process = _fork.Process(target=train, args=(name, every, Path(folder), run, done, restored))
            process.start()
            is_back = False
            while time.monotonic() - begun < end:
                time.sleep(0.005)
                if not process.is_alive():
                    raise RuntimeError(f"{name}: the training ended with exit code {process.exitcode}")
                if not is_back and 0 <= restored.value < done.value:
                    is_back = True
                    back.append(time.monotonic() - born)
                    lost.append(before - restored.value)
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            if not is_back:
                done.value = before
            shutil.rmtree(own_folder(run), ignore_errors=True)
    return {"steps": done.value, "lost": lost[1:], "back": back[1:]}  # the first begins from nothing


def trace(seed: int, seconds: float, mtbf_seconds: float) -> list[float]:
    """Moments of failures, from a Poisson process; the last one well before the end."""
    dice, moment, found = random.Random(seed), 0.0, []
    while (moment := moment + dice.expovariate(1 / mtbf_seconds)) < seconds - mtbf_seconds / 4:
        found.append(moment)
    return found


# ── the report ──────────────────────────────────────────────────────────────────────────────────────────────────────


def table(known: dict[str, dict[str, Any]], flights: dict[str, list[dict[str, Any]]], seconds: float) -> list[str]:
    """Markdown: a row a method."""
    step = statistics.median(found["step"] for found in known.values())
    lines = [
        "| method | every | cost a save | stall | durable after | goodput | rounds | lost a kill | back after |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, rounds in flights.items():
        found = known[name]
        shares = [each["steps"] * step / seconds for each in rounds]
        lost = [steps for each in rounds for steps in each["lost"]]
        back = [took for each in rounds for took in each["back"]]
        saves = (
            f"{rounds[0]['every']} steps | {found['cost']:.3f} s | {found['stall']:.3f} s | {found['durable']:.2f} s"
            if name != "none"
            else "never | | | "
        )
        lines.append(
            f"| {name} | {saves} | {statistics.mean(shares):.3f} | {', '.join(f'{each:.3f}' for each in shares)} | "
            f"{statistics.mean(lost):.1f} steps | {statistics.median(back):.2f} s |"
        )
    return [*lines, "", f"A step takes {step:.3f} s without saves. `none` starts from nothing after each kill."]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Goodput on a trace of preemptions; see the top of the file.")
    parser.add_argument("--seconds", type=float, default=70.0, help="of a flight (70)")
    parser.add_argument("--mtbf", type=float, default=15.0, help="seconds between failures, on average (15)")
    parser.add_argument("--rounds", type=int, default=1, help="traces, each with a seed of its own (1)")
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--out", type=Path, help="folder for preemption.jsonl and .md")
    parser.add_argument("--folder", type=Path, help="where to save; default: a temporary folder")
    given = parser.parse_args()
    kept = Kept(None if given.out is None else given.out / "preemption.jsonl")
    known = {name: kept(f"cost {name}", lambda name=name: costs(name, given.folder)) for name in given.methods}  # type: ignore[misc]
    flights: dict[str, list[dict[str, Any]]] = {name: [] for name in given.methods}
    for number in range(given.rounds):
        kills = trace(number, given.seconds, given.mtbf)
        for name in random.Random(number).sample(given.methods, len(given.methods)):
            every = best_interval(known[name], given.mtbf) if name != "none" else 0
            flight = lambda name=name, every=every, kills=kills: (  # noqa: E731
                fly(name, every, kills, given.seconds, given.folder) | {"every": every, "kills": kills}
            )
            flights[name].append(kept(f"{number} {name} {given.seconds:g} {given.mtbf:g}", flight))
            print(f"round {number}: {name}: {flights[name][-1]['steps']} steps", file=sys.stderr, flush=True)
    setting = f"commits {kept.commits}; {given.seconds:g} s a flight, a failure in {given.mtbf:g} s on average"
    publish("preemption", "Goodput on a trace of preemptions", [setting, "", *table(known, flights, given.seconds)], given.out)


if __name__ == "__main__":
    main()
