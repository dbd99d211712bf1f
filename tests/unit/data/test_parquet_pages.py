"""Rows of Parquet by their pages: as pyarrow reads them, for a part of their row group where the file has an index."""

from __future__ import annotations

import logging
import os
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shade import Shards
from shade.data._shards import pieces, tables
from shade.data._source.source import not_counted
from shade.errors import DataError

NUM = 600


@pytest.fixture(autouse=True)
def _folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def rows() -> Any:
    draw = np.random.default_rng(0)
    n = range(NUM)
    fields = {
        "n": pa.array(n),
        "image": [
            None if i % 9 == 0 else {"bytes": draw.bytes(i % 50 * 200), "path": None if i % 7 == 0 else f"{i}"}
            for i in n
        ],
        "flag": [None if i % 11 == 0 else i % 2 == 1 for i in n],
        "list": [None if i % 13 == 0 else list(range(i % 4)) for i in n],
        "deep": [{"inner": {"bytes": draw.bytes(1000)}, "list": [{"i": i}] * (i % 3)} if i % 5 else None for i in n],
        "fixed": pa.array([draw.bytes(8) for _ in n], pa.binary(8)),
        "decimal": pa.array([Decimal(i) / 100 for i in n], pa.decimal128(10, 2)),
        "kind": pa.array([f"k{i % 30}" for i in n]).dictionary_encode(),
        "text": [f"text {i % 200}" for i in n],
        "large": pa.array([draw.bytes(3000) for _ in n], pa.large_binary()),
    }
    needed = pa.field("needed", pa.int64(), nullable=False)
    return pa.table(fields).append_column(needed, pa.array(n))


def written(path: Path, table: Any, **options: Any) -> Any:
    words = {"write_page_index": True, "write_batch_size": 16, "data_page_size": 20_000} | options
    pq.write_table(table, path, **words)
    return pq.read_table(path).to_pylist()


def read(shards: Shards, indices: list[int]) -> tuple[list[Any], int, int]:
    """Samples, requests and bytes."""
    counts: list[tuple[int, int]] = []
    payloads = shards.read(indices, lambda *each: counts.append(each))
    items = [shards.item(index, each) for index, each in zip(indices, payloads, strict=True)]
    return items, sum(num for num, _ in counts), sum(num for _, num in counts)


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "snappy"},
        {"compression": "zstd", "data_page_version": "2.0", "use_dictionary": False},
        {"compression": "none", "use_content_defined_chunking": True, "row_group_size": 400},
    ],
)
def test_rows_are_those_that_pyarrow_reads(tmp_path: Path, options: dict[str, Any]) -> None:
    expected = written(tmp_path / "a.parquet", rows(), **options)
    for columns in (None, ["image", "n"], ["deep", "kind"], ["list", "needed", "large"]):
        shards = Shards(tmp_path / "a.parquet", columns)
        order = np.random.default_rng(1).permutation(NUM).tolist()
        for start in range(0, 15, 3):
            indices = order[start : start + 3]
            for index, item in zip(indices, read(shards, indices)[0], strict=True):
                assert item == (
                    expected[index] if columns is None else tuple(expected[index][name] for name in columns)
                )


def test_a_row_costs_its_page_and_its_neighbours_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    expected = written(path, rows(), use_dictionary=False)
    shards = Shards(path, "large")
    item, _, num_bytes = read(shards, [301])
    assert item == [expected[301]["large"]]
    assert num_bytes < path.stat().st_size // 20
    # The page before, too, and then one that is not there.
    first = next(index for index in range(301, 0, -1) if read(shards, [index])[1]) + 1
    assert [read(shards, [index])[0] for index in range(first, 302)] == [
        [expected[n]["large"]] for n in range(first, 302)
    ]
    assert read(shards, [0])[1] > 0


def test_a_window_and_a_disk_still_read_whole_row_groups(tmp_path: Path) -> None:
    expected = written(tmp_path / "a.parquet", rows())
    shards = Shards(tmp_path / "a.parquet", "image", disk=f"{tmp_path / 'disk'}?capacity=64MiB")
    assert read(shards, [300])[0] == [expected[300]["image"]]
    assert read(shards, list(range(0, NUM, 40)))[1:] == (0, 0)
    shards.close()


def test_without_a_good_index_a_row_costs_its_row_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = written(tmp_path / "a.parquet", rows(), write_page_index=False)
    assert read(Shards(tmp_path / "a.parquet"), [NUM - 1])[0] == expected[-1:]
    written(tmp_path / "b.parquet", rows())
    monkeypatch.setattr(tables, "page_table", lambda *words: {}[1])
    shards = Shards(tmp_path / "b.parquet", "large")
    item, _, num_bytes = read(shards, [5])
    assert item == [expected[5]["large"]]
    assert num_bytes > 3000 * NUM


def test_a_damaged_page_is_said_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    written(path, rows())
    shards = Shards(path, "large")
    status, content = path.stat(), bytearray(path.read_bytes())
    start, _ = shards._format.row_ranges(shards._index.scans[0], 0, ["large"], [301])[-1]
    content[start : start + 30] = bytes(30)
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(DataError, match=r"the sample of its index at byte .*a\.parquet.*pyarrow cannot read"):
        shards.read([301], not_counted)


def test_dear_rows_are_said_once_with_a_cure_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "shade.data")
    monkeypatch.setattr(pieces, "_WEIGHED_BYTES", 10 << 20)
    monkeypatch.setattr(pieces, "_RECENT_BYTES", 1)
    table = pa.table({"large": pa.array([bytes([n % 250]) * 30_000 for n in range(NUM)])})
    cure = {"write_page_index": True, "write_batch_size": 8, "data_page_size": 65536}
    for options, num_said in (({"row_group_size": 100}, 1), (cure, 0)):
        caplog.clear()
        path = tmp_path / f"{num_said}.parquet"
        pq.write_table(table, path, compression="none", use_dictionary=False, **options)
        shards = Shards(path, "large")
        for index in np.random.default_rng(0).permutation(NUM)[:40].tolist():
            assert shards[index] == table["large"][index].as_py()
        assert len(caplog.records) == num_said, caplog.text
        assert num_said == ("takes 3.0 MB to read, 99 times its size" in caplog.text)
