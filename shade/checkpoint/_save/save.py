"""Saves on the training thread: the state is captured, laid out, copied, handed to the writer, and waited for.

What is captured is live; the strategy decides when it is copied. One copy is made at a time, and as many saves are in
flight as the strategy's config allows. Invariant: a buffer is written to by one save only, from `begin` until that save
is committed or failed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any, Final

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shade.checkpoint._buffer.copy_and_compare import Comparison, prepare
from shade.checkpoint._buffer.shared_memory_tier import SharedMemoryTier
from shade.checkpoint._buffer.stream_hash import StreamHash
from shade.checkpoint._buffer.tensor_copy import Copying
from shade.checkpoint._capture.app_state import AppState, CapturedState
from shade.checkpoint._capture.layout import ShardLayout, TensorSpec, lay_out
from shade.checkpoint._pacing.schedule import Pace, PaceMeter
from shade.checkpoint._save.async_writer import AsyncWriter, CommitResult, SaveHandle, SaveRequest
from shade.checkpoint._strategies.base import DurabilityLevel, Strategy, StrategyConfig
from shade.errors import CheckpointError, ConfigError, StorageFullError, TornSnapshotError
from shade.rank_group import RankGroup, agreed_name, shared_store

DURABLE_PATIENCE_SECONDS: Final = 600.0
"""Longest time that training waits for a committed save to become durable."""
_PATIENCE_SECONDS: Final = 10.0
"""Time after which a save that waits for another rank is named in the log."""

logger = logging.getLogger("shade.checkpoint")
_saving: dict[Future[Any], object] = {}
"""Whose save is in flight, by the save's end."""


def keep_until(done: Future[Any], owner: object) -> None:
    """Keeps an object that the script has dropped alive until its save is committed or has failed."""
    _saving[done] = owner
    done.add_done_callback(lambda _: _saving.pop(done, None))


