"""Shards as other programs write them. Those of programs that extra `dev` lacks stand in tests/golden/shards too:

    python -m tests.support.shard_writers NAME …        writes some anew, in an environment that has their writers

They were written by Polars 2.1.0, DuckDB 2.0.1, DataFusion 55.0.0, fastparquet 2026.9.0, mosaicml-streaming 0.13.0 and
libarchive-c 5.3, whose library is bsdtar's.
"""

from __future__ import annotations

import datetime
import decimal
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parents[1] / "golden" / "shards"
NUM_ROWS, GROUP_ROWS = 20, 7


def table() -> Any:
    """A table of the types that most programs have, with names and values that are hard to keep."""
    import pyarrow

    rows, utc = range(NUM_ROWS), datetime.timezone.utc
    begin = datetime.datetime(2026, 1, 1, 12)

    def some(make: Callable[[int], Any]) -> list[Any]:
        return [None if n % 5 == 3 else make(n) for n in rows]

    columns = {
        "text": (some(lambda n: "é" * n), pyarrow.string()),
        "long.text": (some(lambda n: "ß" * (n % 2) + "x" * 30 * n), pyarrow.string()),
        "image.bytes": (some(lambda n: bytes([n]) * 10 * n), pyarrow.binary()),
        "yes": (some(lambda n: n % 2 == 0), pyarrow.bool_()),
        "i8": (some(lambda n: n - 10), pyarrow.int8()),
        "u64": (some(lambda n: 2**40 + n), pyarrow.uint64()),
        "i64": ([n - 2**60 for n in rows], pyarrow.int64()),
        "f32": (some(lambda n: n / 3), pyarrow.float32()),
        "f64": ([n / 3 for n in rows], pyarrow.float64()),
        "day": (some(lambda n: datetime.date(2026, 1, 1) + datetime.timedelta(n)), pyarrow.date32()),
        "when": (some(lambda n: begin + datetime.timedelta(seconds=n)), pyarrow.timestamp("us")),
        "zone": (some(lambda n: begin.replace(tzinfo=utc)), pyarrow.timestamp("us", "UTC")),
        "clock": (some(lambda n: datetime.time(n, 1)), pyarrow.time64("us")),
        "money": (some(lambda n: decimal.Decimal(n) / 4), pyarrow.decimal128(9, 2)),
        "vector": (some(lambda n: [part / 2 for part in range(n % 4)]), pyarrow.list_(pyarrow.float64())),
        "words": (some(lambda n: ["w" * (20 * part) for part in range(n % 4)]), pyarrow.list_(pyarrow.string())),
        "vector.of": ([[n, n + 1] for n in rows], pyarrow.list_(pyarrow.int64())),
        "nested": (
            [{"a.b": n, "text": "y" * n, "list": [{"z": n}]} for n in rows],
            pyarrow.struct(
                {
                    "a.b": pyarrow.int64(),
                    "text": pyarrow.string(),
                    "list": pyarrow.list_(pyarrow.struct({"z": pyarrow.int64()})),
                }
            ),
        ),
        "nested.text": ([str(n) for n in rows], pyarrow.string()),
    }
    return pyarrow.table({name: pyarrow.array(*column) for name, column in columns.items()})


def with_views() -> Any:
    """The same with Arrow's view types, as a program whose own memory has them writes it."""
    import pyarrow

    plain = table()
    views = {pyarrow.string(): pyarrow.string_view(), pyarrow.binary(): pyarrow.binary_view()}
    views |= {pyarrow.list_(pyarrow.string()): pyarrow.list_(pyarrow.string_view())}
    plain = plain.cast(pyarrow.schema([field.with_type(views.get(field.type, field.type)) for field in plain.schema]))
    place = plain.schema.names.index("vector.of")
    listed = pyarrow.array(plain.column(place).to_pylist(), pyarrow.list_view(pyarrow.int64()))
    return plain.set_column(place, "vector.of", listed)


def _pyarrow_parquet(path: Path, rows: Any, **options: Any) -> None:
    from pyarrow import parquet

    parquet.write_table(rows, path, row_group_size=GROUP_ROWS, **options)


