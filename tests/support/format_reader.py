"""Reads checkpoints as docs/format.md says. Written from that page: nothing of ours is imported here, nor torch.

Only json, struct, numpy, and the two published formats that the page refers to (xxh3, zstandard).
"""

from __future__ import annotations

import json
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


def read_record(folder: Path) -> dict[str, Any]:
    """§3."""
    text = (folder / "commit.json").read_text(encoding="utf-8")
    record: dict[str, Any] = json.loads(text)
    assert record["format"] == "shade-checkpoint"
    assert record["version"] in (1, 2)
    own = f'"digest":"{record["digest"]}",'
    assert digest(text.replace(own, "", 1).encode()) == record["digest"]
    return record


def read_snapshot(folder: Path) -> tuple[dict[str, Any], list[Any], dict[str, np.ndarray[Any, Any]]]:
    """§1: the record, every rank's state, every tensor; those of types that numpy lacks as bytes."""
    record = read_record(folder)
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    trees = []
    for rank in range(record["world_size"]):
        manifest, data = read_shard(folder, record, rank)
        for name, entry in manifest["tensors"].items():
            piece = np.frombuffer(data[entry["start"] : entry["stop"]], NUMPY.get(entry["dtype"], "|u1"))
            assert name not in tensors
            tensors[name] = piece.reshape(entry["shape"]) if entry["dtype"] in NUMPY else piece
        trees.append(manifest["tree"])
    return record, [make(tree, tensors) for tree in trees], tensors


def digest(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)


def read_shard(folder: Path, record: dict[str, Any], rank: int) -> tuple[dict[str, Any], bytes]:
    """§1, §4: the manifest and the data of a shard, built on the base's if there is one."""
    content = (folder / f"rank-{rank}.json").read_bytes()
    assert digest(content) == record["manifests"][rank]
    manifest = json.loads(content)
    base = b""
    if record.get("base") is not None:
        folders = list(folder.parent.iterdir())
        (place,) = [other for other in folders if digest((other / "commit.json").read_bytes()) == record["base"]]
        _, base = read_shard(place, read_record(place), rank)
    return manifest, read_data(folder, manifest, base)


def read_data(folder: Path, manifest: dict[str, Any], base: bytes) -> bytes:
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
    parts, place, first = [], 0, 0
    for chunk in manifest["chunks"]:
        part = stored[place : place + chunk["num_bytes"]]
        assert digest(part) == chunk["digest"]
        place += len(part)
        length = min(manifest["chunk_bytes"], manifest["num_bytes"] - first)
        codec = chunk.get("codec", manifest["codec"])
        part = decode(codec, part, base[first : first + length], width, spans(manifest, first, length))
        if manifest["version"] == 2:
            assert digest(part) == chunk["plain"]
        first += length
        parts.append(part)
    assert place == len(stored)
    data = b"".join(parts)
    assert len(data) == manifest["num_bytes"]
    return data


def spans(manifest: dict[str, Any], first: int, length: int) -> list[tuple[int, int, bool]]:
    """§5: the tensors' parts in a chunk: first byte, one past the last, whether its items are rough."""
    found = []
    for entry in sorted(manifest["tensors"].values(), key=lambda entry: int(entry["start"])):
        start, stop = max(entry["start"] - first, 0), min(entry["stop"] - first, length)
        rough = entry["dtype"] == "F32" and entry["stop"] - entry["start"] >= 4096
        if start < stop:
            found.append((start, stop, rough and start % 4 == stop % 4 == 0))
    return found


def ungroup(grouped: bytes, width: int) -> bytes:
    """§5: bytes written column by column, row by row again."""
    q = len(grouped) // width
    plain = bytearray(grouped)
    for j in range(width):
        plain[j : q * width : width] = grouped[j * q : (j + 1) * q]
    return bytes(plain)


