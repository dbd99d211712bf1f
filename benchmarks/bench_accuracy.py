"""What a sampling mode costs in accuracy, and what it saves in origin reads, on real images.

Question
    `uniform` reads every sample every epoch; `unbiased` reads about 70 % and weighs their gradients; `pads` (SHADE,
    its defects mended) draws with replacement and repeats cached samples. Whose model is how good, with clean labels
    and with a tenth of the training labels wrong?

Method
    scikit-learn's handwritten digits (1,437 for training, 360 for validation), the small CNN of the embedded default,
    SGD with momentum and a cosine schedule over the same number of epochs for every mode, cache of 20 % of the data.
    Each seed fixes initial weights, flipped labels and augmentation for all modes alike, so differences are paired.
    Wrong labels are only ever in the training set. Accuracy is that of the last epoch on all 360 images: no best-of.
    Origin reads are counted by the ledger after warm-up (from the third epoch on) and divided by the size of the data.

    With ``--storage slow`` the question is time: the training images lie behind `scripts/slowfs` (20 ms an open, 25
    MB/s for all readers together), two workers load, and `uniform` runs with a `static` cache, which is MinIO: the
    best there is for epochs that use every sample once. Every epoch notes its wall time, validation left out, and the
    accuracy after it. Targets are two points, one and a half below the median of what `uniform` ends with; time to one
    is when a run reaches it and is there to stay. Seeds are interleaved: each trains all modes before the next begins.

Command
    python benchmarks/bench_accuracy.py                 (8 seeds, 12 epochs)
    python benchmarks/bench_accuracy.py --storage slow  (15 seeds, 12 epochs, clean labels)

Figures and what they mean: benchmarks/results/accuracy.md, and time_to_accuracy.md, .json and .png, written by these
commands.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import networks
import numpy as np
import torch
import torch.nn.functional as F
from bench_slow_storage import slow
from measures import commit
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder
from tqdm import tqdm

from shade import ShadeDataset, ShadeSampler

ROOT = Path(__file__).resolve().parent.parent
MODES: dict[str, dict[str, Any]] = {
    "uniform": {"mode": "uniform"},
    "unbiased": {"mode": "unbiased", "keep": 0.7},
    "pads -rep 3": {"mode": "pads", "replication_factor": 3.0},
}
TIMED_MODES: dict[str, dict[str, Any]] = {
    "unbiased": MODES["unbiased"],
    "uniform, static cache (MinIO)": {"mode": "uniform", "policy": "static"},
    "pads -rep 3": MODES["pads -rep 3"],
}
BASE = "uniform, static cache (MinIO)"
SLOW = ("20ms", "25MB/s")
WARM_UP = 2
BELOW = (0.02, 0.01, 0.005)
"""How far below the end of `uniform` the targets are. At the last, one image of 360 more or less decides."""


class Epoch(NamedTuple):
    """One epoch of one training."""

    seconds: float
    """Loading and training."""
    accuracy: float
    """On the validation set, after it."""
    reads: float
    """Of the origin, per sample of the data set."""
    hit_ratio: float


def flip(dataset: ImageFolder, fraction: float, seed: int) -> None:
    """Gives a fraction of the samples another class's label."""
    generator = np.random.default_rng(seed)
    for index in generator.permutation(len(dataset))[: int(fraction * len(dataset))]:
        path, target = dataset.samples[index]
        dataset.samples[index] = (path, (target + int(generator.integers(1, 10))) % 10)