def _pyarrow_arrow(path: Path, rows: Any, kind: str, **options: Any) -> None:
    import pyarrow

    options = {"options": pyarrow.ipc.IpcWriteOptions(**options)}
    with (pyarrow.ipc.new_file if kind == "file" else pyarrow.ipc.new_stream)(path, rows.schema, **options) as writer:
        writer.write_table(rows, max_chunksize=GROUP_ROWS)


def _old_stream(path: Path) -> None:
    _pyarrow_arrow(path, table(), "stream", use_legacy_format=True)


def _pandas(path: Path) -> None:
    frame = table().drop(["clock"]).to_pandas()
    frame.index = [f"row {n}" for n in range(NUM_ROWS)]
    frame.to_parquet(path, engine="pyarrow", row_group_size=GROUP_ROWS)


def _huggingface(path: Path) -> None:
    import datasets

    datasets.Dataset(table()).to_parquet(path, batch_size=GROUP_ROWS)


def _huggingface_arrow(path: Path) -> None:
    import datasets

    folder = f"{path}.saved"
    datasets.Dataset(table()).save_to_disk(folder)
    os.replace(f"{folder}/data-00000-of-00001.arrow", path)
    shutil.rmtree(folder)


def _polars(path: Path) -> None:
    import polars

    polars.from_arrow(table()).write_parquet(path, row_group_size=GROUP_ROWS)  # type: ignore[union-attr]


def _polars_arrow(path: Path, **options: Any) -> None:
    import polars

    polars.from_arrow(table()).write_ipc(path, **options)  # type: ignore[union-attr]


def _duckdb(path: Path) -> None:
    import duckdb

    with duckdb.connect() as connection:
        connection.register("rows", table())
        connection.execute(f"copy (select * from rows) to '{path}' (format parquet, row_group_size {GROUP_ROWS})")


def _datafusion(path: Path) -> None:
    import datafusion

    context = datafusion.SessionContext()
    folder = Path(f"{path}.written")
    context.from_arrow(table()).write_parquet(folder, compression="zstd")
    (part,) = folder.rglob("*.parquet") if folder.is_dir() else [folder]
    os.replace(part, path)
    shutil.rmtree(folder, ignore_errors=True)


def _fastparquet(path: Path) -> None:
    import fastparquet

    frame = table().select(["text", "long.text", "image.bytes", "yes", "i8", "i64", "f32", "f64", "when"]).to_pandas()
    fastparquet.write(str(path), frame, row_group_offsets=[0, 7, 14], object_encoding="infer")


MDS_COLUMNS = {"text": "str", "n": "int", "image.bytes": "bytes", "half": "float16", "tree": "json"}


def mds_rows() -> list[dict[str, Any]]:
    return [
        {"text": "é" * n, "n": n, "image.bytes": bytes([n]) * n, "half": np.float16(n / 2), "tree": {"n": [n]}}
        for n in range(NUM_ROWS)
    ]


def _streaming(path: Path) -> None:
    import streaming

    with tempfile.TemporaryDirectory() as folder:
        with streaming.MDSWriter(out=f"{folder}/mds", columns=MDS_COLUMNS) as writer:
            for row in mds_rows():
                writer.write(row)
        shutil.copy(f"{folder}/mds/shard.00000.mds", path)


def archived_files() -> dict[str, bytes]:
    """Files of samples, some with long names and names that are not ASCII, some without a byte."""
    folders = ["part", "part/" + "d" * 110, "part/é"]
    return {
        f"{folders[n % 3]}/{n:03d}.{column}": content
        for n in sorted(range(4), key=lambda n: (folders[n % 3], n))
        for column, content in (("bin", bytes([n]) * n * 200), ("cls", b"%d" % n), ("seg.txt", b"s" * n))
    }


def _unpacked(folder: str) -> list[str]:
    for name, content in archived_files().items():
        Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
        Path(folder, name).write_bytes(content)
    return list(archived_files())


def _libarchive(path: Path, kind: str) -> None:
    import libarchive

    with tempfile.TemporaryDirectory() as folder:
        names, before = _unpacked(folder), os.getcwd()
        try:
            os.chdir(folder)
            with libarchive.file_writer(str(path), kind) as archive:
                archive.add_files(*names)
        finally:
            os.chdir(before)


