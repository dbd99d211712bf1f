"""Shards that other programs wrote: each is read as its format's own reader reads it, or refused when it is opened."""

from __future__ import annotations

import datetime
import io
import json
import os
import subprocess
import tarfile
import uuid
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from shade import ShadeDataset, Shards
from shade.errors import ConfigError, DataError
from tests.support.shard_writers import (
    ARCHIVE_WRITERS,
    MDS_WRITERS,
    TABLE_WRITERS,
    archived_files,
    mds_rows,
    written,
)


@pytest.fixture(autouse=True)
def _own_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shade.cache.breaker.SLOW_SECONDS", 1e9)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _written(name: str, folder: Path) -> Path:
    path = written(name, folder)
    if path is None:
        pytest.skip(f"what writes {name} is not installed, and no golden file of it is there")
    return path


def _rows_of_a_table(path: Path) -> list[dict[str, Any]]:
    """What pyarrow makes of a file."""
    import pyarrow
    from pyarrow import parquet

    if path.suffix == ".parquet":
        return parquet.ParquetFile(path).read().to_pylist()  # type: ignore[no-any-return]
    with pyarrow.OSFile(str(path)) as file:
        is_stream = file.read(6) != b"ARROW1"
    open_it = pyarrow.ipc.open_stream if is_stream else pyarrow.ipc.open_file
    with pyarrow.OSFile(str(path)) as file, open_it(file) as reader:
        return reader.read_all().to_pylist()  # type: ignore[no-any-return]


def _all(shards: Shards) -> list[Any]:
    found = shards.__getitems__(range(len(shards)))
    assert [shards[number] for number in (0, len(shards) - 1)] == [found[0], found[-1]]
    shards.close()
    return found


@pytest.mark.parametrize("name", TABLE_WRITERS)
def test_a_table_is_as_pyarrow_reads_it_whole_and_by_column(tmp_path: Path, name: str) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed; pip install pyarrow")
    path = _written(name, tmp_path)
    rows = _rows_of_a_table(path)
    assert len(rows) == 20
    assert _all(Shards(path)) == rows
    names = list(rows[0])
    for column in names:
        assert _all(Shards(path, column)) == [row[column] for row in rows]
    chosen = [names[-1], names[1], names[0]]
    assert _all(Shards(path, chosen)) == [tuple(row[column] for column in chosen) for row in rows]
    near = f"{tmp_path}/disk?capacity=10MiB"
    assert _all(Shards(path, chosen, disk=near)) == [tuple(row[column] for column in chosen) for row in rows]
    # Behind a URL, ranges are read instead of mapped.
    fsspec.filesystem("memory").pipe_file(f"/{name}", path.read_bytes())
    assert _all(Shards(f"memory://{name}", chosen)) == [tuple(row[column] for column in chosen) for row in rows]
    assert _all(Shards(f"memory://{name}")) == rows


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ARCHIVE_WRITERS)
def test_an_archive_is_as_its_own_reader_reads_it(tmp_path: Path, name: str) -> None:
    path = _written(name, tmp_path)
    files = archived_files()
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            read = {each: archive.read(each) for each in archive.namelist()}
    else:
        with tarfile.open(path) as tar:
            read = {each.name: tar.extractfile(each).read() for each in tar if each.isreg()}  # type: ignore[union-attr]
    assert list(read.values()) == list(files.values())
    columns = ["bin", "cls", "seg.txt"]
    keys = dict.fromkeys(name.partition(".")[0] for name in read)
    expected = [(key, *(read[f"{key}.{column}"] for column in columns)) for key in keys]
    assert _all(Shards(path, ["__key__", *columns], decode=dict.fromkeys(columns, bytes))) == expected


@pytest.mark.parametrize("name", MDS_WRITERS)
def test_an_mds_shard_has_the_rows_that_were_written(tmp_path: Path, name: str) -> None:
    assert _all(Shards(_written(name, tmp_path))) == mds_rows()


