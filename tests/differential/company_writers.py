"""Writers of the data sets of combined scripts that lie in shards: by format, the programs that write it.

A shard holds rows of numbers with a label, the row also under a name with a dot, and a text that no script reads.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

Write = Callable[[Path, np.ndarray, int], None]
"""Writes rows to a file; the last argument is the number of the first."""


def decoded_row(value: bytes) -> torch.Tensor:
    """Numbers from their bytes. An LMDB file has a sample's label as one number more."""
    return torch.frombuffer(bytearray(value), dtype=torch.float32)


# ── tables ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _table(rows: np.ndarray, begin: int) -> Any:
    import pyarrow

    columns = {
        "x": pyarrow.array(["no numbers " * 9] * len(rows)),
        "x.row": pyarrow.array(rows.tolist(), pyarrow.list_(pyarrow.float32())),
        "y": pyarrow.array([(begin + number) % 2 for number in range(len(rows))]),
    }
    return pyarrow.table(columns)


def _with_views(rows: np.ndarray, begin: int) -> Any:
    import pyarrow

    table = _table(rows, begin)
    table = table.set_column(0, "x", table.column(0).cast(pyarrow.string_view()))
    return table.set_column(1, "x.row", pyarrow.array(rows.tolist(), pyarrow.list_view(pyarrow.float32())))


def _parquet(table: Any, path: Path, **options: Any) -> None:
    from pyarrow import parquet

    parquet.write_table(table, path, row_group_size=6, **options)


def _arrow(table: Any, path: Path, *, stream: bool = False, **options: Any) -> None:
    import pyarrow

    made = pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file
    with made(path, table.schema, options=pyarrow.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=6)


def _with_dictionary(rows: np.ndarray, begin: int) -> Any:
    table = _table(rows, begin)
    return table.set_column(0, "x", table.column(0).dictionary_encode())


def _polars(path: Path, rows: np.ndarray, begin: int, **options: Any) -> None:
    import polars

    frame: Any = polars.from_arrow(_table(rows, begin))
    frame.write_parquet(path, row_group_size=6) if path.suffix == ".parquet" else frame.write_ipc(path, **options)


def _duckdb(path: Path, rows: np.ndarray, begin: int) -> None:
    import duckdb

    with duckdb.connect() as connection:
        connection.register("rows", _table(rows, begin))
        connection.execute(f"copy (select * from rows) to '{path}' (format parquet, row_group_size 6)")


def _datafusion(path: Path, rows: np.ndarray, begin: int) -> None:
    import datafusion

    folder = Path(f"{path}.written")
    datafusion.SessionContext().from_arrow(_table(rows, begin)).write_parquet(folder)
    (part,) = folder.rglob("*.parquet") if folder.is_dir() else [folder]
    part.rename(path)
    shutil.rmtree(folder, ignore_errors=True)


def _hugging_face(path: Path, rows: np.ndarray, begin: int) -> None:
    import datasets

    datasets.disable_progress_bars()
    dataset = datasets.Dataset(_table(rows, begin))
    if path.suffix == ".parquet":
        dataset.to_parquet(str(path), batch_size=6)
    else:
        with tempfile.TemporaryDirectory() as folder:
            dataset.save_to_disk(folder)
            shutil.copy(f"{folder}/data-00000-of-00001.arrow", path)


# ── archives ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _files(rows: np.ndarray, begin: int) -> Iterator[tuple[str, bytes]]:
    for number, row in enumerate(rows, begin):
        content = io.BytesIO()
        np.save(content, row)
        yield f"{number:03d}.cls", b"%d" % (number % 2)
        yield f"{number:03d}.x.npy", content.getvalue()


def _tar(path: Path, files: list[tuple[str, bytes]], kind: int = tarfile.USTAR_FORMAT) -> None:
    with tarfile.open(path, "w", format=kind) as tar:
        for name, data in files:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def _by_column(path: Path, rows: np.ndarray, begin: int) -> None:
    _tar(path, sorted(_files(rows, begin), key=lambda each: each[0].partition(".")[2]))


def _command(*words: str, change: Callable[[Path], None] = lambda folder: None) -> Write:
    def write(path: Path, rows: np.ndarray, begin: int) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for each, data in _files(rows, begin):
                (folder / each).write_bytes(data)
            change(folder)
            names = sorted(each.name for each in folder.iterdir())
            subprocess.run([*words, str(path), *names], cwd=folder, check=True, capture_output=True)

    return write


def _with_links(folder: Path) -> None:
    """One label is a second name of another's file, as ``cp --link`` makes it."""
    first, *others = sorted(folder.glob("*.cls"))
    others[1].unlink()
    others[1].hardlink_to(first)


def _with_holes(folder: Path) -> None:
    for path in folder.glob("*.cls"):
        with path.with_suffix(".pad").open("wb") as file:
            file.truncate(2**16)


def _webdataset(path: Path, rows: np.ndarray, begin: int) -> None:
    import webdataset

    samples = dict[str, dict[str, Any]]()
    for name, content in _files(rows, begin):
        key, _, column = name.partition(".")
        samples.setdefault(key, {"__key__": key})[column] = content
    with webdataset.TarWriter(str(path), encoder=False) as writer:
        for sample in samples.values():
            writer.write(sample)


def _zip(path: Path, rows: np.ndarray, begin: int, **options: Any) -> None:
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, data in _files(rows, begin):
            with archive.open(name, "w") as file:  # streamed: sizes stand behind the content
                file.write(data)


