"""Carries snapshots from the buffer to where they are safe, in a thread, while training goes on.

One snapshot at a time, in the order in which they were taken, the same on every rank: so all collectives of a group are
made by this thread, and in one order. The way of a snapshot:

1. The copy is done: chunks are hashed where they lie, the manifest is made, the ranks agree on the record.
2. Own memory: the record is put beside the buffer.
3. Cluster memory. From here it is *committed*: it outlives this machine. A flusher makes it durable.
4. Where there is no cluster memory, or it refused or failed: storage, directly. The reason is told once, and its end.

A save that reached no tier beyond own memory has failed: its `Ticket` says so and the log says so, every time; training
goes on, because the alternative is to lose what has not been saved as well.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from shade.checkpoint.group import Group
from shade.checkpoint.manifest import TensorEntry
from shade.checkpoint.packing import Packer
from shade.checkpoint.protocol import Notes, Stored, agree, store
from shade.checkpoint.schedule import Pace
from shade.checkpoint.stage import Stage
from shade.checkpoint.tier import Tier
from shade.errors import CheckpointError, ShadeError

logger = logging.getLogger("shade.checkpoint")


@dataclass(frozen=True)
class Landing:
    """Where a save has come to."""

    tier: Tier
    place: str
    sequence: int = 0
    """Of the save, as in its record."""


@dataclass
class Ticket:
    """One save, as its owner may follow it."""

    step: int
    begun: float = field(default_factory=time.monotonic)
    copied: Future[None] = field(default_factory=Future)
    """Resolved when the buffer holds the snapshot."""
    landed: Future[Landing] = field(default_factory=Future)
    """Resolved when it is committed beyond own memory; with a CheckpointError when it is nowhere."""
    pace: Pace = field(default_factory=Pace)
    """As of the save before, the same on every rank; known once this one has landed."""
    blocked_seconds: float = 0.0
    """What the training thread has waited for it."""
    landed_seconds: float = 0.0
    """From the moment it was taken until it was committed."""
    kept: bool = False
    """Whether own memory holds it."""


@dataclass(frozen=True)
class Parcel:
    """What the courier is given."""

    ticket: Ticket
    entries: Mapping[str, TensorEntry]
    tree: Any
    num_bytes: int
    buffer: torch.Tensor
    """uint8, the data in its first `num_bytes`."""
    notes: Notes


class Courier:
    """The thread.

    Args:
        run: The run id.
        group: Its collectives are this thread's alone.
        stage: Own memory.
        memory: Cluster memory, or None.
        storage: Storage that this process may write itself, or None.
        codec: Name of the codec of the chunks.
        may_save: Called in the thread before each save; raises a CheckpointError if there must be none.
        landed: Called in the thread after each save that is committed beyond own memory, on every rank.
    """

    def __init__(
        self,
        run: str,
        group: Group,
        stage: Stage,
        memory: Tier | None,
        storage: Tier | None,
        codec: str,
        may_save: Callable[[], None],
        landed: Callable[[Landing], None],
    ) -> None:
        self._group, self._stage = group, stage
        self._ways = [tier for tier in (memory, storage) if tier is not None]
        self._packer = Packer(run, group.rank, group.world_size, codec)
        self._may_save, self._landed = may_save, landed
        self._troubled: set[str] = set()
        self._parcels: queue.SimpleQueue[Parcel | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="shade-courier", daemon=True)
        self._thread.start()

    def send(self, parcel: Parcel) -> None:
        """Takes a snapshot; its buffer must not be written to before ``parcel.ticket.landed`` is resolved."""
        self._parcels.put(parcel)

    def close(self) -> None:
        """Returns when everything sent has landed or failed. Safe to call twice."""
        if self._thread.is_alive():
            self._parcels.put(None)
            self._thread.join()

    def _serve(self) -> None:
        while (parcel := self._parcels.get()) is not None:
            ticket = parcel.ticket
            try:
                landing = self._deliver(parcel)
            except CheckpointError as error:
                logger.error("step %d is not saved: %s", ticket.step, error)
                ticket.landed.set_exception(error)
            except Exception as error:  # noqa: BLE001 - a dead peer is a RuntimeError of gloo; its owner must hear of it
                logger.error("step %d is not saved: %s", ticket.step, error)
                failure = CheckpointError(f"step {ticket.step} is not saved: {error}")
                failure.__cause__ = error
                ticket.landed.set_exception(failure)
            else:
                ticket.landed_seconds = time.monotonic() - ticket.begun
                ticket.landed.set_result(landing)
                try:
                    self._landed(landing)
                except ShadeError as error:
                    logger.warning("after step %d: %s", ticket.step, error)

    def _deliver(self, parcel: Parcel) -> Landing:
        packed, error = None, None
        try:
            parcel.ticket.copied.result()
            self._may_save()
            packed = self._packer.pack(
                parcel.ticket.step, parcel.buffer, parcel.num_bytes, parcel.entries, parcel.tree
            )
        except Exception as failure:  # noqa: BLE001 - whatever it is, the other ranks wait to hear of it
            error = " ".join(str(failure).split()) or type(failure).__name__
        ticket = parcel.ticket
        agreed = agree(self._group, None if packed is None else packed.manifest, error, parcel.notes)
        ticket.pace = agreed.pace
        assert packed is not None, "agree() raises where a rank has none"
        manifest, chunks = packed.manifest, packed.chunks
        at_home = store(self._stage, self._group, agreed, manifest, lambda: ())
        ticket.kept = at_home.place is not None
        if at_home.place is not None:
            self._troubled.discard(self._stage.name)
        elif self._stage.name not in self._troubled:
            self._troubled.add(self._stage.name)
            logger.warning("own memory keeps no copy of step %d, nor of those to come: %s", ticket.step, at_home.reason)
        reasons = []
        for tier in self._ways:
            stored = store(tier, self._group, agreed, manifest, lambda: chunks)
            self._tell(tier, stored)
            if stored.place is not None:
                return Landing(tier, stored.place, agreed.record.sequence)
            reasons.append(f"{tier.name}: {stored.reason}")
        if not self._ways and at_home.place is not None:
            return Landing(self._stage, at_home.place, agreed.record.sequence)
        raise CheckpointError("; ".join(reasons) or f"own memory: {at_home.reason}")

    def _tell(self, tier: Tier, stored: Stored) -> None:
        """A tier's trouble is told when it begins and when it ends, by rank 0."""
        troubled = stored.place is None
        if troubled != (tier.name in self._troubled) and self._group.rank == 0:
            if troubled:
                last = tier is self._ways[-1]
                logger.warning("%s fails%s: %s", tier.name, "" if last else "; saves go to storage", stored.reason)
            else:
                logger.warning("%s works again", tier.name)
        (self._troubled.add if troubled else self._troubled.discard)(tier.name)
