"""Runs the Checkpointer of a training session, and counts its saves for the metrics.

Without flags, snapshots go into the run directory. Each of several machines has its own, so there rank 0 alone saves
what all ranks hold alike, and sends it to the others when the run resumes. No shared file system is needed, as for
everything else that the session writes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import wait
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from shade.cache.cache import SampleCache
from shade.checkpoint._save.async_writer import SaveHandle
from shade.checkpoint._session.checkpointer import Checkpointer, tiers_of
from shade.config import HAS_SNAPSHOTS, RunConfig
from shade.errors import ConfigError
from shade.rank_group import current_group
from shade.train.one_memory import OneMemory
from shade.types import Stateful

logger = logging.getLogger("shade.train")


class Snapshots:
    """Saves and restores a run. Collective, as are all its methods.

    Args:
        config: The resolved run; the run id of machine 0 counts.
        things: The objects to save, by name.
        cache: The cache that may share the store with snapshots, or None.

    Raises:
        ConfigError: The places for snapshots cannot be used.
        RunInUseError: Another live process saves under the run's id.
    """

    def __init__(self, config: RunConfig, things: Mapping[str, Stateful], cache: SampleCache | None) -> None:
        self._is_elastic = config.min_nodes is not None
        with closing(current_group("the run id")) as group:
            run, resumes = group.share([config.run, config.resume or self._is_elastic])
        self.resumes: bool = resumes
        """Whether the run resumes from a snapshot. Machine 0 decides, because it sees them."""
        self._checkpointer = Checkpointer(
            config.checkpoint_url,
            persist_to=config.storage,
            run=run,
            strategy=config.checkpoint_strategy,
            every=config.checkpoint_every,
            keep=config.checkpoint_keep,
            first_rank_saves=config.nodes > 1 and config.keeps_beside,
            make_room=self._make_room,
        )
        self._checkpointer.attach(**things)
        self._checkpointer.watch("SIGTERM", *filter(None, [config.notice]))
        tiers = tiers_of(self._checkpointer)
        self._one_memory = None
        if cache is not None and tiers.memory is not None:
            self._one_memory = OneMemory(cache, tiers.memory, flushed=tiers.storage is not None)
        self._handles: list[SaveHandle] = []
        self._blocked_seconds = 0.0
        self._committed: SaveHandle | None = None
        self._mark: Path | None = Path(config.out) / HAS_SNAPSHOTS
        self._durable_step = 0

    def restore(self) -> int:
        """Restores the newest whole snapshot; returns its step, or 0 for an elastic run without a snapshot.

        Raises `ConfigError` if there is no snapshot, and `CheckpointError`, which says why, if none can be used.
        """
        restored = self._checkpointer.restore_latest()
        if not restored and not self._is_elastic:
            raise ConfigError.of("a checkpoint to resume from", f"none of {self._checkpointer.run}", "start without it")
        return restored.step if restored else 0

    def _make_room(self, num_bytes: int) -> None:
        if self._one_memory is not None:
            self._one_memory.make_room(num_bytes)

    def begin_epoch(self, total_steps: int, num_steps: int) -> None:
        """Divides the memory for an epoch of at most `num_steps` steps, before it is planned."""
        if self._one_memory is not None:
            due = self._checkpointer.is_due(total_steps + num_steps - 1)
            self._one_memory.begin_epoch(due=due, latest=self._checkpointer.latest)

    def step(self, total_steps: int) -> None:
        """Saves if a save is due; call it between two steps, with the steps of the whole run."""
        self._checkpointer.step_count = total_steps - 1
        if self._checkpointer.step():
            self._follow(self._checkpointer.latest)

    def save(self, total_steps: int, metrics: Mapping[str, float] | None = None) -> None:
        """Saves now, with metrics to choose the best snapshot by; returns when the training may continue."""
        self._checkpointer.step_count = total_steps
        self._follow(self._checkpointer.save(metrics))

    def wait_committed(self) -> None:
        """Waits until the newest save outlives this process; raises `CheckpointError` if no tier has it."""
        self._checkpointer.wait_committed()

    def settle(self) -> None:
        """Waits until the newest save is committed or has failed."""
        if self._checkpointer.latest is not None:
            self._checkpointer.wait_copy_complete()
            wait([self._checkpointer.latest.committed])

    def _follow(self, handle: SaveHandle | None) -> None:
        assert handle is not None, "a save was begun"
        self._handles.append(handle)
        handle.committed.add_done_callback(lambda _: self._note_commit(handle))

    def _note_commit(self, handle: SaveHandle) -> None:
        if handle.committed.exception() is None:
            self._committed = handle
            if self._mark is not None:
                # In a directory that is full or gone it only makes a resume more careless.
                with suppress(OSError):
                    self._mark.touch()
                self._mark = None

    def gauge(self) -> dict[str, Any]:
        """Returns what a failure of each kind would cost now, as `RecoveryEstimate.row` does."""
        return self._checkpointer.recovery_estimate().row()

    def figures(self) -> dict[str, Any]:
        """Returns the outcome of the saves since the last call, and the present steps.

        Returns:
            ``saves``, ``failed`` (nowhere at all), ``blocked_seconds`` (the training waited for them),
            ``committed_step`` (the newest that outlives this machine), ``durable_step`` (in storage), 0 for none, and
            ``if_ended_now``: the `shade.checkpoint._preemption.recovery_estimate.RecoveryEstimate`.
        """
        done = [handle for handle in self._handles if handle.committed.done()]
        blocked_seconds = sum(handle.blocked_seconds for handle in self._handles)
        figures = {
            "saves": len(done),
            "failed": sum(handle.committed.exception() is not None for handle in done),
            "blocked_seconds": blocked_seconds - self._blocked_seconds,
            "committed_step": self._committed.step if self._committed else 0,
            "durable_step": self._durable(),
            "if_ended_now": self.gauge(),
        }
        self._handles = [handle for handle in self._handles if not handle.committed.done()]
        self._blocked_seconds = sum(handle.blocked_seconds for handle in self._handles)
        return figures

    def _durable(self) -> int:
        if self._committed is not None and self._checkpointer.is_durable(self._committed):
            self._durable_step = self._committed.step
        return self._durable_step

    def close(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Closes the Checkpointer. After an error shared memory stays, for a restart on this machine.

        Raises `CheckpointError` if there was no error, but no tier has the last save.
        """
        try:
            self._checkpointer.__exit__(kind, error, trace)
        finally:
            if self._one_memory is not None and error is None:
                self._one_memory.close()
