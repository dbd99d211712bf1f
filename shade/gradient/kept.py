"""What DDP's buckets keep back, by parameter: DDP cuts its buckets anew after the first step, and in another run.

A bucket is known by the names of its parameters. When one comes that was not there before, everything that is kept is
taken apart into parameters, and the new bucket's memory is put together from those.

Invariant: cutting anew changes nothing of what is kept. What is chosen does depend on the cut, so a resumed run, whose
first step has DDP's first cut again, is not the uninterrupted one to the bit.

Legend: D bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shade.errors import ConfigError, StateMismatchError
from shade.gradient.correction import STEPS
from shade.gradient.error_feedback import ErrorFeedback


class Keeper:
    """One `ErrorFeedback` for each bucket that there is.

    Args:
        model: Its parameters' names.
        make: Makes the memory of a bucket of a size.
    """

    def __init__(self, model: nn.Module, make: Callable[[int], ErrorFeedback]) -> None:
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._sizes = {name: parameter.numel() for parameter, name in self._names.items()}
        self._make = make
        self._buckets: dict[tuple[str, ...], ErrorFeedback] = {}
        self._apart: dict[str, dict[str, Tensor]] = {}

    def of(self, parameters: Sequence[Tensor]) -> ErrorFeedback:
        """The memory of a bucket.

        Args:
            parameters: In it, in order.

        Returns:
            Its memory, with whatever was kept of these parameters in other buckets.

        Raises:
            ConfigError: A parameter of another model.
        """
        unknown = [parameter for parameter in parameters if parameter not in self._names]
        if unknown:
            got = f"one of shape {tuple(unknown[0].shape)}"
            raise ConfigError.of("parameters of the state's model", got, "give SparseState the model that DDP wraps")
        key = tuple(self._names[parameter] for parameter in parameters)  # type: ignore[index]
        if key not in self._buckets:
            self._take_apart(set(key))
            feedback = self._make(sum(self._sizes[name] for name in key))
            apart = {name: self._apart.pop(name, {}) for name in key}
            kinds = {kind for kept in apart.values() for kind in kept}
            if kinds:
                zeros = {name: torch.zeros(self._sizes[name]) for name in key}
                whole = {
                    kind: torch.cat([apart[name].get(kind, zeros[name]) for name in key]) for kind in kinds - {STEPS}
                }
                counted = [kept[STEPS] for kept in apart.values() if STEPS in kept]
                feedback.load_state_dict(whole | ({STEPS: torch.stack(counted).amin(dim=0)} if counted else {}))
            self._buckets[key] = feedback
        return self._buckets[key]

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """What is kept, by parameter; copies."""
        state = {name: dict(kept) for name, kept in self._apart.items()}
        for key, feedback in self._buckets.items():
            state |= self._split(key, feedback)
        return state

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes `state_dict` back, whatever buckets there will be.

        Args:
            state: By parameter.

        Raises:
            StateMismatchError: Of other parameters; nothing was loaded.
        """
        apart = {name: {kind: torch.as_tensor(each).clone() for kind, each in k.items()} for name, k in state.items()}
        for name, kept in apart.items():
            got = {kind: each.numel() for kind, each in kept.items() if kind != STEPS}
            if set(got.values()) - {self._sizes.get(name)}:
                expected = f"what was kept of {name!r}: {self._sizes.get(name, 'no such parameter,')} elements"
                raise StateMismatchError.of(expected, got, "build the model as it was when it was saved")
        self._buckets, self._apart = {}, apart

    def _take_apart(self, names: set[str]) -> None:
        """Ends the buckets that hold any of these parameters."""
        for key in [key for key in self._buckets if names & set(key)]:
            self._apart |= self._split(key, self._buckets.pop(key))

    def _split(self, key: tuple[str, ...], feedback: ErrorFeedback) -> dict[str, dict[str, Tensor]]:
        state = feedback.state_dict()
        sizes = [self._sizes[name] for name in key]
        split: dict[str, Sequence[Tensor]] = {
            kind: [each] * len(key) if kind == STEPS else torch.split(each.clone(), sizes)
            for kind, each in state.items()
        }
        return {name: {kind: parts[place] for kind, parts in split.items()} for place, name in enumerate(key)}
