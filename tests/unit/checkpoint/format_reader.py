"""Reads checkpoints as docs/format.md says. Written from that page: nothing of ours is imported here, nor torch.

Only json, struct, re, numpy, and the two published formats that the page refers to (xxh3, zstandard).
"""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zstandard

WIDTHS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}
NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1", "U64": "<u8"}
NUMPY |= {"U32": "<u4", "U16": "<u2", "U8": "|u1", "BOOL": "|b1", "C64": "<c8"}


def read_snapshot(folder: Path) -> tuple[dict[str, Any], list[Any], dict[str, np.ndarray[Any, Any]]]:
    """§1: the record, every rank's state, every tensor; those of types that numpy lacks as bytes."""
    text = (folder / "commit.json").read_text(encoding="utf-8")
    record = json.loads(text)
    assert (record["format"], record["version"]) == ("shade-checkpoint", 1)
    assert digest(re.sub(r'"digest":"[0-9a-f]{32}",', "", text, count=1).encode()) == record["digest"]
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    trees = []
    for rank in range(record["world_size"]):
        content = (folder / f"rank-{rank}.json").read_bytes()
        assert digest(content) == record["manifests"][rank]
        manifest = json.loads(content)
        data = read_data(folder, manifest)
        for name, entry in manifest["tensors"].items():
            piece = np.frombuffer(data[entry["start"] : entry["stop"]], NUMPY.get(entry["dtype"], "|u1"))
            assert name not in tensors
            tensors[name] = piece.reshape(entry["shape"]) if entry["dtype"] in NUMPY else piece
        trees.append(manifest["tree"])
    return record, [make(tree, tensors) for tree in trees], tensors


def digest(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)


def read_data(folder: Path, manifest: dict[str, Any]) -> bytes:
    """§2, §4, §5: the data of a shard."""
    if manifest["codec"] == "none":
        stored = (folder / f"rank-{manifest['rank']}.safetensors").read_bytes()
        (length,) = struct.unpack("<Q", stored[:8])
        assert (8 + length) % 4096 == 0
        stored = stored[8 + length :]
    else:
        stored = (folder / f"rank-{manifest['rank']}.chunks").read_bytes()
    held: dict[int, int] = {}
    for entry in manifest["tensors"].values():
        width = WIDTHS[entry["dtype"]]
        held[width] = held.get(width, 0) + entry["stop"] - entry["start"]
    width = max((num_bytes, width) for width, num_bytes in held.items())[1] if manifest["num_bytes"] else 1
    parts, place = [], 0
    for chunk in manifest["chunks"]:
        part = stored[place : place + chunk["num_bytes"]]
        assert digest(part) == chunk["digest"]
        place += len(part)
        if manifest["codec"] == "zstd":
            grouped = zstandard.ZstdDecompressor().decompress(part)
            q = len(grouped) // width
            plain = bytearray(grouped)
            for j in range(width):
                plain[j : q * width : width] = grouped[j * q : (j + 1) * q]
            part = bytes(plain)
        parts.append(part)
    assert place == len(stored)
    data = b"".join(parts)
    assert len(data) == manifest["num_bytes"]
    return data


def make(node: Any, tensors: dict[str, np.ndarray[Any, Any]]) -> Any:
    """§6, for what is in the state below; tensors as arrays."""
    if isinstance(node, list):
        return [make(each, tensors) for each in node]
    if not isinstance(node, dict):
        return node
    ((kind, content),) = node.items()
    if kind in ("tensor", "array"):
        return tensors[content]
    if kind == "viewed":
        stored = tensors[content[1]]
        return stored.view("<c16")[..., 0] if content[0] == "complex128" else stored
    if kind == "raw_array":
        return np.frombuffer(tensors[content[2]].tobytes(), content[0]).reshape(content[1])
    if kind == "scalar":
        return np.frombuffer(bytes.fromhex(content[1]), content[0])[0]
    if kind == "numbers":
        return tensors[content].tolist()
    if kind in ("dict", "OrderedDict", "Counter", "module_state"):
        return dict(zip(make(content[0], tensors), make(content[1], tensors), strict=True))
    if kind == "defaultdict":
        return dict(zip(make(content[1], tensors), make(content[2], tensors), strict=True))
    if kind == "deque":
        return make(content[1], tensors)
    if kind == "tuple":
        return tuple(make(content, tensors))
    if kind == "bytes":
        return bytes.fromhex(content) if isinstance(content, str) else tensors[content["tensor"]].tobytes()
    if kind == "int":
        return int(content, 16)
    if kind == "float":
        return struct.unpack(">d", bytes.fromhex(content))[0]
    raise AssertionError(f"docs/format.md has no {kind}")
