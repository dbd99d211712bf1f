"""How a module takes a state: under which names, whether it fits, what its parts do in ways of their own, the way back.

PyTorch's own modules copy tensors of the same names and shapes, so it is known beforehand whether they will. A part may
also load itself: rename what it gets, take another shape, refuse when others have been loaded. Such a part is asked by
loading it, and what it had is put back if it refuses. Invariant: after `way_back_of`'s function, each parameter and
buffer is the object that it was, with the bits that it had.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from shade.checkpoint._capture.sharding import is_dtensor
from shade.errors import StateMismatchError

_CURE: Final = "build the model as it was saved; shade.checkpoint.load_weights(…, strict=False) takes what fits"
_WRAPPERS: Final = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module"})
"""Parts of a name that wrappers put there."""


def unwrapped(target: Any) -> Any:
    """Returns the module inside DistributedDataParallel, DataParallel and `torch.compile`; others as they are."""
    if isinstance(target, torch.nn.Module):
        inner = target._modules.get("_orig_mod")
        if isinstance(target, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            inner = target.module
        return target if inner is None else unwrapped(inner)
    return target


def plain_name(name: str) -> str:
    """Returns a parameter's name without what wrappers put there."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def renamed(own: Mapping[str, Any], saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a module's saved state under the names that the module has now.

    Args:
        own: The module's state.
        saved: What was saved.

    Returns:
        The saved state; names without a counterpart stay, as do all where it is not certain which belongs to which.
    """
    mine = {plain_name(name): name for name in own}
    if own.keys() == saved.keys() or len(mine) < len(own) or len({*map(plain_name, saved)}) < len(saved):
        return saved
    made = OrderedDict((mine.get(plain_name(name), name), value) for name, value in saved.items())
    # Versions of modules, by path. Of a wrapper and what it wraps, the longer path is what it wraps.
    versions = {plain_name(path): each for path, each in sorted(getattr(saved, "_metadata", {}).items())}
    paths = getattr(own, "_metadata", {})
    made._metadata = {path: versions[plain_name(path)] for path in paths if plain_name(path) in versions}  # type: ignore[attr-defined]
    return made


def own_ways(module: torch.nn.Module) -> tuple[str, ...] | None:
    """Returns the prefixes of the names that a module's parts load in ways of their own, which may give tensors other
    names and shapes; None if the module itself does."""
    if not is_torchs(module, "load_state_dict"):
        return None
    parts = module.named_modules(remove_duplicate=False)
    prefixes = tuple(f"{prefix}." for prefix, part in parts if not _loads_plainly(part))
    return None if "." in prefixes else prefixes


def _loads_plainly(part: torch.nn.Module) -> bool:
    """Whether a part of a module loads its own state as PyTorch's own do, and nothing else happens."""
    hooks = has_pre_hooks(part) or not all(map(_is_of_fsdp, part._load_state_dict_post_hooks.values()))
    return not hooks and all(is_torchs(part, method) for method in ("_load_from_state_dict", "set_extra_state"))


def has_pre_hooks(part: torch.nn.Module) -> bool:
    """Returns whether functions of others than `fully_shard` see a state before a part of a module loads it."""
    hooks: Any = part._load_state_dict_pre_hooks
    return not all(_is_of_fsdp(hook.hook) for hook in hooks.values())


def _is_of_fsdp(hook: Callable[..., Any]) -> bool:
    # They put the shards in the place of the whole parameters, and nothing else.
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp._fully_shard")


def untaken(module: torch.nn.Module, own: Mapping[str, Any]) -> list[str]:
    """Returns the names in a module's own state that its `load_state_dict` would refuse or miss."""
    ways = own_ways(module)
    if ways is None:
        return []
    taken = {key for key, _ in module.named_parameters(remove_duplicate=False)}
    for prefix, part in module.named_modules(remove_duplicate=False):
        kept = part._buffers.keys() - part._non_persistent_buffers_set
        taken |= {f"{prefix}.{key}" if prefix else key for key in kept if part._buffers[key] is not None}
    return sorted(key for key in own.keys() ^ taken if not key.startswith(ways))


