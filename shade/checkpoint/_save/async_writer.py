"""Carries snapshots from the buffer to where they are safe, in threads, while training goes on.

A thread for each save that may be in flight, each with a group of its own; save i goes to thread i mod N on every rank.
So all collectives of a group are made by one thread, and in one order. The way of a snapshot:

1. The copy is done: chunks are hashed where they lie, the manifest is made, the ranks agree on the record.
2. Own memory: the record is put beside the buffer.
3. Cluster memory. From here it is *committed*: it outlives this machine. A flusher makes it durable.
4. Where there is no cluster memory, or it refused or failed: storage, directly. The reason is told once, and its end.

Where chunks are streamed, those of 3 (or 4) go out before 1, while the copy is still under way: see
`_save.stream_upload`. Snapshots in flight at once may land in another order than they were taken in; which one
is the newest is in their records, so whichever lands last, the newest that has landed is the one that is restored.

A codec that stores differences sends one to where its base has landed. If that place will not have it, or has lost the
base, the snapshot is made to stand alone and goes the usual way.

A save that reached no tier beyond own memory has failed: its `SaveHandle` says so and the log says so, every time;
training goes on, because the alternative is to lose what has not been saved as well.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from shade.checkpoint._buffer.shared_memory_tier import SharedMemoryTier
from shade.checkpoint._buffer.stream_hash import StreamHash
from shade.checkpoint._commit.process_group import ProcessGroup
from shade.checkpoint._commit.protocol import (
    Agreed,
    Notes,
    Stored,
    agree,
    announce,
    commit,
    discard,
    prepare,
    put,
    store,
)
from shade.checkpoint._format.manifest import Manifest, TensorEntry
from shade.checkpoint._pacing.batching import Batching
from shade.checkpoint._pacing.cpu_time import cpu_seconds
from shade.checkpoint._pacing.schedule import Pace
from shade.checkpoint._save.packing import PackedShard, Packer
from shade.checkpoint._save.stream_upload import StreamUpload
from shade.checkpoint._tiers.tier import Tier
from shade.errors import CheckpointError, ShadeError
from shade.types import Bytes

logger = logging.getLogger("shade.checkpoint")


@dataclass(frozen=True)
class CommitResult:
    """Where a save has come to."""

    tier: Tier
    place: str
    sequence: int = 0
    """Of the save, as in its record."""


@dataclass
class SaveHandle:
    """One save, as its owner may follow it."""

    step: int
    begun: float = field(default_factory=time.monotonic)
    copied: Future[None] = field(default_factory=Future)
    """Resolved when the buffer holds the snapshot."""
    landed: Future[CommitResult] = field(default_factory=Future)
    """Resolved when it is committed beyond own memory; with a CheckpointError when it is nowhere."""
    pace: Pace = field(default_factory=Pace)
    """As of the save before, the same on every rank; known once this one has landed."""
    blocked_seconds: float = 0.0
    """What the training thread has waited for it."""
    released_effort_seconds: float = 0.0
    """Processor time of all saves' threads when the training went on; and more, while it waited again."""
    landed_effort_seconds: float = 0.0
    """Processor time of all saves' threads when it had landed."""
    landed_seconds: float = 0.0
    """From the moment it was taken until it was committed."""
    kept: bool = False
    """Whether own memory holds it."""

    @property
    def worked_seconds(self) -> float:
        """Processor time that saves took beside the training, from when it went on until this one had landed."""
        return max(0.0, self.landed_effort_seconds - self.released_effort_seconds)

    @contextlib.contextmanager
    def blocking(self) -> Iterator[None]:
        """Within it, the training thread waits for this save."""
        begun, effort = time.monotonic(), cpu_seconds()
        try:
            yield
        finally:
            self.blocked_seconds += time.monotonic() - begun
            self.released_effort_seconds += cpu_seconds() - effort


@dataclass(frozen=True)
class SaveRequest:
    """What the courier is given."""

    ticket: SaveHandle
    entries: Mapping[str, TensorEntry]
    tree: Any
    num_bytes: int
    buffer: torch.Tensor
    """uint8, the data in its first `num_bytes`."""
    place: str
    """The buffer's, in own memory."""
    notes: Notes
    arrivals: StreamHash | None = None
    """Tells which chunks are there; None: the snapshot goes when all are."""


