"""Writes and reads states as safetensors: one file, or a folder of several with the index that HuggingFace uses.

The tensors lie as `shade.checkpoint.layout` lays them; the skeleton of the state goes along as text in the metadata,
under ``shade.tree``. Written by ourselves, since the library wants all bytes twice and refuses tensors that share
memory; read by the library, since it has been hardened against files made to harm.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from shade.checkpoint.assembly import assemble
from shade.checkpoint.layout import TensorSpec, bytes_of, plan
from shade.checkpoint.state import dismantle
from shade.errors import ConfigError, CorruptCheckpointError

TREE: Final = "shade.tree"
"""Where the skeleton is."""
MAX_FILE_BYTES: Final = 5 * 10**9
"""Beyond this a state is split into files, as HuggingFace does."""
_INDEX: Final = "model.safetensors.index.json"
_ALIGNMENT: Final = 8


def save_safetensors(state: Any, path: Path, max_file_bytes: int = MAX_FILE_BYTES) -> None:
    """Writes a state.

    Args:
        state: A state.
        path: The file; a folder of this name, with files and an index, where the state is larger than one file may be.
        max_file_bytes: Of tensors in one file; one tensor alone may be larger.
    """
    tree, tensors = dismantle(state)
    metadata = {"format": "pt", TREE: json.dumps(tree, separators=(",", ":"), ensure_ascii=False)}
    files = _split(tensors, max_file_bytes)
    if len(files) <= 1:
        _write(path, tensors, metadata)
        return
    path.mkdir()
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        _write(path / file, {name: tensors[name] for name in names}, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    total_bytes = sum(TensorSpec.of(tensor).num_bytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_bytes, TREE: metadata[TREE]}, "weight_map": weight_map}
    (path / _INDEX).write_text(json.dumps(index, ensure_ascii=False), encoding="utf-8")


def load_safetensors(path: Path) -> Any:
    """Reads a state.

    Args:
        path: A safetensors file, an index, or a folder with one of either.

    Returns:
        The state; of files without a skeleton, a dict by tensor name.

    Raises:
        ConfigError: The safetensors package is missing, or a folder holds several files and no index.
        CorruptCheckpointError: The files are not what the index says.
    """
    if path.is_dir():
        found = sorted(path.glob("*.safetensors.index.json")) or sorted(path.glob("*.safetensors"))
        if len(found) != 1:
            raise ConfigError.of("a folder with one safetensors file or index", f"{len(found)} in {path}", "name one")
        path = found[0]
    if path.suffix != ".json":
        tensors, metadata = _read(path)
        return _assembled(metadata.get(TREE), tensors)
    index = json.loads(path.read_text(encoding="utf-8"))
    files = sorted(set(index["weight_map"].values()))
    if any(Path(file).name != file for file in files):
        raise CorruptCheckpointError(f"expected {path} to name files beside it, got {files}")
    tensors = {}
    for file in files:
        tensors |= _read(path.parent / file)[0]
    return _assembled(index.get("metadata", {}).get(TREE), tensors)


def _assembled(tree: str | None, tensors: dict[str, torch.Tensor]) -> Any:
    return tensors if tree is None else assemble(json.loads(tree), tensors)


def _split(tensors: Mapping[str, torch.Tensor], max_file_bytes: int) -> list[list[str]]:
    """Names by file, in the order of the state."""
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


def _write(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    entries = plan({name: TensorSpec.of(tensor) for name, tensor in tensors.items()}, 0, 1).entries
    header: dict[str, Any] = {"__metadata__": metadata}
    for name, entry in entries.items():
        header[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [entry.start, entry.stop]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for content in _contents(tensors[name] for name in entries):
            file.write(content)


def _contents(tensors: Iterable[torch.Tensor]) -> Iterable[memoryview]:
    for tensor in tensors:
        yield bytes_of(tensor.cpu().contiguous()).numpy().data


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ConfigError.of("the safetensors package", "none", "pip install 'shade[checkpoint]'") from None
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise CorruptCheckpointError(f"{path} is not a sound safetensors file: {error}") from error
