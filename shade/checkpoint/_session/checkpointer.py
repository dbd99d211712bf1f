"""Checkpointer: what a training script holds. It attaches its objects, and calls `step` after each optimizer step.

The training thread only captures the state and, depending on the strategy, waits for its copy; the async writer does
the rest. *Copied*: the state may change again; *committed*: the snapshot outlives this machine; *durable*: it outlives
all machines. Invariant: `restore_latest` returns a committed snapshot bit for bit (with a lossy codec: within
`Restored.bounds`), and never one older than the newest durable one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from shade.checkpoint._capture.app_state import AppState, steppers
from shade.checkpoint._capture.flatten import part_of, unflatten
from shade.checkpoint._codecs.delta import memory_slots
from shade.checkpoint._pacing.batching import Batching
from shade.checkpoint._pacing.schedule import Pace, PaceMeter, Schedule
from shade.checkpoint._preemption.deadline import EXIT_CODE, Deadline, open_deadline_store
from shade.checkpoint._preemption.notice import GRACE_SECONDS, source_of
from shade.checkpoint._preemption.recovery_estimate import LossTracker, RecoveryEstimate
from shade.checkpoint._restore.reader import Snapshot
from shade.checkpoint._restore.restore import Restored, load_module, read_newest_alone, restore_app_state
from shade.checkpoint._save.async_writer import AsyncWriter, CommitResult, SaveHandle
from shade.checkpoint._save.packing import KEYFRAME_EVERY, Packer
from shade.checkpoint._save.save import SaveCalls, Saver, WaitPolicy, keep_until
from shade.checkpoint._session.at_exit import end_at_exit
from shade.checkpoint._session.open_tiers import Tiers, open_tiers, open_to_read
from shade.checkpoint._strategies import STRATEGIES, StrategyConfig
from shade.errors import CheckpointError, ConfigError
from shade.rank_group import RankGroup, SingleProcessGroup, check_alike, check_met, current_group
from shade.types import Stateful, StrategyName

DEFAULT_RUN = "run"
"""Id of a run that was given none."""

logger = logging.getLogger("shade.checkpoint")


class Checkpointer:
    """Saves and restores one run, as one of its ranks; a context manager.

    Making it, saving and restoring are collective: every rank does it at the same step.

    Args:
        store: URL of the cluster whose memory takes snapshots; None: shared memory and storage alone.
        persist_to: Path or URL of durable storage; None: memory alone.
        run: Id of the run in these locations; one live process group each. None: ``run``, and without any storage the
            command line distinguishes one job's snapshots from another's.
        strategy: Name in `_strategies.STRATEGIES`. It sets every argument below that is None.
        every: When `step` saves: ``50`` (steps), ``"30s"``, ``"5m"``, ``"2%"`` (of the time), ``"never"``; see
            `Schedule`.
        keep: Which snapshots stay in storage: see `_format.retention.Keep`.
        slots: Snapshots that the cluster's memory has room for, ≥ 2: one being flushed, the newest, the next.
        replicas: Further copies of every chunk on other nodes of the cluster.
        parity: (k, r): instead of copies, r parity chunks for every k chunks, on other nodes.
        codec: Codec of the chunks: see `CODECS`.
        keyframe_every: Saves from one full snapshot to the next, with a codec that stores differences.
        max_error: Greatest relative error of a tensor, with a lossy codec; a tensor beyond it is stored exactly. None:
            the codec's own limit.
        compress: ``always``, or ``if-faster``: a chunk is compressed only where that shortens the save, by costs
            measured when the run begins (`_pacing.write_cost`).
        buffers: Snapshots that shared memory has room for, ≥ 1; see `_buffer.shared_memory_tier`.
        in_flight: Saves in flight at once, ≥ 1; at most as many as buffers, and as slots beside the newest snapshot's.
        replicated: Whether all ranks hold the same parameters, as under DistributedDataParallel. A DTensor says itself
            what each rank holds.
        first_rank_saves: Rank 0 saves its own state for all ranks, where the others' machines reach none of these
            tiers.
        make_room: Called on every rank before it saves, with the bytes of its shard, so that a cache in the same store
            can give memory back.

    Raises:
        ConfigError: An argument cannot be honoured, or the store or the storage does not answer.
        RunInUseError: Another live process saves under this id.
    """

    def __init__(
        self,
        store: str | None = None,
        *,
        persist_to: str | os.PathLike[str] | None = None,
        run: str | None = None,
        strategy: StrategyName = "overlap",
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
        run, is_named = run or DEFAULT_RUN, run is not None
        self._run, self._strategy_name = run, strategy
        purpose = f"snapshots of run {run!r}"
        check_met(purpose)
        self._group: RankGroup = current_group(purpose)
        given = {"store": store and "given", "persist_to": persist_to and "given", "run": run, "strategy": strategy}
        check_alike(self._group, {**given, "every": every, "codec": codec, "first_rank_saves": first_rank_saves})
        self._strategy = STRATEGIES.get(strategy)()
        self._config = config = self._strategy.config.agreed(
            every=every, codec=codec, slots=slots, replicas=replicas, buffers=buffers, in_flight=in_flight
        )
        world_size = 1 if first_rank_saves else self._group.world_size
        board = None if world_size == 1 else open_deadline_store(self._group.rank, world_size)
        self._schedule = Schedule(config.every, config.in_flight, board, self._group.rank)
        self._meter = PaceMeter()
        self._app_state = self._new_app_state(replicated)
        self._save_groups: list[RankGroup] = [SingleProcessGroup() if first_rank_saves else self._group]
        self._save_groups += [
            SingleProcessGroup() if first_rank_saves else current_group(purpose) for _ in range(config.in_flight - 1)
        ]
        self._saves = self._group.rank == 0 or not first_rank_saves
        # Before any tier is opened: it refuses wrong arguments, and `time_write` is called later.
        packer = Packer(
            run,
            self._save_groups[0].rank,
            self._save_groups[0].world_size,
            config.codec,
            keyframe_every=keyframe_every,
            max_error=max_error,
            compress=compress,
            time_write=lambda num_bytes: self._tiers.time_write(num_bytes),
        )
        self._tiers: Tiers = open_tiers(
            run,
            self._group,
            store if self._saves else None,
            persist_to if self._saves else None,
            keep=keep,
            slots=memory_slots(config.codec, config.slots, keyframe_every),
            replicas=replicas or 0,
            wished_replicas=config.replicas if replicas is None else 0,
            parity=parity,
            buffers=config.buffers,
            in_flight=config.in_flight,
            is_named=is_named,
        )
        has_storage = self._tiers.storage is not None
        self._losses = LossTracker(
            self._group.rank,
            self._group.world_size,
            config.buffers,
            lambda: self.step_count,
            self._tiers.is_durable if has_storage else None,
        )
        self._deadline: Deadline | None = None
        writer = AsyncWriter(
            self._save_groups,
            self._tiers.shared_memory,
            self._tiers.memory,
            self._tiers.storage,
            packer,
            self._tiers.check_run_lock,
            self._tiers.after_commit,
            self._strategy.before_chunk,
            Batching() if config.batches else None,
        )
        self._saver = Saver(
            self._app_state,
            self._tiers.shared_memory,
            self._strategy,
            config,
            writer,
            self._save_groups[0],
            self._tiers.reader.newest_sequence(),
            SaveCalls(self._save_groups[0]),
            make_room,
        )
        self._wait_policy = WaitPolicy(self._saver, config, self._tiers.wait_durable if has_storage else None)
        self._hooks: list[Any] = []
        self._closed = False
        self._saved_step = 0
        self._has_changed = False
        """Whether an attached optimizer has begun a step that `step` has not counted yet."""
        self.step_count = 0
        """Optimizer steps done in the whole run: `step` counts, `restore` sets."""
        end_at_exit(self._at_exit)

    def _check_open(self, what: str) -> None:
        if self._closed:
            cure = "make another for what follows, or let the `with` block end later"
            raise ConfigError.of("an open Checkpointer", f"{what}() after close()", cure)

    def _new_app_state(self, replicated: bool) -> AppState:
        # Overridden by `StateDictCheckpointer`, whose state is passed at each save.
        return AppState(replicated)

    @property
    def run(self) -> str:
        """The run id."""
        return self._run

    @property
    def config(self) -> StrategyConfig:
        """The strategy's config that holds: its own values, and what was passed instead."""
        return self._config

    def __repr__(self) -> str:
        shown = [repr(self._run), self._strategy_name, f"every {self._config.every}"]
        shown += self._tiers.locations
        shown += [f"step {self.step_count}", f"{self._saver.num_begun} save{'' if self._saver.num_begun == 1 else 's'}"]
        latest = self.latest
        if latest is not None:
            shown.append(f"step {latest.step} {_state_of(latest)}")
        return f"<Checkpointer of run {', '.join(shown)}{', closed' if self._closed else ''}>"

    # ── what is saved ───────────────────────────────────────────────────────────────────────────────────────────────

    def attach(self, **objects: Stateful) -> None:
        """Attaches objects by name, to be saved and restored: model, optimizer, scheduler, scaler, sampler …

        The generators of Python, NumPy and PyTorch are attached already. A model is attached after it is sharded.

        Args:
            **objects: Any objects with ``state_dict`` and ``load_state_dict``.

        Raises:
            ConfigError: One has no state, or a name is taken.
        """
        self._app_state.attach(objects)
        optimizers = [
            each
            for target in objects.values()
            if isinstance(target, torch.optim.Optimizer)
            for each in steppers(target)
        ]
        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self._before_optimizer_step()))
        modules = [each for each in objects.values() if isinstance(each, torch.nn.Module)]
        self._strategy.attach(modules, optimizers)

    def _before_optimizer_step(self) -> None:
        self._wait_policy.before_step()
        self._has_changed = True

    # ── saving ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def step(self, metrics: Mapping[str, float] | None = None) -> bool:
        """Counts an optimizer step, and saves when a save is due. Call it after ``optimizer.step()``, on every rank.

        Args:
            metrics: Kept with the snapshot if one is taken.

        Returns:
            Whether a save was begun.
        """
        self._check_open("step")
        self._saver.check_calls(self.step_count)
        self._meter.step(time.monotonic(), busy=self._saver.is_busy)
        self.step_count += 1
        self._has_changed = False
        self._app_state.count_step()
        if self._deadline is not None and self._deadline.at_step():
            return True
        if not self._saves:
            return False
        self._saver.warm_up()
        self._schedule.look(self.step_count)
        if not self._schedule.is_due(self.step_count):
            return False
        self.save(metrics)
        return True

    def save(self, metrics: Mapping[str, float] | None = None) -> SaveHandle:
        """Takes a snapshot of all attached objects now. Call it on every rank, between two optimizer steps.

        Args:
            metrics: Kept with the snapshot: numbers to choose the best one by.

        Returns:
            A handle to wait for the save.

        Raises:
            ConfigError: An attached object cannot be saved.
            TornSnapshotError: A tensor changed while it was copied, and again during a second copy.
            StorageFullError: There is not enough shared memory for the buffer.
        """
        self._check_open("save")
        if not self._saves:
            return self._saver.stand_by(self.step_count, CommitResult(self._tiers.shared_memory, ""))
        handle = self._saver.begin(self.step_count, metrics or {}, self._meter)
        self._saved_step = self.step_count
        keep_until(handle.committed, self)
        self._losses.begun(handle, self._saver.num_bytes)
        self._schedule.saved(self.step_count, self._saver.pace)
        # With a preemption notice there is no time to wait.
        if not self.should_stop:
            self._wait_policy.after_save()
        return handle

    @property
    def _has_news(self) -> bool:
        # Steps that would be lost at the end, though a schedule is to save them and some tier would keep them.
        outlives = self._tiers.storage is not None or self._tiers.memory is not None
        is_left_to_schedule = self._config.every != "never" and not self.should_stop
        return outlives and is_left_to_schedule and self.step_count != self._saved_step

    def is_due(self, step: int) -> bool:
        """Whether a save is due at that step, or before."""
        return self._schedule.is_due(step)

    @property
    def latest(self) -> SaveHandle | None:
        """The handle of the save begun last; None before the first."""
        return self._saver.latest

    # ── waiting ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def wait_copy_complete(self) -> None:
        """Returns when the state may change again. Attached optimizers wait for the same before each step.

        Raises:
            TornSnapshotError: The state has changed already; the message names the tensor. The snapshot is refused.
        """
        self._saver.wait_copy_complete()

    def wait_committed(self) -> str:
        """Returns when the save begun last outlives this machine.

        Returns:
            Name of the tier that holds it; ``shared memory`` only if there is no other tier.

        Raises:
            CheckpointError: No tier has taken it, and the message says why; or no save was begun.
        """
        return self._saver.result().tier.name

    def wait_durable(self, timeout_seconds: float | None = None) -> None:
        """Returns when the save begun last is in storage.

        Args:
            timeout_seconds: Longest time to wait; None: as long as it takes.

        Raises:
            ConfigError: There is no storage.
            CheckpointError: No tier has taken it, or it is not durable in time.
        """
        if not self._saves:
            return
        if self._tiers.storage is None:
            raise ConfigError.of("storage to be durable in", None, "pass persist_to=")
        result = self._saver.result()
        assert self.latest is not None
        self._tiers.wait_durable(result, self.latest.step, timeout_seconds)

    def is_durable(self, handle: SaveHandle) -> bool:
        """Whether a save, or a later one, is in storage.

        Args:
            handle: The save.

        Returns:
            False before the save is committed, while the flusher has still to bring it there, or without storage.
        """
        if self._tiers.storage is None or not handle.committed.done() or handle.committed.exception() is not None:
            return False
        return self._tiers.is_durable(handle.committed.result())

    # ── failures and preemption ───────────────────────────────────────────────────────────────────────────────────────

    def recovery_estimate(self) -> RecoveryEstimate:
        """Estimates what would be lost, and how soon recovered, if this process, machine or cluster ended now."""
        return self._losses.read()

    def watch(self, *sources: str, grace_seconds: float = GRACE_SECONDS, exit_code: int | None = EXIT_CODE) -> None:
        """Watches for preemption notices: `step` then saves what can be saved in time, and exits. Collective.

        Args:
            *sources: ``SIGTERM`` (if none is named) or another signal, paths of files, ``http://…``: see
                `_preemption.notice`.
            grace_seconds: Time left after a notice that names no time.
            exit_code: Exit code of the SystemExit that `step` raises then; None: it returns, and `should_stop` is true.

        Raises:
            ConfigError: A source cannot be watched.
        """
        self._check_open("watch")
        if self._deadline is not None:
            self._deadline.close()
        watched = [source_of(source, grace_seconds) for source in sources or ("SIGTERM",)]
        store = open_deadline_store(self._group.rank, self._group.world_size)
        self._deadline = Deadline(self, self._losses, store, watched, exit_code=exit_code)

    @property
    def should_stop(self) -> bool:
        """Whether this rank or another has a preemption notice: a last snapshot is taken in the next steps."""
        return self._deadline is not None and self._deadline.should_stop

    # ── restoring ───────────────────────────────────────────────────────────────────────────────────────────────────

    def restore_latest(self, only: Sequence[str] | None = None) -> Restored:
        """Loads the newest whole snapshot, from the nearest tier that has it.

        Args:
            only: Names of the attached objects to load; by default all.

        Returns:
            What was loaded; false if there is no snapshot at all.

        Raises:
            CorruptCheckpointError: There are snapshots, and none is whole.
            StateMismatchError: It does not fit the attached objects; nothing was changed.
            CheckpointError: No snapshot was found, but a tier that might have one does not answer.
        """
        return self._restore(None, only)

    def restore(self, step: int, only: Sequence[str] | None = None) -> Restored:
        """Loads the snapshot of one step; otherwise as `restore_latest`.

        Args:
            step: The step.
            only: Names of the attached objects to load.

        Returns:
            What was loaded.

        Raises:
            CheckpointError: There is no snapshot of that step.
        """
        restored = self._restore(step, only)
        if not restored:
            known = sorted({snapshot.record.step for snapshot in self.list()})
            raise CheckpointError.of(f"a snapshot of step {step}", f"steps {known}", "choose one of those")
        return restored

    def _restore(self, step: int | None, only: Sequence[str] | None) -> Restored:
        self._check_open("restore")
        self._saver.check_calls(self.step_count)
        self._saver.before_step()
        self._saver.settle()
        restored, found = restore_app_state(self._tiers.reader, self._group, self._app_state, step, only)
        if found is not None:
            self.step_count = self._saved_step = restored.step
            self._saver.sequence = max(self._saver.sequence, found.newest_sequence)
            self._schedule.saved(self.step_count, Pace())
            for source in found.sources:
                if source.tier is self._tiers.shared_memory:
                    self._tiers.shared_memory.spare(source.location)
            held_by = [source.tier.name for source in found.sources]
            self._losses.restored(restored.step, held_by, found.tiers, restored.seconds, restored.num_bytes)
        return restored

    def list(self) -> list[Snapshot]:
        """Returns every snapshot of the run that this rank can see, newest first."""
        return self._tiers.reader.snapshots()

    # ── ending ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Waits until the last save is committed, then frees all resources. Safe to call twice.

        Raises:
            CheckpointError: No tier has taken the save begun last.
        """
        if self._closed:
            return
        is_safe = False
        try:
            self._saver.check_calls(self.step_count)
            if self.latest is not None:
                self._saver.result()
            is_safe = True
        finally:
            self._end(keep_buffers=not is_safe)

    def _at_exit(self, has_failed: bool) -> None:
        """Closes what its script has left open."""
        if has_failed and not self._closed:
            self._end(keep_buffers=True)
        with contextlib.suppress(CheckpointError):  # which the writer has logged
            self.close()

    def _end(self, *, keep_buffers: bool) -> None:
        self._closed = True
        if self._deadline is not None:
            self._deadline.close()
        self._schedule.close()
        for hook in self._hooks:
            hook.remove()
        self._saver.close()
        self._losses.close()
        self._tiers.close(keep_buffers=keep_buffers)
        for group in (self._group, *self._save_groups):
            group.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Saves the last steps and closes."""
        # After an exception the buffers stay: the process that restarts on this machine reads them.
        is_unfinished = error is not None
        try:
            if self._deadline is not None and isinstance(error, Exception):
                self._deadline.at_failure(is_between_steps=not self._has_changed)
            elif error is None and not self._closed and self._has_news:
                self.save()
        except BaseException:
            is_unfinished = True
            raise
        finally:
            if not is_unfinished:
                self.close()
            elif not self._closed:
                self._end(keep_buffers=True)


