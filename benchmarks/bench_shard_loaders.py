"""Shards on slow storage, with room for all on the local disk: how fast are the first epoch, later ones, a later job?

Question: samples of 100 KB, 20 ms an open and 25 MB/s for all readers together. How near to the line (the data set's
bytes at that bandwidth) does the first epoch come, how many requests and bytes does it take, how fast are later epochs
beside the same shards on the local disk, and what does a second job read, with `Shards`, LitData and MosaicML Streaming
at equal bytes of disk?

Method: the same samples as WebDataset tars, MDS and LitData chunks lie behind `scripts/slowfs`, each in parts of 8 MB.
Each way gets an empty folder of the local disk, room for all, and two workers; it loads epochs of batches of 64, in
which every sample's content is hashed and compared, and nothing trains. Then a second process does the same with the
folder that the first one left. All ways take turns in each round, in an order that changes; medians. Rivals at the
settings of their documentation for this case: one canonical node and a shuffle block of the same window (Streaming), a
cache without limit, more chunks ahead than by default. The index of the tars is made before, and so are the copies that
the others read.

    pip install litdata mosaicml-streaming
    python benchmarks/bench_shard_loaders.py --folder /nvme/bench --rounds 3 --markdown benchmarks/results/shards.md

It needs root or fusermount3, as slowfs does.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import xxhash
from bench_shards import write_shards
from measures import SLOW_STATS, commit, processors
from torch.utils.data import DataLoader

ROOT = Path(__file__).resolve().parent.parent
BATCH, WORKERS, PART_BYTES = 64, 2, 8 << 20
EPOCHS = 3
BYTES_PER_SECOND = 25e6
PACKAGES = ("torch", "numpy", "litdata", "mosaicml-streaming")


def checked(content: bytes) -> tuple[int, int]:
    """Returns a sample's number, which it holds, and the hash of its content: all that a worker sends."""
    return int.from_bytes(content[:8], "little"), xxhash.xxh32_intdigest(content)


def contents(folder: Path) -> Iterator[bytes]:
    """Yields the samples of the tars in order."""
    from shade import Shards

    shards = Shards(folder / "tar", "bin", index=folder / "index")
    for number in range(len(shards)):
        yield shards[number]
    shards.close()


def make_data(folder: Path, num_samples: int) -> None:
    """Writes tars, MDS shards and LitData's chunks of the same samples, and their hashes."""
    from litdata import optimize
    from streaming import MDSWriter

    data = folder / "data"
    if data.exists():
        return
    (data / "tar").mkdir(parents=True)
    write_shards(data / "tar", num_samples)
    np.save(folder / "hashes.npy", [checked(content)[1] for content in contents(data)])
    with MDSWriter(out=str(data / "mds"), columns={"content": "bytes"}, size_limit=PART_BYTES) as writer:
        for content in contents(data):
            writer.write({"content": content})
    samples = list(contents(data))
    optimize(
        fn=samples.__getitem__,
        inputs=list(range(len(samples))),
        output_dir=str(data / "lit"),
        chunk_bytes=PART_BYTES,
        num_workers=1,
    )


# ── the ways; each is called with the data, the local folder and the window, and returns an epoch's loader ───────────


def shade(data: Path, local: Path, window: int | None, *, cache: str | None, keeps: bool = True) -> Any:
    """`Shards` in a `ShadeDataset`."""
    from shade import ShadeDataset, ShadeSampler, Shards

    disk = f"{local}/disk?capacity=64GiB" if keeps else None
    shards = Shards(data / "tar", "bin", index=local.parent / f"index-{data.name}", disk=disk)
    dataset = ShadeDataset(shards, cache, transform=checked)
    sampler = ShadeSampler(dataset, batch_size=BATCH, mode="uniform", shuffle_window=window, seed=1)
    loader = DataLoader(dataset, BATCH, sampler=sampler, num_workers=WORKERS, persistent_workers=True)

    def epoch(number: int) -> Iterator[tuple[Any, Any]]:
        sampler.set_epoch(number)
        for (numbers, hashes), _ in loader:
            yield numbers, hashes

    epoch.close = dataset.close  # type: ignore[attr-defined]
    return epoch


