"""Defines the path of a gradient between the ranks: directly, or summed inside each node first.

A topology says which part of a bucket this rank is responsible for, which peers it exchanges that part with, and how
the merged parts become a bucket again. Inside a node gradients are summed densely; between nodes only chosen elements
travel::

    node 0: rank 0 rank 1      node 1: rank 2 rank 3
       1. dense sum over the node; each rank keeps one part (reduce-scatter, fast link)
            part 0 part 1               part 0 part 1
       2. each part: residual, choice, payload; exchanged with the same part's rank on the other nodes (slow link)
            0 ↔ 2   1 ↔ 3
       3. the node assembles the merged parts (all-gather of sparse parts, fast link)

The slow link carries one payload per node and part, whatever the number of ranks in a node. Ranks are numbered node by
node, as torchrun does; every node has the same number. A part's length is a multiple of 16 elements (a cache line), so
the last part may be shorter, or empty.

Invariants: after `assemble`, every rank of the world holds the same merged bucket, bit for bit. With density 1 the
result is the weighted mean over all ranks, in either topology.

Legend: D bucket · W world · L ranks in a node · P peers (nodes) · N fields.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from shade.errors import ConfigError
from shade.gradient._comm.transport import Octets, PendingGather, Transport
from shade.gradient._compress.compressor import Sparse
from shade.gradient._kernels.lines import LINE
from shade.types import Indices


class Topology(ABC):
    """Base class of both topologies."""

    world: Transport
    """All ranks."""

    @property
    @abstractmethod
    def link(self) -> Transport:
        """The transport over the slow link; a step's report counts its traffic."""

    @property
    @abstractmethod
    def peers(self) -> tuple[tuple[int, ...], ...]:
        """The P peers of this rank, itself included, in order; each as the ranks that it represents."""

    @property
    @abstractmethod
    def place(self) -> int:
        """This rank's index among the peers."""

    @abstractmethod
    def part(self, size: int) -> slice:
        """Returns the part of a bucket of ``size`` elements that this rank is responsible for."""

    @abstractmethod
    def begin(self, num_samples: float) -> tuple[float, float]:
        """Starts a step. Returns the factor for this rank's gradients that makes their sum over the node its mean, and
        the node's number of samples.
        """

    @abstractmethod
    def reduce(self, gradient_D: Tensor) -> Tensor:
        """Returns this rank's part, contiguous, of the node's sum of float32 (D,) on the CPU."""

    @abstractmethod
    def gather_fields(self, fields_N: Indices) -> Indices:
        """Gathers every rank's int64 (N,) on every rank; returns int64 (W, N), by rank."""

    @abstractmethod
    def exchange(self, payload: Octets, lengths_P: Sequence[int]) -> PendingGather:
        """Starts to exchange this part's payloads with the peers; see `Transport.begin_gather`."""

    @abstractmethod
    def assemble(self, merged: Sparse, size: int) -> Sparse:
        """Assembles a bucket of ``size`` elements from the node's merged parts; indices count from a part's start."""

    @abstractmethod
    def close(self) -> None:
        """Frees the groups."""


class FlatTopology(Topology):
    """Every rank is responsible for whole buckets and exchanges them with all others."""

    def __init__(self, world: Transport) -> None:
        self.world = world

    @property
    @override
    def link(self) -> Transport:
        return self.world

    @property
    @override
    def peers(self) -> tuple[tuple[int, ...], ...]:
        return tuple((rank,) for rank in range(self.world.world_size))

    @property
    @override
    def place(self) -> int:
        return self.world.rank

    @override
    def part(self, size: int) -> slice:
        return slice(0, size)

    @override
    def begin(self, num_samples: float) -> tuple[float, float]:
        return 1.0, num_samples

    @override
    def reduce(self, gradient_D: Tensor) -> Tensor:
        return gradient_D

    @override
    def gather_fields(self, fields_N: Indices) -> Indices:
        return self.world.gather_fields(fields_N)

    @override
    def exchange(self, payload: Octets, lengths_P: Sequence[int]) -> PendingGather:
        return self.world.begin_gather(payload, lengths_P)

    @override
    def assemble(self, merged: Sparse, size: int) -> Sparse:
        return merged

    @override
    def close(self) -> None:
        self.world.close()


class NodeTopology(Topology):
    """Dense inside nodes, sparse between them. Its constructor is collective over all ranks of ``world``.

    Args:
        world: All ranks.
        local_size: L, ranks in each node; divides the world.

    Raises:
        ConfigError: The nodes are not equally large.
    """

    def __init__(self, world: Transport, local_size: int) -> None:
        if local_size < 1 or world.world_size % local_size:
            expected = f"ranks per node that divide {world.world_size}"
            raise ConfigError.of(expected, local_size, "start equally many ranks on each node, or leave local_size out")
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

        # Two groups inside the node: one thread calls `begin` and `reduce`, another all other collectives.
        self._reducing, self._local, self._across = transport(beside), transport(beside), transport(across)

    @property
    @override
    def link(self) -> Transport:
        return self._across

    @property
    @override
    def peers(self) -> tuple[tuple[int, ...], ...]:
        size = self.local_size
        return tuple(tuple(range(first, first + size)) for first in range(0, self.world.world_size, size))

    @property
    @override
    def place(self) -> int:
        return self._node

    @override
    def part(self, size: int) -> slice:
        length = self._part_length(size)
        return slice(min(size, self._local_rank * length), min(size, (self._local_rank + 1) * length))

    @override
    def begin(self, num_samples: float) -> tuple[float, float]:
        fields = np.array([num_samples], dtype=np.float64).view(np.int64)
        total = float(self._reducing.gather_fields(fields).view(np.float64).sum())
        return (num_samples / total if total > 0 else 0.0), total

    @override
    def reduce(self, gradient_D: Tensor) -> Tensor:
        size = gradient_D.numel()
        padded = torch.zeros(self._part_length(size) * self.local_size, dtype=torch.float32)
        padded[:size] = gradient_D
        part = self.part(size)
        return self._reducing.add_parts(padded)[: part.stop - part.start]

    @override
    def gather_fields(self, fields_N: Indices) -> Indices:
        across_PN = self._across.gather_fields(fields_N)
        all_LPN = self._local.gather_fields(across_PN.reshape(-1)).reshape(self.local_size, -1, len(fields_N))
        return np.ascontiguousarray(all_LPN.transpose(1, 0, 2)).reshape(self.world.world_size, len(fields_N))

    @override
    def exchange(self, payload: Octets, lengths_P: Sequence[int]) -> PendingGather:
        return self._across.begin_gather(payload, lengths_P)

    @override
    def assemble(self, merged: Sparse, size: int) -> Sparse:
        counts_L = self._local.gather_fields(np.array([merged.count], dtype=np.int64))[:, 0]
        mine = np.concatenate([merged.indices_K.astype(np.uint32).view(np.uint8), merged.values_K.view(np.uint8)])
        everything = self._local.gather_bytes(mine, (8 * counts_L).tolist())
        indices, values = [], []
        for place, (content, count) in enumerate(zip(everything, counts_L.tolist(), strict=True)):
            indices.append(content[: 4 * count].view(np.uint32) + np.uint32(place * self._part_length(size)))
            values.append(content[4 * count :].view(np.float32))
        return Sparse(np.concatenate(indices), np.concatenate(values), size)

    @override
    def close(self) -> None:
        for transport in (self._across, self._local, self._reducing, self.world):
            transport.close()

    def _part_length(self, size: int) -> int:
        lines = -(-size // LINE)
        return -(-lines // self.local_size) * LINE
