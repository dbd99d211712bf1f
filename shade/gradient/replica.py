"""Makes all ranks' models one and the same before the first step, and their buffers at stated moments afterwards.

Parameters stay alike by themselves: every rank applies the same merged gradient to the same weights in the same
order. What has to be ensured is the beginning: the same names, shapes, types and settings (a difference is said by
name, on all ranks, instead of hanging in the first exchange), and rank 0's values.

Buffers, such as BatchNorm's running statistics, are not trained and drift apart between exchanges, as each rank sees
its own samples. They are left alone during training (DistributedDataParallel would send rank 0's before every
forward) and brought together by `GradientEngine.finish`, before an evaluation or a snapshot: floating-point ones
become their mean over the ranks, all others (counts) are rank 0's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shade.errors import ConfigError
from shade.gradient.bucket import Bucket
from shade.gradient.exchange import Exchange


def check_alike(exchange: Exchange, model: nn.Module, buckets: Sequence[Bucket], settings: Mapping[str, Any]) -> None:
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
    everyone = exchange.gather_messages(mine)
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        for name in {**first, **theirs}:
            if first.get(name) != theirs.get(name):
                raise ConfigError(
                    f"expected {name} of rank {rank} to be {first.get(name)!r} as on rank 0, got {theirs.get(name)!r}; "
                    "build the same model, optimizer and engine on every rank"
                )


def share_weights(exchange: Exchange, model: nn.Module, buckets: Sequence[Bucket], source: int = 0) -> None:
    """Gives every rank one rank's parameters and buffers. Collective.

    Args:
        exchange: Of all ranks.
        model: Overwritten, except on ``source``.
        buckets: What is trained.
        source: Whose values.
    """
    if exchange.world_size == 1:
        return
    for bucket in buckets:
        exchange.broadcast(bucket.weights_D, source)
        bucket.publish()
    share_rest(exchange, model, buckets, source)


def share_rest(exchange: Exchange, model: nn.Module, buckets: Sequence[Bucket], source: int = 0) -> None:
    """Gives every rank one rank's buffers, and the parameters that are not trained. Collective.

    Args:
        exchange: Of all ranks.
        model: Overwritten, except on ``source``.
        buckets: What is trained, and left alone.
        source: Whose values.
    """
    if exchange.world_size == 1:
        return
    held = {parameter for bucket in buckets for parameter in bucket.parameters}
    others = [parameter for parameter in model.parameters() if parameter not in held]
    for tensor in (*others, *model.buffers()):
        _share(exchange, tensor, source)


def unite_buffers(exchange: Exchange, model: nn.Module) -> None:
    """Replaces floating-point buffers by their mean over the ranks and all others by rank 0's. Collective.

    Args:
        exchange: Of all ranks.
        model: Whose buffers.
    """
    buffers = list(model.buffers())
    if exchange.world_size == 1 or not buffers:
        return
    floats = [buffer for buffer in buffers if buffer.is_floating_point() and buffer.numel()]
    if floats:
        flat = torch.cat([buffer.detach().reshape(-1).to("cpu", torch.float64) for buffer in floats])
        exchange.add(flat)
        flat /= exchange.world_size
        parts = torch.split(flat, [buffer.numel() for buffer in floats])
        with torch.no_grad():
            for buffer, part in zip(floats, parts, strict=True):
                buffer.copy_(part.reshape(buffer.shape))
    for buffer in buffers:
        if not buffer.is_floating_point():
            _share(exchange, buffer, 0)


def _share(exchange: Exchange, tensor: Tensor, source: int) -> None:
    content = tensor.detach().to("cpu", copy=True).contiguous()
    exchange.broadcast(content.view(torch.uint8) if content.ndim and content.numel() else content, source)
    with torch.no_grad():
        tensor.copy_(content)


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
