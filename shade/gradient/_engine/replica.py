"""Makes all ranks' models the same before the first step, and checks afterwards that they stay the same.

Parameters stay the same by themselves: every rank applies the same merged gradient to the same weights in the same
order. The start must be the same: names, shapes, types and settings (a difference raises an error that names it, on
all ranks, instead of a hang in the first exchange), and rank 0's values.

Buffers, such as BatchNorm's running statistics, are not trained; each rank's follow its own samples. Training leaves
them alone (DistributedDataParallel would send rank 0's before every forward). `GradientEngine.finish` averages
floating-point buffers over the ranks, before an evaluation or a snapshot, and takes all others (counts) from rank 0.

`Consistency` finds replicas that diverged all the same: a flipped bit in a memory, a script that changes weights on
one rank, a flush that not all ranks made. Without it the mean of their gradients means less and less, in silence. It
hashes each bucket's weights and optimizer state (xxh3, 64 bits) and gathers the hashes, so all ranks draw the same
conclusion. The state of most ranks is taken as right; in a tie, that of the lowest rank. Its lowest holder sends the
bucket to all. The repair is logged and counted: on the second one, inspect that machine.

Cost: one pass over weights and state, and 16 bytes a bucket, every `every` steps.

Legend: W world · N fields · B buckets.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Container, Mapping, Sequence
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
    transport: Transport,
    model: nn.Module,
    buckets: Sequence[Bucket],
    settings: Mapping[str, Any],
    refusal: ConfigError | None = None,
) -> None:
    """Compares names, shapes, types and ``settings`` (JSON-plain) of all ranks. Collective.

    A difference, or a ``refusal`` on any rank, raises `ConfigError` on all ranks; the message names what and where.
    """
    parameters = {name: _describe(parameter) for name, parameter in model.named_parameters()}
    trained = {name: f"bucket {number}" for number, each in enumerate(buckets) for name in each.names}
    buffers = {f"buffer {name}": _describe(buffer) for name, buffer in model.named_buffers()}
    mine = {**{f"setting {name}": value for name, value in settings.items()}, **buffers}
    mine |= {f"parameter {name}": f"{shape}, {trained.get(name, 'frozen')}" for name, shape in parameters.items()}
    everyone = transport.gather_messages(mine if refusal is None else {"refusal": str(refusal)})
    if refusal is not None:
        raise refusal
    for rank, theirs in enumerate(everyone):
        if "refusal" in theirs:
            raise ConfigError(f"refused on rank {rank}: {theirs['refusal']}")
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        for name in {**first, **theirs}:
            if first.get(name) != theirs.get(name):
                raise ConfigError(
                    f"expected {name} of rank {rank} to be {first.get(name)!r} as on rank 0, got {theirs.get(name)!r}; "
                    "build the same model, optimizer and engine on every rank"
                )


def check_all_known(model: nn.Module, known: Container[Tensor], cure: str) -> None:
    """Raises `ConfigError` if the model has trainable parameters that are not ``known``."""
    new = [name for name, each in model.named_parameters() if each.requires_grad and each not in known]
    if new:
        raise ConfigError.of("the parameters that the engine was made with", f"others as {new}", cure)


def check_none_refuses(transport: Transport, refusal: Exception | None) -> None:
    """Raises this rank's refusal, or a `GradientError` with another rank's. Collective."""
    causes = transport.gather_messages("" if refusal is None else f"{type(refusal).__name__}: {refusal}")
    if refusal is not None:
        raise refusal
    for rank, cause in enumerate(causes):
        if cause:
            raise GradientError(f"rank {rank} refused, so no rank continues: {cause}")


def broadcast_weights(transport: Transport, model: nn.Module, buckets: Sequence[Bucket], source: int = 0) -> None:
    """Gives every rank the parameters and buffers of rank ``source``. Collective."""
    if transport.world_size == 1:
        return
    for bucket in buckets:
        transport.broadcast(bucket.weights_D, source)
        bucket.publish()
    broadcast_untrained(transport, model, buckets, source)


def broadcast_untrained(transport: Transport, model: nn.Module, buckets: Sequence[Bucket], source: int = 0) -> None:
    """Gives every rank the buffers and the frozen parameters of rank ``source``. Collective."""
    if transport.world_size == 1:
        return
    held = {parameter for bucket in buckets for parameter in bucket.parameters}
    others = [parameter for parameter in model.parameters() if parameter not in held]
    for tensor in (*others, *model.buffers()):
        _broadcast(transport, tensor, source)


def average_buffers(transport: Transport, model: nn.Module) -> None:
    """Averages floating-point buffers over the ranks, and takes all others from rank 0. Collective."""
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
        """Returns hash and number of arrays of each bucket."""
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
    """Returns the lowest rank that holds what most ranks hold; in a tie, the lowest of all."""
    counts = Counter(hashes_W)
    return min(range(len(hashes_W)), key=lambda rank: (-counts[hashes_W[rank]], rank))
