"""Batches on their way to a device, one ahead of training.

The copy runs in a stream of its own, from page-locked memory, while training computes on the batch before; training's
stream waits for it, and the processor for nothing. Price: one batch more in the device's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map


def on_device(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """The same batches, their tensors on a device.

    Args:
        batches: On the host.
        device: Where they go.

    Yields:
        Each batch, ready to be used in the current stream.
    """
    if device.type != "cuda":
        for batch in batches:
            yield _moved(batch, device)
        return
    stream, ahead = torch.cuda.Stream(device), None  # type: ignore[no-untyped-call]
    for batch in batches:
        with torch.cuda.stream(stream):
            moved, there = _moved(batch, device), stream.record_event()
        if ahead is not None:
            yield _ready(*ahead, device)
        ahead = (moved, there)
    if ahead is not None:
        yield _ready(*ahead, device)


def _moved(batch: Any, device: torch.device) -> Any:
    return tree_map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf, batch)


def _ready(batch: Any, there: torch.cuda.Event, device: torch.device) -> Any:
    """Makes the current stream wait, and its use known to the memory that the other stream took."""
    current = torch.cuda.current_stream(device)
    current.wait_event(there)
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            leaf.record_stream(current)
    return batch
