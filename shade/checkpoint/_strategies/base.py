"""Defines a strategy: when a snapshot's bytes are copied, and which config it proposes.

A strategy gets the tensors as a `Copying` and decides when each is copied. `Strategy.wait` is its only promise. The
published ways of checkpointing differ mostly in plain values: these are the `StrategyConfig`. The content of a
snapshot, its location, its commit and its restore are the same for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from shade.checkpoint._buffer.tensor_copy import Copying
from shade.checkpoint._codecs.base import CODECS, is_delta
from shade.errors import ConfigError, TornSnapshotError
from shade.registry import Registry

DurabilityLevel = Literal["begun", "copied", "committed", "durable"]
"""How far a save has come. *Begun*: nothing is certain. *Copied*: the state may change again. *Committed*: the snapshot
outlives this machine. *Durable*: storage holds it; without storage, the same as *committed*."""


@dataclass(frozen=True)
class StrategyConfig:
    """The settings that a strategy proposes; an argument of `Checkpointer` of the same name overrides each."""

    every: str | int = "30s"
    """When `step` saves, as `_pacing.schedule.Schedule` takes it."""
    codec: str = "none"
    """The chunks' codec: a name in `_codecs.base.CODECS`."""
    slots: int = 3
    """Snapshots that fit into the cluster's memory: those in flight and the newest."""
    replicas: int = 0
    """Further copies of every chunk on other servers, as far as servers suffice."""
    buffers: int = 1
    """Snapshots that fit into shared memory."""
    in_flight: int = 1
    """Saves in flight at once; a further save waits for the oldest. 1 with a delta codec."""
    streams: bool = False
    """Whether chunks are hashed and sent while others are still copied. Never with a codec that stores differences, and
    with any other but ``none`` only where there is no cluster memory."""
    batches: bool = False
    """Whether streamed chunks go to storage in batches of the length that finishes first."""
    save_waits_for: DurabilityLevel = "begun"
    """The level that a save reaches before `Checkpointer.save` returns."""
    step_waits_for: DurabilityLevel = "copied"
    """The level that a save reaches before an attached optimizer steps; at least *copied*."""

    @property
    def is_exact(self) -> bool:
        """Whether a restore returns every bit."""
        return CODECS.get(self.codec).is_exact

    def agreed(
        self,
        *,
        every: str | int | None = None,
        codec: str | None = None,
        slots: int | None = None,
        replicas: int | None = None,
        buffers: int | None = None,
        in_flight: int | None = None,
    ) -> StrategyConfig:
        """Returns the config with the user's values in place of the proposed ones; None: not given.

        A save in flight needs a buffer, and a slot beside the newest snapshot's. So fewer buffers or slots lower the
        number of saves in flight, and more saves in flight raise both, unless the user gives the number. Raises
        `ConfigError` if there is no buffer, no room for `in_flight` saves, or no such codec.
        """
        chosen = self.codec if codec is None else codec
        wanted = self.in_flight if in_flight is None else in_flight
        # A difference needs a committed base, so the save before must be done.
        if is_delta(chosen):
            if in_flight is not None and in_flight > 1:
                raise ConfigError.of(f"one save in flight with codec {chosen!r}", in_flight, "leave in_flight out")
            wanted = 1
        num_slots = max(self.slots, wanted + 1) if slots is None else slots
        num_buffers = max(self.buffers, wanted) if buffers is None else buffers
        if wanted < 1 or num_buffers < 1:
            shown = f"buffers={num_buffers}, in_flight={wanted}"
            raise ConfigError.of("one buffer and one save in flight, or more", shown, "leave them out")
        possible = max(1, min(wanted, num_buffers, num_slots - 1))
        if in_flight is not None and possible < in_flight:
            raise ConfigError.of(
                f"{in_flight} buffers and {in_flight + 1} slots for {in_flight} saves in flight",
                f"buffers={num_buffers}, slots={num_slots}",
                "give it more of both, or leave them out",
            )
        return replace(
            self,
            every=self.every if every is None else every,
            codec=chosen,
            streams=self.streams and not is_delta(chosen),
            batches=self.batches and chosen == "none",
            replicas=self.replicas if replicas is None else replicas,
            slots=num_slots,
            buffers=num_buffers,
            in_flight=possible,
        )


class Strategy(ABC):
    """Decides when bytes are copied. Runs on the training thread, except `before_chunk`."""

    config: ClassVar[StrategyConfig] = StrategyConfig()
    """The proposed settings."""

    def attach(  # noqa: B027 - most strategies hang no hooks
        self, modules: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        """Takes the modules and optimizers to hook; called before the first `begin`, perhaps several times."""

    @abstractmethod
    def begin(self, copying: Copying) -> Future[None]:
        """Begins a snapshot. May return before its bytes are copied, but copies first what is not in `Copying.steady`.

        The future resolves when the buffer holds the snapshot, or fails with the error that `wait` raises.
        """

    @abstractmethod
    def wait(self) -> None:
        """Waits until the snapshot begun last is copied in full; from then on the state may change.

        Raises:
            TornSnapshotError: The state changed during the copy.
        """

    def before_chunk(self, num_bytes: int) -> None:  # noqa: B027 - most strategies send as fast as they can
        """Waits until a chunk of `num_bytes` may be sent; the async writer calls it in its thread."""

    def close(self) -> None:  # noqa: B027 - some have no threads
        """Removes hooks, ends threads and releases `before_chunk`. Safe to call twice."""


def copy_at_once(copying: Copying, helper: Executor) -> Future[None]:
    """Copies and checks a whole snapshot on this thread and a helper's; the future is resolved, or has failed."""
    done: Future[None] = Future()
    try:
        copying.finish(helper)
        done.set_result(None)
    except TornSnapshotError as error:
        done.set_exception(error)
    return done


STRATEGIES: Registry[Strategy] = Registry("checkpoint strategy")
"""Maps a name to a class that takes no arguments."""
