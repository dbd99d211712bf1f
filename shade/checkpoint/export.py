"""Takes a state out of a checkpoint into the files that others read, and brings it back from them.

Three forms, each read by its own library without us: ``safetensors`` (one file, or several with an index), ``torch``
(one file for `torch.load` with ``weights_only=True``) and ``dcp`` (a folder for `torch.distributed.checkpoint`).
Safetensors and DCP carry the skeleton of the state along, so that what comes back is what went out; the ``torch`` form
has only plain types, so arrays come back as tensors, and deques and the like as lists. Files from elsewhere are read
too; of what they hold nothing is executed. Invariant: a path that is written appears whole or not at all.
"""

from __future__ import annotations

import os
import pickle
import shutil
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch

from shade.checkpoint.assembly import assemble
from shade.checkpoint.export_dcp import load_dcp, save_dcp
from shade.checkpoint.export_safetensors import load_safetensors, save_safetensors
from shade.checkpoint.state import ARRAYS
from shade.errors import ConfigError, CorruptCheckpointError, ShadeError, StorageError

_BAD_FILE: Final = (
    *(pickle.UnpicklingError, struct.error, EOFError, OSError, ArithmeticError, AssertionError, AttributeError),
    *(LookupError, RuntimeError, TypeError, ValueError),
)
"""What the readers of torch and DCP are known to raise on files that are not theirs."""


class Source(Protocol):
    """A snapshot that has been read and verified."""

    tree: Any
    """The skeleton of its state."""

    def tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Every tensor that the tree names, with its name; others are left out."""
        ...


@dataclass(frozen=True)
class Form:
    """A kind of file."""

    save: Callable[[Any, Path], None]
    load: Callable[[Path], Any]


def export(source: Source, path: Path, form: str, only: str | None = None) -> None:
    """Writes a snapshot for others.

    Args:
        source: The snapshot.
        path: A file, or a folder for ``dcp``; nothing may be there.
        form: A name in `FORMS`.
        only: One attached thing, ``"model"`` say: its state alone, under its own names, as its library expects it.

    Raises:
        ConfigError: No such form or thing, something is there already, or a package is missing.
        StorageError: It could not be written; nothing is left.
    """
    save_state(state_of(source, only), path, form)


def state_of(source: Source, only: str | None = None) -> Any:
    """The state that a snapshot holds.

    Args:
        source: The snapshot.
        only: One attached thing; by default all, by name.

    Returns:
        The state.

    Raises:
        ConfigError: No thing of that name; the message lists them.
    """
    state = assemble(source.tree, dict(source.tensors()))
    if only is None:
        return state
    if not isinstance(state, dict) or only not in state:
        known = ", ".join(map(str, state)) if isinstance(state, dict) else "none"
        raise ConfigError.of(f"one of {known}", only, "name a thing that was attached")
    return state[only]


def save_state(state: Any, path: Path, form: str) -> None:
    """Writes a state.

    Args:
        state: Of the types that `shade.checkpoint.state.dismantle` takes.
        path: As for `export`.
        form: A name in `FORMS`.

    Raises:
        ConfigError: As `export`.
        StorageError: As `export`.
    """
    with _appearing(path) as aside:
        _form(form).save(state, aside)


def load_state(path: Path, form: str) -> Any:
    """Reads a state that `save_state` or somebody else has written.

    Args:
        path: A file, an index of several, or a folder.
        form: A name in `FORMS`.

    Returns:
        The state; of a safetensors file from elsewhere a dict by tensor name.

    Raises:
        ConfigError: No such form, nothing there, or a package is missing.
        CorruptCheckpointError: It is not of that form, or holds what would have to be executed.
    """
    if not path.exists():
        raise ConfigError.of(f"a checkpoint in the form {form!r}", f"nothing at {path}", "check the path")
    try:
        return _form(form).load(path)
    except ShadeError:
        raise
    except _BAD_FILE as error:
        said = " ".join(str(error).split())[:200]
        raise CorruptCheckpointError(f"{path} cannot be read in the form {form!r}: {said}") from error


def _form(name: str) -> Form:
    if name not in FORMS:
        raise ConfigError.of(f"one of {', '.join(FORMS)}", name, "choose one of them")
    return FORMS[name]


@contextmanager
def _appearing(path: Path) -> Iterator[Path]:
    """A path beside the one wanted, put into its place at the end; what it was written as is on the disk then."""
    if path.exists():
        raise ConfigError.of("a path where nothing is", str(path), "remove it, or choose another")
    aside = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove(aside)
        yield aside
        for each in (aside, *aside.rglob("*")) if aside.is_dir() else (aside,):
            _sync(each)
        aside.replace(path)
        _sync(path.parent)
    except (OSError, RuntimeError) as error:  # torch's writer says RuntimeError of a full disk
        _remove(aside)
        raise StorageError(f"could not write {path}: {getattr(error, 'strerror', None) or error}") from error
    except BaseException:
        _remove(aside)
        raise


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def plain(state: Any) -> Any:
    """A state in types that `torch.load` takes without being told to trust the file.

    Args:
        state: A state.

    Returns:
        Arrays as tensors (of strings and dates: lists), array scalars as numbers, deques as lists, frozensets as sets,
        defaultdicts as dicts; all else as it was. A tensor that is part of a larger memory is copied, since
        `torch.save` would write all of that; those that were one are one.
    """
    return _plain(state, {})


def _plain(state: Any, copies: dict[Any, torch.Tensor]) -> Any:
    kind = type(state)
    if isinstance(state, torch.Tensor):
        if state.untyped_storage().nbytes() == state.numel() * state.itemsize:
            return state
        same = (state.data_ptr(), state.dtype, state.shape, state.stride())
        if same not in copies:
            copies[same] = state.detach().clone()
        return copies[same]
    if isinstance(state, Mapping):
        made: dict[Any, Any] = kind() if kind in (OrderedDict, Counter) else {}
        for key, value in state.items():
            made[_plain(key, copies)] = _plain(value, copies)
        if kind is OrderedDict:
            vars(made).update(vars(state))
        return made
    if kind in (tuple, list, deque):
        return (tuple if kind is tuple else list)(_plain(each, copies) for each in state)
    if kind is frozenset:
        return set(state)
    if isinstance(state, np.ndarray):
        numeric = state.dtype.str in ARRAYS or state.dtype == np.complex128
        return torch.from_numpy(np.array(state)) if numeric else state.tolist()
    return state.item() if isinstance(state, np.generic) else state


def _save_torch(state: Any, path: Path) -> None:
    torch.save(plain(state), path)


def _load_torch(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


FORMS: Final[Mapping[str, Form]] = {
    "safetensors": Form(save_safetensors, load_safetensors),
    "torch": Form(_save_torch, _load_torch),
    "dcp": Form(lambda state, path: save_dcp(state, plain(state), path), load_dcp),
}
"""Every form by name."""
