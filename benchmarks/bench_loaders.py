"""Every loader at its best over the same storage: ours, torch's own, and those that people move to.

Question
    A folder of JPEGs lies on a local disk, on decent network storage, or on slow network storage. How many samples a
    second does each loader bring into the training process, at what CPU cost, and what does it ask of the storage? How
    much of our lead is the pipeline, how much the decoder, and how much the cache?

Method
    4,000 JPEGs of 400 × 300 pixels (about 35 KB) → random resized crop to 224, flip, normalise. Batches of 64, no
    training step. All files, the images and every converted copy, lie behind `scripts/slowfs`, which delays opens, caps
    the bandwidth of all readers together, caches nothing and counts; "local disk" is the same mount without delay or
    cap, so that nobody profits from the page cache. The caches of loaders that have one hold 0, 20, 50 or 100 % of the
    data set, on local disk or in memory as the loader likes. Small samples: bench_small_samples.

    torch's DataLoader is measured with 2 to 32 workers, with more prefetching, with simplejpeg, and with torchvision's
    own decoder and transforms v2. The base of all ratios is the fastest of these rows on the same storage. Other
    loaders are set up as their documentation advises (benchmarks/loader_methods.py says how).

    A run is one loader in a process of its own with an empty cache: set-up, a first epoch, then more. Rounds are
    interleaved: every loader once, then all again. Figures are medians over all epochs but the first of each run, the
    spread is their lowest to highest. CPU time is that of the process and everything it started (workers, a private
    Redis server), not the mount's. Opens and bytes are those the mount served in an epoch. A converted copy is opened
    by shard, so its opens say little; its bytes do. `unbiased` draws 70 % of the samples an epoch, which shortens the
    epoch and not the samples/s.

The rule, written before the first result
    1. README and docs give the ratio of ShadeLoader to the fastest torch row, and never to a slower one.
    2. ShadeLoader is *ahead* at a share if it is faster than every other loader that was given this share, or that has
       no cache. A loader that keeps everything and cannot be limited is compared where all is cached.
    3. The pipeline's part is ShadeLoader without a cache and with Pillow over the fastest torch row; the decoder's part
       is ShadeLoader without a cache over that; the cache's part is ShadeLoader with a cache over without.

    Every epoch is a line in loaders.jsonl, appended as its run ends. Started again, the command goes on where it was
    stopped; a method whose package is missing, or that fails or hangs, is a row that says so: it is left out of later
    rounds, and tried again when the command is.

Command
    python benchmarks/bench_loaders.py                    about 4 hours on two idle cores, 80 minutes a round
    python benchmarks/bench_loaders.py --minutes 40       the next 40 minutes of it
    python benchmarks/bench_loaders.py --quick            every method once on few images: does it work?
    python benchmarks/bench_loaders.py --report           the table and the picture, from the lines there are

    pip install litdata mosaicml-streaming datasets webdataset spdl-io spdl-core grain simplejpeg
    pip install nvidia-dali-cuda120 nvidia-nvimgcodec-cu12
    apt install ffmpeg                                    SPDL decodes with its libraries

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
from loader_methods import METHODS, SHARES
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
    "torch", "torchvision", "mosaicml-streaming", "litdata", "webdataset", "spdl-io", "grain", "nvidia-dali-cuda120",
    "ffcv", "datasets", "redis", "pillow", "simplejpeg",
)  # fmt: skip
CONVERT_SECONDS = 1800
EPOCH_SECONDS, SAMPLE_SECONDS = 60, 0.04
"""What takes longer, for each epoch and its samples, has hung."""


class Data:
    """One data set, made once, and its converted copies."""

    def __init__(self, folder: Path, num_images: int, width: int, height: int, side: int) -> None:
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
        ended = start(["convert", name, str(self.folder / "images"), str(partial)], self.folder, CONVERT_SECONDS)
        if ended.returncode == 0:
            partial.rename(done)
        return why(ended)


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


def printed_rows(ended: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """The lines that are ours; peers may print, too."""
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]


def why(ended: subprocess.CompletedProcess[str]) -> str | None:
    """Why a process brought nothing, in a few words; None where it did."""
    if ended.returncode == 0:
        return None
    missing = [row["missing"] for row in printed_rows(ended) if "missing" in row]
    if missing:
        return "not installed"
    lines = [line for line in ended.stderr.splitlines() if line.strip()]
    return f"failed: {lines[-1].strip()[:120]}" if lines else f"failed with status {ended.returncode}"


def measure(data: Data, storage: str, share: float | None, name: str, epochs: int) -> list[dict[str, Any]]:
    """One run; its lines, or one that says why there are none."""
    problem = data.convert(name)
    if problem is not None:
        return [{"why": problem}]
    with tempfile.TemporaryDirectory() as scratch, slow(data.folder, *STORAGE[storage]) as mount:
        setting = {
            "root": str(mount),
            "scratch": scratch,
            "side": data.side,
            "share": share or 0.0,
            "num_samples": data.num_samples,
            "num_bytes": data.num_bytes,
        }
        limit_seconds = epochs * (EPOCH_SECONDS + SAMPLE_SECONDS * data.num_samples)
        ended = start(["run", name, json.dumps(setting), str(epochs)], Path(scratch), limit_seconds)
    problem = why(ended)
    if problem is not None:
        print(ended.stderr[-2000:], file=sys.stderr)
        return [{"why": problem}]
    return printed_rows(ended)


def environment() -> dict[str, Any]:
    """What a reader must know to believe the figures."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {"commit": commit(), "kernel": platform.release(), "machine": machine(), "versions": versions}


