"""Saves, from the live state to the courier: captured, laid out, copied, sent off, and followed.

The part of a `Checkpointer` that the training thread waits in. What is captured is live; the strategy decides when it
is copied. What moves while the training thread is still in `begin` is copied again, once; what is found to have moved
later is refused, for all that is no tensor is of another moment by then.

One copy at a time, and as many saves on their way as the terms allow: one more waits until the oldest has landed.
Every rank waits for the same one, so what that one has told of the pace is the same on every rank. Invariant: a buffer
is written to by one save only, from `begin` until that save has landed or failed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any

import torch

from shade.checkpoint._buffer.copy import Copying
from shade.checkpoint._buffer.shared_memory_tier import SharedMemoryTier
from shade.checkpoint._buffer.stream_hash import StreamHash
from shade.checkpoint._buffer.streaming_copy import prepare
from shade.checkpoint._buffer.torn_read import Comparison
from shade.checkpoint._capture.app_state import AppState, CapturedState
from shade.checkpoint._capture.layout import ShardLayout, TensorSpec, lay_out
from shade.checkpoint._commit.process_group import ProcessGroup
from shade.checkpoint._commit.protocol import Notes
from shade.checkpoint._pacing.cpu_time import cpu_seconds
from shade.checkpoint._pacing.schedule import Pace, PaceMeter
from shade.checkpoint._save.async_writer import AsyncWriter, CommitResult, SaveHandle, SaveRequest
from shade.checkpoint._strategies.base import Strategy, Terms
from shade.errors import CheckpointError, ConfigError, StorageFullError, TornSnapshotError

logger = logging.getLogger("shade.checkpoint")


class Saver:
    """One rank's saves.

    Args:
        contents: What is saved.
        stage: Where it is copied to.
        strategy: When.
        terms: How many saves at once, and whether they are streamed.
        courier: Who takes it from there.
        group: The ranks that save together.
        sequence: Of the newest snapshot that there is.
        make_room: Called before a copy is begun, with the length of this rank's shard; None: nobody has to yield.
    """

    def __init__(
        self,
        contents: AppState,
        stage: SharedMemoryTier,
        strategy: Strategy,
        terms: Terms,
        courier: AsyncWriter,
        group: ProcessGroup,
        sequence: int,
        make_room: Callable[[int], None] | None = None,
    ) -> None:
        self._contents, self._stage, self._strategy, self._courier = contents, stage, strategy, courier
        self._terms, self._group = terms, group
        self._comparison = Comparison()
        self.sequence = sequence
        """Of the newest snapshot; the next one's is higher."""
        self.latest: SaveHandle | None = None
        """The save begun last."""
        self.settled: SaveHandle | None = None
        """The last save that was waited for to make room for another; the same on every rank."""
        self._under_way: deque[SaveHandle] = deque()
        """Saves that may not have landed yet, oldest first."""
        self._make_room = make_room
        self._plan: ShardLayout | None = None
        self._planned_for: dict[str, TensorSpec] = {}
        self._is_copying = False
        self._preparing: threading.Thread | None = None

    @property
    def num_bytes(self) -> int:
        """Length of this rank's shard in the save begun last."""
        return self._plan.num_bytes if self._plan is not None else 0

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way."""
        return not all(ticket.landed.done() for ticket in self._under_way)

    def begin(self, step: int, metrics: Mapping[str, float], meter: PaceMeter) -> SaveHandle:
        """Takes a snapshot; waits until there is room for it.

        Args:
            step: Optimizer steps done.
            metrics: Kept with it.
            meter: What this rank has measured so far; is told that a save begins.

        Returns:
            The save.

        Raises:
            ConfigError: Something attached, or a metric, cannot be saved.
            TornSnapshotError: Something changed while it was copied, and again when it was copied once more.
            StorageFullError: There is not enough shared memory for the buffer.
        """
        begun = time.monotonic()
        self.before_step()
        self._make_way(step)
        self.sequence += 1
        ticket = self.latest = SaveHandle(step)
        self._under_way.append(ticket)
        pace = self._strategy.steer(self._measured(meter), self.pace)
        notes = Notes(self.sequence, time.time(), {}, pace, "")
        buffer: torch.Tensor | None = None
        try:
            captured = self._contents.capture(self._group.rank, self._group.world_size)
            notes = replace(notes, metrics=_numbers(metrics), replica=captured.replica(self._group.world_size))
            layout = self._layout(captured)
            if self._make_room is not None:
                self._make_room(layout.num_bytes)
            place, buffer = self._stage.begin(layout.num_bytes)
            if self._preparing is None:
                self._prepare(prepare)
            streams = self._strategy.streams and self._terms.codec == "none"
            data = memoryview(buffer.numpy().data)[: layout.num_bytes]
            arrivals = StreamHash(data) if streams else None
            copying = Copying(captured.tensors, layout.entries, buffer, captured.steady, arrivals, self._comparison)
            copied = self._strategy.begin(copying)
            if copied.done() and copied.exception() is not None:
                copied = self._again(step, copying)
                arrivals = None if arrivals is None else StreamHash.of_all(data)
        except BaseException as error:
            # Story: the other ranks are about to wait for this one's word. So it goes there too, and the turn is taken.
            if buffer is None:
                self._stage.skip()
            ticket.copied.set_exception(error)
            self._courier.send(SaveRequest(ticket, {}, None, 0, torch.empty(0, dtype=torch.uint8), "", notes))
            raise
        self._is_copying = True
        copied.add_done_callback(lambda done: _pass_on(done, ticket.copied))
        if arrivals is not None:
            end = arrivals.end
            ticket.copied.add_done_callback(lambda _: end())
        parcel = SaveRequest(ticket, layout.entries, captured.tree, layout.num_bytes, buffer, place, notes, arrivals)
        # Story: a tensor's last reference lets go of the interpreter as it dies. Were that after the courier has begun
        # to work, each of a thousand would wait to get it back: a third of what a save costs. So they die first.
        del captured, copying
        self._courier.send(parcel)
        ticket.blocked_seconds += time.monotonic() - begun
        ticket.released_effort_seconds = cpu_seconds()
        return ticket

    def stand_by(self, step: int, landing: CommitResult) -> SaveHandle:
        """What a rank has to show for a save that another makes for it.

        Args:
            step: Optimizer steps done.
            landing: Where, as far as this rank knows.

        Returns:
            A save that has landed.
        """
        ticket = self.latest = SaveHandle(step)
        ticket.copied.set_result(None)
        ticket.landed.set_result(landing)
        return ticket

    def _again(self, step: int, copying: Copying) -> Future[None]:
        """Copies once more, at once, what has just failed."""
        try:
            self._strategy.wait()
        except TornSnapshotError as error:
            logger.warning("step %d: %s; copying it again", step, error)
        copying.again().finish()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def wait_copy_complete(self) -> None:
        """Returns when the state may change again.

        Raises:
            TornSnapshotError: It has changed already. Nothing is saved.
        """
        is_copying, self._is_copying = self._is_copying, False
        if not is_copying:
            return
        ticket = self.latest
        assert ticket is not None, "whoever copies has a ticket"
        with ticket.blocking():
            self._strategy.wait()

    def before_step(self) -> None:
        """As `wait_copy_complete`, but a torn copy is no reason to end a training: the courier says that it failed."""
        with contextlib.suppress(TornSnapshotError):
            self.wait_copy_complete()

    def _measured(self, meter: PaceMeter) -> Pace:
        meter.begun()
        last = self.settled
        return (
            meter.pace() if last is None else meter.pace(last.landed_seconds, last.blocked_seconds, last.worked_seconds)
        )

    @property
    def pace(self) -> Pace:
        """The newest that every rank knows: it came with the last save that was waited for."""
        return Pace() if self.settled is None else self.settled.pace

    def _make_way(self, step: int) -> None:
        """Waits for room: the oldest save has landed, or all have, if one of them is of this very step.

        Story: two saves of one step, on their way at once, would choose the same folder in storage for it.
        """
        if any(ticket.step == step for ticket in self._under_way):
            self.settle()
        elif len(self._under_way) == self._terms.in_flight:
            self._wait_for_oldest()

    def settle(self) -> None:
        """Returns when every save has landed or failed: their buffers are free. A failure has been told."""
        while self._under_way:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        self.settled = self._under_way.popleft()
        wait([self.settled.landed])

    def landing(self) -> CommitResult:
        """Where the save begun last has come to; waits for it.

        Returns:
            The tier and the place.

        Raises:
            CheckpointError: It is nowhere, or there has been none.
        """
        self.wait_copy_complete()
        if self.latest is None:
            raise CheckpointError.of("a save to wait for", None, "call save() first")
        return self.latest.landed.result()

    def warm_up(self) -> None:
        """Has the buffers made and the copying compiled, the first time: the first save shall not wait for them."""
        if self._plan is not None:
            return
        layout = self._layout(self._contents.capture(self._group.rank, self._group.world_size))

        def reserve() -> None:
            with contextlib.suppress(StorageFullError):  # the save that needs them will say so
                self._stage.reserve(layout.num_bytes)
            prepare()

        self._prepare(reserve)

    def _prepare(self, work: Callable[[], None]) -> None:
        """Begins what is done once, in a thread."""
        self._preparing = threading.Thread(target=work, name="shade-prepare", daemon=True)
        self._preparing.start()

    def _layout(self, captured: CapturedState) -> ShardLayout:
        """Where each tensor goes; planned anew when tensors have come, gone or changed their form."""
        specs = captured.specs()
        if self._plan is None or specs != self._planned_for:
            self._plan = lay_out(specs, self._group.rank, self._group.world_size)
            self._planned_for = specs
        return self._plan

    def close(self) -> None:
        """Returns when everything has landed or failed, and ends the threads. Safe to call twice."""
        if self._preparing is not None:
            self._preparing.join()
        self._strategy.close()
        self._courier.close()


def _pass_on(done: Future[None], to: Future[None]) -> None:
    error = done.exception()
    if error is None:
        to.set_result(None)
    else:
        to.set_exception(error)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as plain numbers: they may come as tensors of one element."""
    try:
        plain = {str(name): value.item() if hasattr(value, "item") else value for name, value in metrics.items()}
        return {name: float(value) for name, value in plain.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError.of("a number for each metric", metrics, "pass loss.item(), say") from error