class AsyncWriter:
    """The threads.

    Args:
        run: The run id.
        groups: One for each thread, whose alone its collectives are: as many as saves may be in flight.
        stage: Own memory.
        memory: Cluster memory, or None.
        storage: Storage that this process may write itself, or None.
        packer: Gives chunks their stored form; one that stores differences takes one save at a time.
        may_save: Called in the thread before each save; raises a CheckpointError if there must be none.
        landed: Called in the thread after each save that is committed beyond own memory, on every rank; never twice
            at once.
        before_chunk: Called in the thread before each chunk is sent, with its length; may wait.
        batching: Says how much is written to storage at once, of what is streamed; None: a chunk.
    """

    def __init__(
        self,
        run: str,
        groups: Sequence[ProcessGroup],
        stage: SharedMemoryTier,
        memory: Tier | None,
        storage: Tier | None,
        packer: Packer,
        may_save: Callable[[], None],
        landed: Callable[[CommitResult], None],
        before_chunk: Callable[[int], None] = lambda _: None,
        batching: Batching | None = None,
    ) -> None:
        self._run, self._stage = run, stage
        self._ways = [tier for tier in (memory, storage) if tier is not None]
        self._packer = packer
        self._base_tier: Tier | None = None
        """Where the snapshot lies that the next one may build on."""
        self._may_save, self._landed = may_save, landed
        self._before_chunk, self._batching = before_chunk, batching
        self._troubled: set[str] = set()
        self._one_at_a_time = threading.Lock()
        """Held while something is packed, told or tidied up."""
        self._num_sent = 0
        self._lanes: list[queue.SimpleQueue[SaveRequest | None]] = [queue.SimpleQueue() for _ in groups]
        self._threads = [
            threading.Thread(target=self._serve, args=each, name="shade-courier", daemon=True)
            for each in zip(self._lanes, groups, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def send(self, parcel: SaveRequest) -> None:
        """Takes a snapshot; its buffer must not be written to before ``parcel.ticket.landed`` is resolved."""
        self._lanes[self._num_sent % len(self._lanes)].put(parcel)
        self._num_sent += 1

    def close(self) -> None:
        """Returns when everything sent has landed or failed. Safe to call twice."""
        for lane, thread in zip(self._lanes, self._threads, strict=True):
            if thread.is_alive():
                lane.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self, lane: queue.SimpleQueue[SaveRequest | None], group: ProcessGroup) -> None:
        while (parcel := lane.get()) is not None:
            ticket = parcel.ticket
            try:
                landing = self._deliver(parcel, group)
            except CheckpointError as error:
                self._packer.forget()
                logger.error("step %d is not saved: %s", ticket.step, error)
                ticket.landed.set_exception(error)
            except Exception as error:  # noqa: BLE001 - a dead peer is a RuntimeError of gloo; its owner must hear of it
                self._packer.forget()
                logger.error("step %d is not saved: %s", ticket.step, error)
                failure = CheckpointError(f"step {ticket.step} is not saved: {error}")
                failure.__cause__ = error
                ticket.landed.set_exception(failure)
            else:
                ticket.landed_seconds = time.monotonic() - ticket.begun
                ticket.landed_effort_seconds = cpu_seconds()
                ticket.landed.set_result(landing)
                try:
                    with self._one_at_a_time:
                        self._landed(landing)
                except ShadeError as error:
                    logger.warning("after step %d: %s", ticket.step, error)

    # ── the way of a snapshot ───────────────────────────────────────────────────────────────────────────────────────

    def _deliver(self, parcel: SaveRequest, group: ProcessGroup) -> CommitResult:
        early = _Early(None, Stored(None)) if parcel.arrivals is None else self._send_early(parcel, group)
        if self._packer.builds and len(set(group.gather(self._packer.base))) > 1:
            self._packer.forget()
        packed, error = None, None
        try:
            parcel.ticket.copied.result()
            self._may_save()
            packed = early.outgoing.packed() if early.outgoing is not None else self._pack(parcel)
        except Exception as failure:  # noqa: BLE001 - whatever it is, the other ranks wait to hear of it
            error = _said(failure)
        try:
            agreed = self._agreed(parcel, group, packed, error)
        except CheckpointError:
            if early.stored.place is not None:
                discard(self._ways[0], group, early.stored.place)
            raise
        assert packed is not None, "agree() raises where a rank has none"
        if packed.base is not None:
            landing = self._build_on(parcel, group, agreed, packed)
            if landing is not None:
                return landing
            error = None
            try:
                packed = self._packer.alone(packed, parcel.buffer)
            except Exception as failure:  # noqa: BLE001 - as above
                error = _said(failure)
            agreed = self._agreed(parcel, group, packed, error)
        at_home = self._keep(parcel, group, agreed, packed.manifest)
        reasons = []
        for tier in self._ways:
            if early.outgoing is None or tier is not self._ways[0]:
                stored = store(tier, group, agreed, packed.manifest, lambda: self._paced(packed.chunks))
            elif early.stored.place is None:
                stored = early.stored
            else:
                stored = commit(tier, group, early.stored.place, agreed.record)
            self._tell(tier, stored, group)
            if stored.place is not None:
                return self._landing(parcel, agreed, packed, tier, stored.place)
            reasons.append(f"{tier.name}: {stored.reason}")
        if not self._ways and at_home.place is not None:
            return CommitResult(self._stage, at_home.place, agreed.record.sequence)
        raise CheckpointError("; ".join(reasons) or f"own memory: {at_home.reason}")

    def _agreed(
        self, parcel: SaveRequest, group: ProcessGroup, packed: PackedShard | None, error: str | None
    ) -> Agreed:
        manifest, base = (None, None) if packed is None or error else (packed.manifest, packed.base)
        agreed = agree(group, manifest, error, parcel.notes, base)
        parcel.ticket.pace = agreed.pace
        return agreed

    def _build_on(
        self, parcel: SaveRequest, group: ProcessGroup, agreed: Agreed, packed: PackedShard
    ) -> CommitResult | None:
        """Stores a difference where its base is; None where that place will not have it: then it has to stand alone."""
        tier = self._base_tier
        assert tier is not None, "a base has landed somewhere"
        self._keep(parcel, group, agreed, packed.manifest)
        stored = store(tier, group, agreed, packed.manifest, lambda: self._paced(packed.chunks))
        if stored.place is None:
            self._stage.discard(parcel.place)
            return None
        self._tell(tier, stored, group)
        return self._landing(parcel, agreed, packed, tier, stored.place)

    def _landing(
        self, parcel: SaveRequest, agreed: Agreed, packed: PackedShard, tier: Tier, place: str
    ) -> CommitResult:
        self._packer.landed(packed, agreed.record.digest, parcel.buffer)
        self._base_tier = tier
        return CommitResult(tier, place, agreed.record.sequence)

    def _pack(self, parcel: SaveRequest) -> PackedShard:
        with self._one_at_a_time:
            return self._packer.pack(parcel.ticket.step, parcel.buffer, parcel.num_bytes, parcel.entries, parcel.tree)

    def _send_early(self, parcel: SaveRequest, group: ProcessGroup) -> _Early:
        """Puts the chunks into the first tier as they arrive; nobody sees them there yet."""
        outgoing, error = None, None
        try:
            self._may_save()
            outgoing = self._outgoing(parcel, group)
        except Exception as failure:  # noqa: BLE001 - as above
            error = _said(failure)
        shard_bytes = announce(group, None if outgoing is None else outgoing.manifest, error)
        assert outgoing is not None, "announce() raises where a rank has none"
        if not self._ways:
            return _Early(outgoing, Stored(None))
        tier = self._ways[0]
        batching = self._batching if tier.is_durable else None
        chunks = outgoing.chunks() if batching is None else outgoing.batches(batching)
        stored = prepare(tier, group, parcel.ticket.step, shard_bytes)
        if stored.place is not None:
            stored = put(tier, group, stored.place, outgoing.manifest, lambda: self._paced(chunks))
        return _Early(outgoing, stored)

    def _outgoing(self, parcel: SaveRequest, group: ProcessGroup) -> StreamUpload:
        assert parcel.arrivals is not None
        data = memoryview(parcel.buffer.numpy().data)[: parcel.num_bytes]
        draft = Manifest(
            run=self._run,
            step=parcel.ticket.step,
            rank=group.rank,
            world_size=group.world_size,
            codec="none",
            num_bytes=parcel.num_bytes,
            tensors=parcel.entries,
            chunks=(),
            tree=parcel.tree,
        )
        return StreamUpload(draft, data, parcel.arrivals, parcel.ticket.copied)

    def _paced(self, chunks: Iterable[Bytes]) -> Iterator[Bytes]:
        for chunk in chunks:
            self._before_chunk(len(chunk))
            yield chunk

    def _keep(self, parcel: SaveRequest, group: ProcessGroup, agreed: Agreed, manifest: Manifest) -> Stored:
        """Makes the snapshot count in own memory, where it lies already."""
        kept = put(self._stage, group, parcel.place, manifest, lambda: ())
        if kept.place is not None:
            kept = commit(self._stage, group, kept.place, agreed.record)
        parcel.ticket.kept = kept.place is not None
        if parcel.ticket.kept:
            self._troubled.discard(self._stage.name)
        elif self._stage.name not in self._troubled:
            self._troubled.add(self._stage.name)
            step = parcel.ticket.step
            logger.warning("own memory keeps no copy of step %d, nor of those to come: %s", step, kept.reason)
        return kept

    def _tell(self, tier: Tier, stored: Stored, group: ProcessGroup) -> None:
        """A tier's trouble is told when it begins and when it ends, by rank 0."""
        troubled = stored.place is None
        with self._one_at_a_time:
            is_news = troubled != (tier.name in self._troubled)
            (self._troubled.add if troubled else self._troubled.discard)(tier.name)
        if is_news and group.rank == 0:
            if troubled:
                last = tier is self._ways[-1]
                logger.warning("%s fails%s: %s", tier.name, "" if last else "; saves go to storage", stored.reason)
            else:
                logger.warning("%s works again", tier.name)


@dataclass(frozen=True)
class _Early:
    """What was sent before the ranks have agreed."""

    outgoing: StreamUpload | None
    """None: nothing, the snapshot goes as a whole."""
    stored: Stored
    """Where in the first tier it waits for its record."""


def _said(failure: Exception) -> str:
    return " ".join(str(failure).split()) or type(failure).__name__