def streaming(data: Path, local: Path, window: int | None) -> Any:
    """MosaicML Streaming."""
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()

    class Samples(StreamingDataset):
        def __getitem__(self, at: Any) -> Any:
            return checked(super().__getitem__(at)["content"])

    samples = Samples(
        remote=str(data / "mds"),
        local=str(local / "mds"),
        shuffle=True,
        shuffle_algo="py1e",
        shuffle_block_size=window,
        num_canonical_nodes=1,
        batch_size=BATCH,
        predownload=8 * BATCH,
    )
    loader = DataLoader(samples, BATCH, num_workers=WORKERS, persistent_workers=True)
    return lambda number: iter(loader)


def litdata(data: Path, local: Path, window: int | None) -> Any:
    """LitData."""
    from litdata import StreamingDataLoader, StreamingDataset

    samples = StreamingDataset(
        f"local:{data / 'lit'}",
        cache_dir=str(local / "lit"),
        shuffle=True,
        drop_last=False,
        max_cache_size="64GB",
        max_pre_download=8,
        transform=checked,
    )
    loader = StreamingDataLoader(samples, batch_size=BATCH, num_workers=WORKERS, persistent_workers=True)
    return lambda number: iter(loader)


def _way(**options: Any) -> Callable[[Path, Path, int | None], Any]:
    return lambda data, local, window: shade(data, local, window, **options)


def _global(data: Path, local: Path, window: int | None) -> Any:
    return shade(data, local, None, cache="local://")


def _local(data: Path, local: Path, window: int | None) -> Any:
    return shade(local.parent / "data", local, None, cache=None, keeps=False)


LOCAL = "shards on the local disk"
WAYS: dict[str, Callable[[Path, Path, int | None], Any]] = {
    "Shards, window": _way(cache="local://"),
    "Shards, window, no memory tier": _way(cache=None),
    "Shards, global order": _global,
    "Shards, window, no disk": _way(cache=None, keeps=False),
    "MosaicML Streaming": streaming,
    "LitData": litdata,
    LOCAL: _local,
}


class Meter:
    """Seconds, reads and bytes since the last question."""

    def __init__(self, mount: Path) -> None:
        self._stats = mount / SLOW_STATS
        self._before = self._now()

    def _now(self) -> tuple[float, int]:
        counts = json.loads(self._stats.read_text())
        return time.perf_counter(), counts["read_bytes"]

    def take(self) -> tuple[float, int]:
        """Returns both, and begins anew."""
        before, now = self._before, self._now()
        self._before = now
        return now[0] - before[0], now[1] - before[1]


def run(name: str, mount: Path, local: Path, window: int, hashes: Path, epochs: int) -> None:
    """Loads epochs as one job, and prints what they took."""
    expected, meter = np.load(hashes), Meter(mount)
    epoch = WAYS[name](mount, local, window)
    found: dict[str, Any] = {"open": meter.take()}
    rows, begun = [], time.perf_counter()
    for number in range(epochs):
        meter.take()
        seen = np.zeros(len(expected), dtype=np.int64)
        for numbers, content_hashes in epoch(number):
            found.setdefault("first", time.perf_counter() - begun)
            numbers = np.asarray(numbers)
            assert (np.asarray(content_hashes) == expected[numbers]).all()
            seen[numbers] += 1
        rows.append(meter.take())
        assert (seen >= 1).all(), name
        assert seen.sum() <= len(expected) + BATCH, name
    getattr(epoch, "close", bool)()
    print(json.dumps(found | {"epochs": rows}), flush=True)
    os._exit(0)  # what is left to end belongs to no epoch


