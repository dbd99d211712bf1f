"""Makes all ranks' models the same before the first step.

Parameters stay the same by themselves: every rank applies the same merged gradient to the same weights in the same
order. The start must be the same: names, shapes, types and settings, and rank 0's values.

Buffers, such as BatchNorm's running statistics, are not trained; each rank's follow its own samples, until
`GradientEngine.finish` averages them. DistributedDataParallel would send rank 0's before every forward pass.

Legend: W world · N fields · B buckets.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shade.errors import ConfigError, GradientError
from shade.gradient._comm.transport import Transport
from shade.gradient._compress.bucket import Bucket


def check_same_setup(
    transport: Transport,
    model: nn.Module,
    buckets: Sequence[Bucket],
    settings: Mapping[str, Any],
    refusal: Exception | None = None,
) -> None:
    """Compares names, shapes, types and ``settings`` (JSON-plain) of all ranks. Collective.

    A difference, or another rank's ``refusal``, raises `ConfigError` on all ranks; the message names what and where.
    This rank's own is raised as it is.
    """
    parameters = {name: _describe(parameter) for name, parameter in model.named_parameters()}
    trained = {name: f"bucket {number}" for number, each in enumerate(buckets) for name in each.names}
    buffers = {f"buffer {name}": _describe(buffer) for name, buffer in model.named_buffers()}
    mine = {**{f"setting {name}": value for name, value in settings.items()}, **buffers}
    mine |= {f"parameter {name}": f"{shape}, {trained.get(name, 'frozen')}" for name, shape in parameters.items()}
    # An error that names the difference, on all ranks, instead of a hang in the first exchange.
    everyone = transport.gather_messages(mine if refusal is None else {"refusal": str(refusal) or repr(refusal)})
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
        # Counts have no mean.
        if not buffer.is_floating_point():
            _broadcast(transport, buffer, 0)


def _broadcast(transport: Transport, tensor: Tensor, source: int) -> None:
    content = tensor.detach().to("cpu", copy=True).contiguous()
    transport.broadcast(content.view(torch.uint8) if content.ndim and content.numel() else content, source)
    with torch.no_grad():
        tensor.copy_(content)


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


logger = logging.getLogger("shade.gradient")