def _command(path: Path, *words: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        names = _unpacked(folder)
        subprocess.run([*words, str(path), *names], cwd=folder, check=True, capture_output=True)


def _webdataset(path: Path) -> None:
    import webdataset

    samples = dict[str, dict[str, Any]]()
    for name, content in archived_files().items():
        key, _, column = name.partition(".")
        samples.setdefault(key, {"__key__": key})[column] = content
    with webdataset.TarWriter(str(path), encoder=False) as writer:
        for sample in samples.values():
            writer.write(sample)


def _python_zip(path: Path, **options: Any) -> None:
    import zipfile

    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, content in archived_files().items():
            # Streamed, as to a pipe: sizes stand behind the content.
            with archive.open(name, "w", force_zip64=True) as file:
                file.write(content)


TABLE_WRITERS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "pyarrow.parquet": ("pyarrow", lambda path: _pyarrow_parquet(path, table())),
    "pyarrow-views.parquet": ("pyarrow", lambda path: _pyarrow_parquet(path, with_views())),
    "pyarrow-pages.parquet": (
        "pyarrow",
        lambda path: _pyarrow_parquet(
            path, table(), data_page_version="2.0", compression="brotli", write_page_index=True
        ),
    ),
    "spark.parquet": (
        "pyarrow",
        lambda path: _pyarrow_parquet(
            path, table().drop(["u64"]), flavor="spark", use_deprecated_int96_timestamps=True
        ),
    ),
    "pyarrow.arrow": ("pyarrow", lambda path: _pyarrow_arrow(path, table(), "file")),
    "pyarrow-views.arrow": ("pyarrow", lambda path: _pyarrow_arrow(path, with_views(), "file")),
    "pyarrow-zstd.arrow": ("pyarrow", lambda path: _pyarrow_arrow(path, table(), "file", compression="zstd")),
    "pyarrow-stream.arrow": ("pyarrow", lambda path: _pyarrow_arrow(path, with_views(), "stream")),
    "pyarrow-old-stream.arrow": ("pyarrow", _old_stream),
    "pandas.parquet": ("pandas", _pandas),
    "huggingface.parquet": ("datasets", _huggingface),
    "huggingface.arrow": ("datasets", _huggingface_arrow),
    "polars.parquet": ("polars", _polars),
    "polars.arrow": ("polars", _polars_arrow),
    "polars-lz4.arrow": ("polars", lambda path: _polars_arrow(path, compression="lz4")),
    "duckdb.parquet": ("duckdb", _duckdb),
    "datafusion.parquet": ("datafusion", _datafusion),
    "fastparquet.parquet": ("fastparquet", _fastparquet),
}
"""By file: the package that writes it, and how."""
ARCHIVE_WRITERS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "webdataset.tar": ("webdataset", _webdataset),
    **{
        f"gnu-{kind}.tar": ("tar", lambda path, kind=kind: _command(path, "tar", f"--format={kind}", "-cf"))  # type: ignore[misc]
        for kind in ("gnu", "oldgnu", "posix")
    },
    "gnu-label.tar": ("tar", lambda path: _command(path, "tar", "-V", "label", "-cf")),
    "libarchive-pax.tar": ("libarchive", lambda path: _libarchive(path, "pax_restricted")),
    "libarchive.zip": ("libarchive", lambda path: _libarchive(path, "zip")),
    "info-zip.zip": ("zip", lambda path: _command(path, "zip", "-q")),
    "python.zip": ("zipfile", _python_zip),
    "python-deflated.zip": ("zipfile", lambda path: _python_zip(path, compression=8)),
}
MDS_WRITERS: dict[str, tuple[str, Callable[[Path], None]]] = {"streaming.mds": ("streaming", _streaming)}
_ALL = TABLE_WRITERS | ARCHIVE_WRITERS | MDS_WRITERS


def written(name: str, folder: Path) -> Path | None:
    """Returns a shard that its writer has just written, or had written before; None where neither can be."""
    program, write = _ALL[name]
    if importlib.util.find_spec(program) is None and shutil.which(program) is None:
        return GOLDEN / name if (GOLDEN / name).exists() else None
    write(folder / name)
    return folder / name


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for each in sys.argv[1:]:
        _ALL[each][1](GOLDEN / each)
