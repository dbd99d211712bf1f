"""Which way a gradient takes between the ranks: straight, or inside a node first (`_comm.topology`).

A route says which part of a bucket this rank answers for, with whom it trades that part, and how the merged parts come
together again. The pipeline is written against this and does not know how many nodes there are.

Collectives of `begin` and `reduce` are made by one thread, all others by another; each in the same order on all ranks.

Invariant: after `spread`, every rank of the world holds the same merged bucket, bit for bit.

Legend: D bucket · W world · P peers · N words.

Inside a node gradients are added up whole; between nodes only what matters travels, each rank's own part of it.

::

    node 0: rank 0 rank 1      node 1: rank 2 rank 3
       1. dense sum over the node; each rank keeps one part (reduce-scatter, fast link)
            part 0 part 1               part 0 part 1
       2. each part: residual, choice, payload; exchanged with the rank of the same place on the other nodes (slow link)
            0 ↔ 2   1 ↔ 3
       3. the merged parts are put together inside the node (all-gather of sparse parts, fast link)

Each rank has a residual for its own part only: one bucket's memory per node, not per rank, and compressing is spread
over the ranks. The slow link carries one payload per node and part, whatever the number of ranks in a node.

Ranks are numbered node by node, as torchrun does; every node has the same number. A part's length is a multiple of 16
elements (a cache line), so the last part of a bucket may be shorter, and of a very short bucket empty.

Invariant: with density 1 the result is the weighted mean over all ranks, as on the straight route.

Legend: D bucket · W world · L ranks in a node · P nodes · N words.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shade.errors import ConfigError
from shade.gradient._comm.transport import Octets, PendingGather, Transport
from shade.gradient._compress.compressor import Sparse
from shade.types import Indices


class Topology(ABC):
    """Base of both routes."""

    world: Transport
    """All ranks: who they are, and what is said once."""

    @property
    @abstractmethod
    def transports(self) -> tuple[Transport, ...]:
        """All that it uses, for what passed and how long it took."""

    @property
    @abstractmethod
    def link(self) -> Transport:
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
    def gather_fields(self, fields_N: Indices) -> Indices:
        """Tells every rank's words to every rank.

        Args:
            words_N: int64 (N,).

        Returns:
            int64 (W, N), by rank.
        """

    @abstractmethod
    def exchange(self, payload: Octets, lengths_P: Sequence[int]) -> PendingGather:
        """Sets out to exchange this part's payloads with the peers; see `Transport.begin_gather`.

        Args:
            payload: This rank's.
            lengths_P: Of all of them.

        Returns:
            What waits for the peers' payloads, in order.
        """

    @abstractmethod
    def assemble(self, merged: Sparse, size: int) -> Sparse:
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


class FlatTopology(Topology):
    """Every rank answers for whole buckets and trades with all others.

    Args:
        world: All ranks.
    """

    def __init__(self, world: Transport) -> None:
        self.world = world

    @property
    def transports(self) -> tuple[Transport, ...]:
        """See `Topology`."""
        return (self.world,)

    @property
    def link(self) -> Transport:
        """See `Topology`."""
        return self.world

    @property
    def peers(self) -> tuple[tuple[int, ...], ...]:
        """See `Topology`."""
        return tuple((rank,) for rank in range(self.world.world_size))

    @property
    def place(self) -> int:
        """See `Topology`."""
        return self.world.rank

    def part(self, size: int) -> slice:
        """See `Topology`."""
        return slice(0, size)

    def begin(self, num_samples: float) -> tuple[float, float]:
        """See `Topology`."""
        return 1.0, num_samples

    def reduce(self, gradient_D: Tensor) -> Tensor:
        """See `Topology`."""
        return gradient_D

    def gather_fields(self, fields_N: Indices) -> Indices:
        """See `Topology`."""
        return self.world.gather_fields(fields_N)

    def exchange(self, payload: Octets, lengths_P: Sequence[int]) -> PendingGather:
        """See `Topology`."""
        return self.world.begin_gather(payload, lengths_P)

    def assemble(self, merged: Sparse, size: int) -> Sparse:
        """See `Topology`."""
        return merged

    def close(self) -> None:
        """See `Topology`."""
        self.world.close()


_LINE = 16


class NodeTopology(Topology):
    """Dense inside nodes, sparse between them. Collective to make, over all ranks of ``world``.

    Args:
        world: All ranks.
        local_size: L, ranks in each node; divides the world.

    Raises:
        ConfigError: Nodes of unequal size.
    """

    def __init__(self, world: Transport, local_size: int) -> None:
        if local_size < 1 or world.world_size % local_size:
            expected = f"ranks per node that divide {world.world_size}"
            raise ConfigError.of(expected, local_size, "start equally many ranks on each node, or leave nodes out")
        self.world = world
        self.local_size = local_size
        self._local_rank = world.rank % local_size
        self._node = world.rank // local_size
        ranks = world.ranks
        beside = ranks[self._node * local_size :][:local_size]
        across = ranks[self._local_rank :: local_size]
        timeout_seconds, generation = world.timeout_seconds, world.generation

        def transport(members: Sequence[int]) -> Transport:
            return Transport(ranks=members, timeout_seconds=timeout_seconds, generation=generation)

        self._reducing, self._local, self._across = transport(beside), transport(beside), transport(across)

    @property
    def transports(self) -> tuple[Transport, ...]:
        """See `Topology`."""
        return self.world, self._reducing, self._local, self._across

    @property
    def link(self) -> Transport:
        """See `Topology`."""
        return self._across

    @property
    def peers(self) -> tuple[tuple[int, ...], ...]:
        """See `Topology`."""
        size = self.local_size
        return tuple(tuple(range(first, first + size)) for first in range(0, self.world.world_size, size))

    @property
    def place(self) -> int:
        """See `Topology`."""
        return self._node

    def part(self, size: int) -> slice:
        """See `Topology`."""
        length = self._part_length(size)
        return slice(min(size, self._local_rank * length), min(size, (self._local_rank + 1) * length))

    def begin(self, num_samples: float) -> tuple[float, float]:
        """See `Topology`."""
        fields = np.array([num_samples], dtype=np.float64).view(np.int64)
        total = float(self._reducing.gather_fields(fields).view(np.float64).sum())
        return (num_samples / total if total > 0 else 0.0), total

    def reduce(self, gradient_D: Tensor) -> Tensor:
        """See `Topology`."""
        size = gradient_D.numel()
        padded = torch.zeros(self._part_length(size) * self.local_size, dtype=torch.float32)
        padded[:size] = gradient_D
        part = self.part(size)
        return self._reducing.add_parts(padded)[: part.stop - part.start]

    def gather_fields(self, fields_N: Indices) -> Indices:
        """See `Topology`."""
        across_PN = self._across.gather_fields(fields_N)
        all_LPN = self._local.gather_fields(across_PN.reshape(-1)).reshape(self.local_size, -1, len(fields_N))
        return np.ascontiguousarray(all_LPN.transpose(1, 0, 2)).reshape(self.world.world_size, len(fields_N))

    def exchange(self, payload: Octets, lengths_P: Sequence[int]) -> PendingGather:
        """See `Topology`."""
        return self._across.begin_gather(payload, lengths_P)

    def assemble(self, merged: Sparse, size: int) -> Sparse:
        """See `Topology`."""
        counts_L = self._local.gather_fields(np.array([merged.count], dtype=np.int64))[:, 0]
        mine = np.concatenate([merged.indices_K.astype(np.uint32).view(np.uint8), merged.values_K.view(np.uint8)])
        everything = self._local.gather_bytes(mine, (8 * counts_L).tolist())
        indices, values = [], []
        for place, (content, count) in enumerate(zip(everything, counts_L.tolist(), strict=True)):
            indices.append(content[: 4 * count].view(np.uint32) + np.uint32(place * self._part_length(size)))
            values.append(content[4 * count :].view(np.float32))
        return Sparse(np.concatenate(indices), np.concatenate(values), size)

    def close(self) -> None:
        """See `Topology`."""
        for transport in reversed(self.transports):
            transport.close()

    def _part_length(self, size: int) -> int:
        lines = -(-size // _LINE)
        return -(-lines // self.local_size) * _LINE