@contextmanager
def slow(source: Path, mount: Path) -> Iterator[None]:
    """Shows the folder through slow storage."""
    mount.mkdir(exist_ok=True)
    command = [str(ROOT / "scripts" / "slowfs"), str(source), str(mount), "--open-latency", "20ms"]
    server = subprocess.Popen([*command, "--bandwidth", "25MB/s"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        if not server.stdout.readline().startswith("slowfs:"):
            sys.exit("slowfs did not mount; its message is above")
        yield
    finally:
        server.terminate()
        server.wait(30)


def job(folder: Path, name: str, window: int, epochs: int) -> dict[str, Any]:
    """Runs one job in a process of its own."""
    command = [sys.executable, __file__, "--folder", str(folder), "--run", name, "--window", str(window)]
    done = subprocess.run([*command, "--epochs", str(epochs)], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def measure(folder: Path, names: list[str], rounds: int, window: int) -> dict[str, list[dict[str, Any]]]:
    """Runs two jobs of each way in each round."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(rounds):
        for name in random.Random(number).sample(names, len(names)):
            shutil.rmtree(folder / "local", ignore_errors=True)
            (folder / "local").mkdir()
            row = job(folder, name, window, EPOCHS)
            if name != LOCAL:
                row["second"] = job(folder, name, window, 1)
            found[name].append(row)
            print(f"round {number}, {name}: {json.dumps(row)}", file=sys.stderr, flush=True)
    return found


def table(found: dict[str, list[dict[str, Any]]], hashes: Path, data: Path, window: int) -> str:
    """Returns the results as Markdown."""
    num_samples = len(np.load(hashes))
    num_bytes = sum(path.stat().st_size for path in (data / "tar").iterdir())
    line = num_bytes / BYTES_PER_SECOND
    local = [num_samples / median(seconds for seconds, _ in row["epochs"][1:]) for row in found[LOCAL]]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    lines = [
        "# Shards on slow storage, with room for all on the local disk",
        "",
        f"commit {commit()}, Python {sys.version.split()[0]}, {processors()}, load {os.getloadavg()[0]:.2f} at the end",
        "",
        f"{versions}; {len(found[LOCAL])} rounds",
        "",
        f"{num_samples:,} samples, {num_bytes / 1e6:.0f} MB; the line is {line:.1f} s. Window: {window:,} samples. The "
        f"same shards on the local disk, without a tier: {median(local):,.0f} samples/s.",
        "",
        "| loader | first epoch: line / seconds | lowest – highest | first batch, s | bytes read / data | "
        "later epochs, samples/s | of the local rate | bytes read later | second job: first batch, s | its samples/s | "
        "bytes it read / data |",
        "|" + "---|" * 11,
    ]
    for name, rows in found.items():
        if name == LOCAL:
            continue
        firsts = [line / row["epochs"][0][0] for row in rows]
        later = [num_samples / median(seconds for seconds, _ in row["epochs"][1:]) for row in rows]
        read = median(row["epochs"][0][1] + row["open"][1] for row in rows) / num_bytes
        read_later = max(sum(each for _, each in row["epochs"][1:]) for row in rows) / num_bytes
        seconds = [row["second"]["epochs"][0] for row in rows]
        again = max(row["second"]["open"][1] + row["second"]["epochs"][0][1] for row in rows) / num_bytes
        ratio = median(mine / theirs for mine, theirs in zip(later, local, strict=True))
        cells = [
            f"{median(firsts):.2f}",
            f"{min(firsts):.2f} – {max(firsts):.2f}",
            f"{median(row['first'] for row in rows):.1f}",
            f"{read:.2f}",
            f"{median(later):,.0f}",
            f"{ratio:.2f}",
            f"{read_later:.2f}",
            f"{median(row['second']['first'] for row in rows):.1f}",
            f"{median(num_samples / each for each, _ in seconds):,.0f}",
            f"{again:.2f}",
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Makes the data, measures, and prints or writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="a folder of a local disk")
    parser.add_argument("--samples", type=int, default=4000, help="samples of 100 KB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--window", type=int, default=1000, help="of the shuffle, in samples")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), help="some of them")
    parser.add_argument("--markdown", type=Path, help="where the table goes")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.folder.resolve()
    hashes = folder / "hashes.npy"
    if options.run is not None:
        return run(options.run, folder / "mount", folder / "local", options.window, hashes, options.epochs)
    folder.mkdir(parents=True, exist_ok=True)
    make_data(folder, options.samples)
    with slow(folder / "data", folder / "mount"):
        shade(folder / "mount", folder / "local", None, cache=None, keeps=False)  # makes the index
        found = measure(folder, options.ways, options.rounds, options.window)
    text = table(found, hashes, folder / "data", options.window)
    if options.markdown is not None:
        options.markdown.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
