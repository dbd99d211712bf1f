"""Exports a state to the files of other libraries, and loads it from them.

Three formats, each readable without this package: ``safetensors`` (one file, or several with HuggingFace's index),
``torch`` (one file for `torch.load` with ``weights_only=True``) and ``dcp`` (a folder for
`torch.distributed.checkpoint`). Safetensors and DCP carry the skeleton of the state, so the loaded state equals the
saved one; ``torch`` has only plain types. Tensors that are one in memory are written under each of their names. Foreign
files are read too; nothing in a file is executed. `import_state` makes a snapshot of a foreign state dict. Invariant: a
path that is written appears complete or not at all.
"""

from __future__ import annotations

import enum
import io
import json
import pickle
import pickletools
import struct
import time
import warnings
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import unquote

import numpy as np
import torch
from torch.distributed.checkpoint import _nested_dict, filesystem, metadata
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from shade.checkpoint._capture.flatten import ARRAYS, VIEWED, flatten, unflatten, viewed_in
from shade.checkpoint._capture.layout import TensorSpec, bytes_of, lay_out
from shade.checkpoint._capture.sharding import whole
from shade.checkpoint._commit.protocol import record_of, statement
from shade.checkpoint._format.manifest import Commit, header_of
from shade.checkpoint._restore.reader import Reader
from shade.checkpoint._save.packing import Packer
from shade.checkpoint._tiers.tier import Shard, Tier
from shade.errors import ConfigError, CorruptCheckpointError, ShadeError, StorageError
from shade.installation import install_hint
from shade.process import remove_leftovers, replacing


def import_state(state: dict[str, Any], tier: Tier, run: str, step: int) -> Commit:
    """Stores a state, by the names of attached objects, as the run's newest snapshot; returns the record. Raises
    ConfigError if something in it cannot be saved, StoreError or StorageError if the tier refuses."""
    tree, tensors = flatten(state)
    layout = lay_out({name: TensorSpec.of(tensor) for name, tensor in tensors.items()}, 0, 1)
    buffer = torch.empty(layout.num_bytes, dtype=torch.uint8)
    for name, entry in layout.entries.items():
        buffer[entry.start : entry.stop] = bytes_of(tensors[name].cpu().contiguous())
    packed = Packer(run, 0, 1, "none").pack(step, buffer, layout.num_bytes, layout.entries, tree)
    sequence = Reader([tier]).newest_sequence() + 1
    record = record_of([statement(packed.manifest, sequence=sequence, saved_at=time.time())])
    location = tier.prepare(step, [packed.manifest.stored_bytes])
    try:
        tier.put(location, Shard(packed.manifest, packed.chunks))
        tier.commit(location, record)
    except BaseException:
        tier.discard(location)
        raise
    return record


TREE: Final = "shade.tree"
"""Metadata key of the skeleton."""
MAX_FILE_BYTES: Final = 5 * 10**9
"""A larger state is split into files, as HuggingFace does."""
_INDEX: Final = "model.safetensors.index.json"
_NATIVE: Final[Mapping[str, str]] = {
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
"""Types that a snapshot stores as bytes, and a safetensors file by their names: others would read codes as numbers."""
_ALIGNMENT: Final = 8


def save_safetensors(state: Any, path: Path, max_file_bytes: int = MAX_FILE_BYTES) -> None:
    """Writes a state as safetensors.

    Args:
        state: The state.
        path: The file; a folder of this name, with files and an index, if the state is larger than one file may be.
        max_file_bytes: Bytes of tensors per file; a single tensor may be larger.
    """
    tied: dict[str, torch.Tensor] = {}
    tree, tensors = flatten(state, tied=tied, escapes=False)
    tensors |= tied
    native = {tensors[name].data_ptr(): _NATIVE[kind] for kind, name in viewed_in(tree) if kind in _NATIVE}
    metadata = {"format": "pt", TREE: json.dumps(tree, separators=(",", ":"), ensure_ascii=False)}
    files = _split(tensors, max_file_bytes)
    if len(files) <= 1:
        _write(path, tensors, metadata, native)
        return
    path.mkdir()
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        _write(path / file, {name: tensors[name] for name in names}, {"format": "pt"}, native)
        weight_map |= dict.fromkeys(names, file)
    total_bytes = sum(TensorSpec.of(tensor).num_bytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_bytes, TREE: metadata[TREE]}, "weight_map": weight_map}
    (path / _INDEX).write_text(json.dumps(index, ensure_ascii=False), encoding="utf-8")


