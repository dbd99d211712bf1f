"""Writes snapshots from the buffer into the tiers, in threads, while training continues.

Each save that may be in flight has a thread and a process group of its own; save i goes to thread i mod N on every
rank, so all collectives of a group are made by one thread, in one order. The way of a snapshot:

1. When the copy is done, the chunks are hashed where they lie, and the ranks agree on the commit record.
2. The record is put beside the buffer: the shared-memory tier has the snapshot.
3. It goes to the cluster's memory, and from there it is *committed*. The flusher makes it durable.
4. Where there is no cluster memory, or it refused or failed, it goes to storage directly.

With a streaming strategy, the chunks of 3 (or 4) are uploaded before 1, during the copy (`_save.stream_upload`).
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
from typing import Any, TypeVar

import torch

from shade.checkpoint._buffer.shared_memory_tier import SharedMemoryTier
from shade.checkpoint._buffer.stream_hash import StreamHash
from shade.checkpoint._commit.protocol import (
    agree,
    announce,
    commit,
    discard,
    note_health,
    prepare,
    put,
    store,
)
from shade.checkpoint._format.manifest import ChunkEntry, Commit, Manifest, TensorEntry
from shade.checkpoint._pacing.batching import Batching
from shade.checkpoint._pacing.schedule import Pace
from shade.checkpoint._save.packing import PackedShard, Packer
from shade.checkpoint._save.stream_upload import StreamUpload
from shade.checkpoint._tiers.tier import Tier
from shade.errors import CheckpointError, ShadeError
from shade.rank_group import RankGroup
from shade.tracking.events import emit, listeners
from shade.types import Bytes

T = TypeVar("T")

logger = logging.getLogger("shade.checkpoint")


@dataclass(frozen=True)
class CommitResult:
    """Where a save is committed."""

    tier: Tier
    location: str
    sequence: int = 0
    """Number of the save in its run, as in its record."""


@dataclass
class SaveHandle:
    """One save, as its owner can follow it."""

    step: int
    number: int = 0
    """Number of the save among this object's, from 1."""
    begun: float = field(default_factory=time.monotonic)
    copied: Future[None] = field(default_factory=Future)
    """Resolved when the buffer holds the snapshot: the state may change again."""
    committed: Future[CommitResult] = field(default_factory=Future)
    """Resolved when the snapshot outlives this machine; with a CheckpointError when no tier has taken it."""
    pace: Pace = field(default_factory=Pace)
    """Pace as of the save before, the same on every rank; known when this save is committed."""
    blocked_seconds: float = 0.0
    """Time that the training thread waited for this save."""
    commit_seconds: float = 0.0
    """Time from the beginning of the save until it was committed."""
    is_in_shared_memory: bool = False
    """Whether the shared-memory tier holds the snapshot."""

    @contextlib.contextmanager
    def blocking(self) -> Iterator[None]:
        """Charges to this save what the training thread waits within the block."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.blocked_seconds += time.monotonic() - begun


@dataclass(frozen=True)
class SaveRequest:
    """One save, as the writer needs it."""

    handle: SaveHandle
    sequence: int
    """Number of the save in its run."""
    saved_at: float
    """When the state was taken, in seconds since 1970."""
    pace: Pace
    """Pace that this rank measured; rank 0's reaches all ranks with the commit."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    replica: str = ""
    """Digest over samples of the state that all ranks should hold alike; empty where they need not."""
    entries: Mapping[str, TensorEntry] = field(default_factory=dict)
    """Where each tensor lies in the buffer."""
    tree: Any = None
    num_bytes: int = 0
    buffer: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    """uint8, the data in its first `num_bytes`."""
    location: str = ""
    """The buffer's location in the shared-memory tier."""
    stream_hash: StreamHash | None = None
    """Knows which chunks are copied; None: the snapshot is written when all are."""


