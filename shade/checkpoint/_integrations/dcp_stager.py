"""ShadeStager: `dcp.async_save` goes on after one memcpy into warm memory, or after none.

DCP saves a copy of the state while training goes on; a stager makes it. This one copies into one block of shared
memory, touched beforehand and used again by the next save, with the C library's memcpy, in the order in which our
writer lays a shard: so the writer hashes and sends it where it lies, and DCP's checkpoint process reads it there.

Given optimizers, it returns before the copy: what only their steps change, parameters and their own state, is copied
by a thread while forward and backward run, all else at once. Their steps wait for the copy, by a hook.

A block is used again when nobody holds what was staged in it; as long as a save is under way, the next one takes a
second block. A tensor that changes while it is copied is found (`_buffer.copy`). Then there is nothing to
save; but an exception here would leave the other ranks waiting in DCP's collectives. So what is staged is something
that fails when DCP plans the save, which DCP tells to all ranks. Invariant: what is saved stood still while it was
copied, or the save fails on every rank.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

from shade.checkpoint._buffer.copy import Copying
from shade.checkpoint._buffer.torn_read import Comparison
from shade.checkpoint._capture.flatten import SPELLINGS, escape
from shade.checkpoint._capture.layout import TensorSpec, lay_out
from shade.errors import ConfigError, TornSnapshotError

_ROUND_BYTES: Final = 2 * 2**20

logger = logging.getLogger("shade.checkpoint")


@dataclass(frozen=True)
class _Piece:
    """Stands for a tensor in the recipe of a staged state."""

    data: tuple[int, int] | torch.Tensor
    """First byte in the block and one past the last; itself, where it is of a type that few know."""
    dtype: torch.dtype
    shape: torch.Size
    spec: Any
    """Of the DTensor whose local part it is; None for a plain tensor."""
    attributes: Mapping[str, Any]
    """Where a plain tensor says of what it is a part, for DCP."""

    def on(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor, in that block."""
        if isinstance(self.data, torch.Tensor):
            made = self.data
        else:
            made = memory[self.data[0] : self.data[1]].view(self.dtype).view(self.shape)
        if self.spec is not None:
            # from_local() would move it to the mesh's device; torch's own stagers build theirs from the same parts
            return DTensor(made, self.spec, requires_grad=False)
        vars(made).update(self.attributes)
        return made


class Staged(dict[str, Any]):
    """A staged state; while it is held, so is the memory that its tensors lie in.

    Another process is given the memory as a whole, and what to make of it. (Tensor by tensor would be a file descriptor
    each, and a DTensor whose local part does not begin at the start of its storage cannot be pickled by PyTorch 2.15.)

    Args:
        memory: uint8, shared.
        recipe: The state with a `_Piece` for each tensor.
    """

    def __init__(self, memory: torch.Tensor, recipe: dict[str, Any]) -> None:
        super().__init__(_mapped(recipe, "", lambda _, piece: piece.on(memory), _Piece))
        self._parts = memory, recipe

    def __reduce__(self) -> tuple[type[Staged], tuple[torch.Tensor, dict[str, Any]]]:
        return Staged, self._parts


class _Refusal:
    """Stands for a state that could not be staged: raises when DCP asks what is to be written of it."""

    def __init__(self, error: TornSnapshotError) -> None:
        self._error = error

    def __create_write_items__(self, name: str, value: object) -> list[Any]:
        raise self._error


