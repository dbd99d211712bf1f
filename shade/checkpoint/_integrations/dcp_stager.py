"""ShadeStager: stages a state for `dcp.async_save` with one memcpy into warm memory, or during the next step.

With optimizers it returns before the copy: a thread copies what only their steps change, and the steps wait for it, by
a hook. A block of memory is reused when nothing holds what was staged in it. Invariant: what is saved did not change
during the copy (`_buffer.tensor_copy`), or the save fails on every rank.
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

from shade.checkpoint._buffer.copy_and_compare import Comparison
from shade.checkpoint._buffer.tensor_copy import Copying
from shade.checkpoint._capture.flatten import SPELLINGS, escape
from shade.checkpoint._capture.layout import TensorSpec, lay_out
from shade.errors import ConfigError, TornSnapshotError

_ROUND_BYTES: Final = 2 * 2**20

logger = logging.getLogger("shade.checkpoint")


@dataclass(frozen=True)
class _Piece:
    """Replaces a tensor in the recipe of a staged state."""

    data: tuple[int, int] | torch.Tensor
    """First byte in the block and one past the last; or the tensor itself, if safetensors has no name for its type."""
    dtype: torch.dtype
    shape: torch.Size
    spec: Any
    """Spec of the DTensor whose local part it is; None for a plain tensor."""
    attributes: Mapping[str, Any]
    """Attributes by which a plain tensor says, for DCP, what it is a part of."""

    def on(self, memory: torch.Tensor) -> torch.Tensor:
        """Returns the tensor, as a view of the block."""
        if isinstance(self.data, torch.Tensor):
            made = self.data
        else:
            made = memory[self.data[0] : self.data[1]].view(self.dtype).view(self.shape)
        if self.spec is not None:
            # from_local() would move it to the mesh's device; torch's own stagers build theirs from the same parts.
            return DTensor(made, self.spec, requires_grad=False)
        vars(made).update(self.attributes)
        return made


class Staged(dict[str, Any]):
    """A staged state; it keeps alive the memory of its tensors, and is pickled as the memory and the recipe.

    Args:
        memory: uint8, shared.
        recipe: The state with a `_Piece` for each tensor.
    """

    def __init__(self, memory: torch.Tensor, recipe: dict[str, Any]) -> None:
        super().__init__(_mapped(recipe, "", lambda _, piece: piece.on(memory), _Piece))
        self._parts = memory, recipe

    def __reduce__(self) -> tuple[type[Staged], tuple[torch.Tensor, dict[str, Any]]]:
        # Tensors one by one would take a file descriptor each, and PyTorch 2.15 cannot pickle a DTensor whose local
        # part does not begin at the start of its storage.
        return Staged, self._parts


class _Refusal:
    """Replaces a state that could not be staged: raises when DCP plans what to write of it."""

    def __init__(self, error: TornSnapshotError) -> None:
        self._error = error

    def __create_write_items__(self, name: str, value: object) -> list[Any]:
        raise self._error


class _Block:
    """A block of shared memory, pinned if there is a device to copy from."""

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
        """Whether nothing holds what was staged in it."""
        return self._holder is None or self._holder() is None

    def lend(self, staged: Staged) -> None:
        """Marks the block as used until the state is garbage-collected."""
        self._holder = weakref.ref(staged)

    def close(self) -> None:
        """Releases the memory; existing views keep it alive."""
        if self._pinned:
            _cudart().cudaHostUnregister(self._address)
            self._pinned = False
        self.memory = torch.empty(0, dtype=torch.uint8)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class ShadeStager(AsyncStager):
    """An AsyncStager for `dcp.async_save`; create one, use it for all saves, close it after the last.

    Args:
        *optimizers: Overlap the copy with what runs between two steps of these (from PyTorch 2.9); by default
            `async_save` returns after the copy.

    Raises:
        ConfigError: This PyTorch cannot save a state that is still being staged.
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
        """Copies a state.

        Args:
            state_dict: Nested dicts and lists of tensors, DTensors, and whatever `copy.deepcopy` takes.
            **kwargs: Ignored.

        Returns:
            The copy; with optimizers, a future of it.

        Raises:
            ConfigError: A tensor cannot be staged; the message has its path.
        """
        self.synchronize_staging()
        live: dict[str, torch.Tensor] = {}
        names: dict[tuple[Any, ...], str] = {}

        def enter(path: str, tensor: torch.Tensor) -> None:
            local = _local(tensor, path)
            if local.dtype in SPELLINGS and not _is_lazy(local):
                # Tied weights are one memory under two paths: it is copied once.
                live[names.setdefault(_memory_of(local), f"{escape(path)}[")] = local

        _mapped(state_dict, "", enter)
        # The order in which our writer lays out a shard, so that it hashes and sends the block itself.
        layout = lay_out({name: TensorSpec.of(tensor) for name, tensor in live.items()}, 0, 1)
        block = self._block(layout.num_bytes)

        def describe(path: str, tensor: torch.Tensor) -> _Piece:
            local = _local(tensor, path)
            name = names.get(_memory_of(local))
            entry = layout.entries[name] if name else None
            data = (entry.start, entry.stop) if entry else local.resolve_conj().resolve_neg().cpu().clone()
            spec = tensor._spec if isinstance(tensor, DTensor) else None
            return _Piece(data, local.dtype, local.shape, spec, {} if spec else dict(vars(tensor)))

        staged = Staged(block.memory, _mapped(state_dict, "", describe))
        block.lend(staged)
        copying = Copying(live, layout.entries, block.memory, self._steady(live), comparison=self._comparison)
        if self._thread is None:
            return _finished(copying, staged)
        # At once: what no step of the optimizers guards may change as soon as this returns.
        refused = _settled(copying)
        self._copying = self._thread.submit(lambda: refused or _finished(copying, staged))
        return self._copying

    def synchronize_staging(self) -> None:
        """Returns when the state may change again; the optimizers' step hooks call it."""
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.result()

    def close(self) -> None:
        """Waits for the copy and releases everything. Safe to call twice."""
        self.synchronize_staging()
        for hook in self._hooks:
            hook.remove()
        if self._thread is not None:
            self._thread.shutdown()
        for block in self._blocks:
            block.close()
        self._blocks = []

    def _block(self, num_bytes: int) -> _Block:
        free = [block for block in self._blocks if block.is_free]
        for block in free:
            if len(block.memory) >= num_bytes:
                return block
            block.close()
            self._blocks.remove(block)
        self._blocks.append(_Block(num_bytes))
        return self._blocks[-1]

    def _steady(self, live: Mapping[str, torch.Tensor]) -> frozenset[str]:
        known = set()
        for optimizer in self._optimizers:
            held = [param for group in optimizer.param_groups for param in group["params"]]
            held += [value for entry in optimizer.state.values() for value in entry.values()]
            known |= {_memory_of(_local(tensor, "")) for tensor in held if isinstance(tensor, torch.Tensor)}
        return frozenset(name for name, tensor in live.items() if _memory_of(tensor) in known)


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns a key that is equal for tensors that are the same view of the same memory."""
    address = tensor.data_ptr() or id(tensor)
    return address, tensor.dtype, tensor.shape, tensor.stride(), tensor.device, _is_lazy(tensor)


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory does not say what it is: its conjugate or its negative is meant, or zeros."""
    return tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor()


