"""Defines a strategy: when a snapshot's bytes are copied, and how often, how far and with what it is saved.

A strategy sees the tensors as a `Copying` and decides when each is copied; its one promise is about `Strategy.wait`.
What else distinguishes the published methods needs no code of theirs: how often they save, how many saves are in
flight, whether chunks leave while others are still being copied, what the training waits for. Those are values of the
*strategy config*, which the rest of the package honours for all strategies alike. What is in a snapshot, where it
lies, when it counts and how it is restored is the same for every strategy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from shade.checkpoint._buffer.tensor_copy import Copying
from shade.checkpoint._codecs.base import CODECS, is_delta
from shade.checkpoint._pacing.schedule import Pace
from shade.errors import ConfigError
from shade.registry import Registry

DurabilityLevel = Literal["begun", "copied", "committed", "durable"]
"""How far a save has come: it is under way; the state may change again; it survives this machine; it is in storage.
Without storage, *durable* means *committed*."""


@dataclass(frozen=True)
class StrategyConfig:
    """What a strategy proposes; an argument of `Checkpointer` of the same name has the last word."""

    every: str | int = "30s"
    """When `step` saves: see `_pacing.schedule.Schedule`."""
    codec: str = "none"
    """Of the chunks: a name in `_codecs.base.CODECS`."""
    slots: int = 3
    """Snapshots that the cluster's memory has room for: those on their way, and the newest."""
    replicas: int = 0
    """Further copies of every chunk on other servers, as far as there are servers for them."""
    buffers: int = 1
    """Snapshots that own memory has room for."""
    in_flight: int = 1
    """Saves under way at once: one more waits until the oldest has landed. One, where the codec stores differences."""
    streams: bool = False
    """Whether chunks are hashed and sent while others are still being copied. What has a codec goes as a whole."""
    batches: bool = False
    """Whether streamed chunks go to storage in batches of the length that ends soonest."""
    save_waits_for: DurabilityLevel = "begun"
    """Before `Checkpointer.save` returns."""
    step_waits_for: DurabilityLevel = "copied"
    """Before an attached optimizer steps; never less than *copied*."""

    @property
    def is_exact(self) -> bool:
        """Whether every bit comes back."""
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
        """What is proposed, with what the user has said in its place.

        A save in flight needs a buffer, and a slot beside that of the newest snapshot. So fewer buffers or slots mean
        fewer saves in flight, and more saves in flight mean more of both, unless the user has said how many.

        Args:
            every: As given to `Checkpointer`, like all that follow; None: not given.
            codec: Of the chunks.
            slots: In the cluster's memory.
            replicas: Further copies.
            buffers: In own memory.
            in_flight: Saves under way at once.

        Returns:
            The config that holds.

        Raises:
            ConfigError: No buffer, or more saves in flight than there is room for, or a codec that is none.
        """
        chosen = self.codec if codec is None else codec
        wanted = self.in_flight if in_flight is None else in_flight
        if is_delta(chosen):  # what a save is compared with has to have landed
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
            streams=self.streams and chosen == "none",
            batches=self.batches and chosen == "none",
            replicas=self.replicas if replicas is None else replicas,
            slots=num_slots,
            buffers=num_buffers,
            in_flight=possible,
        )


class Strategy(ABC):
    """Copies snapshots. All methods but `before_chunk` are called on the training thread."""

    config: ClassVar[StrategyConfig] = StrategyConfig()
    """What it proposes."""
    is_ablation: ClassVar[bool] = False
    """Whether it is another strategy without one part, made to measure that part and not to train with."""
    is_for_devices: ClassVar[bool] = False
    """Whether it differs from its parent class on a device only, so that a state on the host is saved alike."""

    def open(self, config: StrategyConfig) -> None:  # noqa: B027 - most strategies need only their class's config
        """Receives the config that holds, before anything else.

        Args:
            config: The config that holds.
        """

    @property
    def streams(self) -> bool:
        """Whether the next save is streamed; if the config that holds forbids streaming, it is not."""
        return self.config.streams

    def steer(self, mine: Pace, agreed: Pace) -> Pace:
        """Returns the pace that this rank sends with a save; called before each, when the previous one is copied.

        Args:
            mine: As this rank has measured it.
            agreed: The newest that every rank knows, rank 0's.

        Returns:
            The pace that all ranks adopt from rank 0 once this save is committed; by default as measured.
        """
        return mine

    def attach(  # noqa: B027 - most strategies hang no hooks
        self, modules: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        """Receives the trained objects, to register hooks. Called before the first `begin`, perhaps more than once.

        Args:
            modules: Attached modules.
            optimizers: Attached optimizers.
        """

    @abstractmethod
    def begin(self, copying: Copying) -> Future[None]:
        """Takes a snapshot; may return before its bytes are copied, but not before what is not steady is.

        Args:
            copying: Not begun; see `Copying.steady`.

        Returns:
            Resolved when the buffer holds the snapshot, or with the `TornSnapshotError` that `wait` raises.
        """

    @abstractmethod
    def wait(self) -> None:
        """Returns when the snapshot begun last is copied in full: from then on the state may change.

        Raises:
            TornSnapshotError: Something changed too early.
        """

    def before_chunk(self, num_bytes: int) -> None:  # noqa: B027 - most strategies send as fast as they can
        """Returns when a chunk may be sent: the async writer's thread calls it before each.

        Args:
            num_bytes: Length of the chunk.
        """

    def close(self) -> None:  # noqa: B027 - nor threads
        """Takes hooks off and ends threads; nothing waits in `before_chunk` from then on. Safe to call twice."""


STRATEGIES: Registry[Strategy] = Registry("checkpoint strategy")
"""Name → class, built without arguments."""
