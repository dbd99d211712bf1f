"""Every loader at its best over the same storage: ours, torch's own, and those that people move to.

Question
    A folder of JPEGs lies on a local disk, on decent network storage, on slow network storage, or in a bucket. How many
    samples a second does each loader bring into the training process, at what CPU cost, and what does it ask of the
    storage? How much of our lead is the pipeline, how much the decoder, and how much the cache?

Method
    4,000 JPEGs of 400 × 300 pixels (about 35 KB) → random resized crop to 224, flip, normalise. Batches of 64, no
    training step. All files, the images and every converted copy, lie behind `scripts/slowfs`, which delays opens, caps
    the bandwidth of all readers together, caches nothing and counts; "local disk" is the same mount without delay or
    cap, so that no loader profits from the page cache. The bucket is the same folder behind `object_server`, a stand-in
    for S3 on this machine: each request is answered after 30 ms, all answers together get 50 MB/s. It has no TLS, and
    it shares the cores with the loaders. Loaders that read files only say so in their row. The caches of loaders that
    have one hold 0, 20, 50 or 100 % of the data set, on local disk or in memory as the loader likes. Small samples:
    bench_small_samples.

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

What is measured how often, written before the first complete table
    Round 0 measures everything once, but for what no claim above can use. On all storages but the local disk two
    workers of torch wait for the storage: they are there as they come, and not with more prefetching or another
    decoder; from the bucket they are at most 67 samples/s by arithmetic, and torch begins with 8. Of ours, the
    DataLoader and `unbiased` are there with 20 % in cache, and Pillow without a cache; LitData with simplejpeg has
    20 %.
    Later rounds repeat, on each storage, what the three rules compare: ShadeLoader with all shares, and without a cache
    with Pillow; torch's fastest setting, and each other loader that is the fastest at a share, and with them whatever
    came within a tenth of those in round 0, so that the first is not the first by chance. What is a tenth or more
    behind keeps a single run, which the column `epochs` shows. Lines of an earlier protocol stay in the table.

    Every epoch is a line in loaders.jsonl, appended as its run ends. Started again, the command goes on where it was
    stopped; a method whose package is missing, or that fails or hangs, is a row that says so: it is left out of later
    rounds, and tried again when the command is.

Command
    python benchmarks/bench_loaders.py                    2 hours on two idle cores, of which round 0 takes 75 minutes
    python benchmarks/bench_loaders.py --minutes 40       the next 40 minutes of it
    python benchmarks/bench_loaders.py --quick            every method once on few images: does it work?
    python benchmarks/bench_loaders.py --report           the table and the picture, from the lines there are

    pip install litdata mosaicml-streaming datasets webdataset spdl-io spdl-core grain simplejpeg
    pip install nvidia-dali-cuda120 nvidia-nvimgcodec-cu12 boto3 s3fs aiohttp
    apt install ffmpeg                                    SPDL decodes with its libraries

Figures: benchmarks/results/loaders.md and loaders.png, written by this command from loaders.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import loader_report
from bench_slow_storage import make_images, slow
from loader_methods import METHODS, SCHEME, SHARES
from measures import Log, commit, machine
from object_server import BUCKET, object_server
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = Path(__file__).with_name("loader_epochs.py")
STORAGE = {
    "local disk": ("0ms", "100GB/s"),
    "2 ms, 100 MB/s": ("2ms", "100MB/s"),
    "20 ms, 25 MB/s": ("20ms", "25MB/s"),
}
BUCKETS = {"bucket, 30 ms, 50 MB/s": (30.0, 50.0)}
"""Milliseconds, and MB/s."""
ACCESS = {"AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none", "AWS_DEFAULT_REGION": "us-east-1"}
"""S3 clients want these; the object server does not look at them."""
TWO_WORKERS = ("torch-2-deep", "torch-2-simplejpeg", "torch-2-v2")
LEFT_OUT = {
    "2 ms, 100 MB/s": TWO_WORKERS,
    "20 ms, 25 MB/s": TWO_WORKERS,
    **dict.fromkeys(BUCKETS, ("torch-2", "torch-4", *TWO_WORKERS)),
}
"""By storage, the methods that no claim can use."""
Cell = tuple[str, float | None]
"""Method and share of cache."""
PACKAGES = (
    "torch", "torchvision", "mosaicml-streaming", "litdata", "webdataset", "spdl-io", "grain", "nvidia-dali-cuda120",
    "ffcv", "datasets", "redis", "pillow", "simplejpeg", "boto3", "s3fs",
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
    """Runs `loader_epochs`."""
    return start_program(PROGRAM, words, scratch, limit_seconds)


def start_program(
    program: Path, words: list[str], scratch: Path, limit_seconds: float
) -> subprocess.CompletedProcess[str]:
    """Runs a program; one that hangs is ended, and all it started with it."""
    command = [sys.executable, str(program), *words]
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


@contextlib.contextmanager
def stored(folder: Path, storage: str) -> Iterator[str]:
    """Puts the data behind a storage; gives their root there."""
    if storage in STORAGE:
        with slow(folder, *STORAGE[storage]) as mount:
            yield str(mount)
        return
    with object_server(folder, *BUCKETS[storage]) as url:
        words = ACCESS | {"AWS_ENDPOINT_URL": url}
        os.environ.update(words)
        try:
            yield f"{SCHEME}{BUCKET}"
        finally:
            for name in words:
                del os.environ[name]


def measure(data: Data, storage: str, share: float | None, name: str, epochs: int) -> list[dict[str, Any]]:
    """One run; its lines, or one that says why there are none."""
    problem = METHODS[name][1].files_only if storage in BUCKETS else None
    problem = problem or data.convert(name)
    if problem is not None:
        return [{"why": problem}]
    with tempfile.TemporaryDirectory() as scratch, stored(data.folder, storage) as root:
        setting = {
            "root": root,
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
        f"Up to {rounds} rounds of {epochs} epochs, of which the first stands apart; batches of 64. "
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
    storages = [*STORAGE, *BUCKETS]
    parser.add_argument("--storage", nargs="+", choices=storages, default=storages, metavar="NAME")
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


def planned(number: int, storage: str, rows: list[dict[str, Any]], args: argparse.Namespace) -> list[Cell]:
    """Returns the methods and shares of a round: see "what is measured how often" above."""
    names = [name for name in args.methods if name not in LEFT_OUT.get(storage, ())]
    everything = [(name, share) for name in names for share in loader_report.runs_of(name, args.shares)]
    if number == 0:
        return everything
    first = [row for row in rows if row["round"] == 0]
    contenders = loader_report.contenders(loader_report.summary(first, storage))
    return [cell for cell in everything if cell in contenders]


def measure_all(log: Log, data: Data, args: argparse.Namespace) -> None:
    """Runs what is not in the log yet, round by round, until there is no time left."""
    end = time.monotonic() + 60 * args.minutes if args.minutes else float("inf")
    keys = ("round", "storage", "share", "method")
    done = {tuple(row[key] for key in keys) for row in log.rows if row.get("epoch", -1) >= 1}
    hopeless = set()
    for number in range(args.rounds):
        todo = [
            (number, storage, share, name)
            for storage in args.storage
            for name, share in planned(number, storage, log.rows, args)
            if (number, storage, share, name) not in done
        ]
        for key in tqdm(todo, desc=f"round {number}", unit="run", smoothing=0.1, dynamic_ncols=True):
            _, storage, share, name = key
            if time.monotonic() > end:
                return
            if (storage, share, name) in hopeless:
                continue
            for row in measure(data, storage, share, name, args.epochs):
                row |= dict(zip(keys, key, strict=True)) | {"commit": commit()}
                row |= {"num_samples": data.num_samples, "num_bytes": data.num_bytes}
                row["at"] = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
                log.add(row)
                if "why" in row:
                    hopeless.add((storage, share, name))


if __name__ == "__main__":
    main()