def load_safetensors(path: Path) -> Any:
    """Reads a state from a safetensors file, an index, or a folder that contains one of them; a dict by tensor name
    for files without a skeleton. Raises ConfigError if the package is missing or a folder holds several files and no
    index, and CorruptCheckpointError if the files do not match the index."""
    if path.is_dir():
        found = sorted(path.glob("*.safetensors.index.json")) or sorted(path.glob("*.safetensors"))
        if len(found) != 1:
            raise ConfigError.of("a folder with one safetensors file or index", f"{len(found)} in {path}", "name one")
        path = found[0]
    if path.suffix != ".json":
        tensors, metadata = _read(path)
        return _state(metadata.get(TREE), tensors)
    index = json.loads(path.read_text(encoding="utf-8"))
    files = sorted(set(index["weight_map"].values()))
    if any(Path(file).name != file for file in files):
        raise CorruptCheckpointError(f"expected {path} to name files beside it, got {files}")
    tensors = {}
    for file in files:
        tensors |= _read(path.parent / file)[0]
    return _state(index.get("metadata", {}).get(TREE), tensors)


def _state(tree: str | None, tensors: dict[str, torch.Tensor]) -> Any:
    if tree is None:
        return tensors
    plain = {name: each.view(VIEWED.get(each.dtype, each.dtype)) for name, each in tensors.items()}
    return unflatten(json.loads(tree), plain)


def _split(tensors: Mapping[str, torch.Tensor], max_file_bytes: int) -> list[list[str]]:
    """Returns the tensor names of each file, in the order of the state."""
    files: list[list[str]] = []
    held = max_file_bytes
    for name, tensor in tensors.items():
        num_bytes = TensorSpec.of(tensor).num_bytes
        if held + num_bytes > max_file_bytes or not files:
            files.append([])
            held = 0
        files[-1].append(name)
        held += num_bytes
    return files


def _write(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], native: Mapping[int, str]
) -> None:
    """Writes a file; ``native`` are the types, by address, of tensors whose bytes are given."""
    # By number: a name may be any text, and one with an @ would be a rank's own.
    names = sorted(tensors)
    specs = {f"{number:09}": TensorSpec.of(tensors[name]) for number, name in enumerate(names)}
    laid_out = lay_out(specs, 0, 1).entries.items()
    entries = {names[int(number)]: entry for number, entry in laid_out}
    spelled = {
        name: replace(entry, dtype=native.get(tensors[name].data_ptr(), "U8")) if entry.dtype == "U8" else entry
        for name, entry in entries.items()
    }
    with path.open("wb") as file:
        file.write(header_of(spelled, metadata, _ALIGNMENT))
        for name in entries:
            file.write(bytes_of(tensors[name].cpu().contiguous()).numpy().data)


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ConfigError.of("the safetensors package", "none", install_hint("checkpoint")) from None
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise CorruptCheckpointError(f"{path} is not a sound safetensors file: {error}") from error


STAND_IN: Final = "%deepspeed"
"""Key of a dict that stands for an object of DeepSpeed's, whose fields or whose value are beside it."""
_OURS: Final = "shade"
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
    """Writes a state as a DCP folder.

    Raises ConfigError if it is no dict, or has a key that we use, or StorageError if DCP could not write.
    """
    if not isinstance(plain, dict) or _OURS in plain:
        raise ConfigError.of(f"a dict without a key {_OURS!r} for DCP", type(state).__name__, "wrap or rename it")
    tree, tensors = flatten(state)
    flat, _ = _nested_dict.flatten_state_dict(plain)
    unseen = {name: tensor for name, tensor in tensors.items() if not _is_like(flat.get(_dotted(name)), tensor)}
    try:
        with _warning_silenced():
            save({**plain, _OURS: {"tree": json.dumps(tree), **unseen}}, checkpoint_id=path, no_dist=True)
    except CheckpointException as error:
        raise StorageError(f"DCP could not write {path}: {_reason(error)}") from error