def write_report(rows: list[dict[str, Any]], out: Path, epochs: int) -> None:
    """loaders.md and loaders.png."""
    here = environment()
    versions = ", ".join(f"{name} {version}" for name, version in here["versions"].items() if version)
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows if "commit" in row))
    rounds = len({row["round"] for row in rows})
    where = (
        f"{rounds} rounds of {epochs} epochs, of which the first stands apart; batches of 64. "
        f"Measured at commit {commits}; {here['machine']}, Linux {here['kernel']}; {versions}."
    )
    (out / "loaders.md").write_text(f"# Loaders\n\n{where}\n\n{loader_report.report(rows)}\n")
    loader_report.plot(rows, out / "loaders.png")


def main() -> None:
    """Measures what is missing, then writes the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2, help="in a run; the first stands apart")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    parser.add_argument("--storage", nargs="+", choices=STORAGE, default=list(STORAGE), metavar="NAME")
    parser.add_argument("--shares", nargs="+", type=float, choices=SHARES, default=list(SHARES), help="in cache")
    parser.add_argument("--data", type=Path, default=ROOT / ".cache" / "loaders", help="where images are made")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--minutes", type=float, help="stop after so long; the next call goes on")
    parser.add_argument("--quick", action="store_true", help="few images, one round, two epochs, into --out/quick")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    args = parser.parse_args()
    if args.quick:
        args.images, args.rounds, args.epochs = 320, 1, 2
        args.out /= "quick"
    args.out.mkdir(parents=True, exist_ok=True)
    log = Log(args.out / "loaders.jsonl")
    if not args.report:
        measure_all(log, Data(args.data, args.images, 400, 300, 224), args)
    write_report(log.rows, args.out, args.epochs)
    print(loader_report.report(log.rows))


def measure_all(log: Log, data: Data, args: argparse.Namespace) -> None:
    """Runs what is not in the log yet, until there is no time left."""
    end = time.monotonic() + 60 * args.minutes if args.minutes else float("inf")
    done = {
        tuple(row[key] for key in ("round", "storage", "share", "method"))
        for row in log.rows
        if row.get("epoch", -1) >= 1
    }
    todo = [
        (number, storage, share, name)
        for number, storage, name in itertools.product(range(args.rounds), args.storage, args.methods)
        for share in loader_report.runs_of(name, args.shares)
        if (number, storage, share, name) not in done
    ]
    hopeless = set()
    for number, storage, share, name in tqdm(todo, unit="run", smoothing=0.1, dynamic_ncols=True):
        if (storage, share, name) in hopeless or time.monotonic() > end:
            continue
        for row in measure(data, storage, share, name, args.epochs):
            row |= {"round": number, "storage": storage, "share": share, "method": name, "commit": commit()}
            row |= {"num_samples": data.num_samples, "num_bytes": data.num_bytes}
            row["at"] = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
            log.add(row)
            if "why" in row:
                hopeless.add((storage, share, name))


if __name__ == "__main__":
    main()
