"""Checkpoints a state dict that is passed at each save, instead of objects that were attached once.

What attaching would say is found out at each save: which tensors are alike on all ranks, every byte of them, so that
each rank saves a share, and which are steady, so that they are copied while the training runs.
Invariant: each rank gets back the state that it passed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch
from typing_extensions import override

from shade.checkpoint._capture.app_state import Agree, AppState, CapturedState, RandomState, agreed
from shade.checkpoint._capture.flatten import flatten, parts_in, unflatten
from shade.checkpoint._capture.layout import bytes_of
from shade.checkpoint._format.digest import digest_of
from shade.checkpoint._session.checkpointer import Checkpointer
from shade.errors import ConfigError
from shade.rank_group import RankGroup
from shade.types import Stateful

SMALL_BYTES: Final = 2**16
"""Tensors that change with every forward pass are smaller, and copied in microseconds."""
_WORD_BYTES: Final = 8
_BLOCK_WORDS: Final = 2**20
_FACTOR: Final = 0x1E3779B97F4A7C15
_THREADS: Final = 4
"""Threads that hash: each tensor is read at the pace of memory, while the training waits."""


class StateDictState(AppState):
    """The state dict passed last, and this process's random generators."""

    def __init__(self, group: RankGroup) -> None:
        super().__init__(replicated=True)
        self._group = group
        self._random: Stateful = RandomState()
        self.state: dict[str, Any] = {}
        """The state that is saved next."""
        self.loaded: dict[str, Any] | None = None
        """The state read last, until it is taken."""
        self._generators: dict[str, Any] | None = None

    @override
    def capture(self, rank: int, world_size: int) -> CapturedState:
        # Collective: what one rank cannot save, no rank saves.
        state = {"state": self.state, "random": self._random.state_dict()}
        failure: ConfigError | None = None
        try:
            tree, tensors = flatten(state, rank=rank)
            if parts := parts_in(tree, rank):
                cure = "attach the model and the optimizer to a Checkpointer"
                raise ConfigError.of("plain tensors in a state that is passed", f"a DTensor: {min(parts)}", cure)
        except ConfigError as error:
            failure = error
        if world_size > 1:
            # A rank that failed gathers too: the others wait for it here.
            mine = None if failure else _digests(tensors)
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
        return CapturedState(tree, tensors, frozenset() if self._num_torn else frozenset(large))

    @property
    @override
    def epoch(self) -> int:
        """The ``epoch`` of the state that was read; 0 where it has none."""
        found = self.loaded.get("epoch") if self.loaded is not None else None
        return found if type(found) is int else 0

    @override
    def forgettable(self, tree: Any, rank: int) -> Set[str]:
        # The state that is read is the state that the caller gets, so no memory of it may be released.
        return set()

    @override
    def left_out(self, tree: Any, attached: Collection[str]) -> list[str]:
        return []

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
        """Keeps a state that was read, until it is taken; attached objects come as a dict by their names.
        ``with_generators`` says whether its random generators are this rank's."""
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


def _digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Returns the digest of each tensor: of all its bytes, or of sums of them where it lies on a device."""
    sums = {name: _sums(tensor) for name, tensor in tensors.items() if not tensor.is_cpu}
    here = [name for name in tensors if name not in sums]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="shade-digest") as pool:
        hashed = pool.map(lambda name: digest_of(bytes_of(tensors[name].contiguous()).numpy().data), here)
        # The devices sum meanwhile.
        return {name: str(each.tolist()) for name, each in sums.items()} | dict(zip(here, hashed, strict=True))


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """Returns weighted sums of a tensor's bytes, on its device, where a copy to the host would take long."""
    flat = bytes_of(tensor.contiguous())
    rest = -flat.numel() % _WORD_BYTES
    word_W = torch.cat([flat, flat.new_zeros(rest)]).view(torch.int64) if rest else flat.clone().view(torch.int64)
    # An odd weight loses no bit of a word, and the order of the additions changes nothing.
    weight_B = torch.arange(min(_BLOCK_WORDS, len(word_W)), device=flat.device) * _FACTOR | 1
    parts = [(part * weight_B[: len(part)]).sum() for part in torch.split(word_W, _BLOCK_WORDS)]
    return torch.stack(parts) if parts else flat.new_zeros(0)


class StateDictCheckpointer(Checkpointer):
    """A `Checkpointer` of state dicts; it has no attached objects and no schedule."""

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
        """Saves a state dict as that of a step. Call it on every rank; it waits until the save before is committed.
        Raises ConfigError if a part of the state cannot be saved."""
        self.step_count = step
        self.state_dict_state.state = state
        try:
            self.save()
        finally:
            self.state_dict_state.state = {}