class SaveCalls:
    """Finds saves that a rank leaves out while others wait for it, as in ``if rank == 0: checkpointer.save()``.

    A rank that begins a save notes it in torch.distributed's own key-value store; each rank looks there once a step,
    which takes 22 µs, and joins with an error what it has passed: so the save fails on all ranks at once. Collective to
    make; of one rank alone, nothing is looked for.
    """

    def __init__(self, group: RankGroup) -> None:
        self._rank, self._world_size, self._store = group.rank, group.world_size, None
        if group.world_size > 1:
            self._store = shared_store(f"saves/{agreed_name(group)}")

    def close(self) -> None:
        """Drops the store, whose server a new group of this process may start anew."""
        self._store = None

    def note(self, number: int, step: int) -> None:
        """Notes that this rank begins a save, the ``number``-th, of a step."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the process that holds the store is gone: the run is ending
                self._store.set(f"{number}", f"{step}")
                self._store.set(f"{number}-{self._rank}", "")

    def step_of(self, number: int) -> int | None:
        """Returns the step whose save some rank has begun as its ``number``-th; None if none has."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                if self._store.check([f"{number}"]):
                    return int(self._store.get(f"{number}"))
        return None

    def missing(self, number: int) -> list[int]:
        """Returns the ranks that have not begun a save yet."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                return [rank for rank in range(self._world_size) if not self._store.check([f"{number}-{rank}"])]
        return []


class Saver:
    """The saves of one rank. ``sequence`` is the number of the newest snapshot that exists. ``make_room`` is called
    before each copy with the length of this rank's shard, so that the owner of other memory can give some back."""

    def __init__(
        self,
        app_state: AppState,
        shared_memory: SharedMemoryTier,
        strategy: Strategy,
        config: StrategyConfig,
        writer: AsyncWriter,
        group: RankGroup,
        sequence: int,
        calls: SaveCalls,
        make_room: Callable[[int], None] | None = None,
    ) -> None:
        self._app_state, self._shared_memory, self._strategy, self._writer = app_state, shared_memory, strategy, writer
        self._config, self._group, self._calls = config, group, calls
        self._comparison = Comparison()
        self.sequence = sequence
        """Number of the newest snapshot; the next one's is higher."""
        self.latest: SaveHandle | None = None
        """The save begun last."""
        self.num_begun = 0
        """Saves begun by this object."""
        self.settled: SaveHandle | None = None
        """The last save that was waited for to make room for another; the same on every rank."""
        self._in_flight: deque[SaveHandle] = deque()
        """Saves that may not be committed yet, oldest first."""
        self._make_room = make_room
        self._layout: ShardLayout | None = None
        self._specs: dict[str, TensorSpec] = {}
        """What the layout was made for."""
        self._is_copying = False
        self._copied: set[int] = set()
        """Where the memory begins that is being copied."""
        self._step_hook: Any = None
        self._preparing: threading.Thread | None = None

    @property
    def num_bytes(self) -> int:
        """Length of this rank's shard in the save begun last."""
        return self._layout.num_bytes if self._layout is not None else 0

    @property
    def is_busy(self) -> bool:
        """Whether a save is in flight."""
        return not all(handle.committed.done() for handle in self._in_flight)

    def begin(self, step: int, metrics: Mapping[str, float], meter: PaceMeter) -> SaveHandle:
        """Takes a snapshot; waits until there is room for it. The metrics are kept with it, and the meter learns that a
        save begins. Raises `ConfigError` if something attached, or a metric, cannot be saved, `TornSnapshotError` if
        something changed while it was copied, and again during a second copy, and `StorageFullError` if there is not
        enough shared memory for the buffer."""
        begun = time.monotonic()
        self._calls.note(self.num_begun + 1, step)
        self.before_step()
        self._wait_for_room(step)
        handle = self._new_handle(step)
        sequence, saved_at = self.sequence, time.time()
        pace = self._measured(meter)
        is_buffer_taken = False
        try:
            captured = self._app_state.capture(self._group.rank, self._group.world_size)
            numbers = _numbers(metrics)
            replica = captured.replica(self._group.world_size, self.num_begun)
            layout = self._lay_out(captured)
            if self._make_room is not None:
                self._make_room(layout.num_bytes)
            location, buffer = self._shared_memory.begin(layout.num_bytes)
            is_buffer_taken = True
            if self._preparing is None:
                self._prepare(prepare)
            data = memoryview(buffer.numpy().data)[: layout.num_bytes]
            streams = self._strategy.config.streams and self._writer.can_stream
            stream_hash = StreamHash(data) if streams else None
            copying = Copying(captured.tensors, layout.entries, buffer, captured.steady, stream_hash, self._comparison)
            copied = self._strategy.begin(copying)
            # Torn while the training thread is still here: it waits, so no step tears the second copy. A copy that is
            # torn later makes the save fail.
            if copied.done() and copied.exception() is not None:
                copied = self._copy_again(step, copying)
                stream_hash = None if stream_hash is None else StreamHash.of_all(data)
        except BaseException as error:
            # The other ranks are about to wait for this rank in a collective: the failure goes there too, and the turn
            # of the buffers is taken, so that all ranks stay in step.
            if not is_buffer_taken:
                self._shared_memory.skip()
            handle.copied.set_exception(error)
            self._writer.send(SaveRequest(handle, sequence, saved_at, pace))
            raise
        self._is_copying = True
        copied.add_done_callback(lambda done: self._pass_on(done, handle.copied))
        if not copied.done():
            self._guard(captured)
        if stream_hash is not None:
            end = stream_hash.end
            handle.copied.add_done_callback(lambda _: end())
        request = SaveRequest(
            handle=handle,
            sequence=sequence,
            saved_at=saved_at,
            pace=pace,
            metrics=numbers,
            replica=replica,
            entries=layout.entries,
            tree=captured.tree,
            num_bytes=layout.num_bytes,
            buffer=buffer,
            location=location,
            stream_hash=stream_hash,
        )
        # A tensor's last reference releases the interpreter's lock as it dies. After the writer has begun to work, each
        # of a thousand would wait to get it back: a third of what a save costs. So they die before.
        del captured, copying
        self._writer.send(request)
        handle.blocked_seconds += time.monotonic() - begun
        return handle

    def _new_handle(self, step: int) -> SaveHandle:
        self.sequence += 1
        self.num_begun += 1
        self.latest = SaveHandle(step, self.num_begun)
        self._in_flight.append(self.latest)
        return self.latest

    def check_calls(self, step: int) -> None:
        """Raises a CheckpointError if another rank saves a step that this one has left without a save: ``step``, or one
        before. That save fails on all ranks."""
        begun = self._calls.step_of(self.num_begun + 1)
        if begun is None or begun > step:
            return
        expected = f"every rank to save step {begun}"
        error = CheckpointError.of(expected, f"no save() on rank {self._group.rank}", "call it without `if rank == 0`")
        handle = self._new_handle(begun)
        self._shared_memory.skip()
        handle.copied.set_exception(error)
        self._writer.send(SaveRequest(handle, self.sequence, time.time(), Pace()))
        raise error

    def stand_by(self, step: int, result: CommitResult) -> SaveHandle:
        """Returns a committed handle, on a rank for which another rank saves."""
        handle = self.latest = SaveHandle(step)
        handle.copied.set_result(None)
        handle.committed.set_result(result)
        return handle

    def _copy_again(self, step: int, copying: Copying) -> Future[None]:
        try:
            self._strategy.wait()
        except TornSnapshotError as error:
            logger.warning("step %d: %s; copying it again", step, error)
        copying.again().finish()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _guard(self, captured: CapturedState) -> None:
        """Makes every optimizer that would change what is being copied wait for the copy, attached or not."""
        # A fused optimizer does not count its changes, and may change a bit in few words only: no check would see it.
        self._copied = {0, *map(_storage_of, captured.tensors.values())}
        if self._step_hook is None:
            this = weakref.ref(self)
            self._step_hook = register_optimizer_step_pre_hook(lambda optimizer, *_: _wait_before(this(), optimizer))

    def is_copying(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a copy is under way of what an optimizer's step changes."""
        params = (param for group in optimizer.param_groups for param in group["params"])
        return self._is_copying and any(_storage_of(param) in self._copied for param in params)

    def _pass_on(self, done: Future[None], to: Future[None]) -> None:
        error = done.exception()
        if isinstance(error, TornSnapshotError):
            self._app_state.note_torn()
        if error is None:
            to.set_result(None)
        else:
            to.set_exception(error)

    def wait_copy_complete(self) -> None:
        """Returns when the state may change again; raises a TornSnapshotError if it has changed already."""
        is_copying, self._is_copying = self._is_copying, False
        if not is_copying:
            return
        assert self.latest is not None, "a copy belongs to a save"
        with self.latest.blocking():
            self._strategy.wait()

    def before_step(self) -> None:
        """Waits as `wait_copy_complete` does, but a torn copy does not raise: the writer logs the failure."""
        with contextlib.suppress(TornSnapshotError):
            self.wait_copy_complete()

    def _measured(self, meter: PaceMeter) -> Pace:
        meter.begun()
        last = self.settled
        if last is None:
            return meter.pace()
        return meter.pace(last.commit_seconds, last.blocked_seconds)

    @property
    def pace(self) -> Pace:
        """The newest pace that every rank knows: it came with the last save that was waited for."""
        return Pace() if self.settled is None else self.settled.pace

    def _wait_for_room(self, step: int) -> None:
        """Waits until the oldest save is committed, or until all are if one of them is of this very step."""
        # Two saves of one step, in flight at once, would choose the same folder in storage.
        if any(handle.step == step for handle in self._in_flight):
            self.settle()
        elif len(self._in_flight) == self._config.in_flight:
            self._wait_for_oldest()

    def settle(self) -> None:
        """Returns when every save is committed or has failed: their buffers are free. Failures have been logged."""
        while self._in_flight:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        self.settled = self._in_flight.popleft()
        self._await(self.settled)

    def result(self) -> CommitResult:
        """Waits for the save begun last; raises a CheckpointError if no tier has taken it, or no save was begun."""
        self.wait_copy_complete()
        if self.latest is None:
            raise CheckpointError.of("a save to wait for", None, "call save() first")
        self._await(self.latest)
        return self.latest.committed.result()

    def _await(self, handle: SaveHandle) -> None:
        if not wait([handle.committed], _PATIENCE_SECONDS).done and (ranks := self._calls.missing(handle.number)):
            logger.warning(
                "the save of step %d waits for save() on ranks %s: every rank has to call it", handle.step, ranks
            )
        wait([handle.committed])

    def warm_up(self) -> None:
        """Makes the buffers and compiles the copying in the background, once, so that the first save need not wait."""
        if self._layout is not None:
            return
        layout = self._lay_out(self._app_state.capture(self._group.rank, self._group.world_size))

        def reserve() -> None:
            # The save that needs them raises it.
            with contextlib.suppress(StorageFullError):
                self._shared_memory.reserve(layout.num_bytes)
            prepare()

        self._prepare(reserve)

    def _prepare(self, work: Callable[[], None]) -> None:
        self._preparing = threading.Thread(target=work, name="shade-prepare", daemon=True)
        self._preparing.start()

    def _lay_out(self, captured: CapturedState) -> ShardLayout:
        """Returns the layout; makes a new one only when tensors were added, removed or changed their shape."""
        specs = captured.specs()
        if self._layout is None or specs != self._specs:
            self._layout = lay_out(specs, self._group.rank, self._group.world_size)
            self._specs = specs
        return self._layout

    def close(self) -> None:
        """Returns when every save is committed or has failed, and ends the threads. Safe to call twice."""
        if self._preparing is not None:
            self._preparing.join()
        if self._step_hook is not None:
            self._step_hook.remove()
        self._strategy.close()
        self._writer.close()
        self._calls.close()


class WaitPolicy:
    """Makes the training thread wait for as long as the strategy's config says.

    Args:
        saver: Whose saves are waited for.
        config: How far a save must have come.
        wait_durable: Returns when a committed save of a step is in storage, or raises a CheckpointError after so many
            seconds; None: there is no storage.
    """

    def __init__(
        self, saver: Saver, config: StrategyConfig, wait_durable: Callable[[CommitResult, int, float], None] | None
    ) -> None:
        self._saver, self._wait_durable = saver, wait_durable
        after_copy: Mapping[DurabilityLevel, Callable[[SaveHandle], None]] = {
            "begun": lambda _: None,
            "copied": lambda _: None,
            "committed": self._until_committed,
            "durable": self._until_committed if wait_durable is None else self._until_durable,
        }
        self._after_save, self._before_step = after_copy[config.save_waits_for], after_copy[config.step_waits_for]
        self._save_waits_for_copy = config.save_waits_for != "begun"
        self._passed: SaveHandle | None = None
        """The save that need not be waited for again."""

    def after_save(self) -> None:
        """Waits before `save` returns."""
        if self._save_waits_for_copy:
            self._saver.before_step()
        self._wait(self._after_save)

    def before_step(self) -> None:
        """Waits before an optimizer steps, and so changes what may not have been copied."""
        self._saver.before_step()
        if self._saver.latest is not self._passed:
            self._wait(self._before_step)
            self._passed = self._saver.latest

    def _wait(self, until: Callable[[SaveHandle], None]) -> None:
        handle = self._saver.latest
        if handle is not None:
            with handle.blocking():
                until(handle)

    def _until_committed(self, handle: SaveHandle) -> None:
        wait([handle.committed])

    def _until_durable(self, handle: SaveHandle) -> None:
        self._until_committed(handle)
        if handle.committed.exception() is not None:
            return
        assert self._wait_durable is not None
        try:
            self._wait_durable(handle.committed.result(), handle.step, DURABLE_PATIENCE_SECONDS)
        except CheckpointError as error:
            logger.warning("training continues before step %d is durable: %s", handle.step, error)


def _wait_before(saver: Saver | None, optimizer: torch.optim.Optimizer) -> None:
    if saver is not None and saver.is_copying(optimizer):
        saver.before_step()


def _storage_of(tensor: torch.Tensor) -> int:
    """Returns where the memory begins that a tensor is a view of; 0 if it is made of others."""
    return tensor.untyped_storage().data_ptr() if type(tensor) in (torch.Tensor, torch.nn.Parameter) else 0


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns metrics as plain numbers; they may come as tensors of one element."""
    try:
        plain = {str(name): value.item() if hasattr(value, "item") else value for name, value in metrics.items()}
        return {name: float(value) for name, value in plain.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError.of("a number for each metric", metrics, "pass {'loss': loss.item()}, say") from error