def train(
    mode: dict[str, Any], flipped: float, seed: int, epochs: int, images: Path, val: Path, cache: str, workers: int
) -> Iterator[Epoch]:
    """Trains one model.

    Args:
        mode: Arguments of the sampler, and ``policy`` for the data set.
        flipped: Share of wrong labels.
        seed: Of weights, labels and augmentation.
        epochs: How many.
        images: For training.
        val: For validation.
        cache: URL.
        workers: Of the loader.

    Yields:
        Each epoch.
    """
    torch.manual_seed(seed)
    options = dict(mode)
    folder = ImageFolder(str(images))
    flip(folder, flipped, seed)
    plain = transforms.Compose([transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.25] * 3)])
    view = transforms.Compose([transforms.RandomCrop(32, padding=4), plain])
    val_set = ImageFolder(str(val), transform=plain)
    val_images, val_targets = next(iter(DataLoader(val_set, batch_size=len(val_set))))
    policy = options.pop("policy", None)
    dataset = ShadeDataset(folder, cache=cache, working_set_fraction=0.2, policy=policy, transform=view)
    sampler = ShadeSampler(dataset, batch_size=64, seed=seed, epochs=epochs, **options)
    loader = DataLoader(dataset, batch_size=64, sampler=sampler, num_workers=workers, persistent_workers=workers > 0)
    model = networks.build("cnn", num_classes=10, image_size=32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    for epoch in range(epochs):
        before, began = dataset.cache.residency.totals(), time.perf_counter()
        sampler.set_epoch(epoch)
        model.train()
        for batch, targets, indices in loader:
            losses_B = F.cross_entropy(model(batch), targets, reduction="none")
            optimizer.zero_grad()
            (losses_B * sampler.weights(indices)).mean().backward()
            optimizer.step()
            sampler.report(indices, losses_B)
        scheduler.step()
        seconds = time.perf_counter() - began
        model.eval()
        with torch.no_grad():
            accuracy = float((model(val_images).argmax(1) == val_targets).float().mean())
        sampler.report_validation(accuracy)
        ledger = dataset.cache.residency.totals() - before
        yield Epoch(seconds, accuracy, ledger["origin_reads"] / len(dataset), ledger["hits"] / ledger["samples"])
    del loader
    sampler.close()
    dataset.close()


def run(mode: dict[str, Any], flipped: float, seed: int, epochs: int, data: Path) -> tuple[float, float, float]:
    """Trains one model from memory.

    Returns:
        Validation accuracy of the last epoch; after warm-up, origin reads per sample of the data set and epoch, and the
        hit ratio.
    """
    told = list(train(mode, flipped, seed, epochs, data / "train", data / "val", "memory://", 0))
    later = told[WARM_UP:]
    reads, hits = (statistics.mean(getattr(each, name) for each in later) for name in ("reads", "hit_ratio"))
    return told[-1].accuracy, reads, hits


def table(results: dict[str, dict[str, list[tuple[float, float, float]]]]) -> str:
    """The Markdown table: accuracy, paired difference to uniform with its standard error, reads, hit ratio."""
    lines = [
        "| labels | sampling | accuracy % | Δ to uniform, points | origin reads / N | hit ratio |",
        "|---|---|---|---|---|---|",
    ]
    for labels, by_mode in results.items():
        for mode, runs in by_mode.items():
            accuracy, reads, hits = (np.array(column) for column in zip(*runs, strict=True))
            delta = 100 * (accuracy - np.array([run[0] for run in by_mode["uniform"]]))
            difference = "–" if mode == "uniform" else f"{delta.mean():+.2f} ± {standard_error(delta):.2f}"
            row = (
                labels,
                mode,
                f"{100 * accuracy.mean():.2f}",
                difference,
                f"{reads.mean():.2f}",
                f"{hits.mean():.2f}",
            )
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def standard_error(values: np.ndarray) -> float:
    """Of the mean; not a number where there is one value."""
    return float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else math.nan


def seconds_to(course: Sequence[Sequence[float]], target: float) -> float:
    """Wall time until the accuracy has reached the target for good; infinite if never."""
    reached, passed = math.inf, 0.0
    for seconds, accuracy, *_ in course:
        passed += seconds
        if accuracy < target:
            reached = math.inf
        elif reached == math.inf:
            reached = passed
    return reached


def time_to_accuracy(seeds: int, epochs: int, data: Path, out: Path) -> str:
    """Trains every mode from slow storage, and writes time_to_accuracy.json, .md and .png.

    Args:
        seeds: How many.
        epochs: Of each training.
        data: Folders ``train`` and ``val``.
        out: Where results go.

    Returns:
        The report.
    """
    courses: dict[str, list[list[Epoch]]] = {name: [] for name in TIMED_MODES}
    with slow(data / "train", *SLOW) as mount:
        grid = [(seed, name) for seed in range(seeds) for name in TIMED_MODES]
        for seed, name in tqdm(grid, unit="run", mininterval=0.2 if sys.stderr.isatty() else 30):
            courses[name].append(list(train(TIMED_MODES[name], 0.0, seed, epochs, mount, data / "val", "local://", 2)))
    return timed_report(courses, out)


def timed_report(courses: dict[str, list[list[Epoch]]], out: Path) -> str:
    """What `time_to_accuracy` writes.

    Args:
        courses: Of each mode, seed by seed.
        out: Where results go.

    Returns:
        The report.
    """
    end = statistics.median(course[-1].accuracy for course in courses[BASE])
    targets = [end - below for below in BELOW]
    heads = [f"seconds to {100 * target:.1f} %" for target in targets]
    lines = [
        f"| sampling | {' | '.join(heads)} | epoch, s | origin reads / N | accuracy at the end, % |",
        "|---" * (len(heads) + 4) + "|",
    ]
    base = [_median_to(courses[BASE], target) for target in targets]
    for name, runs in courses.items():
        reached = [_reached(runs, target, slowest) for target, slowest in zip(targets, base, strict=True)]
        later = [each for course in runs for each in course[WARM_UP:]]
        ends = 100 * np.array([course[-1].accuracy for course in runs])
        lines.append(
            f"| {name} | {' | '.join(reached)} | {statistics.median(each.seconds for each in later):.2f} | "
            f"{statistics.mean(each.reads for each in later):.2f} | "
            f"{ends.mean():.2f} ± {standard_error(ends):.2f} |"
        )
    seeds, epochs = len(courses[BASE]), len(courses[BASE][0])
    where = (
        f"{seeds} seeds, {epochs} epochs, 20 ms an open, 25 MB/s, commit {commit()}. Median of the seeds; in brackets, "
        "how many times sooner than `uniform`, and how many seeds came there to stay."
    )
    report = "\n".join([*lines, "", where, ""])
    (out / "time_to_accuracy.md").write_text("# Time to accuracy from slow storage, digits\n\n" + report)
    kept = {"targets": targets, "commit": commit(), "courses": courses}
    (out / "time_to_accuracy.json").write_text(json.dumps(kept) + "\n")
    plot(courses, targets, out / "time_to_accuracy.png")
    return report


def _median_to(runs: list[list[Epoch]], target: float) -> float:
    return statistics.median(seconds_to(course, target) for course in runs)


def _reached(runs: list[list[Epoch]], target: float, slowest: float) -> str:
    middle = _median_to(runs, target)
    if not math.isfinite(middle):
        return "never"
    num_reached = sum(math.isfinite(seconds_to(course, target)) for course in runs)
    return f"{middle:.1f} ({slowest / middle:.2f}×, {num_reached})"


def plot(courses: dict[str, list[list[Epoch]]], targets: list[float], path: Path) -> None:
    """Accuracy against wall time: every seed thin, the medians thick."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for colour, (name, runs) in zip(("tab:orange", "tab:blue", "tab:grey"), courses.items(), strict=True):
        times = [np.cumsum([each.seconds for each in course]) for course in runs]
        accuracies = [[100 * each.accuracy for each in course] for course in runs]
        for seconds, accuracy in zip(times, accuracies, strict=True):
            axis.plot(seconds, accuracy, color=colour, linewidth=0.5, alpha=0.5)
        axis.plot(np.median(times, axis=0), np.median(accuracies, axis=0), color=colour, linewidth=2, label=name)
    for target in targets:
        axis.axhline(100 * target, color="black", linewidth=0.8, linestyle=":")
    axis.set(xlabel="seconds of loading and training", ylabel="validation accuracy, %", ylim=(80, 100))
    axis.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    """Runs the whole grid and writes accuracy.json and accuracy.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, help="8, or 15 with --storage slow")
    parser.add_argument("--storage", choices=("memory", "slow"), default="memory", help="slow: time to accuracy")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--data", type=Path, default=ROOT / ".cache" / "digits")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.storage == "slow":
        print(time_to_accuracy(args.seeds or 15, args.epochs, args.data, args.out))
        return
    args.seeds = args.seeds or 8
    began = time.time()
    grid = [(labels, flipped, seed, mode) for labels, flipped in (("clean", 0.0), ("10 % flipped", 0.1))
            for seed in range(args.seeds) for mode in MODES]  # fmt: skip
    results: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
    for labels, flipped, seed, mode in tqdm(grid, unit="run", mininterval=0.2 if sys.stderr.isatty() else 30):
        results.setdefault(labels, {}).setdefault(mode, []).append(
            run(MODES[mode], flipped, seed, args.epochs, args.data)
        )
    where = (
        f"{args.seeds} seeds, {args.epochs} epochs, commit {commit()}, torch {torch.__version__}, {platform.machine()} "
        f"CPU, one thread, {time.time() - began:.0f} s; ± is the standard error of the paired difference."
    )
    report = f"{table(results)}\n\n{where}\n"
    (args.out / "accuracy.md").write_text("# Accuracy by sampling mode, digits\n\n" + report)
    (args.out / "accuracy.json").write_text(json.dumps({"settings": where, "runs": results}, indent=1) + "\n")
    print(report)
    medians = {mode: statistics.median(run[0] for run in runs) for mode, runs in results["clean"].items()}
    print("median accuracy, clean:", medians)


if __name__ == "__main__":
    main()