def loads_all_plainly(module: torch.nn.Module) -> bool:
    """Whether a module takes any state that `check_module` accepts, as PyTorch's own do."""
    own = module.state_dict() if own_ways(module) == () else {}
    plain = (torch.Tensor, torch.nn.Parameter)
    is_plain = all(type(each) in plain or is_dtensor(each) for each in own.values())
    return own_ways(module) == () and is_plain and not untaken(module, own)


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether a parameter or a buffer gets its shape from the first batch."""
    return isinstance(tensor, UninitializedParameter | UninitializedBuffer)


def check_module(
    name: str, own: Mapping[str, Any], saved: Mapping[str, Any], ways: tuple[str, ...] | None = ()
) -> None:
    """Raises StateMismatchError if a saved state does not fit a module, whose own state is given; ``ways`` are what
    `own_ways` returned: such parts find out themselves."""
    for key, tensor in own.items():
        if isinstance(tensor, torch.Tensor) and tensor.is_meta:
            raise StateMismatchError.of(f"memory for '{name}/{key}'", "meta", "call to_empty(device=...) first")
    if ways is None:
        return
    for said, keys in (("has no", own.keys() - saved.keys()), ("also has", saved.keys() - own.keys())):
        if listed := sorted(key for key in keys if not key.startswith(ways)):
            more = f" and {len(listed) - 5} more" if len(listed) > 5 else ""
            raise StateMismatchError(
                f"expected the parameters of this {name!r}, got a snapshot that {said} {', '.join(listed[:5])}{more}; "
                f"{_CURE}"
            )
    for key, tensor in own.items():
        if isinstance(tensor, torch.Tensor) and not key.startswith(ways):
            _check_tensor(f"{name}/{key}", tensor, saved[key])


def _check_tensor(name: str, own: torch.Tensor, saved: Any) -> None:
    if not isinstance(saved, torch.Tensor) or (own.shape, own.dtype) != (saved.shape, saved.dtype):
        got = f"{tuple(saved.shape)} {saved.dtype}" if isinstance(saved, torch.Tensor) else repr(saved)
        raise StateMismatchError(f"expected {name!r} of shape {tuple(own.shape)} {own.dtype}, got {got}; {_CURE}")


def way_back_of(module: torch.nn.Module) -> Callable[[], None]:
    """Returns what gives a module the parameters, buffers and other attributes that it has now."""
    # Not by its state: some modules do not take what they write.
    parts = [(part, dict(vars(part))) for part in module.modules()]
    holders = [each for _, attributes in parts for each in attributes.values() if isinstance(each, dict | list | set)]
    contents = [copy.copy(each) for each in holders]
    extra = [(part, copy.deepcopy(part.get_extra_state())) for part, _ in parts if _has_extra_state(part)]
    tensors = [(each, each.detach().clone()) for each in (*module.parameters(), *module.buffers()) if not is_lazy(each)]

    @torch.no_grad()
    def undo() -> None:
        for part, attributes in parts:
            vars(part).clear()
            vars(part).update(attributes)
        for holder, content in zip(holders, contents, strict=True):
            holder.clear()
            (holder.extend if isinstance(holder, list) else holder.update)(content)
        for tensor, saved in tensors:
            if tensor.shape == saved.shape:
                tensor.copy_(saved)
            else:
                tensor.data = saved
        for part, state in extra:
            part.set_extra_state(state)

    return undo


def _has_extra_state(part: torch.nn.Module) -> bool:
    return not is_torchs(part, "get_extra_state") and not is_torchs(part, "set_extra_state")


def is_torchs(target: object, method: str) -> bool:
    """Returns whether a method is PyTorch's own."""
    return str(getattr(type(target), method).__module__).startswith(("torch.nn.", "torch.optim.", "torch._dynamo."))