def load_dcp(path: Path) -> Any:
    """Reads a state from a DCP folder; nested as DCP's metadata says for a foreign one. Raises UnpicklingError if
    its metadata would have to execute something, and CorruptCheckpointError if it is damaged or an object in it
    would have to be executed."""
    reader = _Reader(path)
    described = reader.read_metadata()
    wanted: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, metadata.TensorStorageMetadata)
        else entry
        for name, entry in described.state_dict_metadata.items()
    }
    try:
        with _warning_silenced():
            load(wanted, storage_reader=reader, planner=_Planner(), no_dist=True)
    except CheckpointException as error:
        raise CorruptCheckpointError(f"DCP cannot read {path}: {_reason(error)}") from error
    tree = wanted.get(TREE)
    if isinstance(tree, str):
        return unflatten(json.loads(tree), _Named(wanted))
    return _nested_dict.unflatten_state_dict(wanted, described.planner_data) if described.planner_data else wanted


@contextmanager
def _warning_silenced() -> Iterator[None]:
    """Silences DCP's warning about running in one process, which is intended here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


def _reason(error: CheckpointException) -> str:
    """Returns the reason of DCP's exception, which is no `Exception` and wraps each rank's with its trace."""
    return "; ".join(str(failure[0]) for failure in error.failures.values())[:200]


class _Named(dict[str, torch.Tensor]):
    """Finds tensors by our names among DCP's names."""

    def __missing__(self, name: str) -> torch.Tensor:
        for candidate in (f"{_OURS}.{name}", _dotted(name)):
            if isinstance(self.get(candidate), torch.Tensor):
                return self[candidate]
        raise KeyError(name)


def _is_like(seen: Any, tensor: torch.Tensor) -> bool:
    return isinstance(seen, torch.Tensor) and (seen.dtype, seen.shape) == (tensor.dtype, tensor.shape)


def _dotted(name: str) -> str:
    """Returns DCP's name of a tensor."""
    return ".".join(unquote(part) for part in name.split("/"))


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        path = self.mappings[read_item.dest_index.fqn]
        loaded = torch.load(value, map_location="cpu", weights_only=True)
        set_element(self.original_state_dict, path, loaded)