class AsyncWriter:
    """The threads that write snapshots.

    Args:
        groups: One process group for each thread, used by nothing else: as many as saves may be in flight.
        shared_memory: The shared-memory tier.
        memory: The cluster-memory tier, or None.
        storage: The storage tier, if this process may write it itself, or None.
        packer: Encodes chunks; one that stores differences takes one save at a time.
        check_may_save: Called in the thread before each save; raises a CheckpointError if there must be none.
        after_commit: Called in the thread after each save that is committed beyond shared memory, on every rank; never
            twice at once.
        before_chunk: Called in the thread before each chunk is sent, with its length; may wait.
        batching: Chooses how many streamed bytes are written to storage at once; None: a chunk.
    """

    def __init__(
        self,
        groups: Sequence[RankGroup],
        shared_memory: SharedMemoryTier,
        memory: Tier | None,
        storage: Tier | None,
        packer: Packer,
        check_may_save: Callable[[], None],
        after_commit: Callable[[CommitResult], None],
        before_chunk: Callable[[int], None] = lambda _: None,
        batching: Batching | None = None,
    ) -> None:
        self._shared_memory = shared_memory
        self._tiers = [tier for tier in (memory, storage) if tier is not None]
        """Beyond shared memory, in the order in which they are tried."""
        self._packer = packer
        self._base_tier: Tier | None = None
        """Where the snapshot lies that the next one may build on."""
        self._check_may_save, self._after_commit = check_may_save, after_commit
        self._before_chunk, self._batching = before_chunk, batching
        self._failing: set[str] = set()
        """Names of the tiers that failed last time."""
        self._one_at_a_time = threading.Lock()
        """Held while a thread logs or tidies up."""
        self._packing = threading.Lock()
        """Held while a thread packs a shard, or a chunk of one."""
        self._num_sent = 0
        self._queues: list[queue.SimpleQueue[SaveRequest | None]] = [queue.SimpleQueue() for _ in groups]
        self._threads = [
            threading.Thread(target=self._serve, args=each, name="shade-save", daemon=True)
            for each in zip(self._queues, groups, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def can_stream(self) -> bool:
        """Whether chunks may leave before all are packed."""
        # Cluster memory has to know beforehand how long each chunk is, and a difference goes where its base is.
        goes_to_storage = bool(self._tiers) and self._tiers[0].is_durable
        return self._packer.codec == "none" or (goes_to_storage and not self._packer.builds)

    def send(self, request: SaveRequest) -> None:
        """Queues a save; its buffer must not be written to before ``request.handle.committed`` is resolved."""
        # The same thread on every rank, so that all collectives of a group are made in one order.
        self._queues[self._num_sent % len(self._queues)].put(request)
        self._num_sent += 1

    def close(self) -> None:
        """Returns when every queued save is committed or has failed. Safe to call twice."""
        for requests, thread in zip(self._queues, self._threads, strict=True):
            if thread.is_alive():
                requests.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self, requests: queue.SimpleQueue[SaveRequest | None], group: RankGroup) -> None:
        while (request := requests.get()) is not None:
            handle = request.handle
            try:
                result = self._write(request, group)
            except Exception as error:  # noqa: BLE001 - a dead peer is a RuntimeError of gloo; the owner must learn of it
                self._packer.forget()
                # The next snapshot must not build on one that cannot be read.
                logger.error("step %d is not saved: %s", handle.step, error)
                failure = error
                if not isinstance(error, CheckpointError):
                    failure = CheckpointError(f"step {handle.step} is not saved: {error}")
                    failure.__cause__ = error
                handle.commit_seconds = time.monotonic() - handle.begun
                _emit(request, group, error=type(failure).__name__)
                handle.committed.set_exception(failure)
            else:
                handle.commit_seconds = time.monotonic() - handle.begun
                _emit(request, group, tier=result.tier.name)
                handle.committed.set_result(result)
                try:
                    with self._one_at_a_time:
                        self._after_commit(result)
                except ShadeError as error:
                    logger.warning("after step %d: %s", handle.step, error)

    # ── the way of a snapshot ───────────────────────────────────────────────────────────────────────────────────────

    def _write(self, request: SaveRequest, group: RankGroup) -> CommitResult:
        upload = None if request.stream_hash is None else self._upload(request, group)
        # A rank that was restarted has another base than the others: all begin again, with a snapshot that stands
        # alone.
        if self._packer.builds and len(set(group.gather(self._packer.base))) > 1:
            self._packer.forget()
        packed, error = _or_message(lambda: self._pack(request, upload))
        try:
            record, shard_bytes = self._agree(request, group, packed, error)
        except CheckpointError:
            if upload is not None and upload.location is not None:
                discard(self._tiers[0], group, upload.location)
            raise
        assert packed is not None, "agree() raises where a rank has none"
        # A difference lies where its base lies. If that tier fails or has lost the base, the shard is packed again
        # without.
        if packed.base is not None:
            result = self._build_on_base(request, group, record, shard_bytes, packed)
            if result is not None:
                return result
            built = packed
            packed, error = _or_message(lambda: self._packer.alone(built, request.buffer))
            record, shard_bytes = self._agree(request, group, packed, error)
            assert packed is not None, "as above"
        refusal = self._keep_in_shared_memory(request, group, record, packed.manifest)
        reasons = []
        for tier in self._tiers:
            try:
                if upload is None or tier is not self._tiers[0]:
                    location = self._store(tier, group, record, shard_bytes, packed)
                else:
                    location = upload.location_or_raise()
                    commit(tier, group, location, record)
            except CheckpointError as failure:
                self._note_health(tier, group, str(failure))
                reasons.append(f"{tier.name}: {failure}")
                continue
            self._note_health(tier, group, None)
            return self._committed(request, record, packed, tier, location)
        if not self._tiers and refusal is None:
            return CommitResult(self._shared_memory, request.location, record.sequence)
        # Shared memory alone does not outlive the machine, so beside other tiers such a save has failed. Training goes
        # on, because stopping it would lose the unsaved steps as well.
        raise CheckpointError("; ".join(reasons) or f"{self._shared_memory.name}: {refusal}")

    def _agree(
        self, request: SaveRequest, group: RankGroup, packed: PackedShard | None, error: str | None
    ) -> tuple[Commit, list[int]]:
        record, shard_bytes, request.handle.pace = agree(
            group,
            None if packed is None else packed.manifest,
            error,
            sequence=request.sequence,
            saved_at=request.saved_at,
            metrics=request.metrics,
            replica=request.replica,
            pace=request.pace,
            base=None if packed is None else packed.base,
        )
        return record, shard_bytes

    def _store(
        self, tier: Tier, group: RankGroup, record: Commit, shard_bytes: Sequence[int], packed: PackedShard
    ) -> str:
        return store(tier, group, record, shard_bytes, packed.manifest, lambda: self._paced(packed.chunks))

    def _build_on_base(
        self,
        request: SaveRequest,
        group: RankGroup,
        record: Commit,
        shard_bytes: Sequence[int],
        packed: PackedShard,
    ) -> CommitResult | None:
        """Stores a difference where its base is; returns None if that tier refuses or fails."""
        tier = self._base_tier
        assert tier is not None, "a base is committed somewhere"
        self._keep_in_shared_memory(request, group, record, packed.manifest)
        try:
            location = self._store(tier, group, record, shard_bytes, packed)
        except CheckpointError:
            self._shared_memory.discard(request.location)
            return None
        self._note_health(tier, group, None)
        return self._committed(request, record, packed, tier, location)

    def _committed(
        self, request: SaveRequest, record: Commit, packed: PackedShard, tier: Tier, location: str
    ) -> CommitResult:
        self._packer.committed(packed, record.digest, request.buffer)
        self._base_tier = tier
        return CommitResult(tier, location, record.sequence)

    def _pack(self, request: SaveRequest, upload: StreamUpload | None) -> PackedShard:
        request.handle.copied.result()
        self._check_may_save()
        if upload is not None:
            return upload.packed()
        with self._packing:
            return self._packer.pack(
                request.handle.step, request.buffer, request.num_bytes, request.entries, request.tree
            )

    def _upload(self, request: SaveRequest, group: RankGroup) -> StreamUpload:
        """Uploads the chunks into the first tier as they are copied; no reader finds them there yet."""
        upload, error = _or_message(lambda: self._new_upload(request))
        shard_bytes = announce(group, None if upload is None else upload.manifest, error)
        assert upload is not None, "announce() raises where a rank has none"
        if self._tiers:
            tier = self._tiers[0]
            batching = self._batching if tier.is_durable else None
            with contextlib.closing(upload.chunks() if batching is None else upload.batches(batching)) as chunks:
                try:
                    location = prepare(tier, group, request.handle.step, shard_bytes)
                    put(tier, group, location, upload.manifest, lambda: self._paced(chunks))
                    upload.location = location
                except CheckpointError as failure:
                    upload.refusal = failure
        return upload

    def _new_upload(self, request: SaveRequest) -> StreamUpload:
        self._check_may_save()
        assert request.stream_hash is not None
        data = memoryview(request.buffer.numpy().data)[: request.num_bytes]
        draft = self._packer.draft(request.handle.step, request.num_bytes, request.entries, request.tree)

        def pack(chunk: memoryview, number: int, plain: str) -> tuple[Bytes, ChunkEntry]:
            with self._packing:
                return self._packer.pack_chunk(chunk, draft.item_bytes, number, plain)

        return StreamUpload(draft, data, request.stream_hash, request.handle.copied, pack)

    def _paced(self, chunks: Iterable[Bytes]) -> Iterator[Bytes]:
        for chunk in chunks:
            self._before_chunk(len(chunk))
            yield chunk

    def _keep_in_shared_memory(
        self, request: SaveRequest, group: RankGroup, record: Commit, manifest: Manifest
    ) -> str | None:
        """Commits the snapshot in shared memory, where it lies already; returns why not where that fails."""
        tier, handle = self._shared_memory, request.handle
        try:
            put(tier, group, request.location, manifest, lambda: ())
            commit(tier, group, request.location, record)
        except CheckpointError as failure:
            handle.is_in_shared_memory = False
            if tier.name not in self._failing:
                self._failing.add(tier.name)
                logger.warning("%s keeps no copy of step %d, nor of those to come: %s", tier.name, handle.step, failure)
            return str(failure)
        handle.is_in_shared_memory = True
        self._failing.discard(tier.name)
        return None

    def _note_health(self, tier: Tier, group: RankGroup, failure: str | None) -> None:
        with self._one_at_a_time:
            note_health(tier, group, self._failing, failure, is_last=tier is self._tiers[-1])


def _or_message(action: Callable[[], T]) -> tuple[T | None, str | None]:
    """Returns the result, or the message of an error, whatever it is: the other ranks wait for this one's."""
    try:
        return action(), None
    except Exception as failure:  # noqa: BLE001
        return None, " ".join(str(failure).split()) or type(failure).__name__


def _emit(request: SaveRequest, group: RankGroup, **outcome: str) -> None:
    handle = request.handle
    if not listeners:
        return
    emit(
        "save",
        handle.commit_seconds,
        rank=group.rank,
        step=handle.step,
        state_bytes=request.num_bytes,
        blocked_seconds=handle.blocked_seconds,
        **outcome,
    )
