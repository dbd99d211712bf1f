"""What does loading cost a training that runs beside it, and how many accelerators does a loader feed?

Question
    ShadeLoader's threads share an interpreter with the training loop. How much longer does a step take than with its
    data in memory already, against loaders whose workers are processes? And, as MLPerf Storage asks: with accelerators
    played by a wait, how many does a loader keep busy for nine tenths of the time?

Method
    The images, storages and loaders of `bench_loaders`, two epochs a run, the first left out. Each batch goes through
    a step:

        train      forward and backward of a small network on one core, SGD, and what a script's own Python does: a
                   metric, a loss read as a number, a line formatted. The rest of the machine is left to the loader.
        emulated   a wait of T seconds in which no interpreter is needed, as while a GPU computes, and the same Python.

    Data "in memory" is one batch given again and again: what a step takes without any loading. A step's time counts
    from batch to batch, waiting included; a run's figure is the median of its steps. The utilisation of an emulated
    accelerator is T over a step's mean time. T is halved from 0.8 s until it falls below 0.9; the smallest T that keeps
    0.9 is found to a tenth, and one accelerator is said to need 0.8 s for a batch: so many are fed.

    Rounds are interleaved: every loader once, then all again. Rows are appended to OUT/beside-training.jsonl as runs
    end; the same command continues where it was interrupted, and draws the table from what is there.

The rule, written before the first result
    1. Loading costs a training nothing where the step's time is at most 1.02 × that with data in memory.
    2. A loader is ahead in `train` if its ratio is lower than another's in every round; in `emulated` if it feeds more.
    3. ShadeLoader's threads stay the default if no way with processes over the same data set is ahead of them in both.

Command
    python benchmarks/bench_beside_training.py                                   half an hour on two idle cores
    python benchmarks/bench_beside_training.py --storage "local disk" --methods memory shadeloader --rounds 1

Figures go to OUT/beside-training.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import loader_methods
import torch
from bench_loaders import BUCKETS, ROOT, STORAGE, Data, printed_rows, start_program, stored, why
from loader_methods import BATCH, METHODS, Method, Setting
from measures import Log, commit, machine
from tqdm import tqdm

LONGEST_SECONDS = 0.8
"""What one accelerator needs for a batch."""
BUSY = 0.9
LIMIT_SECONDS = 300
NAMES = ("memory", "shadeloader", "shade", "torch-2", "torch-16-simplejpeg", "litdata-simplejpeg")
SHARE = 0.2
"""In cache, of the loaders that have one."""


class Memory(Method):
    """One batch, again and again."""

    def epoch(self, number: int) -> int:
        """See `Method`."""
        batch = (torch.rand(BATCH, 3, self.setting.side, self.setting.side),)
        return loader_methods.count([batch] * (self.setting.num_samples // BATCH), self.setting.side)


class Training:
    """What is done with a batch.

    Args:
        wait_seconds: Of an emulated accelerator; None: a network is trained.
    """

    def __init__(self, wait_seconds: float | None) -> None:
        self._wait_seconds = wait_seconds
        self.times: list[float] = []
        """When each step ended."""
        self.model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 24, 7, 4),
            torch.nn.ReLU(),
            torch.nn.Conv2d(24, 48, 3),
            torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(4),
            torch.nn.Flatten(),
            torch.nn.Linear(768, 10),
        )
        # So slow that nothing is learnt: a batch seen again and again ends in denormal numbers, which take a core long.
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-9, momentum=0.9)
        self._lines: list[str] = []

    def step(self, images: torch.Tensor) -> None:
        """One step, and a script's own Python."""
        if self._wait_seconds is None:
            target = torch.zeros(len(images), dtype=torch.long)
            loss = torch.nn.functional.cross_entropy(self.model(images), target)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            value = loss.item()
        else:
            time.sleep(self._wait_seconds)
            value = 1.0
        counts: dict[int, float] = {}
        for number in range(10_000):
            counts[number % 97] = counts.get(number % 97, 0.0) + value
        self._lines.append(f"step {len(self.times)}: loss {value:.4f}, metric {sum(counts.values()):.2f}")
        self.times.append(time.perf_counter())


def run(name: str, setting: Setting, wait_seconds: float | None) -> None:
    """Two epochs; prints the seconds of the second one's steps."""
    torch.set_num_threads(1)
    training = Training(wait_seconds)
    loader_methods.step = training.step
    method = Memory(setting) if name == "memory" else METHODS[name][1](setting)
    method.epoch(0)
    first = len(training.times)
    method.epoch(1)
    ends = training.times[first:]
    print(json.dumps({"steps": [later - before for before, later in itertools.pairwise(ends)]}), flush=True)
    method.close()


