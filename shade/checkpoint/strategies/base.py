"""What a strategy is: the choice of the moments at which a snapshot's bytes are copied.

Everything else about a snapshot (what is in it, where it goes, when it counts) is the same for all of them. A strategy
sees the tensors as a `Copying` and decides which are copied when; the one promise it makes is about `Strategy.wait`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future

import torch

from shade.checkpoint.copying import Copying
from shade.registry import Registry


class Strategy(ABC):
    """When the bytes are copied. Called on the training thread."""

    def attach(  # noqa: B027 - most strategies hang no hooks
        self, modules: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        """Learns what is trained: a place to hang hooks on. Called before the first `begin`, perhaps more than once.

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

    def close(self) -> None:  # noqa: B027 - nor threads
        """Takes hooks off and ends threads. Safe to call twice."""


STRATEGIES: Registry[Strategy] = Registry("checkpoint strategy")
"""Name → class, built without arguments."""
