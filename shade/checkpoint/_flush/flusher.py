"""Moves one run's snapshots from the cluster's memory into durable storage while the training continues.

A slot's dirty bit says that its snapshot is in memory only. Newest first; of the others only those are written that the
retention rules would keep (decision 0011). Invariant: a bit is cleared only when that snapshot, or a newer one of the
run, is committed in storage, fsync and rename included.

A snapshot is written after its base: storage never has a delta without it. Reading and writing overlap, through a ring
of buffers.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shade.checkpoint._commit.protocol import check_base, retire
from shade.checkpoint._format.manifest import Commit, Manifest
from shade.checkpoint._format.retention import Keep, lineage
from shade.checkpoint._pacing.batching import best_batch_bytes
from shade.checkpoint._pacing.prefetch import Prefetch
from shade.checkpoint._pacing.write_cost import Line
from shade.checkpoint._restore.reader import Reader, Snapshot, SnapshotSource
from shade.checkpoint._tiers.memory import MemoryTier
from shade.checkpoint._tiers.tier import Shard, Tier
from shade.errors import CorruptCheckpointError, ShadeError, StorageError, StoreError
from shade.terminal import bytes_bar
from shade.types import Bytes, Clock

MOST_BYTES: Final = 2**20
"""Bytes of one fetch, unless one chunk alone is longer: it is received and verified while it is in a core's cache. With
a round trip of 1 ms this is still 1 GB/s."""
_PAGE_BYTES: Final = 4096
_FIRST_FETCHES: Final = (1, 2, 4, 8)
_REMEMBERED: Final = 8


class FetchPace:
    """Measures fetches, and chooses the number of chunks of the next one."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}
        """Times of the last fetches by number of chunks; equal numbers alone would give no line."""
        self._num_tried = 0

    def begin(self) -> None:
        """Starts a new snapshot."""
        self._num_tried = 0

    def fetched(self, num_chunks: int, seconds: float) -> None:
        """Records a fetch of ``num_chunks`` that took ``seconds``."""
        self._seconds.setdefault(num_chunks, deque(maxlen=_REMEMBERED)).append(seconds)
        self._num_tried += 1

    def num_chunks(self, num_all: int) -> int:
        """Returns the number of chunks of the next fetch, at least 1; ``num_all`` is that of the snapshot."""
        if self._num_tried < len(_FIRST_FETCHES):
            # Different numbers give the line different points, and the disk an early start.
            return _FIRST_FETCHES[self._num_tried]
        # Each fetch costs a fixed time and a time a chunk; the first write waits for the first fetch. So there is a
        # best number of chunks, AsymCheck's B* (`_pacing.batching`).
        line = Line.fit([(num, statistics.median(seconds)) for num, seconds in self._seconds.items()])
        return max(1, round(best_batch_bytes(num_all, line.alpha, 1, line.beta)))


def batches(lengths: Sequence[int], pace: FetchPace, num_all: int) -> Iterator[range]:
    """Divides a shard's chunks, by their stored lengths, into fetches of adjacent ones: one chunk, or several of
    together at most `MOST_BYTES`. Asks the pace for their number each time; ``num_all`` is that of the snapshot."""
    first = 0
    while first < len(lengths):
        stop, most = first + 1, pace.num_chunks(num_all)
        num_bytes = _pages(lengths[first])
        while stop < len(lengths) and stop - first < most and num_bytes + _pages(lengths[stop]) <= MOST_BYTES:
            num_bytes += _pages(lengths[stop])
            stop += 1
        yield range(first, stop)
        first = stop


class BufferRing:
    """Lends memory in turn, each piece at the beginning of a page.

    Args:
        longest: Length of the longest piece.
        num_held: Number of latest results of `take` that may be in use when the next is requested.
    """

    def __init__(self, longest: int, num_held: int) -> None:
        most = max(MOST_BYTES, _pages(longest))
        # So long that a piece is lent again only after the next `num_held` results; the end may be too short for a
        # piece, and is skipped.
        self._length = (num_held + 1) * most + _pages(longest)
        self._memory = memoryview(mmap.mmap(-1, self._length))
        self._next = 0

    def take(self, lengths: Sequence[int]) -> list[memoryview]:
        """Returns contiguous memory for each length; the lengths are those of one fetch of `batches`."""
        taken = []
        for length in lengths:
            if self._next + _pages(length) > self._length:
                self._next = 0
            taken.append(self._memory[self._next : self._next + length])
            self._next += _pages(length)
        return taken


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