def decode(codec: str, stored: bytes, base: bytes, width: int, parts: list[tuple[int, int, bool]]) -> bytes:
    """§5: one chunk."""
    if codec == "none":
        return stored
    if codec == "dedup":
        assert bytes.fromhex(digest(base)) == stored
        return base
    told = zstandard.ZstdDecompressor().decompress(stored)
    if codec == "zstd":
        return ungroup(told, width)
    if codec == "xor-zstd":
        return bytes(a ^ b for a, b in zip(ungroup(told, width), base, strict=True))
    made = bytearray(base)
    head = sum(could_be for _, _, could_be in parts)
    flags = iter(told[:head])
    parts = [(start, stop, could_be and bool(next(flags))) for start, stop, could_be in parts]
    for start, stop, is_rough in parts:
        if not is_rough:
            made[start:stop] = told[head : head + stop - start]
            head += stop - start
    rough = [(start, stop) for start, stop, is_rough in parts if is_rough]
    lengths = [(stop - start) // 4 for start, stop in rough]
    items = np.concatenate([np.frombuffer(base[start:stop], "<f4") for start, stop in rough])
    items = ROUGH[codec](told[head:], items, lengths)
    for (start, stop), part in zip(rough, np.split(items, np.cumsum(lengths)[:-1]), strict=True):
        made[start:stop] = part.tobytes()
    return bytes(made)


def topk(told: bytes, items: np.ndarray[Any, Any], lengths: list[int]) -> np.ndarray[Any, Any]:
    """§5."""
    pairs = ungroup(told, 4)
    gaps = np.frombuffer(pairs[: len(pairs) // 2], "<u4")
    differences = np.frombuffer(pairs[len(pairs) // 2 :], "<f4")
    items, place = items.copy(), 0
    for gap, difference in zip(gaps, differences, strict=True):
        place += int(gap)
        items[place] += difference
    return items


def int8(told: bytes, items: np.ndarray[Any, Any], lengths: list[int]) -> np.ndarray[Any, Any]:
    """§5."""
    head = 4 * -(-len(items) // 1024)
    steps, counts = np.frombuffer(told[:head], "<f4"), np.frombuffer(told[head:], "i1")
    made = [item + np.float32(counts[n]) * steps[n // 1024] for n, item in enumerate(items)]
    return np.array(made, "<f4")


def excp(told: bytes, items: np.ndarray[Any, Any], lengths: list[int]) -> np.ndarray[Any, Any]:
    """§5."""
    items, place, first = items.copy(), 0, 0
    for length in lengths:
        is_change, num = told[place], told[place + 1]
        values = [np.float32(0), *np.frombuffer(told[place + 2 : place + 2 + 4 * num], "<f4")]
        place += 2 + 4 * num
        for n in range(length):
            pair = told[place + n // 2]
            value = values[pair >> 4 if n % 2 else pair & 15]
            items[first + n] = items[first + n] + value if is_change else value
        place += (length + 1) // 2
        first += length
    return items


ROUGH = {"topk-delta": topk, "int8-delta": int8, "excp": excp}


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
    if kind == "ordered":
        return make(content[1], tensors)
    if kind == "wrapper":
        return [*content[:2], *make(content[3], tensors)]
    if kind == "dtensor":
        return split(content, tensors)
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


def split(content: list[Any], tensors: dict[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """§6, DTensors whose part is a plain tensor."""
    part, _, n, shape, mesh, ranks, placements = content
    name = part["tensor"]
    places = list(np.ndindex(*mesh))
    numbers = ranks.get("ranks") or [ranks["first"] + int(np.dot(place, ranks["strides"])) for place in places]
    made: Any = None
    for place, rank in zip(places, numbers, strict=True):
        replica = 0
        for at, size, each in zip(place, mesh, placements, strict=True):
            replica = replica if each is not None else replica * size + at
        if replica != n:
            continue
        held = [list(range(size)) for size in shape]
        for at, size, each in zip(place, mesh, placements, strict=True):
            if each is not None:
                dim, factor = each
                held[dim] = [index for run in runs(held[dim], factor) for index in runs(run, size)[at]]
        mine = tensors[f"{name}@rank{rank}"]
        made = np.zeros(shape, mine.dtype) if made is None else made
        for at_part in np.ndindex(*mine.shape):
            made[tuple(held[dim][at] for dim, at in enumerate(at_part))] = mine[at_part]
    return np.asarray(made)


def runs(indices: list[int], count: int) -> list[list[int]]:
    """§6."""
    length = -(-len(indices) // count)
    return [indices[number * length : (number + 1) * length] for number in range(count)]
