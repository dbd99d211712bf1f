"""Adapts torchdata's StatefulDataLoader to what is attached: a state, a check of it, and a way back.

A StatefulDataLoader takes a state at once and looks at it when the next epoch begins: one of other workers would raise
an AssertionError there, and a state of its sampler would come too late for a training loop that asks for the epoch
first. So both are looked at when the state is loaded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from shade.errors import StateMismatchError
from shade.types import Resumed, Stateful


@dataclass(frozen=True)
class StatefulLoader(Resumed):
    """A StatefulDataLoader, as it is attached.

    Args:
        loader: The loader.
    """

    loader: Any

    @staticmethod
    def fits(target: object) -> bool:
        """Returns whether an object is a StatefulDataLoader."""
        return isinstance(target, torch.utils.data.DataLoader) and hasattr(target, "next_iter_state")

    @property
    def sampler(self) -> Any:
        """The loader's sampler."""
        return self.loader.sampler

    @override
    def state_dict(self) -> dict[str, Any]:
        # The loader has its sampler's state as it was when workers were asked last: later losses would be missing.
        state: dict[str, Any] = self.loader.state_dict()
        main = _main_state(state)
        position = main.get("_sampler_iter_state")
        if not isinstance(self.sampler, Stateful) or position is None or "sampler_state" not in position:
            return state
        main = {**main, "_sampler_iter_state": {**position, "sampler_state": self.sampler.state_dict()}}
        return {**state, "_snapshot": {**state["_snapshot"], "_main_snapshot": main}} if "_snapshot" in state else main

    def check(self, name: str, state: Mapping[str, Any]) -> None:
        """Raises a StateMismatchError if the loader was saved with another number of workers."""
        saved = (main := _main_state(state)).get("_num_workers", 0 if "_num_yielded" in main else None)
        if saved not in (None, self.loader.num_workers):  # None: a subclass has a state of its own
            raise StateMismatchError.of(
                f"{name!r} with num_workers={saved}, as it was saved",
                f"num_workers={self.loader.num_workers}",
                "a StatefulDataLoader resumes with the same number; with a ShadeSampler attach the sampler in its "
                "place, which resumes with any",
            )

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)
        sampler = (_main_state(state).get("_sampler_iter_state") or {}).get("sampler_state")
        if sampler is not None:
            self.sampler.load_state_dict(sampler)

    def way_back(self) -> Callable[[], None]:
        """Returns what undoes a `load_state_dict`. Asking for a state instead would start the workers."""
        names = ("_iterator", "next_iter_state", "_initial_iter_for_state_dict")
        own = {name: getattr(self.loader, name) for name in names}
        sampler = copy.deepcopy(self.sampler.state_dict()) if isinstance(self.sampler, Stateful) else None

        def undo() -> None:
            vars(self.loader).update(own)
            if sampler is not None:
                self.sampler.load_state_dict(sampler)

        return undo

    @override
    def at_resume(self, action: Callable[[], None]) -> None:
        make = self.loader._get_iterator

        def once() -> Any:
            self.loader._get_iterator = make
            made = make()
            action()
            return made

        self.loader._get_iterator = once


def _main_state(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the part of a StatefulDataLoader's state that no worker holds."""
    found: Mapping[str, Any] = state["_snapshot"]["_main_snapshot"] if "_snapshot" in state else state
    return found
