"""Which way a gradient takes between the ranks: straight, or inside a node first (`shade.gradient.hierarchy`).

A route says which part of a bucket this rank answers for, with whom it trades that part, and how the merged parts come
together again. The pipeline is written against this and does not know how many nodes there are.

Collectives of `begin` and `reduce` are made by one thread, all others by another; each in the same order on all ranks.

Invariant: after `spread`, every rank of the world holds the same merged bucket, bit for bit.

Legend: D bucket · W world · P peers · N words.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from shade.gradient.exchange import Arrival, Exchange, Octets
from shade.gradient.sparse import Sparse
from shade.types import Indices


class Route(ABC):
    """Base of both routes."""

    world: Exchange
    """All ranks: who they are, and what is said once."""

    @property
    @abstractmethod
    def exchanges(self) -> tuple[Exchange, ...]:
        """All that it uses, for what passed and how long it took."""

    @property
    @abstractmethod
    def link(self) -> Exchange:
        """The one over the slow link: what is reported of a step."""

    @property
    @abstractmethod
    def peers(self) -> tuple[tuple[int, ...], ...]:
        """The P parties that trade with this rank, itself included, in order; each as the ranks it speaks for."""

    @property
    @abstractmethod
    def place(self) -> int:
        """Which of the peers this rank is."""

    @abstractmethod
    def part(self, size: int) -> slice:
        """What of a bucket of ``size`` elements this rank answers for."""

    @abstractmethod
    def begin(self, num_samples: float) -> tuple[float, float]:
        """Called once a step, before the first `reduce`.

        Args:
            num_samples: Of this rank.

        Returns:
            What this rank's gradients have to be multiplied with, so that their sum over the node is its mean; and the
            samples of the node.
        """

    @abstractmethod
    def reduce(self, gradient_D: Tensor) -> Tensor:
        """The sum over the node of what this rank answers for.

        Args:
            gradient_D: float32 (D,) on the CPU.

        Returns:
            Its part, contiguous.
        """

    @abstractmethod
    def agree(self, words_N: Indices) -> Indices:
        """Tells every rank's words to every rank.

        Args:
            words_N: int64 (N,).

        Returns:
            int64 (W, N), by rank.
        """

    @abstractmethod
    def trade(self, payload: Octets, lengths_P: Sequence[int]) -> Arrival:
        """Sets out to exchange this part's payloads with the peers; see `Exchange.begin_gather`.

        Args:
            payload: This rank's.
            lengths_P: Of all of them.

        Returns:
            What waits for the peers' payloads, in order.
        """

    @abstractmethod
    def spread(self, merged: Sparse, size: int) -> Sparse:
        """Puts the node's merged parts together.

        Args:
            merged: This rank's part; places count from the part's beginning.
            size: D.

        Returns:
            The whole merged bucket.
        """

    @abstractmethod
    def close(self) -> None:
        """Frees the groups."""


class StraightRoute(Route):
    """Every rank answers for whole buckets and trades with all others.

    Args:
        world: All ranks.
    """

    def __init__(self, world: Exchange) -> None:
        self.world = world

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """See `Route`."""
        return (self.world,)

    @property
    def link(self) -> Exchange:
        """See `Route`."""
        return self.world

    @property
    def peers(self) -> tuple[tuple[int, ...], ...]:
        """See `Route`."""
        return tuple((rank,) for rank in range(self.world.world_size))

    @property
    def place(self) -> int:
        """See `Route`."""
        return self.world.rank

    def part(self, size: int) -> slice:
        """See `Route`."""
        return slice(0, size)

    def begin(self, num_samples: float) -> tuple[float, float]:
        """See `Route`."""
        return 1.0, num_samples

    def reduce(self, gradient_D: Tensor) -> Tensor:
        """See `Route`."""
        return gradient_D

    def agree(self, words_N: Indices) -> Indices:
        """See `Route`."""
        return self.world.gather_words(words_N)

    def trade(self, payload: Octets, lengths_P: Sequence[int]) -> Arrival:
        """See `Route`."""
        return self.world.begin_gather(payload, lengths_P)

    def spread(self, merged: Sparse, size: int) -> Sparse:
        """See `Route`."""
        return merged

    def close(self) -> None:
        """See `Route`."""
        self.world.close()
