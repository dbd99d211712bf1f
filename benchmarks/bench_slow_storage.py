"""What slow storage costs an epoch, with the plain DataLoader and with ours, over the same mount.

Question
    JPEGs lie behind a network: each open waits, and all readers share one line. How long is an epoch with torch's own
    DataLoader, and how long with `ShadeDataset` and `ShadeSampler` in the very same DataLoader?

Method
    2,000 JPEGs of 400 × 300 pixels (about 35 KB) behind `scripts/slowfs`, which delays opens, caps the bandwidth of all
    readers together, caches nothing and counts every open. All loaders use two workers, batches of 64, and the same
    decoding, crop, flip and normalisation; there is no training step, so this is loading alone. Ours have a cache of
    20 % of the data in a private Redis server. Epochs are interleaved round by round after two warm-up epochs; figures
    are medians over the rounds, ratios are to the DataLoader in the same run. Opens are those the mount counted.

    An `unbiased` epoch draws 70 % of the samples, so it is shorter for that reason too: samples/s tells how fast
    loading is, the epoch's seconds what an epoch of training waits.

Command
    python benchmarks/bench_slow_storage.py

Figures: benchmarks/results/slow_storage.md, written by this command.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from measures import SLOW_STATS, commit
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder
from tqdm import tqdm

from shade import ShadeDataset, ShadeSampler

ROOT = Path(__file__).resolve().parent.parent
REGIMES = {"2 ms, 100 MB/s": ("2ms", "100MB/s"), "20 ms, 25 MB/s": ("20ms", "25MB/s")}
BATCH, WORKERS, CLASSES, WARM_UP = 64, 2, 10, 2


def make_images(folder: Path, num_images: int, width: int = 400, height: int = 300) -> None:
    """Writes JPEGs of smooth noise, in classes."""
    generator = np.random.default_rng(0)
    for number in tqdm(range(num_images), unit="image", desc="images", disable=not sys.stderr.isatty()):
        coarse = generator.integers(0, 256, (-(-height // 8), -(-width // 8), 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        noise = generator.integers(-12, 12, (height, width, 3))
        image = Image.fromarray((np.asarray(image) + noise).clip(0, 255).astype(np.uint8))
        path = folder / f"class{number % CLASSES}" / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path, quality=85)


@contextlib.contextmanager
def slow(source: Path, latency: str, bandwidth: str) -> Iterator[Path]:
    """The folder, seen through slow storage."""
    with tempfile.TemporaryDirectory() as mount:
        command = [str(ROOT / "scripts" / "slowfs"), str(source), mount, "--open-latency", latency]
        server = subprocess.Popen([*command, "--bandwidth", bandwidth], stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            if not server.stdout.readline().startswith("slowfs:"):
                sys.exit("slowfs did not mount; its message is above")
            yield Path(mount)
        finally:
            server.terminate()
            server.wait(30)


def opens(mount: Path) -> int:
    """Opens that the mount has seen."""
    return int(json.loads((mount / SLOW_STATS).read_text())["num_opens"])


class Plain:
    """torch's DataLoader, as everybody has it."""

    def __init__(self, mount: Path, view: transforms.Compose) -> None:
        data = ImageFolder(str(mount), transform=view)
        self.loader = DataLoader(data, BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True)

    def epoch(self, number: int) -> int:
        """Loads one epoch; returns the number of samples."""
        return sum(len(batch[1]) for batch in self.loader)

    def close(self) -> None:
        """Nothing to close."""


class Ours:
    """The same DataLoader around our data set and sampler."""

    def __init__(self, mount: Path, view: transforms.Compose, mode: str) -> None:
        self.dataset = ShadeDataset(ImageFolder(str(mount)), cache="local://", working_set_fraction=0.2, transform=view)
        self.sampler = ShadeSampler(self.dataset, batch_size=BATCH, mode=mode)
        self.loader = DataLoader(
            self.dataset, BATCH, sampler=self.sampler, num_workers=WORKERS, persistent_workers=True
        )
        self.losses = torch.from_numpy(np.random.default_rng(1).lognormal(0, 1, len(self.dataset)).astype(np.float32))

    def epoch(self, number: int) -> int:
        """Loads one epoch, reporting losses as a training would; returns the number of samples."""
        self.sampler.set_epoch(number)
        num_samples = 0
        for _, _, indices in self.loader:
            self.sampler.weights(indices)
            self.sampler.report(indices, self.losses[indices])
            num_samples += len(indices)
        return num_samples

    def close(self) -> None:
        """Ends the private server."""
        self.sampler.close()
        self.dataset.close()


def measure(folder: Path, regime: str, rounds: int) -> dict[str, dict[str, float]]:
    """One regime: seconds, samples/s and opens per sample of the data set, medians over the rounds."""
    normalize = transforms.Normalize([0.5] * 3, [0.25] * 3)
    view = transforms.Compose(
        [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor(), normalize]
    )
    with slow(folder, *REGIMES[regime]) as mount:
        loaders = {"DataLoader": Plain(mount, view)}
        loaders |= {f"shade, {mode}": Ours(mount, view, mode) for mode in ("uniform", "unbiased")}
        seen: dict[str, list[tuple[float, float, float]]] = {name: [] for name in loaders}
        for number in range(WARM_UP + rounds):
            for name, loader in loaders.items():
                if number < WARM_UP and name == "DataLoader" and number:
                    continue  # it has nothing to warm up but its workers
                before, began = opens(mount), time.perf_counter()
                num_samples = loader.epoch(number)
                seconds = time.perf_counter() - began
                if number >= WARM_UP:
                    reads = (opens(mount) - before) / len(loader.loader.dataset)
                    seen[name].append((seconds, num_samples / seconds, reads))
        for loader in loaders.values():
            loader.close()
            del loader.loader
    names = ("epoch_seconds", "samples_per_second", "origin_reads_per_sample")
    return {
        name: dict(zip(names, map(statistics.median, zip(*runs, strict=True)), strict=True))
        for name, runs in seen.items()
    }


def main() -> None:
    """Measures all regimes and writes slow_storage.json and slow_storage.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        make_images(Path(folder), args.images)
        for regime in REGIMES:
            results[regime] = measure(Path(folder), regime, args.rounds)
    lines = [
        "| storage | loader | epoch, s | faster | samples/s | ratio | opens / N |",
        "|---|---|---|---|---|---|---|",
    ]
    for regime, by_loader in results.items():
        plain = by_loader["DataLoader"]
        for name, row in by_loader.items():
            faster = plain["epoch_seconds"] / row["epoch_seconds"]
            rate = row["samples_per_second"] / plain["samples_per_second"]
            lines.append(
                f"| {regime} | {name} | {row['epoch_seconds']:.1f} | {faster:.1f}× | {row['samples_per_second']:.0f} | "
                f"{rate:.1f}× | {row['origin_reads_per_sample']:.2f} |"
            )
    where = f"{args.images} JPEGs, 2 workers, medians of {args.rounds} interleaved epochs, 2 cores, commit {commit()}."
    report = "\n".join(lines) + f"\n\n{where}\n"
    (args.out / "slow_storage.md").write_text("# Loading from slow storage\n\n" + report)
    (args.out / "slow_storage.json").write_text(json.dumps({"settings": where, "results": results}, indent=1) + "\n")
    print(report)


if __name__ == "__main__":
    main()
