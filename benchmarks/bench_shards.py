"""How large should a block be, that is read as a whole from a shard on slow storage, and what gap is worth reading?

Question: samples of 100 KB in tars, 20 ms a request, 25 MB/s for all requests together. In a globally random order, how
many requests does the first epoch take, how long does it take, and how long does the first batch take, if samples are
read one by one, and if blocks of 1 to 32 MiB are kept on a local disk? And: from what gap between two ranges on are two
requests faster than one, on storage like that, and on a local disk?

Method: the origin is a local folder behind a link that is played: each request waits for the latency, then for its turn
at the bandwidth. Batches of 64, no training, every sample compared. *Line*: the data set's bytes at the bandwidth. All
ways take turns in each round; medians.

    python benchmarks/bench_shards.py --folder /nvme/bench --rounds 2
    python benchmarks/bench_shards.py --folder /nvme/bench --gaps

Decision 0041 has the result and what follows from it.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import tarfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from typing_extensions import override

from shade import Shards
from shade.data._origin.origin import ByteRange, FileOrigin, FileOrRange
from shade.data._shards import blocks, index

BATCH, SAMPLE_BYTES, PER_SHARD = 64, 100_000, 500
LATENCY_SECONDS, BYTES_PER_SECOND = 0.020, 25e6
MIBS = (0, 1, 4, 8, 16, 32)
"""Sizes of blocks in MiB; 0: none, samples are read one by one."""
GAPS_KIB = (4, 16, 64, 256, 1024)


class PlayedLink(FileOrigin):
    """Files behind a link with a latency and a bandwidth."""

    def __init__(self) -> None:
        super().__init__()
        self.num_reads = self.num_bytes = 0
        self._turn, self._free = threading.Lock(), 0.0

    @override
    def _content(self, path: FileOrRange) -> bytes:
        content = super()._content(path)
        time.sleep(LATENCY_SECONDS)
        with self._turn:
            self.num_reads += 1
            self.num_bytes += len(content)
            self._free = max(self._free, time.monotonic()) + len(content) / BYTES_PER_SECOND
            until = self._free
        time.sleep(max(0.0, until - time.monotonic()))
        return content


def write_shards(folder: Path, num_samples: int) -> None:
    """Writes tars of samples that hold their number."""
    rng = np.random.default_rng(0)
    for first in range(0, num_samples, PER_SHARD):
        with tarfile.open(folder / f"{first // PER_SHARD:04d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for number in range(first, min(first + PER_SHARD, num_samples)):
                member = tarfile.TarInfo(f"{number:08d}.bin")
                content = number.to_bytes(8, "little") + rng.bytes(int(SAMPLE_BYTES * rng.uniform(0.5, 1.5)))
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def epoch(shards: Shards, seed: int) -> tuple[float, float]:
    """Reads an epoch; returns the seconds of its first batch, and of all."""
    order = np.random.default_rng(seed).permutation(len(shards))
    begun = time.perf_counter()
    first = 0.0
    for start in range(0, len(order), BATCH):
        wanted = order[start : start + BATCH].tolist()
        for number, content in zip(wanted, shards.__getitems__(wanted), strict=True):
            assert int.from_bytes(content[:8], "little") == number
        first = first or time.perf_counter() - begun
    return first, time.perf_counter() - begun


def run(folder: Path, mib: int, line_seconds: float, data_bytes: int) -> list[float]:
    """Returns the figures of one way."""
    disk = folder / "disk"
    shutil.rmtree(disk, ignore_errors=True)
    blocks.BLOCK_BYTES = index.BLOCK_BYTES = max(1, mib) << 20  # type: ignore[misc]
    url = f"{disk}?capacity=64GiB" if mib else None
    shards = Shards(folder / "shards", "bin", index=folder / "index", disk=url)
    link: Any = PlayedLink()
    shards._origin = link
    first, seconds = epoch(shards, 1)
    requests, num_bytes = link.num_reads, link.num_bytes
    _, again = epoch(shards, 2)
    shards.close()
    return [
        *(requests / len(shards), num_bytes / data_bytes, first, line_seconds / seconds),
        *(len(shards) / again, (link.num_reads - requests) / len(shards)),
    ]


def compare_blocks(folder: Path, rounds: int) -> None:
    """Prints a row for each size of a block."""
    data_bytes = sum(path.stat().st_size for path in (folder / "shards").iterdir())
    line_seconds = data_bytes / BYTES_PER_SECOND
    found: dict[int, list[list[float]]] = {mib: [] for mib in MIBS}
    for _ in range(rounds):
        for mib in MIBS:
            found[mib].append(run(folder, mib, line_seconds, data_bytes))
    print(f"{data_bytes / 1e6:.0f} MB, line {line_seconds:.1f} s; load {os.getloadavg()[0]:.1f}")
    print(
        "block MiB | requests/sample | bytes/data | first batch s | rate/line | 2nd epoch samples/s | requests/sample"
    )
    for mib, rows in found.items():
        figures = [median(column) for column in zip(*rows, strict=True)]
        print(f"{mib:9} | " + " | ".join(f"{figure:.3f}" for figure in figures))


def compare_gaps(folder: Path) -> None:
    """Prints, for each gap, how long one read over it takes, as a part of two reads beside it."""
    path = str(next((folder / "shards").iterdir()))
    for name, origin in (("link", PlayedLink()), ("local", FileOrigin())):
        for kib in GAPS_KIB:
            ratios = []
            for number in range(20):
                start = number * 1_000_000 % 20_000_000
                middle = start + 32_768 + (kib << 10)
                two = [ByteRange(path, start, start + 32_768), ByteRange(path, middle, middle + 32_768)]
                one = [ByteRange(path, start, middle + 32_768)]
                seconds = []
                FileOrigin().read_many(one)  # both find it in the page cache
                for places in (one, two):
                    begun = time.perf_counter()
                    origin.read_many(places)
                    seconds.append(time.perf_counter() - begun)
                ratios.append(seconds[0] / seconds[1])
            print(f"{name} {kib:5} KiB: one read takes {median(ratios):.2f} of two")


def main() -> None:
    """Writes the shards and measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder", type=Path, required=True, help="a folder of a local disk; shards and a disk tier go there"
    )
    parser.add_argument("--samples", type=int, default=2000, help="samples of 100 KB")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--gaps", action="store_true", help="compare gaps instead of blocks")
    options = parser.parse_args()
    if not (options.folder / "shards").exists():
        (options.folder / "shards").mkdir(parents=True)
        write_shards(options.folder / "shards", options.samples)
    if options.gaps:
        compare_gaps(options.folder)
    else:
        compare_blocks(options.folder, options.rounds)


if __name__ == "__main__":
    main()