@pytest.mark.parametrize(
    ("kind", "column"),
    [("parquet", "text"), ("parquet", "list"), ("arrow", "text"), ("arrow", "list"), ("arrow", "struct")],
)
def test_a_row_of_a_view_type_takes_its_own_bytes_alone(tmp_path: Path, kind: str, column: str) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed; pip install pyarrow")
    from pyarrow import parquet

    view = pyarrow.string_view()
    text = [f"{number:040d}" for number in range(2000)]
    values, view_type = {
        "text": (text, view),
        "list": ([[each, None] for each in text], pyarrow.list_(view)),
        "struct": ([{"a": each, "none": None} for each in text], pyarrow.struct({"a": view, "none": pyarrow.null()})),
    }[column]
    table, path = pyarrow.table({column: pyarrow.array(values, view_type)}), tmp_path / f"a.{kind}"
    if kind == "parquet":
        parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    shards = Shards(path, column)
    assert [shards[number] for number in (0, 7, 1999)] == [values[number] for number in (0, 7, 1999)]
    assert max(map(len, shards.read(range(0, 2000, 100), lambda *_: None))) < 1000
    assert shards.probe()[0].max() < 1000


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_types_with_names_of_their_own_are_as_pyarrow_has_them(tmp_path: Path, kind: str) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed; pip install pyarrow")
    from pyarrow import parquet

    texts = [f'{{"a": "{"x" * number}"}}' for number in range(60)]
    json_of_views = pyarrow.ExtensionArray.from_storage(
        pyarrow.json_(pyarrow.string_view()), pyarrow.array(texts, pyarrow.string_view())
    )
    columns = {
        "key": pyarrow.array([bytes([number] * 16) for number in range(60)], pyarrow.uuid()),
        "tree": json_of_views,
        "yes": pyarrow.array([1, 0] * 30, pyarrow.bool8()),
    }
    table, path = pyarrow.table(columns), tmp_path / f"a.{kind}"
    if kind == "parquet":
        parquet.write_table(table, path, row_group_size=20)
    else:
        with pyarrow.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=20)
    rows = _rows_of_a_table(path)
    assert _all(Shards(path)) == rows
    assert isinstance(rows[0]["key"], uuid.UUID)
    assert rows[-1]["tree"] == texts[-1]


def test_of_a_row_group_only_the_rows_that_are_wanted_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed; pip install pyarrow")
    from pyarrow import parquet

    from shade.data._shards import tables

    made, make = [0], tables._payload

    def counted(row: Any) -> bytes:
        made[0] += 1
        return make(row)

    monkeypatch.setattr(tables, "_payload", counted)
    table = pyarrow.table({"n": range(30_000)})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=10_000)
    with pyarrow.ipc.new_file(
        tmp_path / "a.arrow", table.schema, options=pyarrow.ipc.IpcWriteOptions(compression="lz4")
    ) as w:
        w.write_table(table, max_chunksize=10_000)
    for path in (tmp_path / "a.parquet", tmp_path / "a.arrow"):
        shards, made[0] = Shards(path, "n"), 0
        wanted = [5, 10_005, 6, 29_999, 10_006]
        assert shards.__getitems__(wanted) == wanted
        assert shards[7] == 7
        assert made[0] == 6
        # The bytes of each group came once, for whatever rows of it.
        counted_bytes = [0, 0]

        def count(num_reads: int, num_bytes: int, counts: list[int] = counted_bytes) -> None:
            counts[0] += num_reads

        shards.read([8, 10_008], count)
        assert counted_bytes[0] == 0
        assert made[0] == 8
        assert (shards.probe()[0] < 300).all()
        assert made[0] <= 8 + 4 * 1000


@pytest.mark.parametrize("rows", [[0, 2], [3, 0, 0], [2, 0, 2]])
def test_row_groups_without_rows_hold_no_sample(tmp_path: Path, rows: list[int]) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed; pip install pyarrow")
    from pyarrow import parquet

    schema, number = pyarrow.schema({"n": pyarrow.int64()}), 0
    with parquet.ParquetWriter(tmp_path / "a.parquet", schema) as writer:
        for num in rows:
            writer.write_table(pyarrow.table({"n": range(number, number + num)}, schema=schema))
            number += num
    assert parquet.read_metadata(tmp_path / "a.parquet").num_row_groups == len(rows)
    assert _all(Shards(tmp_path / "a.parquet", "n")) == list(range(sum(rows)))