class _Block:
    """Shared memory, touched; pinned where there is a device to copy from."""

    def __init__(self, num_bytes: int) -> None:
        length = max(1, -(-num_bytes // _ROUND_BYTES)) * _ROUND_BYTES
        self.memory = torch.empty(length, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
        self._pinned = torch.cuda.is_available() and _cudart().cudaHostRegister(self._address, length, 0) == 0
        self._holder: weakref.ref[Staged] | None = None

    @property
    def _address(self) -> int:
        return int(self.memory.data_ptr())

    @property
    def is_free(self) -> bool:
        """Whether nobody holds what was staged in it."""
        return self._holder is None or self._holder() is None

    def lend(self, staged: Staged) -> None:
        """Is that state's from now on, until nobody holds it."""
        self._holder = weakref.ref(staged)

    def close(self) -> None:
        """Lets go of the memory; views that are still about keep it."""
        if self._pinned:
            _cudart().cudaHostUnregister(self._address)
            self._pinned = False
        self.memory = torch.empty(0, dtype=torch.uint8)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class ShadeStager(AsyncStager):
    """An AsyncStager for `dcp.async_save`; make one, use it for all saves, close it after the last.

    Args:
        *optimizers: Overlap the copy with what runs between two steps of these; by default `async_save` returns when
            the copy is done. From PyTorch 2.9 on.

    Raises:
        ConfigError: This PyTorch cannot save what is still being staged.
    """

    _synchronize_after_execute = False

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        if optimizers and not hasattr(state_dict_saver, "AsyncSaveResponse"):
            cure = "leave the optimizers out"
            raise ConfigError.of("PyTorch 2.9 or later for a copy beside the training", torch.__version__, cure)
        self._optimizers = optimizers
        self._hooks = [each.register_step_pre_hook(lambda *_: self.synchronize_staging()) for each in optimizers]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shade-stager") if optimizers else None
        self._copying: Future[Staged] | None = None
        self._comparison = Comparison()
        self._blocks: list[_Block] = []

    @torch.no_grad()
    def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> Staged | Future[Staged]:  # type: ignore[override]
        """Copies a state, as DCP hands it over.

        Args:
            state_dict: Nested dicts and lists of tensors, DTensors, and whatever `copy.deepcopy` takes.
            **kwargs: Not used.

        Returns:
            The copy; with optimizers, a future of it.

        Raises:
            ConfigError: A tensor of a kind that cannot be staged; the message has its path.
        """
        self.synchronize_staging()
        live: dict[str, torch.Tensor] = {}
        names: dict[tuple[Any, ...], str] = {}

        def enter(path: str, tensor: torch.Tensor) -> None:
            local = _local(tensor, path)
            if local.dtype in SPELLINGS:
                live[names.setdefault(_memory_of(local), f"{escape(path)}[")] = local

        _mapped(state_dict, "", enter)
        layout = lay_out({name: TensorSpec.of(tensor) for name, tensor in live.items()}, 0, 1)
        block = self._block(layout.num_bytes)

        def describe(path: str, tensor: torch.Tensor) -> _Piece:
            local = _local(tensor, path)
            name = names.get(_memory_of(local))
            entry = layout.entries[name] if name else None
            data = (entry.start, entry.stop) if entry else local.cpu().clone()
            spec = tensor._spec if isinstance(tensor, DTensor) else None
            return _Piece(data, local.dtype, local.shape, spec, {} if spec else dict(vars(tensor)))

        staged = Staged(block.memory, _mapped(state_dict, "", describe))
        block.lend(staged)
        copying = Copying(live, layout.entries, block.memory, self._steady(live), comparison=self._comparison)
        if self._thread is None:
            return _finished(copying, staged)
        refused = _settled(copying)
        self._copying = self._thread.submit(lambda: refused or _finished(copying, staged))
        return self._copying

    def synchronize_staging(self) -> None:
        """Returns when the state may change again; the optimizers' steps call it."""
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.result()

    def close(self) -> None:
        """Waits for the copy, and lets go of everything. Safe to call twice."""
        self.synchronize_staging()
        for hook in self._hooks:
            hook.remove()
        if self._thread is not None:
            self._thread.shutdown()
        for block in self._blocks:
            block.close()
        self._blocks = []

    def _block(self, num_bytes: int) -> _Block:
        """A free block that is long enough."""
        free = [block for block in self._blocks if block.is_free]
        for block in free:
            if len(block.memory) >= num_bytes:
                return block
            block.close()
            self._blocks.remove(block)
        self._blocks.append(_Block(num_bytes))
        return self._blocks[-1]

    def _steady(self, live: Mapping[str, torch.Tensor]) -> frozenset[str]:
        """Tensors that nothing but a step of the optimizers changes."""
        known = set()
        for optimizer in self._optimizers:
            held = [param for group in optimizer.param_groups for param in group["params"]]
            held += [value for entry in optimizer.state.values() for value in entry.values()]
            known |= {_memory_of(_local(tensor, "")) for tensor in held if isinstance(tensor, torch.Tensor)}
        return frozenset(name for name, tensor in live.items() if _memory_of(tensor) in known)


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The same for tensors that are the same memory, seen the same way."""
    return tensor.data_ptr() or id(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def _local(tensor: torch.Tensor, path: str) -> torch.Tensor:
    """The part of a tensor that is here.

    Args:
        tensor: A tensor of the state.
        path: Where in it.

    Returns:
        A plain tensor.

    Raises:
        ConfigError: It is of another kind.
    """
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    if (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
    ):
        return tensor.detach()
    cure = "leave async_stager out: DCP's own stager takes it"
    raise ConfigError.of(f"a plain tensor or a DTensor at {path!r}", type(tensor).__name__, cure)


def _mapped(value: Any, path: str, on_leaf: Callable[[str, Any], Any], kind: type = torch.Tensor) -> Any:
    """A copy of a state in which something else stands for each leaf of a kind; it shares nothing with the original."""
    if isinstance(value, kind):
        return on_leaf(path, value)
    before = path and path + "."
    if isinstance(value, Mapping):
        pairs = ((key, _mapped(each, f"{before}{key}", on_leaf, kind)) for key, each in value.items())
        return OrderedDict(pairs) if type(value) is OrderedDict else dict(pairs)
    if type(value) in (list, tuple):
        return type(value)(_mapped(each, f"{before}{place}", on_leaf, kind) for place, each in enumerate(value))
    return copy.deepcopy(value)


def _settled(copying: Copying) -> Staged | None:
    """Copies what may change at any moment; what is to be saved instead, where that did not stand still."""
    try:
        copying.settle(name for name in copying.names if name not in copying.steady)
    except TornSnapshotError as error:
        return _refused(error)
    return None


def _finished(copying: Copying, staged: Staged) -> Staged:
    """The state, once it is copied; where it did not stand still, what makes the save fail."""
    try:
        copying.finish()
    except TornSnapshotError as error:
        return _refused(error)
    return staged


def _refused(error: TornSnapshotError) -> Staged:
    logger.error("not saved: %s", error)
    return Staged(torch.empty(0, dtype=torch.uint8), {"torn": _Refusal(error)})
