"""Writes and reads states as folders of `torch.distributed.checkpoint` (DCP), by DCP itself, in one process.

DCP flattens nested dicts to names with dots and forgets types and tuples, and the integer keys of an optimizer's state
come back as a list. So we add entries of our own below ``shade``: the skeleton of the state, and tensors that DCP does
not see as such. With them the state comes back exactly; without them, as DCP has it.

DCP's metadata file is a pickle. It is read by an unpickler that knows DCP's own few classes and refuses all else, and
the objects in the folder by `torch.load` with ``weights_only=True``: nothing that a file brings along is executed.
"""

from __future__ import annotations

import contextlib
import enum
import io
import json
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import torch
from torch.distributed.checkpoint import _nested_dict, filesystem, metadata
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from shade.checkpoint.assembly import assemble
from shade.checkpoint.state import dismantle
from shade.errors import ConfigError, CorruptCheckpointError, StorageError

_OURS: Final = "shade"
_TREE: Final = "shade.tree"
_KNOWN: Final[dict[tuple[str, str], Any]] = {
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    },
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("pathlib", "PosixPath"): Path,
    ("pathlib._local", "PosixPath"): Path,
}


def save_dcp(state: Any, plain: Any, path: Path) -> None:
    """Writes a state.

    Args:
        state: The state: a dict.
        plain: The same in plain types, for others to read.
        path: The folder.

    Raises:
        ConfigError: It is no dict, or has a thing called as our entries are.
        StorageError: DCP could not write.
    """
    if not isinstance(plain, dict) or _OURS in plain:
        raise ConfigError.of(f"a dict without a key {_OURS!r} for DCP", type(state).__name__, "wrap or rename it")
    tree, tensors = dismantle(state)
    flat, _ = _nested_dict.flatten_state_dict(plain)
    unseen = {name: tensor for name, tensor in tensors.items() if not _is_like(flat.get(_dotted(name)), tensor)}
    try:
        with _alone():
            save({**plain, _OURS: {"tree": json.dumps(tree), **unseen}}, checkpoint_id=path, no_dist=True)
    except CheckpointException as error:
        raise StorageError(f"DCP could not write {path}: {_reason(error)}") from error


def load_dcp(path: Path) -> Any:
    """Reads a state.

    Args:
        path: The folder.

    Returns:
        The state; of a folder from elsewhere, nested as DCP says it was.

    Raises:
        UnpicklingError: Its metadata holds what would have to be executed.
        CorruptCheckpointError: It is damaged, or an object in it would have to be executed.
    """
    reader = _Reader(path)
    described = reader.read_metadata()
    wanted: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, metadata.TensorStorageMetadata)
        else entry
        for name, entry in described.state_dict_metadata.items()
    }
    try:
        with _alone():
            load(wanted, storage_reader=reader, planner=_Planner(), no_dist=True)
    except CheckpointException as error:
        raise CorruptCheckpointError(f"DCP cannot read {path}: {_reason(error)}") from error
    tree = wanted.get(_TREE)
    if isinstance(tree, str):
        return assemble(json.loads(tree), _Named(wanted))
    return _nested_dict.unflatten_state_dict(wanted, described.planner_data) if described.planner_data else wanted


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """DCP in one process, on purpose: it warns whenever it is."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


def _reason(error: CheckpointException) -> str:
    """What DCP's exception is about: it is no `Exception`, and wraps the one of each rank with its whole trace."""
    return "; ".join(str(failure[0]) for failure in error.failures.values())[:200]


class _Named(dict[str, torch.Tensor]):
    """Tensors by our names, from DCP's."""

    def __missing__(self, name: str) -> torch.Tensor:
        for candidate in (f"{_OURS}.{name}", _dotted(name)):
            if isinstance(self.get(candidate), torch.Tensor):
                return self[candidate]
        raise KeyError(name)


def _is_like(seen: Any, tensor: torch.Tensor) -> bool:
    return isinstance(seen, torch.Tensor) and (seen.dtype, seen.shape) == (tensor.dtype, tensor.shape)


def _dotted(name: str) -> str:
    """What DCP calls the tensor that we call so."""
    return ".".join(unquote(part) for part in name.split("/"))


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        path = self.mappings[read_item.dest_index.fqn]
        loaded = torch.load(value, map_location="cpu", weights_only=True)
        set_element(self.original_state_dict, path, loaded)


class _Reader(filesystem.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        content = Path(self.path, ".metadata").read_bytes()
        found = _Unpickler(io.BytesIO(content)).load()
        if not isinstance(found, metadata.Metadata):
            raise pickle.UnpicklingError(f"expected DCP's metadata, got {type(found).__name__}")
        if found.storage_meta is None:
            found.storage_meta = metadata.StorageMeta()
        return found


class _Unpickler(pickle.Unpickler):
    """Knows what DCP's own metadata consists of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        known = _KNOWN.get((module, name))
        if known is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if known is None:
            raise pickle.UnpicklingError(f"expected DCP's metadata, got something that needs {module}.{name}")
        return known


def _member(kind: Any, name: Any) -> Any:
    """What Python 3.11's first releases write an enum's member as: ``getattr`` of the class. Of nothing else here."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__):
        raise pickle.UnpicklingError(f"expected DCP's metadata, got something that needs {name!r} of {kind!r}")
    return kind[name]