def _tables_that_are_refused() -> dict[str, tuple[str, Callable[[Path], Any], str]]:
    """By name: the file, what writes it, and what its refusal says."""
    import pyarrow
    from pyarrow import parquet

    def two_of_a_name(path: Path) -> None:
        parquet.write_table(pyarrow.table([[1], [2]], names=["a", "a"]), path)

    def without_columns(path: Path) -> None:
        parquet.write_table(pyarrow.table({"a": [1]}).select([]), path)

    def encrypted(path: Path) -> None:
        path.write_bytes(b"PARE" + bytes(100) + b"PARE")

    def no_footer(path: Path) -> None:
        path.write_bytes(b"PAR1" + bytes(100) + (50).to_bytes(4, "little") + b"PAR1")

    def arrow(path: Path, table: Any) -> None:
        with pyarrow.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)

    def months(path: Path) -> None:
        """Intervals in months, which pyarrow reads and does not write: type 11 of Arrow in the place of text, 5."""
        arrow(path, pyarrow.table({"w": ["a"]}))
        path.write_bytes(path.read_bytes().replace(b"\0\0\1\5", b"\0\0\1\13"))

    words = pyarrow.array(["a", "b"]).dictionary_encode()
    views = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0]), pyarrow.array(["x"], pyarrow.string_view()))
    return {
        "two of a name": ("a.parquet", two_of_a_name, r"by a name of its own, got \"'a' twice\"; rename"),
        "no columns": ("a.parquet", without_columns, "columns in .* got 'none'"),
        "encrypted": ("a.parquet", encrypted, "a plain Parquet file, got 'an encrypted one'; write it without"),
        "no footer": ("a.parquet", no_footer, "a whole Parquet file that pyarrow reads.*copy it again"),
        "dictionary": (
            "a.arrow",
            lambda path: arrow(path, pyarrow.table({"w": words})),
            "plain columns.*a dictionary in w'.*cast",
        ),
        "views in it": ("a.arrow", lambda path: arrow(path, pyarrow.table({"w": views})), "'w' of type dictionary"),
        "months": ("a.arrow", months, "'w' of type month_interval.*as text"),
        "the same twice": (
            "a.arrow",
            lambda path: arrow(path, pyarrow.table([[1], [2]], names=["a", "a"])),
            "by a name of its own",
        ),
    }


@pytest.mark.parametrize(
    "case",
    [
        "two of a name",
        "no columns",
        "encrypted",
        "no footer",
        "dictionary",
        "views in it",
        "months",
        "the same twice",
    ],
)
def test_a_table_that_cannot_be_read_is_refused_when_it_is_opened(tmp_path: Path, case: str) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed; pip install pyarrow")
    name, write, words = _tables_that_are_refused()[case]
    write(tmp_path / name)
    with pytest.raises(DataError, match=words) as info:
        Shards(tmp_path / name)
    assert str(tmp_path / name) in str(info.value)


def test_a_union_of_no_types_is_refused_before_values_are_made(tmp_path: Path, monkeypatch: Any) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed; pip install pyarrow")
    table = pyarrow.table({"w": [[1]]})
    with pyarrow.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    monkeypatch.setattr(pyarrow.types, "is_union", pyarrow.types.is_int64)  # a real one is not made here: it is harmful
    with pytest.raises(DataError, match=r"'w' of type list.*\(a union of no types\)"):
        Shards(tmp_path / "a.arrow")


