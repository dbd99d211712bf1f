"""A state that is handed over at each save, as a dict, instead of things that were attached once.

Nothing is known of such a dict's parts, so what attaching would tell is found out, at each save and within 7 ms for 600
tensors. *Alike on all ranks?* Each rank tells a digest of every tensor: of all of it below `SMALL_BYTES`, of three
places above. Alike tensors are saved once, each rank a share; what differs (batch-norm statistics under
DistributedDataParallel) is each rank's own, and each rank gets its own back. *Steady?* Large tensors are parameters and
optimizer state, which stand still until the next step, and are copied behind the training; small ones are copied at
once. A large tensor that changes all the same is found out, and the save is refused, as any other.

Invariant: what comes back is what was handed over, on each rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import torch
import xxhash

from shade.checkpoint._capture.app_state import AppState, CapturedState
from shade.checkpoint._capture.flatten import flatten
from shade.checkpoint._capture.rng import RandomState
from shade.checkpoint._capture.unflatten import unflatten
from shade.checkpoint._commit.process_group import ProcessGroup
from shade.checkpoint._session.checkpointer import Checkpointer
from shade.errors import ConfigError
from shade.types import Stateful

SMALL_BYTES: Final = 2**16
"""What changes with every forward pass is smaller, and copied in microseconds."""
_PLACE_BYTES: Final = 64


class StateDictState(AppState):
    """The state given last, with the generators of this process beside it.

    Args:
        group: The ranks; used in `capture`.
    """

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(replicated=True)
        self._group = group
        self._random: Stateful = RandomState()
        self.state: dict[str, Any] = {}
        """What is saved next."""
        self.loaded: dict[str, Any] | None = None
        """What was read last, until it is taken."""
        self.copies_at_once = False
        """Whether nothing is trusted to stand still any more."""
        self._generators: dict[str, Any] | None = None

    def capture(self, rank: int, world_size: int) -> CapturedState:
        """See `AppState.capture`. Collective: what one rank cannot save, none does."""
        state = {"state": self.state, "random": self._random.state_dict()}
        failure: ConfigError | None = None
        try:
            tree, tensors = flatten(state, rank=rank)
        except ConfigError as error:
            failure = error
        if world_size > 1:
            mine = None if failure else {name: _digest(tensor) for name, tensor in tensors.items()}
            told = self._group.gather(mine)
            silent = [number for number, each in enumerate(told) if each is None and number != rank]
            if silent and failure is None:
                failure = ConfigError(f"rank {silent[0]} cannot save its state; its own message says why")
        if failure is not None:
            raise failure
        if world_size > 1:
            own = _differing(told)
            tree, tensors = flatten(state, rank=rank, is_own=lambda path: path in own)
        large = (name for name, tensor in tensors.items() if tensor.numel() * tensor.itemsize >= SMALL_BYTES)
        return CapturedState(tree, tensors, frozenset() if self.copies_at_once else frozenset(large))

    @property
    def epoch(self) -> int:
        """As the state that was read says, under ``epoch``; 0 where it does not."""
        found = self.loaded.get("epoch") if self.loaded is not None else None
        return found if type(found) is int else 0

    def forgettable(self, name: str) -> bool:
        """Nothing: what is read is what is handed out."""
        return False

    def load(
        self, tree: Any, tensors: Mapping[str, torch.Tensor], names: Collection[str], trees: Sequence[Any] = ()
    ) -> None:
        """Keeps what was read, to be taken; see `AppState.load`."""
        del trees
        self.read(tree, tensors, with_generators="random" in names)

    def read(self, tree: Any, tensors: Mapping[str, torch.Tensor], *, with_generators: bool) -> None:
        """Keeps what was read, to be taken.

        Args:
            tree: Of any snapshot: also of one of attached things, which come as a dict by their names.
            tensors: All that it names.
            with_generators: Whether those in it are this rank's.
        """
        found = unflatten(tree, tensors)
        generators = found.pop("random", None)
        self._generators = generators if with_generators else None
        self.loaded = found["state"] if found.keys() == {"state"} else found

    def take(self) -> dict[str, Any] | None:
        """What was read, once; the generators stand where they stood then.

        Returns:
            The state, or None where nothing was read.
        """
        state, self.loaded = self.loaded, None
        if self._generators is not None:
            self._random.load_state_dict(self._generators)
            self._generators = None
        return state


def _differing(told: list[dict[str, str]]) -> set[str]:
    """Paths of tensors that are not the same on every rank."""
    names = {name for each in told for name in each}
    differing = {name for name in names if any(each.get(name) != told[0].get(name) for each in told)}
    return {name.rstrip("%") for name in differing}


def _digest(tensor: torch.Tensor) -> str:
    """Of a tensor below `SMALL_BYTES`, or of both ends and the middle of a larger one."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() * flat.itemsize >= SMALL_BYTES:
        width, middle = _PLACE_BYTES // flat.itemsize, flat.numel() // 2
        flat = torch.cat([flat[:width], flat[middle : middle + width], flat[-width:]])
    return xxhash.xxh3_64_hexdigest(flat.cpu().contiguous().view(torch.uint8).numpy().data)


class StateDictCheckpointer(Checkpointer):
    """A `Checkpointer` of a `StateDictState`; made and used as that.

    Args:
        store: As `Checkpointer`, like all that follow.
        **options: As `Checkpointer`.
    """

    def __init__(self, store: str | None = None, **options: Any) -> None:
        self.given: StateDictState
        super().__init__(store, every="never", **options)

    def _new_contents(self, replicated: bool) -> AppState:
        """A state that is given; alike on all ranks is what is found to be so."""
        del replicated
        self.given = StateDictState(self.group)
        return self.given

    def save_state(self, state: dict[str, Any], step: int) -> None:
        """Saves a state. On every rank; waits for the copy of the one before, and for that one to land.

        Args:
            state: To be saved.
            step: To save it under.

        Raises:
            ConfigError: Something in it cannot be saved.
        """
        self.step_count = step
        self.given.state = state
        try:
            self.save()
        finally:
            self.given.state = {}
