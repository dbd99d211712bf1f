"""Snapshots: a run's Checkpointer as its session uses it, and what the metrics say of it.

Where nothing was named, snapshots go into the run directory. On several machines that directory is each one's own, so
there rank 0 alone saves what all ranks hold alike, and gives it to the others when the run is resumed: no file system
in common is needed, as for everything else that the session writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import wait
from types import TracebackType
from typing import Any

from shade.cache.cache import SampleCache
from shade.checkpoint._commit.process_group import current_group
from shade.checkpoint._save.async_writer import CommitResult, SaveHandle
from shade.checkpoint._session.checkpointer import Checkpointer
from shade.config import RunConfig
from shade.errors import ConfigError
from shade.train.one_memory import OneMemory
from shade.types import Stateful


class Snapshots:
    """What keeps a run. Collective, as are all its methods.

    Args:
        config: The resolved run; machine 0's run id counts.
        things: What shall survive, by name.
        cache: What may share the store with snapshots, or None.

    Raises:
        ConfigError: The places for snapshots cannot be used.
        RunInUseError: Another live process saves under the run's id.
    """

    def __init__(self, config: RunConfig, things: Mapping[str, Stateful], cache: SampleCache | None) -> None:
        group = current_group()
        self._is_elastic = config.min_nodes is not None
        run, resumes = group.share([config.run, config.resume or self._is_elastic])
        self.resumes: bool = resumes
        """Whether the run goes on from a snapshot; what machine 0 says, which sees them."""
        group.close()
        self._checkpointer = Checkpointer(
            config.checkpoint_url,
            persist_to=config.persist_to,
            run=run,
            strategy=config.checkpoint_strategy,
            every=config.checkpoint_every,
            keep=config.checkpoint_keep,
            first_rank_saves=config.nodes > 1 and config.keeps_beside,
            make_room=self._make_room,
        )
        self._checkpointer.attach(**things)
        self._checkpointer.watch("SIGTERM", *filter(None, [config.notice]))
        tiers = self._checkpointer.tiers
        self._one_memory = None
        if cache is not None and tiers.memory is not None:
            self._one_memory = OneMemory(cache, tiers.memory, flushed=tiers.storage is not None)
        self._tickets: list[SaveHandle] = []
        self._blocked_seconds = 0.0
        self._committed: tuple[int, CommitResult] | None = None
        self._durable_step = 0

    def restore(self) -> int:
        """Brings everything back from the newest snapshot that is whole.

        Returns:
            Steps done in the whole run; 0 where nothing is there yet, if ranks come and go.

        Raises:
            ConfigError: There is none.
            CheckpointError: There is none that can be used; the message says why.
        """
        restored = self._checkpointer.restore_latest()
        if not restored and not self._is_elastic:
            raise ConfigError.of("a checkpoint to resume from", f"none of {self._checkpointer.run}", "start without it")
        return restored.step if restored else 0

    def _make_room(self, num_bytes: int) -> None:
        if self._one_memory is not None:
            self._one_memory.make_room(num_bytes)

    def begin_epoch(self, total_steps: int, num_steps: int) -> None:
        """Divides the memory for an epoch, before it is planned.

        Args:
            total_steps: In the whole run so far.
            num_steps: That the epoch has at most.
        """
        if self._one_memory is not None:
            due = self._checkpointer.is_due(total_steps + num_steps - 1)
            self._one_memory.begin_epoch(due=due, latest=self._checkpointer.latest)

    def step(self, total_steps: int) -> None:
        """A step has been taken, everything attached is between two steps: saves if a save is due.

        Args:
            total_steps: In the whole run, this one included.
        """
        self._checkpointer.step_count = total_steps - 1
        if self._checkpointer.step():
            self._follow(self._checkpointer.latest)

    def save(self, total_steps: int, metrics: Mapping[str, float] | None = None) -> None:
        """Saves now; returns when the training may go on.

        Args:
            total_steps: In the whole run.
            metrics: To choose the best by.
        """
        self._checkpointer.step_count = total_steps
        self._follow(self._checkpointer.save(metrics))

    def wait_committed(self) -> None:
        """Returns when the save begun last is where it outlives this process.

        Raises:
            CheckpointError: It is nowhere.
        """
        self._checkpointer.wait_committed()

    def settle(self) -> None:
        """Returns when the save begun last has landed or failed."""
        if self._checkpointer.latest is not None:
            self._checkpointer.wait_copy_complete()
            wait([self._checkpointer.latest.landed])

    def _follow(self, ticket: SaveHandle | None) -> None:
        assert ticket is not None, "a save was begun"
        self._tickets.append(ticket)
        ticket.landed.add_done_callback(lambda _: self._landed(ticket))

    def _landed(self, ticket: SaveHandle) -> None:
        if ticket.landed.exception() is None:
            self._committed = (ticket.step, ticket.landed.result())

    def gauge(self) -> dict[str, Any]:
        """What an end would cost now: `shade.checkpoint._preemption.recovery_estimate.RecoveryEstimate`, as a row."""
        return self._checkpointer.gauge().row()

    def figures(self) -> dict[str, Any]:
        """What became of saves since this was last asked; numbers of steps as of now.

        Returns:
            ``saves``, ``failed`` (nowhere at all), ``blocked_seconds`` (the training waited for them),
            ``committed_step`` (the newest that outlives this machine), ``durable_step`` (in storage), 0 for none, and
            ``if_ended_now``: the `shade.checkpoint._preemption.recovery_estimate.RecoveryEstimate`.
        """
        done = [ticket for ticket in self._tickets if ticket.landed.done()]
        blocked_seconds = sum(ticket.blocked_seconds for ticket in self._tickets)
        figures = {
            "saves": len(done),
            "failed": sum(ticket.landed.exception() is not None for ticket in done),
            "blocked_seconds": blocked_seconds - self._blocked_seconds,
            "committed_step": self._committed[0] if self._committed else 0,
            "durable_step": self._durable(),
            "if_ended_now": self.gauge(),
        }
        self._tickets = [ticket for ticket in self._tickets if not ticket.landed.done()]
        self._blocked_seconds = sum(ticket.blocked_seconds for ticket in self._tickets)
        return figures

    def _durable(self) -> int:
        tiers = self._checkpointer.tiers
        if self._committed is not None and tiers.storage is not None and tiers.is_durable(self._committed[1]):
            self._durable_step = self._committed[0]
        return self._durable_step

    def close(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Ends it as ``with`` does: after an error own memory stays, for a restart on this machine.

        Args:
            kind: Of the error, or None.
            error: That ends the run, or None.
            trace: Its.

        Raises:
            CheckpointError: There was no error, but the last save is nowhere.
        """
        try:
            self._checkpointer.__exit__(kind, error, trace)
        finally:
            if self._one_memory is not None and error is None:
                self._one_memory.close()