def _local(tensor: torch.Tensor, path: str) -> torch.Tensor:
    """Returns the local part of a tensor at a path of the state, or raises ConfigError for an unknown kind."""
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
    """Copies a state with each leaf of a kind replaced; the copy shares nothing with the original."""
    if isinstance(value, kind):
        return on_leaf(path, value)
    before = path and path + "."
    if isinstance(value, Mapping):
        pairs = ((key, _mapped(each, f"{before}{key}", on_leaf, kind)) for key, each in value.items())
        return OrderedDict(pairs) if type(value) is OrderedDict else dict(pairs)
    if type(value) in (list, tuple):
        return type(value)(_mapped(each, f"{before}{number}", on_leaf, kind) for number, each in enumerate(value))
    return copy.deepcopy(value)


def _settled(copying: Copying) -> Staged | None:
    """Copies what may change at any moment; returns a refusal if that is torn."""
    try:
        copying.settle(name for name in copying.names if name not in copying.steady)
    except TornSnapshotError as error:
        return _refused(error)
    return None


def _finished(copying: Copying, staged: Staged) -> Staged:
    try:
        copying.finish()
    except TornSnapshotError as error:
        return _refused(error)
    return staged


def _refused(error: TornSnapshotError) -> Staged:
    logger.error("not saved: %s", error)
    return Staged(torch.empty(0, dtype=torch.uint8), {"torn": _Refusal(error)})
