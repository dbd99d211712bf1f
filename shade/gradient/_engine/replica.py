"""Makes all ranks' models one and the same before the first step, and their buffers at stated moments afterwards.

Parameters stay alike by themselves: every rank applies the same merged gradient to the same weights in the same
order. What has to be ensured is the beginning: the same names, shapes, types and settings (a difference is said by
name, on all ranks, instead of hanging in the first exchange), and rank 0's values.

Buffers, such as BatchNorm's running statistics, are not trained and drift apart between exchanges, as each rank sees
its own samples. They are left alone during training (DistributedDataParallel would send rank 0's before every
forward) and brought together by `GradientEngine.finish`, before an evaluation or a snapshot: floating-point ones
become their mean over the ranks, all others (counts) are rank 0's.

Looks every so many steps whether all ranks hold the same bits, and makes them the same again where they do not.

Replicas stay alike because all apply the same steps in the same order. What breaks that is not a matter of rounding: a
flipped bit in a memory, a script that changes weights on one rank, a flush that not all ranks made. Left alone,
replicas part for good and the mean of their gradients means less and less, without a word. So each bucket's weights and
optimizer state are hashed (xxh3, 64 bits), the hashes go to all ranks, and all draw the same conclusion from the same
words.

The state that most ranks hold is taken to be right; among equals, that of the lowest rank. Its lowest holder sends the
bucket to all. That is said in the log and counted: whoever sees it twice should look at that machine.

Price: one pass over the memory of weights and state, and 16 bytes a bucket, every `every` steps.

Legend: W world · N words · B buckets.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from shade.errors import ConfigError, GradientError
from shade.gradient._comm.transport import Transport
from shade.gradient._compress.bucket import Bucket
from shade.gradient._optim.base import SparseOptimizer
from shade.types import Indices


def check_same_setup(
    transport: Transport, model: nn.Module, buckets: Sequence[Bucket], settings: Mapping[str, Any]
) -> None:
    """Compares what has to be the same on every rank. Collective.

    Args:
        exchange: Of all ranks.
        model: This rank's.
        buckets: What is trained.
        settings: Whatever else has to be the same; JSON-plain.

    Raises:
        ConfigError: Some rank's differs from rank 0's; the message names what and where. Raised on all ranks.
    """
    parameters = {name: _describe(parameter) for name, parameter in model.named_parameters()}
    trained = {name: f"bucket {number}" for number, each in enumerate(buckets) for name in each.names}
    buffers = {f"buffer {name}": _describe(buffer) for name, buffer in model.named_buffers()}
    mine = {**{f"setting {name}": value for name, value in settings.items()}, **buffers}
    mine |= {f"parameter {name}": f"{told}, {trained.get(name, 'frozen')}" for name, told in parameters.items()}
    everyone = transport.gather_messages(mine)
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        for name in {**first, **theirs}:
            if first.get(name) != theirs.get(name):
                raise ConfigError(
                    f"expected {name} of rank {rank} to be {first.get(name)!r} as on rank 0, got {theirs.get(name)!r}; "
                    "build the same model, optimizer and engine on every rank"
                )


def broadcast_weights(transport: Transport, model: nn.Module, buckets: Sequence[Bucket], source: int = 0) -> None:
    """Gives every rank one rank's parameters and buffers. Collective.

    Args:
        exchange: Of all ranks.
        model: Overwritten, except on ``source``.
        buckets: What is trained.
        source: Whose values.
    """
    if transport.world_size == 1:
        return
    for bucket in buckets:
        transport.broadcast(bucket.weights_D, source)
        bucket.publish()
    broadcast_untrained(transport, model, buckets, source)


def broadcast_untrained(transport: Transport, model: nn.Module, buckets: Sequence[Bucket], source: int = 0) -> None:
    """Gives every rank one rank's buffers, and the parameters that are not trained. Collective.

    Args:
        exchange: Of all ranks.
        model: Overwritten, except on ``source``.
        buckets: What is trained, and left alone.
        source: Whose values.
    """
    if transport.world_size == 1:
        return
    held = {parameter for bucket in buckets for parameter in bucket.parameters}
    others = [parameter for parameter in model.parameters() if parameter not in held]
    for tensor in (*others, *model.buffers()):
        _broadcast(transport, tensor, source)


def average_buffers(transport: Transport, model: nn.Module) -> None:
    """Replaces floating-point buffers by their mean over the ranks and all others by rank 0's. Collective.

    Args:
        exchange: Of all ranks.
        model: Whose buffers.
    """
    buffers = list(model.buffers())
    if transport.world_size == 1 or not buffers:
        return
    floats = [buffer for buffer in buffers if buffer.is_floating_point() and buffer.numel()]
    if floats:
        flat = torch.cat([buffer.detach().reshape(-1).to("cpu", torch.float64) for buffer in floats])
        transport.add(flat)
        flat /= transport.world_size
        parts = torch.split(flat, [buffer.numel() for buffer in floats])
        with torch.no_grad():
            for buffer, part in zip(floats, parts, strict=True):
                buffer.copy_(part.reshape(buffer.shape))
    for buffer in buffers:
        if not buffer.is_floating_point():
            _broadcast(transport, buffer, 0)


def _broadcast(transport: Transport, tensor: Tensor, source: int) -> None:
    content = tensor.detach().to("cpu", copy=True).contiguous()
    transport.broadcast(content.view(torch.uint8) if content.ndim and content.numel() else content, source)
    with torch.no_grad():
        tensor.copy_(content)


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


EVERY = 500

logger = logging.getLogger("shade.gradient")


class Consistency:
    """One rank's part in it.

    Args:
        exchange: Of all ranks.
        optimizer: Steps the buckets.
        buckets: The same on all ranks, in the same order.
        every: Steps between two looks, ≥ 1.

    Raises:
        ConfigError: Not even one step between looks.
    """

    def __init__(
        self, transport: Transport, optimizer: SparseOptimizer, buckets: Sequence[Bucket], *, every: int = EVERY
    ) -> None:
        if every < 1:
            raise ConfigError.of("every ≥ 1 step", every, f"{EVERY} is the default")
        self._transport, self._optimizer, self._buckets, self._every = transport, optimizer, tuple(buckets), every
        self.num_checks = 0
        """Looks so far."""
        self.num_repairs = 0
        """Buckets that were not the same on all ranks; more than a few: some machine's memory is bad."""

    def after_step(self, step: int) -> list[int]:
        """Looks, if it is time to. Collective, with the same step on every rank.

        Args:
            step: Steps taken.

        Returns:
            As `check`.
        """
        return self.check() if step % self._every == 0 else []

    def check(self) -> list[int]:
        """Looks now. Collective; no step may be under way.

        Returns:
            Numbers of the buckets that were repaired, the same on every rank.

        Raises:
            GradientError: Ranks differ in what they remember, not only in its content.
            PeerLostError: A rank is gone or silent.
        """
        self.num_checks += 1
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
        """Hash and form of each bucket."""
        fields = np.empty((len(self._buckets), 2), dtype=np.int64)
        for number, bucket in enumerate(self._buckets):
            state = xxhash.xxh3_64()
            arrays = self._optimizer.replica(bucket)
            for array in arrays:
                state.update(array.data)
            fields[number] = np.uint64(state.intdigest()).astype(np.int64), len(arrays)
        return fields.reshape(-1)


def broadcast_replica(transport: Transport, optimizer: SparseOptimizer, bucket: Bucket, source: int) -> None:
    """Makes one rank's weights and optimizer state of a bucket everybody's. Collective.

    Args:
        exchange: Of all ranks.
        optimizer: Steps the bucket; has the same moments on every rank.
        bucket: Overwritten, except on ``source``.
        source: Whose state.
    """
    for array in optimizer.replica(bucket):
        transport.broadcast(torch.from_numpy(array), source)
    optimizer.take_replica(bucket)


def _majority_rank(hashes_W: list[int]) -> int:
    """The lowest rank that holds what most hold; among equals, the lowest of all."""
    counts = Counter(hashes_W)
    return min(range(len(hashes_W)), key=lambda rank: (-counts[hashes_W[rank]], rank))