def test_a_dictionary_of_arrow_is_refused_and_the_cast_is_the_cure(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed; pip install pyarrow")
    table = pyarrow.table({"w": pyarrow.array(["a", "b"]).dictionary_encode()})
    for kind, schema in (("refused", table.schema), ("cured", pyarrow.schema({"w": pyarrow.string()}))):
        with pyarrow.ipc.new_stream(tmp_path / f"{kind}.arrow", schema) as writer:
            writer.write_table(table.cast(schema))
    with pytest.raises(DataError, match=r"plain columns.*table\.cast"):
        Shards(tmp_path / "refused.arrow")
    assert _all(Shards(tmp_path / "cured.arrow", "w")) == ["a", "b"]


def _tar(folder: Path, *words: str) -> Path:
    (folder / "x.tar").unlink(missing_ok=True)
    names = sorted(each.name for each in folder.iterdir())
    subprocess.run(["tar", *words, "-cf", "x.tar", *names], cwd=folder, check=True)
    return folder / "x.tar"


@pytest.mark.multiprocess
@pytest.mark.parametrize("form", ["gnu", "posix"])
@pytest.mark.parametrize(
    ("kind", "words", "cure"),
    [
        ("hard", "b.bin, which is a link", "--hard-dereference"),
        ("soft", "b.bin, which is a link", "--dereference"),
        ("sparse", "b.bin, which is sparse", "without --sparse"),
    ],
)
def test_a_tar_whose_file_lies_elsewhere_is_refused_and_the_cure_writes_it_whole(
    tmp_path: Path, form: str, kind: str, words: str, cure: str
) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    for name, content in (("a.bin", b"picture"), ("a.cls", b"1"), ("b.cls", b"2")):
        (folder / name).write_bytes(content)
    if kind == "hard":
        os.link(folder / "a.bin", folder / "b.bin")
    elif kind == "soft":
        os.symlink("a.bin", folder / "b.bin")
    else:
        with (folder / "b.bin").open("wb") as file:
            file.seek(1 << 18)
            file.write(b"picture")
    os.link(folder / "a.cls", folder / "z")  # belongs to no sample
    path = _tar(folder, f"--format={form}", *(["-S"] if kind == "sparse" else []))
    with pytest.raises(DataError, match=rf"{words}.*{cure}") as info:
        Shards(path)
    assert "copy it again" not in str(info.value)
    cured = Shards(
        _tar(folder, f"--format={form}", *([] if kind == "sparse" else ["--dereference", "--hard-dereference"]))
    )
    with tarfile.open(path) as tar:
        expected = tar.extractfile("b.bin").read()  # type: ignore[union-attr]
    assert [(each["bin"], each["cls"]) for each in cured] == [(b"picture", 1), (expected, 2)]  # type: ignore[attr-defined]


def _archive(path: Path, names: list[str]) -> Path:
    contents = {name: name.encode() for name in names}
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in contents.items():
                archive.writestr(name, content)
    else:
        with tarfile.open(path, "w") as tar:
            for name, content in contents.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return path


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_a_sample_whose_files_do_not_lie_side_by_side_is_refused_and_sorted_names_are_the_cure(
    tmp_path: Path, kind: str
) -> None:
    names = ["0.bin", "1.bin", "0.txt", "1.txt"]
    with pytest.raises(DataError, match=r"0\.bin and 0\.txt with others in between.*--sort=name"):
        Shards(_archive(tmp_path / f"a.{kind}", names))
    assert _all(Shards(_archive(tmp_path / f"b.{kind}", sorted(names)), "txt")) == ["0.txt", "1.txt"]
    # A sample that was written twice is two samples, as webdataset has it.
    twice = _archive(tmp_path / f"c.{kind}", ["0.bin", "0.txt", "1.bin", "1.txt"])
    assert len(Shards(twice)) == 2


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_what_macos_keeps_beside_a_file_is_no_sample_and_parts_none(tmp_path: Path, kind: str) -> None:
    names = ["d/._0.bin", "d/0.bin", "d/._0.txt", "d/0.txt", "__MACOSX/d/._0.txt", "d/1.bin", "d/1.txt", "._d"]
    assert _all(Shards(_archive(tmp_path / f"a.{kind}", names), "txt")) == ["d/0.txt", "d/1.txt"]


def test_two_files_of_one_name_in_a_zip_are_two_samples_each_with_its_own_content(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name, content in (("0.txt", "first"), ("1.txt", "other"), ("0.txt", "second")):
            if name in archive.namelist():
                with pytest.warns(UserWarning, match="Duplicate name"):
                    archive.writestr(name, content)
            else:
                archive.writestr(name, content)
    assert _all(Shards(tmp_path / "a.zip", "txt")) == ["first", "other", "second"]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("end", "command"),
    [("gz", "gzip"), ("zst", "zstd"), ("zstd", "zstd"), ("xz", "xz"), ("bz2", "bzip2"), ("lz4", "lz4")],
)
def test_a_compressed_shard_is_refused_by_name_and_the_command_that_is_said_is_the_cure(
    tmp_path: Path, end: str, command: str
) -> None:
    plain = _archive(tmp_path / "a.tar", ["0.txt"])
    try:
        content = subprocess.run([command, "-c"], input=plain.read_bytes(), capture_output=True, check=True).stdout
    except FileNotFoundError:
        pytest.skip(f"{command} is not installed")
    plain.unlink()
    (tmp_path / f"a.tar.{end}").write_bytes(content)
    for name in (tmp_path, tmp_path / f"a.tar.{end}", str(tmp_path / f"*.{end}")):
        with pytest.raises(ConfigError, match=r"a plain shard.*decompress it: ") as info:
            Shards(name)
    cure = str(info.value).partition("decompress it: ")[2]
    subprocess.run(cure, shell=True, check=True)
    assert _all(Shards(tmp_path, "txt")) == ["0.txt"]
    (tmp_path / "b.tar").write_bytes(content)  # under the name of a plain one
    with pytest.raises(DataError, match="to be a plain tar, got 'a compressed one'; decompress it"):
        Shards(tmp_path / "b.tar")


def test_named_databases_are_refused_and_a_file_with_a_main_one_is_the_cure(tmp_path: Path) -> None:
    lmdb = pytest.importorskip("lmdb", reason="lmdb is not installed; pip install lmdb")
    with lmdb.open(str(tmp_path / "named"), max_dbs=2) as env:
        for name in (b"images", b"labels"):
            with env.begin(write=True, db=env.open_db(name)) as transaction:
                for number in range(5):
                    transaction.put(b"%d" % number, name)
        with env.begin(write=True) as transaction:
            transaction.put(b"plain", bytes(48))  # as long as the record of a database
        with env.begin(db=env.open_db(b"images")) as transaction:
            images = list(transaction.cursor())
    with pytest.raises(DataError, match=r"main database of \S+, got \"the database 'images' in it\"; copy its keys"):
        Shards(tmp_path / "named")
    with lmdb.open(str(tmp_path / "main")) as env, env.begin(write=True) as transaction:
        for key, value in images:
            transaction.put(key, value)
        transaction.put(b"plain", bytes(48))
    assert _all(Shards(tmp_path / "main", "value")) == [b"images"] * 5 + [bytes(48)]


def test_a_folder_of_hugging_face_has_the_shards_that_it_lists(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed; pip install datasets")
    folder = tmp_path / "saved"
    datasets.Dataset.from_dict({"n": [*range(30)]}).save_to_disk(folder, num_shards=2)
    loaded = datasets.load_from_disk(folder)
    loaded.map(lambda row: {"n": -row["n"]})
    assert list(folder.glob("cache-*.arrow")), "map keeps its result beside the shards"
    assert _all(Shards(folder, "n")) == list(loaded["n"])
    datasets.DatasetDict({"train": loaded, "test": loaded}).save_to_disk(tmp_path / "both")
    with pytest.raises(DataError, match=r"shards in \S+ itself, got 'folders, such as test'; name one of them"):
        Shards(tmp_path / "both")
    assert len(Shards(tmp_path / "both" / "test")) == 30


def test_a_folder_of_mosaicml_has_the_shards_that_it_lists(tmp_path: Path) -> None:
    for number in range(2):
        path = _written("streaming.mds", tmp_path)
        (tmp_path / f"shard.0000{number}.mds").write_bytes(path.read_bytes())
    listed = [{"raw_data": {"basename": "shard.00000.mds"}, "format": "mds"}]
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": listed}))
    assert len(Shards(tmp_path)) == 20
    (tmp_path / "shard.00000.mds").unlink()
    with pytest.raises(DataError, match=r"shard\.00000\.mds.*No such file"):
        Shards(tmp_path)


@pytest.mark.parametrize("remote", [False, True])
def test_what_a_folder_of_spark_holds(tmp_path: Path, remote: bool) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed; pip install pyarrow")
    from pyarrow import parquet

    def write(path: Path, numbers: list[int]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pyarrow.table({"n": numbers}), path)
        (path.parent / f".{path.name}.crc").write_bytes(b"crc")

    def named(folder: str) -> str:
        if not remote:
            return str(tmp_path / folder)
        files, root = fsspec.filesystem("memory"), f"/spark-{tmp_path.name}"
        files.put(str(tmp_path / folder), f"{root}/{folder}", recursive=True)
        return f"memory:/{root}/{folder}"

    write(tmp_path / "plain/part-00000-ab.snappy.parquet", [1, 2])
    write(tmp_path / "plain/part-00001-ab.snappy.parquet", [3])
    write(tmp_path / "plain/_temporary.parquet", [9])
    write(tmp_path / "plain/_temporary/part-00002-ab.parquet", [9])
    (tmp_path / "plain/_SUCCESS").touch()
    assert _all(Shards(named("plain"), "n")) == [1, 2, 3]
    write(tmp_path / "parted/year=2025/part-0.parquet", [1])
    write(tmp_path / "parted/year=2026/part-0.parquet", [2])
    with pytest.raises(DataError, match=r"got 'folders, such as year=2025'.*/\*/\*"):
        Shards(named("parted"))
    assert _all(Shards(f"{named('parted')}/*/*.parquet", "n")) == [1, 2]  # the cure
    write(tmp_path / "delta/part-0.parquet", [1])
    (tmp_path / "delta/_delta_log").mkdir()
    (tmp_path / "delta/_delta_log/0.json").write_text("{}")
    with pytest.raises(DataError, match=r"a table whose files _delta_log lists.*file_uris"):
        Shards(named("delta"))
    assert _all(Shards([f"{named('delta')}/part-0.parquet"], "n")) == [1]  # the cure


def test_paths_as_people_write_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("exp[1]/t-0.tar", "exp[1]/what?.tar", "exp[1]/star*.tar", "home-0.tar"):
        Path(name).parent.mkdir(exist_ok=True)
        _archive(Path(name), [f"{Path(name).stem[:4]}.txt"])
    for name in ("exp[1]/t-0.tar", "exp[1]/t-{0..0}.tar", "exp[1]/t-*.tar", Path("exp[1]/t-0.tar")):
        assert _all(Shards(name, "txt")) == ["t-0.txt"]
    assert _all(Shards("exp[1]/what?.tar", "txt")) == ["what.txt"]
    assert _all(Shards("exp[1]/star*.tar", "txt")) == ["star.txt"]
    assert len(Shards("exp[1]")) == 3
    assert _all(Shards("~/home-{0..0}.tar", "txt", index="~/places")) == ["home.txt"]
    assert list((tmp_path / "places").glob("*.index"))
    shards = Shards("~/home-*.tar", "txt", disk="~/near?capacity=1MiB")
    assert _all(shards) == ["home.txt"]
    assert (tmp_path / "near").is_dir()
    assert not Path("~").exists()
    with pytest.raises(ConfigError, match=r"the bytes that may lie there, got 'near'; write .*capacity="):
        ShadeDataset(shards, cache=None, disk=Path("near"))
    files = fsspec.filesystem("memory")
    files.pipe_file("/exp[2]/a-0.tar", Path("home-0.tar").read_bytes())
    assert _all(Shards("memory://exp[2]/a-*.tar", "txt")) == ["home.txt"]


def test_dates_and_times_of_a_table_survive_the_cache(tmp_path: Path) -> None:
    path = _written("pyarrow-views.parquet", tmp_path)
    rows = _rows_of_a_table(path)
    dataset = ShadeDataset(Shards(path), "memory://", working_set_fraction=1.0)
    for _ in range(2):
        assert [row for row, _ in dataset.__getitems__(range(20))] == rows
    assert dataset.stats()["hits"] >= 20
    assert rows[0]["when"] == datetime.datetime(2026, 1, 1, 12)
    dataset.close()


def test_numbers_of_a_half_are_as_they_were_written(tmp_path: Path) -> None:
    (half, *_) = Shards(_written("streaming.mds", tmp_path), ["half"])[3]
    assert isinstance(half, np.float16)
    assert half == 1.5
