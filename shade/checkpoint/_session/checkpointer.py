"""Checkpointer: what a training script holds. Attach what shall survive, call `step` after each optimizer step.

The training thread only takes the state and, depending on the strategy, waits for its copy; everything after that is
the courier's. Usually one save is under way: a save that falls due earlier waits for the one before, and says how long.

Three words, three promises: *copied*, the state may change again; *committed*, it outlives this machine; *durable*, it
outlives all of them. `wait_copy_complete`, `wait_committed` and `wait_durable` return when they hold, and an attached
optimizer calls the first of them itself. Invariant: `restore_latest` returns a committed snapshot bit for bit (with
a codec that is not exact: within the bounds that `Restored.bounds` says), and never one older than the newest that was
durable.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from shade.checkpoint._capture.app_state import AppState
from shade.checkpoint._codecs.base import memory_slots
from shade.checkpoint._commit.process_group import ProcessGroup, SingleProcessGroup, current_group
from shade.checkpoint._pacing.batching import Batching
from shade.checkpoint._pacing.schedule import Pace, PaceMeter, Schedule
from shade.checkpoint._preemption.deadline import EXIT_CODE, Deadline, open_deadline_store
from shade.checkpoint._preemption.notice import GRACE_SECONDS, source_of
from shade.checkpoint._preemption.recovery_estimate import LossTracker, RecoveryEstimate
from shade.checkpoint._restore.reader import Snapshot
from shade.checkpoint._restore.restore import Restored, restore_app_state
from shade.checkpoint._save.async_writer import AsyncWriter, CommitResult, SaveHandle
from shade.checkpoint._save.packing import KEYFRAME_EVERY, Packer
from shade.checkpoint._save.save import Saver
from shade.checkpoint._session.open_tiers import Tiers, open_tiers
from shade.checkpoint._session.wait_policy import WaitPolicy
from shade.checkpoint._strategies import STRATEGIES
from shade.errors import CheckpointError, ConfigError
from shade.types import Stateful


class Checkpointer:
    """One rank's part in keeping a run; use as a context manager. Making it, saving and loading are collective.

    Args:
        store: URL of the cluster whose memory takes snapshots; None: own memory and storage alone.
        persist_to: Path or URL of durable storage; None: memory alone.
        run: Id under which the snapshots are kept; one live run each.
        strategy: Name in `_strategies.STRATEGIES`. What is None or left out below, its terms say.
        every: When `step` saves: see `Schedule`.
        keep: What stays in storage: see `_format.retention.Keep`.
        slots: Snapshots that the cluster's memory has room for, ≥ 2: one on its way to storage, the newest, the next.
        replicas: Further copies of every chunk on other nodes of the cluster.
        parity: (k, r): instead of copies, r parity chunks for every k on other nodes.
        codec: Of the chunks: see `_codecs.base.CODECS`.
        keyframe_every: Saves from one that stands alone to the next, where the codec stores differences.
        max_error: Greatest relative error of a tensor, where the codec is not exact; one beyond it is stored exactly.
            None: the codec's own limit.
        compress: ``always``, or ``if-faster``: a chunk is compressed only where that makes the save sooner, by costs
            measured when the run begins (`_pacing.write_cost`).
        buffers: Snapshots that own memory has room for, ≥ 1; see `_buffer.shared_memory_tier`.
        in_flight: Saves under way at once, ≥ 1; never more than buffers, nor than slots beside the newest snapshot's.
        replicated: Whether all ranks hold the same parameters, as under DistributedDataParallel.
        first_rank_saves: Rank 0 keeps its own state for all, where the others' machines reach none of these places.
        make_room: Called on every rank before it saves, with the bytes of its shard: by what shares the store's memory.

    Raises:
        ConfigError: Something of this cannot be, or a named store or storage does not answer.
        RunInUseError: Another live process saves under this id.
    """

    def __init__(
        self,
        store: str | None = None,
        *,
        persist_to: str | None = None,
        run: str = "run",
        strategy: str = "overlap",
        every: str | int | None = None,
        keep: str = "last=2",
        slots: int | None = None,
        replicas: int | None = None,
        parity: tuple[int, int] | None = None,
        codec: str | None = None,
        keyframe_every: int = KEYFRAME_EVERY,
        max_error: float | None = None,
        compress: str = "always",
        buffers: int | None = None,
        in_flight: int | None = None,
        replicated: bool = True,
        first_rank_saves: bool = False,
        make_room: Callable[[int], None] | None = None,
    ) -> None:
        self.run = run
        self._strategy = STRATEGIES.get(strategy)()
        self.terms = terms = self._strategy.terms.agreed(
            every=every, codec=codec, slots=slots, replicas=replicas, buffers=buffers, in_flight=in_flight
        )
        """What holds: the strategy's terms, and what was said instead."""
        self._strategy.open(terms)
        self._schedule, self._meter = Schedule(terms.every, terms.in_flight), PaceMeter()
        self.group: ProcessGroup = current_group()
        self._contents = self._new_contents(replicated)
        self._lanes: list[ProcessGroup] = [SingleProcessGroup() if first_rank_saves else self.group]
        self._lanes += [
            SingleProcessGroup() if first_rank_saves else current_group() for _ in range(terms.in_flight - 1)
        ]
        self._saves = self.group.rank == 0 or not first_rank_saves
        packer = Packer(  # what cannot be shall be said before anything is opened
            run,
            self._lanes[0].rank,
            self._lanes[0].world_size,
            terms.codec,
            keyframe_every=keyframe_every,
            max_error=max_error,
            compress=compress,
            time_write=lambda num_bytes: self.tiers.time_write(num_bytes),
        )
        self.tiers: Tiers = open_tiers(
            run,
            self.group,
            store if self._saves else None,
            persist_to if self._saves else None,
            keep=keep,
            slots=memory_slots(terms.codec, terms.slots, keyframe_every),
            replicas=replicas or 0,
            wished_replicas=terms.replicas if replicas is None else 0,
            parity=parity,
            buffers=terms.buffers,
            in_flight=terms.in_flight,
        )
        is_durable = None if self.tiers.storage is None else self.tiers.is_durable
        self._losses = LossTracker(
            self.group.rank, self.group.world_size, terms.buffers, lambda: self.step_count, is_durable
        )
        self._deadline: Deadline | None = None
        courier = AsyncWriter(
            run,
            self._lanes,
            self.tiers.stage,
            self.tiers.memory,
            self.tiers.storage,
            packer,
            self.tiers.check_lease,
            self.tiers.landed,
            self._strategy.before_chunk,
            Batching() if terms.batches else None,
        )
        newest = max((snapshot.record.sequence for snapshot in self.list()), default=0)
        self._saver = Saver(
            self._contents, self.tiers.stage, self._strategy, terms, courier, self._lanes[0], newest, make_room
        )
        self._barrier = WaitPolicy(self._saver, self.tiers, terms)
        self._hooks: list[Any] = []
        self._closed = False
        self.step_count = 0
        """Optimizer steps done in the whole run: `step` counts, `restore` sets."""

    def _new_contents(self, replicated: bool) -> AppState:
        """What is saved: what is attached. `_session.state_dict_checkpointer` saves something else."""
        return AppState(replicated)

    # ── what is saved ───────────────────────────────────────────────────────────────────────────────────────────────

    def attach(self, **things: Stateful) -> None:
        """Takes things under its care: model, optimizer, scheduler, scaler, sampler … by name.

        The generators of Python, NumPy and PyTorch are attached already.

        Args:
            **things: Whatever has ``state_dict`` and ``load_state_dict``.

        Raises:
            ConfigError: One has no state, or a name is taken.
        """
        self._contents.attach(things)
        optimizers = [thing for thing in things.values() if isinstance(thing, torch.optim.Optimizer)]
        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self._barrier.before_step()))
        modules = [thing for thing in things.values() if isinstance(thing, torch.nn.Module)]
        self._strategy.attach(modules, optimizers)

    # ── saving ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def step(self, metrics: Mapping[str, float] | None = None) -> bool:
        """Counts an optimizer step, and saves when a save is due. After ``optimizer.step()``, on every rank.

        Args:
            metrics: Kept with the snapshot if one is taken.

        Returns:
            Whether a save was begun.
        """
        self._meter.step(time.monotonic(), busy=self._saver.is_busy)
        self.step_count += 1
        if self._deadline is not None and self._deadline.at_step():
            return True
        if not self._saves:
            return False
        self._saver.warm_up()
        if not self._schedule.is_due(self.step_count):
            return False
        self.save(metrics)
        return True

    def save(self, metrics: Mapping[str, float] | None = None) -> SaveHandle:
        """Takes a snapshot of everything attached, now. On every rank, between two optimizer steps.

        Args:
            metrics: Kept with it: numbers to choose the best by.

        Returns:
            The save, to be followed.

        Raises:
            ConfigError: Something attached cannot be saved.
            TornSnapshotError: Something changed while it was copied, and again when it was copied once more.
            StorageFullError: There is not enough shared memory for the buffer.
        """
        if not self._saves:
            return self._saver.stand_by(self.step_count, CommitResult(self.tiers.stage, ""))
        ticket = self._saver.begin(self.step_count, metrics or {}, self._meter)
        self._losses.begun(ticket, self._saver.num_bytes)
        self._schedule.saved(self.step_count, self._saver.pace)
        if not self.should_stop:  # an end that is announced does not wait
            self._barrier.after_save()
        return ticket

    def is_due(self, step: int) -> bool:
        """Whether a save falls due at that step, or before."""
        return self._schedule.is_due(step)

    @property
    def latest(self) -> SaveHandle | None:
        """The save begun last."""
        return self._saver.latest

    # ── waiting ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def wait_copy_complete(self) -> None:
        """Returns when the state may change again. Attached optimizers wait for the same before each step.

        Raises:
            TornSnapshotError: It has changed already; the message names the tensor. This snapshot is refused.
        """
        self._saver.wait_copy_complete()

    def wait_committed(self) -> str:
        """Returns when the save begun last outlives this machine.

        Returns:
            The tier that holds it: own memory only if there is no other.

        Raises:
            CheckpointError: It is nowhere; the message says why, or that there has been none.
        """
        return self._saver.landing().tier.name

    def wait_durable(self, timeout_seconds: float | None = None) -> None:
        """Returns when the save begun last is in storage.

        Args:
            timeout_seconds: Longest time to wait; None: as long as it takes.

        Raises:
            ConfigError: There is no storage.
            CheckpointError: It is nowhere, or not durable in time.
        """
        if not self._saves:
            return
        if self.tiers.storage is None:
            raise ConfigError.of("storage to be durable in", None, "pass persist_to=")
        landing = self._saver.landing()
        assert self.latest is not None
        self.tiers.wait_durable(landing, self.latest.step, timeout_seconds)

    # ── what an end would cost, and one that is announced ─────────────────────────────────────────────────────────────

    def gauge(self) -> RecoveryEstimate:
        """What would be lost, and how soon recovered, if this process, machine or cluster ended now."""
        return self._losses.read()

    def watch(self, *sources: str, grace_seconds: float = GRACE_SECONDS, exit_code: int | None = EXIT_CODE) -> None:
        """Watches for the end of this machine: `step` then saves what can be saved in time, and leaves. Collective.

        Args:
            *sources: ``SIGTERM`` (if none is named), paths of files, ``http://…``: see `_preemption.notice`.
            grace_seconds: What is left after a notice that says no time.
            exit_code: Of the SystemExit that `step` raises then; None: it returns, and `should_stop` is true.

        Raises:
            ConfigError: A source cannot be watched.
        """
        if self._deadline is not None:
            self._deadline.close()
        watched = [source_of(source, grace_seconds) for source in sources or ("SIGTERM",)]
        board = open_deadline_store(self.group.rank, self.group.world_size)
        self._deadline = Deadline(self, self._losses, board, watched, exit_code=exit_code)

    @property
    def should_stop(self) -> bool:
        """Whether an end has been announced, to this rank or another: a last snapshot is taken in the next steps."""
        return self._deadline is not None and self._deadline.should_stop

    # ── restoring ───────────────────────────────────────────────────────────────────────────────────────────────────

    def restore_latest(self, only: Sequence[str] | None = None) -> Restored:
        """Loads the newest snapshot that is whole, from the nearest place that has it.

        Args:
            only: Names of what to load, as attached; by default everything.

        Returns:
            What was loaded; false where there was nothing at all to load.

        Raises:
            CorruptCheckpointError: There are snapshots, and none is whole.
            StateMismatchError: It does not fit what is attached; nothing was changed.
            CheckpointError: There is none, but a tier is silent that might have one.
        """
        return self._restore(None, only)

    def restore(self, step: int, only: Sequence[str] | None = None) -> Restored:
        """Loads the snapshot of one step; otherwise as `restore_latest`.

        Args:
            step: Which.
            only: Names of what to load.

        Returns:
            What was loaded.

        Raises:
            CheckpointError: There is none of that step.
        """
        restored = self._restore(step, only)
        if not restored:
            known = sorted({snapshot.record.step for snapshot in self.list()})
            raise CheckpointError.of(f"a snapshot of step {step}", f"steps {known}", "choose one of those")
        return restored

    def _restore(self, step: int | None, only: Sequence[str] | None) -> Restored:
        self._saver.before_step()
        self._saver.settle()
        restored, found = restore_app_state(self.tiers.reader, self.group, self._contents, step, only)
        if found is not None:
            self.step_count = restored.step
            self._saver.sequence = max(self._saver.sequence, found.newest_sequence)
            self._schedule.saved(self.step_count, Pace())
            self._losses.restored(restored.step, found.held_by, found.tiers, restored.seconds, restored.num_bytes)
        return restored

    def list(self) -> list[Snapshot]:
        """Every snapshot of the run that this rank can see, newest first."""
        return self.tiers.reader.snapshots()

    # ── ending ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Waits until what was saved has landed, then lets go of everything. Safe to call twice.

        Raises:
            CheckpointError: The save begun last is nowhere.
        """
        if self._closed:
            return
        is_safe = False
        try:
            if self.latest is not None:
                self._saver.landing()
            is_safe = True
        finally:
            self._end(keep_buffers=not is_safe)

    def _end(self, *, keep_buffers: bool) -> None:
        self._closed = True
        if self._deadline is not None:
            self._deadline.close()
        for hook in self._hooks:
            hook.remove()
        self._saver.close()
        self._losses.close()
        self.tiers.close(keep_buffers=keep_buffers)
        for group in (self.group, *self._lanes):
            group.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes; after an exception without waiting, and with own memory left for whoever comes after."""
        if error is None:
            self.close()
        elif not self._closed:
            self._end(keep_buffers=True)