class _Reader(filesystem.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        content = Path(self.path, ".metadata").read_bytes()
        # The unpickler makes room for any index of its memo and any length that is stated.
        for code, number, _ in pickletools.genops(content):
            if code.name in ("PUT", "LONG_BINPUT") and int(number or 0) > len(content):
                raise pickle.UnpicklingError(f"expected DCP's metadata, got object {number} in {len(content)} bytes")
        found = _Unpickler(io.BytesIO(content)).load()
        if not isinstance(found, metadata.Metadata):
            raise pickle.UnpicklingError(f"expected DCP's metadata, got {type(found).__name__}")
        if found.storage_meta is None:
            found.storage_meta = metadata.StorageMeta()
        return found


class _Unpickler(pickle.Unpickler):
    """Knows the classes of DCP's metadata, and refuses all others."""

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
    """Returns an enum's member: Python 3.11's first releases pickle it as ``getattr`` of the class. Nothing else."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__):
        raise pickle.UnpicklingError(f"expected DCP's metadata, got something that needs {name!r} of {kind!r}")
    return kind[name]


_BAD_FILE: Final = (
    *(pickle.UnpicklingError, struct.error, EOFError, OSError, ArithmeticError, AssertionError, AttributeError),
    *(LookupError, MemoryError, RuntimeError, TypeError, ValueError),
)
"""Exceptions that torch and DCP raise on files that are not theirs."""


class ExportSource(Protocol):
    """A snapshot that was read and verified."""

    tree: Any
    """The skeleton of its state."""

    def tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Returns every tensor that the tree names, and all parts of its DTensors, with their names."""
        ...


@dataclass(frozen=True)
class ExportFormat:
    """Saves and loads one file format."""

    save: Callable[[Any, Path], None]
    load: Callable[[Path], Any]


def export(source: ExportSource, path: Path, form: str, only: str | None = None) -> None:
    """Writes a snapshot to a file.

    Args:
        source: The snapshot.
        path: A file, or a folder for ``dcp``; it must not exist.
        form: A name in `FORMS`.
        only: Name of one attached object, ``"model"`` say: its state alone, under its own names.

    Raises:
        ConfigError: No such format or object, the path exists, or a package is missing.
        StorageError: It could not be written; nothing is left.
    """
    save_state(state_of(source, only), path, form)


def state_of(source: ExportSource, only: str | None = None) -> Any:
    """Returns the state of a snapshot, or of one attached object in it. Raises ConfigError, with their names, if
    there is no such object."""
    state = whole(unflatten(source.tree, dict(source.tensors())))
    if only is None:
        return state
    if not isinstance(state, dict) or only not in state:
        known = ", ".join(map(str, state)) if isinstance(state, dict) else "none"
        raise ConfigError.of(f"one of {known}", only, "use the name of an attached object")
    return state[only]


def save_state(state: Any, path: Path, form: str) -> None:
    """Writes a state of the types that `_capture.flatten.flatten` takes; path, form and errors are those of
    `export`."""
    with _atomically(path) as aside:
        _form(form).save(state, aside)


def load_state(path: Path, form: str) -> Any:
    """Reads a state from a file of `save_state` or of another program.

    Args:
        path: A file, an index of several, or a folder.
        form: A name in `FORMS`.

    Returns:
        The state; a dict by tensor name for a foreign safetensors file.

    Raises:
        ConfigError: No such format, nothing there, or a package is missing.
        CorruptCheckpointError: It is not in that format, or something in it would have to be executed.
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


def _form(name: str) -> ExportFormat:
    if name not in FORMS:
        raise ConfigError.of(f"one of {', '.join(FORMS)}", name, "choose one of them")
    return FORMS[name]


@contextmanager
def _atomically(path: Path) -> Iterator[Path]:
    """Yields a path beside the wanted one; syncs it and moves it into place at the end."""
    if path.exists():
        raise ConfigError.of("a path that does not exist", str(path), "remove it, or choose another")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path)
        with replacing(path, durable=True) as beside:
            yield beside
    except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError on a full disk
        raise StorageError(f"could not write {path}: {getattr(error, 'strerror', None) or error}") from error


def plain(state: Any) -> Any:
    """Returns a state in types that `torch.load` accepts with ``weights_only=True``.

    Args:
        state: The state.

    Returns:
        Arrays as tensors (of strings: lists), array scalars as numbers, dates as text, deques as lists, frozensets as
        sets, defaultdicts as dicts, DeepSpeed's enums as their values; all else unchanged. A tensor that is a part of a
        larger storage is copied, because `torch.save` would write all of that; tensors that were one object stay one.
    """
    return _plain(state, {})


def _plain(state: Any, copies: dict[Any, torch.Tensor]) -> Any:
    kind = type(state)
    if isinstance(state, torch.Tensor):
        if kind is not torch.Tensor:
            raise ConfigError.of("plain tensors for this format", kind.__qualname__, "export as safetensors")
        if state.untyped_storage().nbytes() == state.numel() * state.itemsize:
            return state
        same = (state.data_ptr(), state.dtype, state.shape, state.stride())
        if same not in copies:
            copies[same] = state.detach().clone()
        return copies[same]
    if isinstance(state, Mapping):
        if STAND_IN in state and not isinstance(state.get("fields"), Mapping):
            return _plain(state.get("fields"), copies)
        made: dict[Any, Any] = kind() if kind in (OrderedDict, Counter) else {}
        for key, value in state.items():
            made[_plain(key, copies)] = _plain(value, copies)
        if kind is OrderedDict:
            vars(made).update(vars(state))
        return made
    if kind in (tuple, list, deque):
        return (tuple if kind is tuple else list)(_plain(each, copies) for each in state)
    if kind in (set, frozenset):
        return {_plain(each, copies) for each in state}
    if isinstance(state, np.ndarray):
        numeric = state.dtype.str in ARRAYS or state.dtype == np.complex128
        return torch.from_numpy(np.array(state)) if numeric else _plain_items(state).tolist()
    return _plain_items(state).item() if isinstance(state, np.generic) else state


def _plain_items(value: Any) -> Any:
    """Returns an array or a scalar whose items are plain in Python: dates as text, long doubles as doubles."""
    if value.dtype.kind in "Mm":
        return value.astype(str)
    return value.astype({"f": np.float64, "c": np.complex128}.get(value.dtype.kind, value.dtype))


def _save_torch(state: Any, path: Path) -> None:
    with path.open("wb") as file:  # of a path, the name would be in the file
        torch.save(plain(state), file)


FORMS: Final[Mapping[str, ExportFormat]] = {
    "safetensors": ExportFormat(save_safetensors, load_safetensors),
    "torch": ExportFormat(_save_torch, lambda path: torch.load(path, map_location="cpu", weights_only=True)),
    "dcp": ExportFormat(lambda state, path: save_dcp(state, plain(state), path), load_dcp),
}
"""Formats by name."""
