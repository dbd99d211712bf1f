"""Every loader over the same storage: ours, torch's own, and those that people move to.

Question
    A folder of JPEGs lies on a local disk, on decent network storage, or on slow network storage. How many samples a
    second does each loader bring into the training process, at what CPU cost, and what does it ask of the storage?

Method
    4,000 JPEGs of 400 × 300 pixels (about 35 KB) → random resized crop to 224, flip, normalise; and 20,000 of 32 × 32.
    Batches of 64, two workers (or as many threads as a loader's design asks for), no training step. All files, the
    images and every converted copy, lie behind `scripts/slowfs`, which delays opens, caps the bandwidth of all readers
    together, caches nothing and counts; "local disk" is the same mount without delay or cap, so that nobody profits
    from the page cache. Who has a cache gets 20 % of the data set, on local disk or in memory as it likes; then the
    whole set. Each loader is set up as its documentation advises (benchmarks/loader_methods.py says how).

    A run is one loader in a process of its own with an empty cache: set-up, a first epoch, then more. Rounds are
    interleaved: every loader once, then all again. Figures are medians over the second and later epochs of all rounds,
    the spread is their lowest to highest, ratios are to torch's DataLoader with two workers in the same case. CPU time
    is that of the process and everything it started (workers, a private Redis server), not the mount's. Opens and
    bytes are those the mount served in an epoch. A converted copy is opened by shard, so its opens say little; its
    bytes do. `unbiased` draws 70 % of the samples an epoch, which shortens the epoch and not the samples/s. A loader
    that cannot be told how much to keep is measured with the first share alone, and stands in all tables.

    Every epoch is a line in loaders.jsonl, appended as its run ends. Started again, the command goes on where it was
    stopped; a method whose package is missing, or that fails or hangs, is a row that says so: it is left out of later
    rounds, and tried again when the command is.

Command
    python benchmarks/bench_loaders.py                    hours on two cores; leave the machine alone
    python benchmarks/bench_loaders.py --quick            every method once on few images: does it work?
    python benchmarks/bench_loaders.py --report           the table and the picture, from the lines there are

Figures: benchmarks/results/loaders.md and loaders.png, written by this command from loaders.jsonl.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import loader_report
from bench_slow_storage import make_images, slow
from loader_methods import METHODS
from measures import Log, commit, machine
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = Path(__file__).with_name("loader_epochs.py")
STORAGE = {
    "local disk": ("0ms", "100GB/s"),
    "2 ms, 100 MB/s": ("2ms", "100MB/s"),
    "20 ms, 25 MB/s": ("20ms", "25MB/s"),
}
PACKAGES = (
    "torch", "torchvision", "torchdata", "mosaicml-streaming", "litdata", "webdataset", "spdl", "ffcv", "datasets",
    "redis", "pillow",
)  # fmt: skip
CONVERT_SECONDS = 1800
EPOCH_SECONDS, SAMPLE_SECONDS = 60, 0.04
"""What takes longer, for each epoch and its samples, has hung."""


class Data:
    """One data set, made once, and its converted copies."""

    def __init__(self, folder: Path, num_images: int, width: int, height: int, side: int) -> None:
        self.name = f"{num_images:,} of {width} × {height}"
        self.folder = folder / f"{num_images}-{width}x{height}"
        self.side, self.num_samples = side, num_images
        images = self.folder / "images"
        if not images.exists():
            partial = self.folder / "images.partial"
            shutil.rmtree(partial, ignore_errors=True)
            make_images(partial, num_images, width, height)
            partial.rename(images)
        self.num_bytes = sum(path.stat().st_size for path in images.rglob("*.jpg"))

    def convert(self, name: str) -> str | None:
        """Makes the copy that a method reads; None where all is well, else why it is not."""
        method = METHODS[name][1]
        done = self.folder / method.folder
        if method.convert is None or done.exists():
            return None
        partial = self.folder / f"{method.folder}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        told = start(["convert", name, str(self.folder / "images"), str(partial)], self.folder, CONVERT_SECONDS)
        if told.returncode == 0:
            partial.rename(done)
        return why(told)


def start(words: list[str], scratch: Path, limit_seconds: float) -> subprocess.CompletedProcess[str]:
    """Runs `loader_epochs`; one that hangs is ended, and all it started with it."""
    command = [sys.executable, str(PROGRAM), *words]
    environment = os.environ | {
        "HF_HOME": str(scratch / "hf-home"),
        "HF_DATASETS_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
    }
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        out, complaint = process.communicate(timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        out, _ = process.communicate()
        complaint = f"no end after {limit_seconds:.0f} s"
    return subprocess.CompletedProcess(command, process.returncode, out, complaint)


def told_rows(told: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """The lines that are ours; peers may print, too."""
    return [json.loads(line) for line in told.stdout.splitlines() if line.startswith("{")]


def why(told: subprocess.CompletedProcess[str]) -> str | None:
    """Why a process brought nothing, in a few words; None where it did."""
    if told.returncode == 0:
        return None
    missing = [row["missing"] for row in told_rows(told) if "missing" in row]
    if missing:
        return "not installed"
    lines = [line for line in told.stderr.splitlines() if line.strip()]
    return f"failed: {lines[-1].strip()[:120]}" if lines else f"failed with status {told.returncode}"


def measure(data: Data, storage: str, share: float, name: str, epochs: int) -> list[dict[str, Any]]:
    """One run; its lines, or one that says why there are none."""
    problem = data.convert(name)
    if problem is not None:
        return [{"why": problem}]
    with tempfile.TemporaryDirectory() as scratch, slow(data.folder, *STORAGE[storage]) as mount:
        setting = {
            "root": str(mount),
            "scratch": scratch,
            "side": data.side,
            "share": share,
            "num_samples": data.num_samples,
            "num_bytes": data.num_bytes,
        }
        limit_seconds = epochs * (EPOCH_SECONDS + SAMPLE_SECONDS * data.num_samples)
        told = start(["run", name, json.dumps(setting), str(epochs)], Path(scratch), limit_seconds)
    problem = why(told)
    if problem is not None:
        print(told.stderr[-2000:], file=sys.stderr)
        return [{"why": problem}]
    return told_rows(told)


def environment() -> dict[str, Any]:
    """What a reader must know to believe the figures."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {"commit": commit(), "kernel": platform.release(), "machine": machine(), "versions": versions}


