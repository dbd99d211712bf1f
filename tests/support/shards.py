"""Data sets in shards of every format, and what their formats' own readers make of them."""

from __future__ import annotations

import importlib.util
import io
import itertools
import json
import os
import shutil
import struct
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shade import Shards

COLUMNS = ["bin", "cls"]
PER_SHARD = 40
Item = tuple[bytes, int]


def make_items(num_samples: int, num_bytes: int = 300) -> list[Item]:
    """Samples of different lengths; each holds its number."""
    rng = np.random.default_rng(num_samples)
    return [(rng.bytes(int(rng.integers(1, 2 * num_bytes))), number) for number in range(num_samples)]


def write_tar(path: Path, items: Sequence[Item]) -> None:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for content, number in items:
            for column, data in (("bin", content), ("cls", str(number).encode())):
                member = tarfile.TarInfo(f"part/{number:06d}.{column}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def read_tar(path: Path) -> list[Item]:
    with tarfile.open(path) as tar:
        contents = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    keys = dict.fromkeys(name.rpartition(".")[0] for name in contents)
    return [(contents[f"{key}.bin"], int(contents[f"{key}.cls"])) for key in keys]


def write_zip(path: Path, items: Sequence[Item]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for content, number in items:
            archive.writestr(f"{number:06d}.bin", content, zipfile.ZIP_DEFLATED)
            archive.writestr(f"{number:06d}.cls", str(number))


def read_zip(path: Path) -> list[Item]:
    with zipfile.ZipFile(path) as archive:
        keys = dict.fromkeys(name.rpartition(".")[0] for name in archive.namelist())
        return [(archive.read(f"{key}.bin"), int(archive.read(f"{key}.cls"))) for key in keys]


def _table(items: Sequence[Item]) -> Any:
    import pyarrow

    return pyarrow.table({"bin": [content for content, _ in items], "cls": [number for _, number in items]})


def write_parquet(path: Path, items: Sequence[Item]) -> None:
    from pyarrow import parquet

    parquet.write_table(_table(items), path, row_group_size=7)


def read_parquet(path: Path) -> list[Item]:
    from pyarrow import parquet

    return [(row["bin"], row["cls"]) for row in parquet.read_table(path).to_pylist()]


def write_arrow(path: Path, items: Sequence[Item]) -> None:
    import pyarrow

    table = _table(items)
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def read_arrow(path: Path) -> list[Item]:
    import pyarrow

    return [(row["bin"], row["cls"]) for row in pyarrow.ipc.open_stream(str(path)).read_all().to_pylist()]


def write_mds(path: Path, items: Sequence[Item]) -> None:
    """Writes a shard as MosaicML's ``MDSWriter`` does; `test_mds_is_as_its_own_reader` holds it against theirs."""
    config = {
        "column_encodings": ["bytes", "int"],
        "column_names": COLUMNS,
        "column_sizes": [None, 8],
        "compression": None,
        "format": "mds",
        "hashes": [],
        "size_limit": 1 << 26,
        "version": 2,
    }
    header = json.dumps(config, sort_keys=True).encode()
    samples = [struct.pack("<I", len(content)) + content + struct.pack("<q", number) for content, number in items]
    ends = np.cumsum([0, *map(len, samples)]) + 4 * (len(samples) + 2) + len(header)
    offsets = ends.astype(np.uint32).tobytes()
    path.write_bytes(struct.pack("<I", len(samples)) + offsets + header + b"".join(samples))


def read_mds(path: Path) -> list[Item]:
    content = path.read_bytes()
    (num_samples,) = struct.unpack_from("<I", content)
    offsets = struct.unpack_from(f"<{num_samples + 1}I", content, 4)
    items = []
    for start, stop in itertools.pairwise(offsets):
        (length,) = struct.unpack_from("<I", content, start)
        items.append((content[start + 4 : start + 4 + length], struct.unpack_from("<q", content, stop - 8)[0]))
    return items


def write_lmdb(path: Path, items: Sequence[Item]) -> None:
    """Writes numbers as keys; as a new file, because a process opens one just once."""
    import lmdb

    new = f"{path}.new"
    with lmdb.open(new, subdir=False, lock=False, map_size=1 << 24) as env, env.begin(write=True) as transaction:
        for content, number in items:
            transaction.put(b"%08d" % number, content)
    os.replace(new, path)


def read_lmdb(path: Path) -> list[Item]:
    import lmdb

    copied = shutil.copy(path, f"{path}.read")
    with lmdb.open(copied, subdir=False, readonly=True, lock=False) as env, env.begin() as transaction:
        items = [(bytes(value), int(key)) for key, value in transaction.cursor()]
    os.unlink(copied)
    return items


WRITERS: dict[str, Callable[[Path, Sequence[Item]], None]] = {
    "tar": write_tar,
    "zip": write_zip,
    "parquet": write_parquet,
    "arrow": write_arrow,
    "mds": write_mds,
    "lmdb": write_lmdb,
}
READERS: dict[str, Callable[[Path], list[Item]]] = {
    "tar": read_tar,
    "zip": read_zip,
    "parquet": read_parquet,
    "arrow": read_arrow,
    "mds": read_mds,
    "lmdb": read_lmdb,
}
LIBRARIES = {"parquet": "pyarrow", "arrow": "pyarrow", "lmdb": "lmdb"}
REMOTE_KINDS = [kind for kind in WRITERS if kind != "lmdb"]
"""Formats that are read behind a URL."""


def write_shards(folder: Path, kind: str, items: Sequence[Item], per_shard: int = PER_SHARD) -> list[Path]:
    """Writes shards of a format; skips the test where its library is not installed."""
    library = LIBRARIES.get(kind)
    if library is not None and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed; pip install {library}")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for first in range(0, len(items), per_shard):
        paths.append(folder / f"{first // per_shard:03d}.{kind}")
        WRITERS[kind](paths[-1], items[first : first + per_shard])
    return paths


def open_shards(shards: Any, **options: Any) -> Shards:
    """Opens shards of any format, so that a sample is an `Item`."""
    first = shards[0] if isinstance(shards, list) else shards
    if str(first).endswith("lmdb"):
        return Shards(shards, ["value", "__key__"], decode={"__key__": int}, **options)
    return Shards(shards, COLUMNS, **options)


def read_shards(paths: Sequence[Path]) -> list[Item]:
    """What the formats' own readers make of shards."""
    return [item for path in paths for item in READERS[path.suffix[1:]](path)]
