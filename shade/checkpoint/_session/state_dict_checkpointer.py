"""Checkpoints a state dict that is passed at each save, instead of objects that were attached once.

What attaching would say is found out at each save, within 7 ms for 600 tensors: which tensors are alike on all ranks,
so that each rank saves a share, and which are steady, so that they are copied while the training runs.
Invariant: each rank gets back the state that it passed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any, Final

import torch
import xxhash
from typing_extensions import override

from shade.checkpoint._capture.app_state import Agree, AppState, CapturedState, RandomState, agreed
from shade.checkpoint._capture.flatten import flatten, unflatten
from shade.checkpoint._session.checkpointer import Checkpointer
from shade.errors import ConfigError
from shade.rank_group import RankGroup
from shade.types import Stateful

SMALL_BYTES: Final = 2**16
"""Tensors that change with every forward pass are smaller, and copied in microseconds."""
_PLACE_BYTES: Final = 64


class StateDictState(AppState):
    """The state dict passed last, and this process's random generators.

    Args:
        group: The ranks; used in `capture`.
    """

    def __init__(self, group: RankGroup) -> None:
        super().__init__(replicated=True)
        self._group = group
        self._random: Stateful = RandomState()
        self.state: dict[str, Any] = {}
        """The state that is saved next."""
        self.loaded: dict[str, Any] | None = None
        """The state read last, until it is taken."""
        self.copies_at_once = False
        """Whether every tensor is copied at once, since a large one was found to change between two steps."""
        self._generators: dict[str, Any] | None = None

    @override
    def capture(self, rank: int, world_size: int) -> CapturedState:
        # Collective: what one rank cannot save, no rank saves.
        state = {"state": self.state, "random": self._random.state_dict()}
        failure: ConfigError | None = None
        try:
            tree, tensors = flatten(state, rank=rank)
        except ConfigError as error:
            failure = error
        if world_size > 1:
            # A rank that failed gathers too: the others wait for it here.
            mine = None if failure else {name: _digest(tensor) for name, tensor in tensors.items()}
            gathered = self._group.gather(mine)
            failed = [number for number, each in enumerate(gathered) if each is None and number != rank]
            if failed and failure is None:
                failure = ConfigError(f"rank {failed[0]} cannot save its state; its own message says why")
        if failure is not None:
            raise failure
        if world_size > 1:
            own = _differing(gathered)
            tree, tensors = flatten(state, rank=rank, is_own=lambda path: path in own)
        # Large tensors are parameters and optimizer state, which only a step changes. If one changes during the copy
        # all the same, the copy is found torn, and the save is refused.
        large = (name for name, tensor in tensors.items() if tensor.numel() * tensor.itemsize >= SMALL_BYTES)
        return CapturedState(tree, tensors, frozenset() if self.copies_at_once else frozenset(large))

    @property
    @override
    def epoch(self) -> int:
        """The ``epoch`` of the state that was read; 0 where it has none."""
        found = self.loaded.get("epoch") if self.loaded is not None else None
        return found if type(found) is int else 0

    @override
    def forgettable(self, tree: Any) -> Set[str]:
        # The state that is read is the state that the caller gets, so no memory of it may be released.
        return set()

    @override
    def load(
        self,
        tree: Any,
        tensors: Mapping[str, torch.Tensor],
        names: Collection[str],
        trees: Sequence[Any] = (),
        agree: Agree = lambda failure: None,
    ) -> None:
        del trees
        with agreed(agree):
            self.read(tree, tensors, with_generators="random" in names)

    def read(self, tree: Any, tensors: Mapping[str, torch.Tensor], *, with_generators: bool) -> None:
        """Keeps a state that was read, until it is taken.

        Args:
            tree: Tree of any snapshot; attached objects come as a dict by their names.
            tensors: All tensors that the tree names.
            with_generators: Whether its random generators are this rank's.
        """
        found = unflatten(tree, tensors)
        generators = found.pop("random", None)
        self._generators = generators if with_generators else None
        self.loaded = found["state"] if found.keys() == {"state"} else found

    def take(self) -> dict[str, Any] | None:
        """Returns the state that was read, once, and sets the random generators; None if no state was read."""
        state, self.loaded = self.loaded, None
        if self._generators is not None:
            self._random.load_state_dict(self._generators)
            self._generators = None
        return state


def _differing(gathered: list[dict[str, str]]) -> set[str]:
    names = {name for each in gathered for name in each}
    differing = {name for name in names if any(each.get(name) != gathered[0].get(name) for each in gathered)}
    return {name.rstrip("%") for name in differing}


def _digest(tensor: torch.Tensor) -> str:
    """Returns the digest of a tensor below `SMALL_BYTES`, or of both ends and the middle of a larger one."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() * flat.itemsize >= SMALL_BYTES:
        width, middle = _PLACE_BYTES // flat.itemsize, flat.numel() // 2
        flat = torch.cat([flat[:width], flat[middle : middle + width], flat[-width:]])
    return xxhash.xxh3_64_hexdigest(flat.cpu().contiguous().view(torch.uint8).numpy().data)


class StateDictCheckpointer(Checkpointer):
    """A `Checkpointer` of state dicts; it has no attached objects and no schedule.

    Args:
        store: As for `Checkpointer`.
        **options: As for `Checkpointer`.
    """

    def __init__(self, store: str | None = None, **options: Any) -> None:
        self.state_dict_state: StateDictState
        super().__init__(store, every="never", **options)

    @override
    def _new_app_state(self, replicated: bool) -> AppState:
        # Found out at each save.
        del replicated
        self.state_dict_state = StateDictState(self._group)
        return self.state_dict_state

    def save_state(self, state: dict[str, Any], step: int) -> None:
        """Saves a state dict. Call it on every rank; it waits until the save before is committed.

        Args:
            state: The state dict.
            step: The step to save it under.

        Raises:
            ConfigError: A part of the state cannot be saved.
        """
        self.step_count = step
        self.state_dict_state.state = state
        try:
            self.save()
        finally:
            self.state_dict_state.state = {}