def write_report(rows: list[dict[str, Any]], out: Path, told: str) -> None:
    """loaders.md and loaders.png."""
    here = environment()
    versions = ", ".join(f"{name} {version}" for name, version in here["versions"].items() if version)
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows if "commit" in row))
    where = f"{told} Measured at commit {commits}; {here['machine']}, Linux {here['kernel']}; {versions}."
    (out / "loaders.md").write_text(f"# Loaders\n\n{loader_report.table(rows)}\n\n{where}\n")
    loader_report.plot(rows, out / "loaders.png")


def main() -> None:
    """Measures what is missing, then writes the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=4000, help="large ones")
    parser.add_argument("--small-images", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3, help="in a run; the first is told apart")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    parser.add_argument("--storage", nargs="+", choices=STORAGE, default=list(STORAGE), metavar="NAME")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.2, 1.0], help="of the data set in cache")
    parser.add_argument("--data", type=Path, default=ROOT / ".cache" / "loaders", help="where images are made")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--quick", action="store_true", help="few images, one round, two epochs, into --out/quick")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    args = parser.parse_args()
    if args.quick:
        args.images, args.small_images, args.rounds, args.epochs = 320, 640, 1, 2
        args.out /= "quick"
    args.out.mkdir(parents=True, exist_ok=True)
    log = Log(args.out / "loaders.jsonl")
    rows = log.rows
    if not args.report:
        large = Data(args.data, args.images, 400, 300, 224)
        small = Data(args.data, args.small_images, 32, 32, 32)
        todo = [
            (number, data, storage, share, name)
            for number, share, (data, storage) in itertools.product(
                range(args.rounds), args.shares, itertools.product((large, small), args.storage)
            )
            for name in args.methods
            if share == args.shares[0] or loader_report.is_told_share(name)
        ]
        done = {(row["round"], *loader_report.case_of(row), row["method"]) for row in rows if row.get("epoch", -1) >= 1}
        todo = [each for each in todo if (each[0], each[1].name, *each[2:]) not in done]
        commit = environment()["commit"]
        hopeless = set()
        for number, data, storage, share, name in tqdm(todo, unit="run", smoothing=0.1, dynamic_ncols=True):
            if (data.name, storage, share, name) in hopeless:
                continue
            for row in measure(data, storage, share, name, args.epochs):
                row |= {"round": number, "data": data.name, "storage": storage, "share": share, "method": name}
                row |= {"num_samples": data.num_samples, "num_bytes": data.num_bytes, "commit": commit}
                row["at"] = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
                log.add(row)
                if "why" in row:
                    hopeless.add((data.name, storage, share, name))
    told = f"Up to {args.rounds} rounds of {args.epochs} epochs, the first told apart; batches of 64."
    write_report(rows, args.out, told)
    print(loader_report.table(rows))


if __name__ == "__main__":
    main()