# ── others ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _mds(path: Path, rows: np.ndarray, begin: int) -> None:
    import streaming

    with tempfile.TemporaryDirectory() as folder:
        with streaming.MDSWriter(out=f"{folder}/mds", columns={"x": "str", "x.row": "bytes", "y": "int"}) as writer:
            for number, row in enumerate(rows, begin):
                writer.write({"x": "no numbers", "x.row": row.tobytes(), "y": number % 2})
        shutil.copy(f"{folder}/mds/shard.00000.mds", path)


def _lmdb(path: Path, rows: np.ndarray, begin: int, *, name: bytes | None = None) -> None:
    import lmdb

    env = lmdb.open(str(path), subdir=False, map_size=2**22, max_dbs=1, lock=False)
    database = env.open_db(name)
    with env.begin(write=True) as transaction:
        for number, row in enumerate(rows, begin):
            value = np.append(row, np.float32(number % 2)).astype(np.float32)
            transaction.put(b"%03d" % number, value.tobytes(), db=database)
    env.close()


WRITERS: dict[str, dict[str, tuple[str, Write]]] = {
    "parquet": {
        "pyarrow": ("pyarrow", lambda path, rows, begin: _parquet(_table(rows, begin), path)),
        "pyarrow, views": ("pyarrow", lambda path, rows, begin: _parquet(_with_views(rows, begin), path)),
        "pyarrow, pages": (
            "pyarrow",
            lambda path, rows, begin: _parquet(
                _table(rows, begin), path, data_page_version="2.0", compression="zstd", write_page_index=True
            ),
        ),
        "pandas": (
            "pandas",
            lambda path, rows, begin: _table(rows, begin).to_pandas().to_parquet(path, row_group_size=6),
        ),
        "hugging face": ("datasets", _hugging_face),
        "polars": ("polars", _polars),
        "duckdb": ("duckdb", _duckdb),
        "datafusion": ("datafusion", _datafusion),
    },
    "arrow": {
        "pyarrow": ("pyarrow", lambda path, rows, begin: _arrow(_table(rows, begin), path)),
        "pyarrow, views": ("pyarrow", lambda path, rows, begin: _arrow(_with_views(rows, begin), path)),
        "pyarrow, zstd": ("pyarrow", lambda path, rows, begin: _arrow(_table(rows, begin), path, compression="zstd")),
        "pyarrow, stream": ("pyarrow", lambda path, rows, begin: _arrow(_table(rows, begin), path, stream=True)),
        "hugging face": ("datasets", _hugging_face),
        "polars": ("polars", _polars),
        "polars, lz4": ("polars", lambda path, rows, begin: _polars(path, rows, begin, compression="lz4")),
        "pyarrow, dictionary": ("pyarrow", lambda path, rows, begin: _arrow(_with_dictionary(rows, begin), path)),
    },
    "tar": {
        "python": ("tarfile", lambda path, rows, begin: _tar(path, [*_files(rows, begin)])),
        "python, pax": ("tarfile", lambda path, rows, begin: _tar(path, [*_files(rows, begin)], tarfile.PAX_FORMAT)),
        "webdataset": ("webdataset", _webdataset),
        "gnu": ("tar", _command("tar", "-cf")),
        "gnu, posix": ("tar", _command("tar", "--format=posix", "-cf")),
        "gnu, label": ("tar", _command("tar", "-V", "label", "-cf")),
        "python, by column": ("tarfile", _by_column),
        "gnu, links": ("tar", _command("tar", "-cf", change=_with_links)),
        "gnu, sparse": ("tar", _command("tar", "-Scf", change=_with_holes)),
    },
    "zip": {
        "python": ("zipfile", _zip),
        "python, deflated": ("zipfile", lambda path, rows, begin: _zip(path, rows, begin, compression=8)),
        "info-zip": ("zip", _command("zip", "-q")),
    },
    "lmdb": {
        "lmdb": ("lmdb", _lmdb),
        "lmdb, named": ("lmdb", lambda path, rows, begin: _lmdb(path, rows, begin, name=b"train")),
    },
    "mds": {"streaming": ("streaming", _mds)},
}
"""By format and writer: the package or command that it needs, and what writes."""
REFUSED = {
    "pyarrow, dictionary",
    "python, by column",
    "gnu, links",
    "gnu, sparse",
    "lmdb, named",
}
"""Writers whose shards are refused when they are opened."""
COLUMNS = {
    "parquet": ["x.row", "y"],
    "arrow": ["x.row", "y"],
    "mds": ["x.row", "y"],
    "tar": ["x.npy", "cls"],
    "zip": ["x.npy", "cls"],
    "lmdb": "value",
}
DECODE = {"mds": {"x.row": decoded_row}, "lmdb": {"value": decoded_row}}


def writers_of(kind: str) -> list[str]:
    """Returns the writers of a format that are installed."""
    found = WRITERS[kind].items()
    return [name for name, (program, _) in found if find_spec(program) or shutil.which(program)]


def write_shards(folder: Path, kind: str, writer: str, rows: np.ndarray) -> None:
    """Writes two shards into a folder, once."""
    if folder.exists():
        return
    made = folder.with_suffix(".making")
    made.mkdir(parents=True)
    half = len(rows) // 2
    for number in range(2):
        WRITERS[kind][writer][1](made / f"{number}.{kind}", rows[number * half : (number + 1) * half], number * half)
    made.rename(folder)