def measured(data: Data, storage: str, name: str, wait_seconds: float | None) -> dict[str, Any]:
    """One run: the median of its steps, their mean, or why there are none."""
    method = Memory if name == "memory" else METHODS[name][1]
    problem = (method.files_only if storage in BUCKETS else "") or (None if name == "memory" else data.convert(name))
    if problem:
        return {"why": problem}
    with tempfile.TemporaryDirectory() as scratch, stored(data.folder, storage) as root:
        share = SHARE if method.shares is not None else 0.0
        setting = {"root": root, "scratch": scratch, "side": data.side, "share": share}
        setting |= {"num_samples": data.num_samples, "num_bytes": data.num_bytes}
        words = ["--run", name, json.dumps(setting), json.dumps(wait_seconds)]
        ended = start_program(Path(__file__), words, Path(scratch), LIMIT_SECONDS)
    problem = why(ended)
    if problem is not None:
        print(ended.stderr[-2000:], file=sys.stderr)
        return {"why": problem}
    (row,) = printed_rows(ended)
    return {"median": statistics.median(row["steps"]), "mean": statistics.fmean(row["steps"])}


def accelerators(data: Data, storage: str, name: str) -> dict[str, Any]:
    """Finds the shortest wait that keeps an accelerator busy; returns how many are fed."""
    good, bad, tried = 0.0, 0.0, LONGEST_SECONDS
    while not good or not bad or good > 1.1 * bad:
        row = measured(data, storage, name, tried)
        if "why" in row:
            return row
        if tried / row["mean"] >= BUSY:
            good = tried
        else:
            bad = tried
        if tried < 0.01 or bad >= LONGEST_SECONDS:
            break
        tried = (good * bad) ** 0.5 if good and bad else tried / 2
    return {"accelerators": LONGEST_SECONDS / good if good else 0.0}


def measure_all(log: Log, data: Data, args: argparse.Namespace) -> None:
    """Runs what is not in the log yet."""
    keys = ("round", "storage", "kind", "method")
    done = {tuple(row[key] for key in keys) for row in log.rows}
    todo = [
        (number, storage, kind, name)
        for number in range(args.rounds)
        for storage in args.storage
        for kind in args.kinds
        for name in args.methods
        if number == 0 or kind == "train"  # the search looks at each loader several times in a round
    ]
    for key in tqdm([key for key in todo if key not in done], unit="run", dynamic_ncols=True):
        _, storage, kind, name = key
        row = measured(data, storage, name, None) if kind == "train" else accelerators(data, storage, name)
        log.add(dict(zip(keys, key, strict=True)) | row | {"commit": commit()})


def report(rows: list[dict[str, Any]]) -> str:
    """The table."""
    lines = ["| storage | loader | step, × data in memory | accelerators at ≥ 90 % |", "|---|---|---|---|"]
    for storage, name in dict.fromkeys((row["storage"], row["method"]) for row in rows):
        mine = [row for row in rows if row["storage"] == storage]
        own = [row for row in mine if row["method"] == name]
        memory = {row["round"]: row["median"] for row in mine if row["method"] == "memory" and "median" in row}
        ratios = [row["median"] / memory[row["round"]] for row in own if "median" in row and row["round"] in memory]
        fed = [row["accelerators"] for row in own if "accelerators" in row]
        wrong = next((row["why"] for row in own if "why" in row), "")
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f})" if ratios else wrong
        label = "data in memory" if name == "memory" else METHODS[name][0]
        lines.append(f"| {storage} | {label} | {spread} | {f'{fed[0]:.1f}' if fed else wrong} |")
    return "\n".join(lines)


def main() -> None:
    """Measures what is missing, then writes the table."""
    if sys.argv[1:2] == ["--run"]:
        name, setting, wait_seconds = sys.argv[2:]
        options = json.loads(setting)
        run(name, Setting(**options | {"scratch": Path(options["scratch"])}), json.loads(wait_seconds))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    storages = [*STORAGE, *BUCKETS]
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3, help="of `train`; `emulated` is measured in the first alone")
    parser.add_argument("--methods", nargs="+", choices=["memory", *METHODS], default=list(NAMES), metavar="NAME")
    parser.add_argument("--storage", nargs="+", choices=storages, default=[storages[0], storages[-1]], metavar="NAME")
    parser.add_argument("--kinds", nargs="+", choices=("train", "emulated"), default=["train", "emulated"])
    parser.add_argument("--data", type=Path, default=ROOT / ".cache" / "loaders", help="where images are made")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    log = Log(args.out / "beside-training.jsonl")
    measure_all(log, Data(args.data, args.images, 400, 300, 224), args)
    commits = ", ".join(dict.fromkeys(row["commit"] for row in log.rows))
    table = f"# Beside a training\n\nMeasured at commit {commits}; {machine()}.\n\n{report(log.rows)}\n"
    (args.out / "beside-training.md").write_text(table)
    print(report(log.rows))


if __name__ == "__main__":
    main()
