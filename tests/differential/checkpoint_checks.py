"""What the checkpoint generator compares: states, bit for bit, and the memory that they lie in."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from shade.checkpoint._capture.app_state import RandomState
from tests.differential.checkpoint_training import Training
from tests.support.states import bits

PLACES = ("cursor", "loader", "sampler")
"""Objects whose state says where they are in the data, in their own ways: compared by what they yield."""


def state_of(training: Training) -> dict[str, Any]:
    """Returns a copy of the state of every object, and of the global generators."""
    named = {name: each.state_dict() for name, each in training.attached.items() if hasattr(each, "state_dict")}
    buffers = dict(training.model.named_buffers()) | dict(training.model.named_parameters())
    return copy.deepcopy(_local(named | {"random": RandomState().state_dict(), "tensors": buffers}))


def _local(state: Any) -> Any:
    """Returns a state with this rank's part in place of each sharded tensor."""
    if isinstance(state, DTensor):
        return state.to_local().detach()
    if type(state) in (dict, OrderedDict):
        return {key: _local(each) for key, each in state.items()}
    return [_local(each) for each in state] if type(state) is list else state


def compared(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parts of a state that two processes have alike."""
    return {name: each for name, each in state.items() if name not in PLACES}


def difference(found: Any, expected: Any, path: str = "") -> str:
    """Returns where and how two values differ, in type or in a bit; empty if they do not."""
    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        same = (found.dtype, found.shape) == (expected.dtype, expected.shape) and bits(found) == bits(expected)
    elif type(found) is not type(expected):
        return f"{path}: expected a {type(expected).__name__}, got a {type(found).__name__}"
    elif isinstance(expected, np.ndarray | np.generic):
        one, other = _native(found), _native(expected)  # what comes through a pipe has lost its order of bytes
        same = (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    elif isinstance(expected, dict):
        if list(found) != list(expected):
            return f"{path}: expected keys {_short(list(expected))}, got {_short(list(found))}"
        return next(filter(None, (difference(found[key], expected[key], f"{path}/{key}") for key in expected)), "")
    elif isinstance(expected, list | tuple | deque) and len(found) == len(expected):
        pairs = enumerate(zip(found, expected, strict=True))
        return next(filter(None, (difference(one, other, f"{path}/{place}") for place, (one, other) in pairs)), "")
    else:
        same = repr(found) == repr(expected) if isinstance(expected, float) else bool(found == expected)
    return "" if same else f"{path or 'value'}: expected {_short(expected)}, got {_short(found)}"


def _native(array: Any) -> Any:
    return array.astype(array.dtype.newbyteorder("="))


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor) and value.numel() > 8:
        return f"{tuple(value.shape)} {value.dtype} of sum {value.detach().double().abs().sum().item()!r}"
    shown = " ".join(repr(value).split())
    return shown if len(shown) <= 200 else f"{shown[:200]} …"


def tensors_of(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yields every tensor in a state, and every array as a tensor in the same memory."""
    if isinstance(value, torch.Tensor):
        yield path, value.detach()
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biufc" and value.dtype.isnative:
        yield path, torch.from_numpy(value)
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from tensors_of(each, f"{path}/{key}")
    elif isinstance(value, list | tuple | deque):
        for place, each in enumerate(value):
            yield from tensors_of(each, f"{path}/{place}")


def shared(training: Training) -> set[tuple[str, str]]:
    """Returns the pairs of tensors that lie in one storage, or in overlapping memory."""
    found = _tensors(training)
    places = [(path, tensor.untyped_storage(), _extent(tensor)) for path, tensor in found]
    return {
        (min(path, other), max(path, other))
        for number, (path, storage, mine) in enumerate(places)
        for other, its_storage, theirs in places[:number]
        if storage.data_ptr() == its_storage.data_ptr() or (mine[0] < theirs[1] and theirs[0] < mine[1])
    }


def changed_together(training: Training) -> set[tuple[str, str]]:
    """Returns the pairs of tensors of which a write to one changes the other. Everything is as before afterwards."""
    found = _tensors(training)
    before, pairs = [bits(tensor) for _, tensor in found], set()
    for number, (path, tensor) in enumerate(found):
        kept = tensor.clone()
        tensor.copy_(kept.logical_not() if kept.dtype is torch.bool else kept + 1)
        pairs |= {
            (min(path, other), max(path, other))
            for place, (other, each) in enumerate(found)
            if place != number and bits(each) != before[place]
        }
        tensor.copy_(kept)
    return pairs


def _tensors(training: Training) -> list[tuple[str, torch.Tensor]]:
    state = {name: each.state_dict() for name, each in training.attached.items() if hasattr(each, "state_dict")}
    return [(path, tensor) for path, tensor in tensors_of(state) if tensor.numel()]


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the first byte of a tensor in memory, and the end."""
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + length * tensor.itemsize


def sizes(training: Training) -> dict[str, int]:
    """Returns how many bytes `torch.save` writes for the state of each object."""
    return {name: _size(each.state_dict()) for name, each in training.attached.items() if hasattr(each, "state_dict")}


def _size(state: Any) -> int:
    stream = io.BytesIO()
    torch.save(state, stream)
    return stream.tell()
