"""Known faults of checkpoints, planted again: inside the context, shade has the fault."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest.mock import PropertyMock, patch

import numpy as np
import torch

from shade.checkpoint import Checkpointer
from shade.checkpoint._buffer import tensor_copy
from shade.checkpoint._buffer.copy_and_compare import Comparison
from shade.checkpoint._buffer.tensor_copy import Copying
from shade.checkpoint._capture import app_state
from shade.checkpoint._capture.app_state import AppState, CapturedState
from shade.checkpoint._capture.flatten import part_of, tensors_in, torch_dtype
from shade.checkpoint._format import retention
from shade.checkpoint._restore import reader, restore
from shade.checkpoint._restore.restore import Arena
from shade.data._loader.loader import EpochProgress
from shade.data._sampler.sampler import ShadeSampler

Fault = Callable[[], AbstractContextManager[None]]


def _patched(*patches: Any) -> Fault:
    @contextlib.contextmanager
    def planted() -> Iterator[None]:
        with ExitStack() as stack:
            for each in patches:
                stack.enter_context(each)
            yield

    return planted


def _views(arena: Arena, entries: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {
        name: arena.tensor[entry.start : entry.stop].view(torch_dtype(entry.dtype)).view(entry.shape)
        for name, entry in entries.items()
    }


def _ends_of_contiguous(tensor: torch.Tensor) -> tuple[int, int, int]:
    return _ends(tensor) if tensor.is_contiguous() else (0, 0, 0)


_ends = tensor_copy._ends
_capture = AppState.capture
_set_generators = app_state._set_generators
_attach = AppState.attach
_load = app_state._load


def _of_all_modules(self: AppState, tree: Any) -> set[str]:
    """What other objects share with a module, and keep, is among it."""
    return tensors_in(part_of(tree, list(self.modules)))


def _put_one_after_the_other(self: AppState, state: Mapping[str, Any], names: Any, *_: Any) -> None:
    for name in sorted(names, key=lambda name: not isinstance(self._objects[name], torch.nn.Module)):
        try:
            _load(self._objects[name], state[name])
        except Exception as error:
            raise app_state.refused(name, error) from error


def _cast(target: Any, state: Any) -> None:
    target.load_state_dict(state)


def _without_buffers(target: Any, state: Any) -> None:
    own = {name: each.clone() for name, each in target.named_buffers()} if isinstance(target, torch.nn.Module) else {}
    _load(target, state)
    if own:
        for name, buffer in target.named_buffers():
            buffer.copy_(own[name])


def _untied(target: Any, state: Any) -> None:
    _load(target, state)
    if isinstance(target, torch.nn.Module) and hasattr(target, "decode"):
        target.decode.weight = torch.nn.Parameter(target.decode.weight.detach().clone())


def _with_own_lr(target: Any, state: Any) -> None:
    own = [group["lr"] for group in target.param_groups] if isinstance(target, torch.optim.Optimizer) else []
    _load(target, state)
    for group, lr in zip(getattr(target, "param_groups", []) if own else [], own, strict=True):
        group["lr"] = lr


class _Stale:
    """Gives the state of the save before."""

    def __init__(self, target: Any) -> None:
        self._target, self._before = target, copy.deepcopy(target.state_dict())

    def state_dict(self) -> Any:
        given, self._before = self._before, copy.deepcopy(self._target.state_dict())
        return given

    def load_state_dict(self, state: Any) -> None:
        self._target.load_state_dict(state)


def _attach_stale(self: AppState, objects: Mapping[str, Any]) -> None:
    _attach(self, {name: _Stale(each) if name.startswith("scheduler") else each for name, each in objects.items()})


def _all_steady(self: AppState, rank: int, world_size: int) -> CapturedState:
    captured = _capture(self, rank, world_size)
    return CapturedState(captured.tree, captured.tensors, frozenset(captured.tensors))


def _without_numpy(state: Mapping[str, Any]) -> None:
    _set_generators({**state, "numpy": np.random.get_state(legacy=False)})


FAULTS: Mapping[str, Fault] = {
    "restored tensors are views of one buffer": _patched(patch.object(Arena, "tensors", _views)),
    "a change of a tensor that is not contiguous is not seen": _patched(
        patch.object(tensor_copy, "_ends", _ends_of_contiguous),
        patch.object(Comparison, "agrees_in_full", lambda *_: True),
    ),
    "a mismatch is applied by half": _patched(
        patch.object(AppState, "_put", _put_one_after_the_other),
        patch.object(app_state, "_check_optimizer", lambda *_: None),
    ),
    "what does not fit on one rank is applied on the others": _patched(
        patch.object(restore, "_agree", lambda *_: None)
    ),
    "moments are cast to the type of their parameters": _patched(patch.object(app_state, "_load", _cast)),
    "a resumed epoch draws its seed again": _patched(
        patch.object(ShadeSampler, "at_resume", lambda *_: None),
        patch.object(EpochProgress, "drawing", lambda self: contextlib.nullcontext()),
    ),
    "a clean end does not save the last steps": _patched(
        patch.object(Checkpointer, "_has_news", PropertyMock(return_value=False))
    ),
    "verify accepts damage": _patched(
        patch.object(reader, "_has_whole_file", lambda *_: True),
        patch.object(reader, "is_sound_at", lambda *_: True),
    ),
    "a base is deleted while a snapshot builds on it": _patched(
        patch.object(retention, "lineage", lambda *_: iter(()))
    ),
    "a change right after a save gets into it": _patched(
        patch.object(AppState, "capture", _all_steady),
        patch.object(Copying, "_agrees", lambda *_: True),
        patch.object(tensor_copy.Fingerprints, "first_changed", lambda *_: None),
    ),
    "memory that is reused is handed back": _patched(
        patch.object(AppState, "forgettable", _of_all_modules),
        patch.object(AppState, "_separate", lambda self, trees, tensors: dict(tensors)),
    ),
    "buffers are not restored": _patched(patch.object(app_state, "_load", _without_buffers)),
    "a scheduler's state is that of the save before": _patched(patch.object(AppState, "attach", _attach_stale)),
    "numpy's generator is not restored": _patched(patch.object(app_state, "_set_generators", _without_numpy)),
    "tied weights come back untied": _patched(patch.object(app_state, "_load", _untied)),
    "the learning rate of a group is not restored": _patched(patch.object(app_state, "_load", _with_own_lr)),
}