def group_of(checkpointer: Checkpointer) -> RankGroup:
    """Returns the ranks, for interfaces that are built on a checkpointer."""
    return checkpointer._group


def tiers_of(checkpointer: Checkpointer) -> Tiers:
    """Returns the tiers, for interfaces that are built on a checkpointer."""
    return checkpointer._tiers


def load_weights(
    module: torch.nn.Module,
    store: str | None = None,
    *,
    persist_to: str | os.PathLike[str] | None = None,
    run: str = DEFAULT_RUN,
    name: str = "model",
    step: int | None = None,
    strict: bool = True,
    prefix: str = "",
) -> Restored:
    """Loads a model's weights from the newest snapshot, beside a training that runs or from a medium that cannot be
    written: it takes no lock and writes nothing.

    Args:
        module: Gets the weights, cast to its floating-point types; wrapped or not, as the saved model was or not.
        store: URL of the cluster whose memory holds snapshots.
        persist_to: Path or URL of durable storage. At least one of both.
        run: Id of the run that saved them.
        name: Name under which the model was attached.
        step: Step of the snapshot; None: the newest that is intact.
        strict: Whether all names and shapes have to fit. Otherwise what does not fit stays as it is, and
            `Restored.missing_keys` and `Restored.unexpected_keys` list it.
        prefix: Part of the model to take: names in the snapshot that begin with it, and without it.

    Returns:
        What was loaded: the step and more.

    Raises:
        ConfigError: An argument is invalid, or nothing was attached under that name.
        CheckpointError: There is no such snapshot, or none is intact, or a location does not answer.
        StateMismatchError: It does not fit the module; nothing was changed.
    """
    begun = time.monotonic()
    with contextlib.ExitStack() as resources:
        reader = open_to_read(store, persist_to, run, resources)
        found = read_newest_alone(reader, [name], step)
        if found is None:
            wanted = "a snapshot" if step is None else f"a snapshot of step {step}"
            known = sorted({snapshot.record.step for snapshot in reader.snapshots()})
            raise CheckpointError.of(f"{wanted} of run {run!r}", f"steps {known}", "name another step, run or location")
    state = unflatten(found.tree, found.tensors)
    if name not in state:
        _, manifest = found.arenas[0]
        attached = ", ".join(sorted(map(str, part_of(manifest.tree, None)["dict"][0])))
        cure = "pass another name=; what torch.distributed.checkpoint saved, ShadeReader reads"
        raise ConfigError.of(f"a model that was attached as {name!r}", attached, cure)
    missing, unexpected = load_module(name, module, state[name], strict=strict, prefix=prefix)
    record, seconds = found.record, time.monotonic() - begun
    logger.info("loaded %s of step %d of run %s from %s", name, record.step, run, ", ".join(found.tiers))
    if missing or unexpected:
        logger.warning("%s of step %d: not loaded: %s; not used: %s", name, record.step, missing, unexpected)
    return Restored(
        *(record.step, 0, tuple(found.tiers), seconds, record.num_bytes, found.bounds),
        missing_keys=tuple(missing),
        unexpected_keys=tuple(unexpected),
    )


def _state_of(handle: SaveHandle) -> str:
    if handle.committed.done():
        failure = handle.committed.exception()
        return f"failed: {failure}" if failure is not None else f"in {handle.committed.result().tier.name}"
    return "copied, not committed yet" if handle.copied.done() else "being copied"
