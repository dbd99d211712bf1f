"""The ledger: counts where every sample's bytes came from, and what that cost.

A *hit* is a sample whose bytes did not come from the origin. Every read of the origin is counted where it happens,
prefetch and refill included, so ``origin_reads`` equals exactly what a counting origin saw.

Counts are integers and times are nanoseconds, in one flat row, so that a row can be in shared memory and rows add up.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

FIELDS: dict[str, str] = {
    "samples": "samples handed to the training process; hits + misses",
    "hits": "samples whose bytes did not come from the origin",
    "misses": "samples whose bytes came from the origin",
    "duplicates": "of the hits: repeats inside one batch, served from memory",
    "borrowed": "of the hits: entries that another job had brought in",
    "near_hits": "of the hits: entries from a server on this machine, where a cluster has several",
    "disk_hits": "of the hits: samples read from this node's disk; the other hits came from memory",
    "disk_bytes": "bytes of payload in them",
    "disk_errors": "rounds that the disk did not answer; each is read from the origin",
    "origin_reads": "reads of the origin that succeeded; probes at the start and replacements for bad samples included",
    "origin_bytes": "bytes those reads returned",
    "cache_reads": "entries that the store returned",
    "cache_bytes": "bytes of payload in them",
    "admitted": "entries written to the store",
    "admitted_bytes": "bytes of payload in them",
    "evicted": "entries removed from the store",
    "yielded": "samples that left early to free space for a snapshot; they come back when it no longer needs it",
    "declined": "admissions that found no space; many mean the capacity is shared or the server is full",
    "surprises": "planned hits the store did not have: it was restarted, flushed or shared",
    "corrupt": "entries that failed their checksum; dropped and read from the origin",
    "store_errors": "rounds the store did not answer; each is a batch read from the origin",
    "skipped": "samples not even asked for while the store was known to be out",
    "bad_samples": "samples that could not be decoded and were replaced",
    "origin_nanoseconds": "time spent reading the origin, summed over workers",
    "cache_nanoseconds": "time spent with the store",
    "decode_nanoseconds": "time spent decoding",
    "transform_nanoseconds": "time spent in the user's transform",
}
"""Every counter, and how to read it."""

_POSITION = {name: position for position, name in enumerate(FIELDS)}
CAUSES = ("origin", "cache", "decode", "transform")
"""What a training process can be waiting for."""


class Ledger:
    """One row of counters.

    Args:
        row: int64 (len(FIELDS),); written in place, so it may be a row of shared memory.
    """

    def __init__(self, row: npt.NDArray[np.int64] | None = None) -> None:
        self._row = np.zeros(len(FIELDS), dtype=np.int64) if row is None else row

    def add(self, **amounts: int) -> None:
        """Adds to the named counters."""
        for name, amount in amounts.items():
            self._row[_POSITION[name]] += amount

    def __getitem__(self, name: str) -> int:
        return int(self._row[_POSITION[name]])

    def __sub__(self, earlier: Ledger) -> Ledger:
        return Ledger(self._row - earlier._row)

    def as_dict(self) -> dict[str, Any]:
        """Returns counts by name and, under ``busy_seconds``, the times by cause."""
        counts: dict[str, Any] = {name: self[name] for name in FIELDS if not name.endswith("_nanoseconds")}
        counts["busy_seconds"] = {cause: self[f"{cause}_nanoseconds"] / 1e9 for cause in CAUSES}
        return counts

    def stall_seconds(self, wait_seconds: float) -> dict[str, float]:
        """Splits the time the training process waited for data over what the workers were doing.

        Args:
            wait_seconds: Time the training loop spent in ``next(loader)``, ≥ 0.

        Returns:
            Seconds by cause; ``wait`` holds what no counted work explains (start-up of workers, hand-over between
            processes). The values sum to ``wait_seconds``.
        """
        busy = {cause: self[f"{cause}_nanoseconds"] / 1e9 for cause in CAUSES}
        total = sum(busy.values())
        explained = min(1.0, wait_seconds / total) if total > 0 else 0.0
        stall = {cause: seconds * explained for cause, seconds in busy.items()}
        stall["wait"] = max(0.0, wait_seconds - sum(stall.values()))
        return stall
