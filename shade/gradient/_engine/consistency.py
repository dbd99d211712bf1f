"""Finds replicas that diverged, and repairs them.

A flipped bit in a memory, a script that changes weights on one rank, a flush that not all ranks made: without a check
the mean of their gradients means less and less, in silence. The state of most ranks is taken as right; in a tie, that
of the lowest rank. On a second repair, inspect that machine.

Cost: one pass over weights and state, and 16 bytes a bucket, every `every` steps.

Legend: W world · B buckets.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
import xxhash

from shade.errors import ConfigError, GradientError
from shade.gradient._comm.transport import Transport
from shade.gradient._compress.bucket import Bucket
from shade.gradient._optim.base import SparseOptimizer
from shade.types import Indices

logger = logging.getLogger("shade.gradient")


EVERY = 500


class Consistency:
    """Checks at intervals that all ranks hold the same bits, and repairs those that do not.

    Args:
        transport: Of all ranks.
        optimizer: Steps the buckets.
        buckets: The same on all ranks, in the same order.
        every: Steps between two checks, ≥ 1.

    Raises:
        ConfigError: ``every`` is below 1.
    """

    def __init__(
        self, transport: Transport, optimizer: SparseOptimizer, buckets: Sequence[Bucket], *, every: int = EVERY
    ) -> None:
        if every < 1:
            raise ConfigError.of("every ≥ 1 step", every, f"{EVERY} is the default")
        self._transport, self._optimizer, self._buckets, self._every = transport, optimizer, tuple(buckets), every
        self.num_checks = 0
        """Checks so far."""
        self.num_repairs = 0
        """Buckets that differed; after more than a few, some machine's memory is bad."""

    def after_step(self, step: int) -> list[int]:
        """Checks if the interval has passed. Collective, with the same step on every rank; returns as `check`."""
        return self.check() if step % self._every == 0 else []

    def check(self) -> list[int]:
        """Checks now. Collective; no step may be in progress.

        Returns:
            Numbers of the repaired buckets, the same on every rank.

        Raises:
            GradientError: Ranks have different kinds of optimizer state, not only different content.
            PeerLostError: A rank is gone or silent.
        """
        self.num_checks += 1
        # All ranks get all hashes (xxh3, 64 bits), so all draw the same conclusion without another exchange.
        fields_WN = self._transport.gather_fields(self._fields()).reshape(self._transport.world_size, -1, 2)
        repaired = []
        for number, bucket in enumerate(self._buckets):
            hashes_W = fields_WN[:, number, 0].tolist()
            if len(set(hashes_W)) == 1:
                continue
            source = _majority_rank(hashes_W)
            others = [rank for rank, each in enumerate(hashes_W) if each != hashes_W[source]]
            if len(set(fields_WN[:, number, 1].tolist())) > 1:
                cure = "restart all ranks from the last checkpoint"
                raise GradientError.of(f"state of the same form in bucket {number} on every rank", others, cure)
            logger.warning("bucket %d of rank %s is not what rank %d has; repaired", number, others, source)
            broadcast_replica(self._transport, self._optimizer, bucket, source)
            repaired.append(number)
        self.num_repairs += len(repaired)
        return repaired

    def _fields(self) -> Indices:
        # Hash and number of arrays of each bucket: other moments cannot be repaired by a broadcast.
        fields = np.empty((len(self._buckets), 2), dtype=np.int64)
        for number, bucket in enumerate(self._buckets):
            state = xxhash.xxh3_64()
            arrays = self._optimizer.replica(bucket)
            for array in arrays:
                state.update(array.data)
            fields[number] = np.uint64(state.intdigest()).astype(np.int64), len(arrays)
        return fields.reshape(-1)


def broadcast_replica(transport: Transport, optimizer: SparseOptimizer, bucket: Bucket, source: int) -> None:
    """Gives every rank a bucket's weights and optimizer state of rank ``source``. Collective.

    The optimizer must have the same moments on every rank.
    """
    for array in optimizer.replica(bucket):
        transport.broadcast(torch.from_numpy(array), source)
    optimizer.take_replica(bucket)


def _majority_rank(hashes_W: list[int]) -> int:
    counts = Counter(hashes_W)
    return min(range(len(hashes_W)), key=lambda rank: (-counts[hashes_W[rank]], rank))
