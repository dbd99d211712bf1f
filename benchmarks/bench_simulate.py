"""How near `shade simulate` comes to the truth: one recorded epoch, and real runs with three other sizes of cache.

Question
    What would more cache give? `shade simulate` answers from one epoch of one run. Is it right?

Method
    N JPEGs in classes, or the folder that is named (a mount of scripts/slowfs makes the seconds interesting). One run
    of one epoch with a fifth of the data cached is recorded by the launcher, as any run is. From it, reads and seconds
    of a later epoch are predicted for each size; then a run of 6 epochs with that size measures them: the mean of its
    epochs 2, 3 and 4, which are neither warm-up nor the full tail. All runs have the same seed. The bar is 10 % of
    measured origin reads. Seconds are told beside it: they are a forecast from rates, not a promise.

Command
    python benchmarks/bench_simulate.py
    scripts/slowfs DATA MOUNT --open-latency 2ms --bandwidth 100MB/s & python benchmarks/bench_simulate.py --data MOUNT

Figures
    Printed, and with --out written as Markdown.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from measures import publish
from PIL import Image

from shade.policy.trace import Trace
from shade.report import load_run
from shade.report.forecast import measure, policy_of, predict, prolong, workers_of

HERE = Path(__file__).resolve().parent
RECORDED, SIZES = 0.2, (0.1, 0.3, 0.6)
EPOCHS, STEADY = 6, (2, 3, 4)


def make_images(folder: Path, num_samples: int, side: int) -> Path:
    """JPEGs of noise over a colour of their class: not all of one size."""
    rng = np.random.default_rng(0)
    for number in range(num_samples):
        path = folder / f"class{number % 10}" / f"{number:06}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        edge = int(side * rng.uniform(0.7, 1.3))
        pixels = rng.integers(0, 120, (edge, edge, 3)) + np.array([12 * (number % 10), 60, 20])
        Image.fromarray(pixels.astype(np.uint8)).save(path, quality=60)
    return folder


def launch(data: Path, out: Path, fraction: float, epochs: int, given: argparse.Namespace) -> Path:
    """One run of the launcher; its directory."""
    words = [data, "--network", "cnn", "--batch_size", given.batch_size, "--workers", given.workers, "--out", out]
    command = [sys.executable, HERE / "runshade.py", "bench_cifar10.py", *words, "-wss", fraction, "--epochs", epochs]
    environment = os.environ | {"PYTHONPATH": str(HERE.parent)}
    told = subprocess.run(
        list(map(str, command)), cwd=out.parent, env=environment, capture_output=True, text=True, check=False
    )
    if told.returncode:
        raise SystemExit(f"a run failed: {told.stderr}")
    return out


def compare(data: Path, work: Path, given: argparse.Namespace) -> list[str]:
    """The table, a line each."""
    recorded = launch(data, work / "recorded", RECORDED, 1, given)
    run, trace = load_run(recorded), Trace.load(recorded / "trace.npz")
    epoch, _ = measure(run)
    steady, skip = prolong(trace, run.plan)
    lines = [
        "| cache | reads predicted | measured | ratio | seconds predicted | measured | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for fraction in SIZES:
        told = predict(
            steady, skip, policy_of(run.plan), int(fraction * trace.data_set_bytes), epoch, workers_of(run.plan)
        )
        truth = load_run(launch(data, work / f"f{fraction}", fraction, EPOCHS, given)).epochs
        reads = statistics.mean(truth[number].counts["origin_reads"] for number in STEADY)
        seconds = statistics.mean(truth[number].epoch_seconds or 0.0 for number in STEADY)
        lines.append(
            f"| {fraction:.0%} | {told.origin_reads:,.0f} | {reads:,.0f} | {told.origin_reads / reads:.3f} "
            f"| {told.seconds:.2f} | {seconds:.2f} | {told.seconds / seconds:.2f} |"
        )
    return lines


def main() -> None:
    """Parses, runs, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="an image folder (made if not named)")
    parser.add_argument("--n", type=int, default=2000, help="images to make (2000)")
    parser.add_argument("--side", type=int, default=64, help="of the images that are made (64)")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, help="folder for simulate.md")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        data = given.data.resolve() if given.data else make_images(work / "data", given.n, given.side)
        lines = compare(data, work, given)
    publish("simulate", "What an epoch foretells", lines, given.out)


if __name__ == "__main__":
    main()