AHEAD_FETCHES: Final = 2
"""Most fetches that are done and not written yet."""
FIRST_WAIT_SECONDS: Final = 0.5
LONGEST_WAIT_SECONDS: Final = 30.0
"""Longest wait between two attempts; each wait is twice the one before."""

logger = logging.getLogger("shade.checkpoint")


@dataclass(frozen=True)
class Flushed:
    """One snapshot that has become durable."""

    record: Commit
    num_bytes: int
    """Bytes written."""
    seconds: float
    num_dirty: int
    """Snapshots that are still in memory only."""

    def __str__(self) -> str:
        rate = self.num_bytes / 1e6 / max(self.seconds, 1e-9)
        return (
            f"{self.record.run} step {self.record.step} is durable: {self.num_bytes / 1e6:,.1f} MB in "
            f"{self.seconds:.2f} s, {rate:,.0f} MB/s; {self.num_dirty} more to flush"
        )


class _StopRequestedError(Exception):
    """Leaves a write in progress after a request to stop."""


class Flusher:
    """Moves the snapshots of one run to storage.

    Args:
        memory: Tier that snapshots come from.
        storage: Tier that they go to.
        keep: Retention rules of the storage.
        stop: Set by others to end a write in progress: the slot stays dirty, nothing becomes visible in storage.
        may_write: Called before anything in storage is changed; False after another flusher has taken over.
        clock: Clock for rates and waits.
        ahead_fetches: See `AHEAD_FETCHES`; 0: reads and writes in turn, without a thread.
    """

    def __init__(
        self,
        memory: MemoryTier,
        storage: Tier,
        keep: Keep,
        *,
        stop: threading.Event | None = None,
        may_write: Callable[[], bool] = lambda: True,
        clock: Clock = time.monotonic,
        ahead_fetches: int = AHEAD_FETCHES,
    ) -> None:
        self._ahead_fetches = ahead_fetches
        self.memory, self.storage, self.keep = memory, storage, keep
        self._stop = stop or threading.Event()
        self._may_write, self._clock = may_write, clock
        self._reader, self._pace = Reader([memory]), FetchPace()
        self._damaged: set[str] = set()
        self._trouble: type[ShadeError] | None = None
        self._trouble_since = 0.0
        self._wait_seconds = 0.0
        self._not_before = -float("inf")
        self.is_drained = False
        """Whether the last look found nothing dirty."""
        self.last_contact = clock()
        """When the store last answered."""
        self.last_error: ShadeError | None = None
        """Error of the last attempt, or None."""

    # ── one snapshot ────────────────────────────────────────────────────────────────────────────────────────────────

    def flush_one(self) -> Flushed | None:
        """Makes one dirty snapshot durable: the newest that the rules keep, with the bases that storage lacks.

        Returns:
            The snapshot; None if nothing is left to do, or after a request to stop.

        Raises:
            StoreError: Memory cannot be read. The slot stays dirty.
            StorageError: Storage refused. The slot stays dirty.
            CorruptCheckpointError: A snapshot is damaged in every copy in memory, and nothing newer is durable. The
                slot stays dirty: a node may come back.
        """
        self.is_drained = False
        dirty = self._dirty()
        self.is_drained = not dirty
        if not dirty:
            return None
        stored = self.storage.held()
        newest = max((record.sequence for record in stored.values()), default=-1)
        dirty, wanted = self._skip_or_queue(dirty, stored)
        lasting = {record.digest for record in self.keep.lasting.kept(record for _, record in dirty)}
        for location, record in dirty:
            if record.digest in lasting:
                self.memory.hold(location)
        lost: CorruptCheckpointError | None = None
        for location, record in wanted:
            began = self._clock()
            try:
                num_bytes = sum(self._make_durable(*each) for each in self._missing_chain(location, record))
            except _StopRequestedError:
                return None
            except CorruptCheckpointError as error:
                if not self.memory.is_dirty(location):  # a newer snapshot has taken the slot
                    continue
                if record.digest not in self._damaged:
                    logger.error("cannot flush, will try again: %s", error)
                elif record.sequence < newest and not self.storage.damaged and self.memory.is_complete():
                    logger.error("%s step %d is given up: damaged in every copy in memory", record.run, record.step)
                    self.memory.mark_clean(location, record.step)
                    continue
                self.memory.note_damage(location)
                self._damaged.add(record.digest)
                lost = error
                continue
            self._damaged.discard(record.digest)
            flushed = Flushed(record, num_bytes, self._clock() - began, len(dirty) - 1)
            self._retain()
            return flushed
        if lost is not None:
            raise lost
        return None

    def _dirty(self) -> list[tuple[str, Commit]]:
        dirty = list(self.memory.dirty())
        self.last_contact = self._clock()
        return dirty

    def _skip_or_queue(
        self, dirty: list[tuple[str, Commit]], stored: Mapping[str, Commit]
    ) -> tuple[list[tuple[str, Commit]], list[tuple[str, Commit]]]:
        """Clears the bits of snapshots that need no write; returns the dirty rest, and what of it to write."""
        durable = {record.digest: record for record in stored.values()}
        newest = max((record.sequence for record in durable.values()), default=-1)
        kept = {record.digest for record in self.keep.kept([*durable.values(), *(record for _, record in dirty)])}
        left = []
        for location, record in dirty:
            # Written before a crash that came between its commit and the clearing of its bit.
            if record.digest in durable:
                self.memory.mark_clean(location, record.step)
            elif record.sequence < newest and record.digest not in kept:
                logger.info("%s step %d is skipped: a newer one is durable", record.run, record.step)
                self.memory.mark_clean(location, record.step)
            else:
                left.append((location, record))
        # When training outruns storage, the user wants the newest state durable, not a queue of old ones.
        newest_first = sorted(left, key=lambda each: each[1].sequence, reverse=True)
        return left, [(location, record) for location, record in newest_first if record.digest in kept]

    def _missing_chain(self, location: str, record: Commit) -> list[tuple[str, Commit]]:
        """Returns a snapshot and those of its bases that storage lacks, the keyframe first."""
        if record.base is None:
            return [(location, record)]
        locations = {held.digest: (location, held) for location, held in self.memory.held().items()}
        durable = {held.digest for held in self.storage.held().values()}
        known = {digest: held for digest, (_, held) in locations.items()}
        # Memory keeps a base as long as something there builds on it, so it can be written even if storage has let it
        # go.
        below = [*itertools.takewhile(lambda base: base.digest not in durable, lineage(record, known))]
        missing = (below[-1] if below else record).base
        if missing is not None and missing not in durable:
            raise CorruptCheckpointError(f"step {record.step} builds on a snapshot ({missing}) that is lost")
        return [*(locations[base.digest] for base in reversed(below)), (location, record)]

    def _make_durable(self, location: str, record: Commit) -> int:
        self.memory.hold(location)
        # Cleared after the commit, never before: after any crash a snapshot is still in memory and still marked.
        num_bytes = self._write(location, record)
        self.memory.mark_clean(location, record.step)
        return num_bytes

    def _write(self, location: str, record: Commit) -> int:
        """Writes and commits one snapshot, and returns its bytes."""
        snapshot = Snapshot(record, (SnapshotSource(self.memory, location),))
        manifests = [self._reader.manifest(snapshot, rank) for rank in range(record.world_size)]
        self._check()
        sizes = [manifest.stored_bytes for manifest in manifests]
        target = self.storage.prepare(record.step, sizes)
        fetching = Prefetch(_fetch(self._reader, snapshot, manifests, self._pace), self._ahead_fetches)
        try:
            with bytes_bar(f"{record.run} step {record.step}", sum(sizes)) as bar, fetching as fetches:
                chunks = itertools.chain.from_iterable(fetches)
                for manifest in manifests:
                    own = itertools.islice(chunks, len(manifest.chunks))
                    self.storage.put(target, Shard(manifest, self._counted(own, bar.update)))
            self._check()
            check_base(self.storage, record)
            self.storage.commit(target, record)
        except BaseException:
            # After another flusher has taken over, what lies there may be its write in progress.
            if self._may_write():
                with contextlib.suppress(StorageError):
                    self.storage.discard(target)
            raise
        finally:
            with contextlib.suppress(StoreError):
                self.memory.release_hold(location)
        return sum(sizes)

    def _counted(self, chunks: Iterable[Bytes], advance: Callable[[int], object]) -> Iterator[Bytes]:
        for content in chunks:
            if self._stop.is_set():
                raise _StopRequestedError
            yield content
            advance(len(content))

    def _check(self) -> None:
        if self._stop.is_set() or not self._may_write():
            raise _StopRequestedError

    def _retain(self) -> None:
        """Removes what no rule keeps; a failed removal is tried again after the next snapshot."""
        try:
            retire(self.storage, self.keep, self._pending)
        except StorageError as error:
            logger.warning("old snapshots could not be removed: %s", error)

    def _pending(self) -> list[Commit]:
        dirty = self.memory.dirty()
        if self.memory.damaged:
            raise StoreError(f"{self.memory.name}, {', '.join(self.memory.damaged)}")
        return [record for _, record in dirty]

    # ── again and again ─────────────────────────────────────────────────────────────────────────────────────────────

    def poll(self) -> Flushed | None:
        """Calls `flush_one` if it is time to try; logs an error once, and retries later with a growing delay."""
        if self._clock() < self._not_before:
            return None
        try:
            flushed = self.flush_one()
        except ShadeError as error:
            self._failed(error)
            return None
        if self._trouble is not None:
            logger.info("flushing continues")
        self._trouble, self.last_error, self._wait_seconds = None, None, 0.0
        if flushed is not None:
            logger.info("%s", flushed)
        return flushed

    def is_stuck(self, patience_seconds: float) -> bool:
        """Returns whether memory has not answered, or has been damaged, for so long."""
        lost = isinstance(self.last_error, (StoreError, CorruptCheckpointError))
        return lost and self._clock() - self._trouble_since > patience_seconds

    def _failed(self, error: ShadeError) -> None:
        if self.last_error is None:
            self._trouble_since = self._clock()
        if self._trouble is not type(error) and not isinstance(error, CorruptCheckpointError):
            logger.warning("flushing waits: %s", " ".join(str(error).split()))
        self._trouble, self.last_error = type(error), error
        self._wait_seconds = min(LONGEST_WAIT_SECONDS, 2 * self._wait_seconds or FIRST_WAIT_SECONDS)
        self._not_before = self._clock() + self._wait_seconds


def _fetch(
    reader: Reader, snapshot: Snapshot, manifests: Sequence[Manifest], pace: FetchPace
) -> Iterator[list[memoryview]]:
    """Yields every chunk of every rank in order, fetch by fetch, in memory that is reused."""
    longest = max((chunk.num_bytes for manifest in manifests for chunk in manifest.chunks), default=1)
    num_all = sum(len(manifest.chunks) for manifest in manifests)
    # At most `AHEAD_FETCHES` fetches wait, and one is being written.
    ring = BufferRing(longest, AHEAD_FETCHES + 1)
    pace.begin()
    for manifest in manifests:
        lengths = [chunk.num_bytes for chunk in manifest.chunks]
        for numbers in batches(lengths, pace, num_all):
            buffers = ring.take([lengths[number] for number in numbers])
            begun = time.perf_counter()
            # From the socket into the ring, verified there, and from there to the disk: no copy, no new memory.
            reader.fill(snapshot, manifest, numbers, buffers)
            pace.fetched(len(numbers), time.perf_counter() - begun)
            yield buffers
