"""Inside a node gradients are added up whole; between nodes only what matters travels, each rank's own part of it.

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

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shade.errors import ConfigError
from shade.gradient.exchange import Arrival, Exchange, Octets
from shade.gradient.route import Route
from shade.gradient.sparse import Sparse
from shade.types import Indices

_LINE = 16


class NodeRoute(Route):
    """Dense inside nodes, sparse between them. Collective to make, over all ranks of ``world``.

    Args:
        world: All ranks.
        local_size: L, ranks in each node; divides the world.

    Raises:
        ConfigError: Nodes of unequal size.
    """

    def __init__(self, world: Exchange, local_size: int) -> None:
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

        def exchange(members: Sequence[int]) -> Exchange:
            return Exchange(ranks=members, timeout_seconds=timeout_seconds, generation=generation)

        self._reducing, self._local, self._across = exchange(beside), exchange(beside), exchange(across)

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """See `Route`."""
        return self.world, self._reducing, self._local, self._across

    @property
    def link(self) -> Exchange:
        """See `Route`."""
        return self._across

    @property
    def peers(self) -> tuple[tuple[int, ...], ...]:
        """See `Route`."""
        size = self.local_size
        return tuple(tuple(range(first, first + size)) for first in range(0, self.world.world_size, size))

    @property
    def place(self) -> int:
        """See `Route`."""
        return self._node

    def part(self, size: int) -> slice:
        """See `Route`."""
        length = self._part_length(size)
        return slice(min(size, self._local_rank * length), min(size, (self._local_rank + 1) * length))

    def begin(self, num_samples: float) -> tuple[float, float]:
        """See `Route`."""
        words = np.array([num_samples], dtype=np.float64).view(np.int64)
        total = float(self._reducing.gather_words(words).view(np.float64).sum())
        return (num_samples / total if total > 0 else 0.0), total

    def reduce(self, gradient_D: Tensor) -> Tensor:
        """See `Route`."""
        size = gradient_D.numel()
        padded = torch.zeros(self._part_length(size) * self.local_size, dtype=torch.float32)
        padded[:size] = gradient_D
        part = self.part(size)
        return self._reducing.add_parts(padded)[: part.stop - part.start]

    def agree(self, words_N: Indices) -> Indices:
        """See `Route`."""
        across_PN = self._across.gather_words(words_N)
        all_LPN = self._local.gather_words(across_PN.reshape(-1)).reshape(self.local_size, -1, len(words_N))
        return np.ascontiguousarray(all_LPN.transpose(1, 0, 2)).reshape(self.world.world_size, len(words_N))

    def trade(self, payload: Octets, lengths_P: Sequence[int]) -> Arrival:
        """See `Route`."""
        return self._across.begin_gather(payload, lengths_P)

    def spread(self, merged: Sparse, size: int) -> Sparse:
        """See `Route`."""
        counts_L = self._local.gather_words(np.array([merged.count], dtype=np.int64))[:, 0]
        mine = np.concatenate([merged.indices_K.astype(np.uint32).view(np.uint8), merged.values_K.view(np.uint8)])
        everything = self._local.gather_bytes(mine, (8 * counts_L).tolist())
        indices, values = [], []
        for place, (content, count) in enumerate(zip(everything, counts_L.tolist(), strict=True)):
            indices.append(content[: 4 * count].view(np.uint32) + np.uint32(place * self._part_length(size)))
            values.append(content[4 * count :].view(np.float32))
        return Sparse(np.concatenate(indices), np.concatenate(values), size)

    def close(self) -> None:
        """See `Route`."""
        for exchange in reversed(self.exchanges):
            exchange.close()

    def _part_length(self, size: int) -> int:
        lines = -(-size // _LINE)
        return -(-lines // self.local_size) * _LINE
