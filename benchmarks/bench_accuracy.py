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

Command
    python benchmarks/bench_accuracy.py                 (8 seeds, 12 epochs)

Figures: benchmarks/results/accuracy.md, written by this command. Time from slow storage: bench_time_to_accuracy.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import networks
import numpy as np
import torch
import torch.nn.functional as F
from measures import commit, standard_error
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
WARM_UP = 2


class Epoch(NamedTuple):
    """One epoch of one training."""

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


def train(mode: dict[str, Any], flipped: float, seed: int, epochs: int, data: Path) -> Iterator[Epoch]:
    """Trains one model.

    Args:
        mode: Arguments of the sampler.
        flipped: Share of wrong labels.
        seed: Of weights, labels and augmentation.
        epochs: How many.
        data: Folders ``train`` and ``val``.

    Yields:
        Each epoch.
    """
    torch.manual_seed(seed)
    folder = ImageFolder(str(data / "train"))
    flip(folder, flipped, seed)
    plain = transforms.Compose([transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.25] * 3)])
    view = transforms.Compose([transforms.RandomCrop(32, padding=4), plain])
    val_set = ImageFolder(str(data / "val"), transform=plain)
    val_images, val_targets = next(iter(DataLoader(val_set, batch_size=len(val_set))))
    dataset = ShadeDataset(folder, cache="memory://", working_set_fraction=0.2, transform=view)
    sampler = ShadeSampler(dataset, batch_size=64, seed=seed, epochs=epochs, **mode)
    loader = DataLoader(dataset, batch_size=64, sampler=sampler)
    model = networks.build("cnn", num_classes=10, image_size=32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    for epoch in range(epochs):
        before = dataset.cache.residency.totals()
        sampler.set_epoch(epoch)
        model.train()
        for batch, targets, indices in loader:
            losses_B = F.cross_entropy(model(batch), targets, reduction="none")
            optimizer.zero_grad()
            (losses_B * sampler.weights(indices)).mean().backward()
            optimizer.step()
            sampler.report(indices, losses_B)
        scheduler.step()
        model.eval()
        with torch.no_grad():
            accuracy = float((model(val_images).argmax(1) == val_targets).float().mean())
        sampler.report_validation(accuracy)
        ledger = dataset.cache.residency.totals() - before
        yield Epoch(accuracy, ledger["origin_reads"] / len(dataset), ledger["hits"] / ledger["samples"])
    del loader
    sampler.close()
    dataset.close()


def run(mode: dict[str, Any], flipped: float, seed: int, epochs: int, data: Path) -> tuple[float, float, float]:
    """Trains one model from memory.

    Returns:
        Validation accuracy of the last epoch; after warm-up, origin reads per sample of the data set and epoch, and the
        hit ratio.
    """
    told = list(train(mode, flipped, seed, epochs, data))
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


def main() -> None:
    """Runs the whole grid and writes accuracy.json and accuracy.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--data", type=Path, default=ROOT / ".cache" / "digits")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    torch.set_num_threads(1)
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
