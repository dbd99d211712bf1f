"""How many chunks should a flusher fetch at once? Every number, and the one that the formula gives.

Question
    `shade.checkpoint._flush.flusher` fetches n* = √(N·T_d / T_c) chunks at once, N chunks in the snapshot, T_d and T_c
    measured as it goes: AsymCheck's B* = √(C·T_d·C_i / T_c) in chunks. Is the flush then as fast as with the best fixed
    number?

Method
    A snapshot of random bytes in a private Redis server, flushed to a folder by
    `shade.checkpoint._flush.flusher.Flusher`, as in production: verified, read ahead, written, synced, renamed. Two
    kinds: 256 chunks of 4 MiB (codec none), and 4096 of 40 kB (what topk-delta leaves of 16 GiB). For each kind the
    fixed numbers 1, 2, 4 … and the measured one take turns, in a new random order each round; before the first round
    the measured one flushes once, so that it has its line. The folder is emptied after each.

    seconds     of one flush, median of the rounds, and their interquartile range.
    over best   the measured one's median over that of the best fixed number, minus one. To hold: ≤ 5 %.

Command
    python benchmarks/bench_flush.py                 (on an idle machine, about five minutes; --rounds 2 for a look)

Reading
    Fetches are ahead of the disk by eight chunks, so much of their cost is hidden: the sweep is flat around its
    minimum, and what has to be avoided are its ends. Figures: decision 0028.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from unittest import mock

from measures import publish

from shade.checkpoint._flush import flusher as flushing
from shade.checkpoint._flush.flusher import FetchPace, Flusher
from shade.checkpoint._format.digest import digest_of
from shade.checkpoint._format.manifest import CHUNK_BYTES, ChunkEntry, Commit, Manifest, TensorEntry
from shade.checkpoint._format.retention import Keep
from shade.checkpoint._tiers.memory import MemoryTier
from shade.checkpoint._tiers.storage import StorageTier
from shade.checkpoint._tiers.tier import Shard
from shade.storage import open_volume
from shade.store import open_store
from shade.store._servers.server import LocalServer

KINDS = {"4 MiB": (256, CHUNK_BYTES), "40 kB": (4096, 40_000)}
MEASURED = 0
ROOM_BYTES = 32 * 2**20
"""What fixed numbers may fetch at once; the measured one is held to the product's own limit."""


class Fixed(FetchPace):
    """Always the same number."""

    def __init__(self, num_chunks: int) -> None:
        super().__init__()
        self._fixed = num_chunks

    def num_chunks(self, num_all: int) -> int:
        return self._fixed


def fill(tier: MemoryTier, num_chunks: int, chunk_bytes: int) -> None:
    """One snapshot of random bytes."""
    dice = random.Random(0)
    some = [dice.randbytes(chunk_bytes) for _ in range(8)]
    chunks = [some[number % len(some)] for number in range(num_chunks)]
    length = num_chunks * chunk_bytes
    entries = tuple(ChunkEntry(len(chunk), digest_of(chunk)) for chunk in chunks)
    tensors = {"x": TensorEntry("U8", (length,), 0, length)}
    manifest = Manifest("run", 1, 0, 1, "none", length, tensors, entries, None, chunk_bytes)
    record = Commit("run", 1, 1, 1, (manifest.digest,), length, 0.0)
    place = tier.prepare(1, [length])
    tier.put(place, Shard(manifest, iter(chunks)))
    tier.commit(place, record)


def flush(tier: MemoryTier, folder: Path, pace: FetchPace) -> float:
    """Seconds of one flush; the slot is dirty again, and the folder empty."""
    storage = StorageTier(open_volume(str(folder)), "run")
    most = ROOM_BYTES if isinstance(pace, Fixed) else flushing.MOST_BYTES
    with mock.patch.object(flushing, "MOST_BYTES", most):
        flusher = Flusher(tier, storage, Keep.parse("last=1"))
        flusher._pace = pace
        begun = time.perf_counter()
        flushed = flusher.flush_one()
        seconds = time.perf_counter() - begun
    assert flushed is not None
    storage.close()
    shutil.rmtree(folder)
    ((place, record),) = tier.held().items()
    tier.commit(place, record)
    return seconds


def sweep(kind: str, folder: Path, rounds: int) -> list[str]:
    """Rows of the table of one kind."""
    num_chunks, chunk_bytes = KINDS[kind]
    numbers = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    if chunk_bytes == CHUNK_BYTES:
        numbers = numbers[:4]  # more than eight would not fit into the ring
    with LocalServer() as server, open_store(server.url, timeout_seconds=30) as store:
        tier = MemoryTier(store, "run", flushed=True)
        fill(tier, num_chunks, chunk_bytes)
        measured = FetchPace()
        flush(tier, folder, measured)
        found: dict[int, list[float]] = {number: [] for number in (MEASURED, *numbers)}
        for turn in range(rounds):
            for number in random.Random(turn).sample(list(found), len(found)):
                found[number].append(flush(tier, folder, Fixed(number) if number else measured))
        chosen = measured.num_chunks(num_chunks)
        tier.close()
    best = min(numbers, key=lambda number: statistics.median(found[number]))
    rows = []
    for number, seconds in found.items():
        median = statistics.median(seconds)
        low, _, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else (median, median, median)
        name = f"measured: {chosen}" if number == MEASURED else f"{number}{' (best)' if number == best else ''}"
        rate = num_chunks * chunk_bytes / median / 1e6
        rows.append(f"| {kind} | {name} | {median:.3f} | {low:.3f} – {high:.3f} | {rate:,.0f} |")
    over = statistics.median(found[MEASURED]) / statistics.median(found[best]) - 1
    rows.append(f"| {kind} | **over best** | **{100 * over:+.1f} %** | | |")
    return rows


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk in question")
    parser.add_argument("--out", type=Path, help="folder for flush.md")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-flush-", dir=given.folder)) / "ckpt"
    lines = [f"{given.rounds} rounds", ""]
    lines += ["| chunks of | fetched at once | seconds | quartiles | MB/s |", "|---|---|---|---|---|"]
    try:
        for kind in KINDS:
            lines += sweep(kind, folder, given.rounds)
    finally:
        shutil.rmtree(folder.parent, ignore_errors=True)
    publish("flush", "How many chunks a flusher fetches at once", lines, given.out)


if __name__ == "__main__":
    main()
