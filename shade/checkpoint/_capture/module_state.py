"""A module's state: its names with and without what wrappers add, and whether a saved one fits.

DistributedDataParallel, DataParallel and `torch.compile` put a part of their own into each name. A state is saved under
the names of the module inside, and a saved one is taken under either. Invariant: nothing changes unless all of it fits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

import torch

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


def load_module(
    name: str, module: torch.nn.Module, saved: Any, *, strict: bool = True, prefix: str = ""
) -> tuple[list[str], list[str]]:
    """Loads a saved state into a module, cast to its floating-point types, as `torch.nn.Module.load_state_dict` does.

    Args:
        name: What to call the module in a message.
        module: The module.
        saved: The saved state.
        strict: Whether everything has to fit. Otherwise what does not, in name or shape, stays as it is.
        prefix: Takes the saved names that begin with it, without it.

    Returns:
        Names in the module that were not loaded, and saved names that were not used.

    Raises:
        StateMismatchError: It does not fit, or nothing of it does; nothing was changed.
    """
    if not isinstance(saved, Mapping):
        raise StateMismatchError.of(f"the state of a module for {name!r}", type(saved).__name__, "pass another name")
    target, saved = unwrapped(module), _beginning_with(saved, prefix)
    own, fits = target.state_dict(), OrderedDict[str, Any]()
    saved = renamed(own, saved)
    for key, value in saved.items():
        mine = own.get(key)
        if all(isinstance(each, torch.Tensor) and each.is_floating_point() for each in (mine, value)):
            value = value.to(mine.dtype)
        if strict or (key in own and getattr(mine, "shape", None) == getattr(value, "shape", None)):
            fits[key] = value
    if not fits and own:
        check_module(name, target, saved)
    missing, unused = sorted(own.keys() - fits.keys()), sorted(saved.keys() - fits.keys())
    if not strict:
        fits.update((key, own[key]) for key in missing)
    fits._metadata = getattr(saved, "_metadata", {})  # type: ignore[attr-defined]
    check_module(name, target, fits)
    target.load_state_dict(fits)
    return ([], []) if strict else (missing, unused)


def _beginning_with(saved: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
    """Returns the part of a module's state that belongs to one of its modules."""
    if not prefix:
        return saved
    prefix = f"{prefix.rstrip('.')}."

    def taken(by_name: Mapping[str, Any]) -> OrderedDict[str, Any]:
        return OrderedDict((each[len(prefix) :], by_name[each]) for each in by_name if each.startswith(prefix))

    part = taken(saved) or taken({plain_name(each): value for each, value in saved.items()})
    if not part:
        known = sorted({plain_name(each).partition(".")[0] for each in saved})
        raise StateMismatchError.of(f"names that begin with {prefix!r}", f"those of {', '.join(known)}", "see prefix=")
    versions = getattr(saved, "_metadata", {})
    part._metadata = {  # type: ignore[attr-defined]
        f"{path}."[len(prefix) :].rstrip("."): each for path, each in versions.items() if f"{path}.".startswith(prefix)
    }
    return part


def check_module(name: str, module: torch.nn.Module, saved: Mapping[str, Any]) -> None:
    own = module.state_dict()
    for said, keys in (("has no", own.keys() - saved.keys()), ("also has", saved.keys() - own.keys())):
        if keys:
            listed = ", ".join(sorted(keys)[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")
            raise StateMismatchError(
                f"expected the parameters of this {name!r}, got a snapshot that {said} {listed}; {_CURE}"
            )
    for key, tensor in own.items():
        if isinstance(tensor, torch.Tensor):
            _check_tensor(f"{name}/{key}", tensor, saved[key])
            if tensor.is_meta:
                raise StateMismatchError.of(f"memory for '{name}/{key}'", "meta", "call to_empty(device=...) first")


def _check_tensor(name: str, own: torch.Tensor, saved: Any) -> None:
    if not isinstance(saved, torch.Tensor) or (own.shape, own.dtype) != (saved.shape, saved.dtype):
        got = f"{tuple(saved.shape)} {saved.dtype}" if isinstance(saved, torch.Tensor) else repr(saved)
        raise StateMismatchError(f"expected {name!r} of shape {tuple(own.shape)} {own.dtype}, got {got}; {_CURE}")
