"""Shards: every sample is what its format's own reader makes of it, and what is wrong with a shard is said by name."""

from __future__ import annotations

import glob
import io
import json
import os
import pickle
import re
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from shade import ShadeDataset, ShadeSampler, Shards
from shade.cache import breaker
from shade.data._shards import blocks, index
from shade.data._shards.archives import tar_members
from shade.data._shards.blocks import coalesced
from shade.errors import BadSampleError, ConfigError, DataError
from tests.support.shards import (
    COLUMNS,
    PER_SHARD,
    REMOTE_KINDS,
    WRITERS,
    make_items,
    open_shards,
    read_shards,
    write_shards,
    write_tar,
    write_zip,
)

NUM_SAMPLES = 100
KINDS = list(WRITERS)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(breaker, "SLOW_SECONDS", 60.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _path_in(message: str) -> Path:
    """The index that the cure of a message names."""
    found = re.search(r"remove (\S+\.index)", message)
    assert found is not None, message
    return Path(found[1])


@pytest.mark.parametrize("kind", KINDS)
def test_every_sample_is_that_of_the_formats_own_reader(tmp_path: Path, kind: str) -> None:
    paths = write_shards(tmp_path / "shards", kind, make_items(NUM_SAMPLES))
    expected = read_shards(paths)
    shards = open_shards(paths)
    assert len(shards) == len(expected) == NUM_SAMPLES
    assert [shards[number] for number in range(NUM_SAMPLES)] == expected
    order = np.random.default_rng(0).permutation(NUM_SAMPLES).tolist()
    assert shards.__getitems__(order) == [expected[number] for number in order]
    assert shards[-1] == expected[-1]
    with pytest.raises(IndexError, match="below 100, got 100"):
        shards[NUM_SAMPLES]
    shards.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_kept_index_and_a_pickled_data_set_give_the_same(tmp_path: Path, kind: str) -> None:
    paths = write_shards(tmp_path / "shards", kind, make_items(NUM_SAMPLES))
    made = open_shards(paths, index=tmp_path / "index")
    assert len(list((tmp_path / "index").glob("*.index"))) == len(paths) == 3
    expected = read_shards(paths)
    for again in (open_shards(paths, index=tmp_path / "index"), pickle.loads(pickle.dumps(made))):
        assert again.fingerprint == made.fingerprint
        assert again.__getitems__(range(NUM_SAMPLES)) == expected
        again.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("disk", [False, True])
def test_epochs_are_unbiased_and_resume_exactly(tmp_path: Path, kind: str, disk: bool) -> None:
    paths = write_shards(tmp_path / "shards", kind, make_items(NUM_SAMPLES))
    expected, batch = read_shards(paths), 8

    def opened() -> tuple[ShadeDataset, ShadeSampler, Any]:
        near = f"{tmp_path}/disk?capacity=10MiB" if disk else None
        dataset = ShadeDataset(open_shards(paths, disk=near), "memory://", working_set_fraction=0.3)
        sampler = ShadeSampler(dataset, batch_size=batch, mode="unbiased", seed=3)
        return dataset, sampler, DataLoader(dataset, batch_size=batch, sampler=sampler, collate_fn=list)

    def epoch(loader: Any, sampler: Any, seen: list[int], stop: int | None = None) -> None:
        for step, items in enumerate(loader):
            for content, number, place in items:
                assert (content, number) == expected[place]
                seen.append(place)
            places = torch.tensor([place for *_, place in items])
            sampler.report(places, 1.0 + places % 7)
            if step + 1 == stop:
                return

    whole = list[list[int]]()
    dataset, sampler, loader = opened()
    for number in range(3):
        sampler.set_epoch(number)
        whole.append([])
        epoch(loader, sampler, whole[-1])
    assert len({tuple(each) for each in whole}) == 3
    counts = dataset.stats()
    assert counts["hits"] > 0
    assert counts["samples"] == sum(map(len, whole))
    sampler.close()
    dataset.close()

    dataset, sampler, loader = opened()
    sampler.set_epoch(0)
    epoch(loader, sampler, [])
    sampler.set_epoch(1)
    first = list[int]()
    epoch(loader, sampler, first, stop=4)
    state = sampler.state_dict()
    sampler.close()
    dataset.close()

    dataset, sampler, loader = opened()
    sampler.load_state_dict(state)
    rest = list[int]()
    epoch(loader, sampler, rest)
    assert first + rest == whole[1]
    sampler.close()
    dataset.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # webdataset leaves files open
def test_a_tar_is_as_webdataset_reads_it(tmp_path: Path) -> None:
    wds = pytest.importorskip("webdataset", reason="webdataset is not installed; pip install webdataset")
    rng = np.random.default_rng(0)
    path = tmp_path / "a.tar"
    with wds.TarWriter(str(path)) as writer:
        for number in range(20):
            picture, array = io.BytesIO(), io.BytesIO()
            Image.fromarray(rng.integers(0, 256, (9, 7, 3), dtype=np.uint8)).save(picture, "PNG")
            np.save(array, rng.normal(size=4))
            name = f"deep/folder/{number:03d}" + "x" * 130 * (number % 2)
            row = {"__key__": name, "png": picture.getvalue(), "cls": b"%d" % number, "seg.npy": array.getvalue()}
            writer.write(row | {"json": json.dumps([number]).encode(), "txt": "ä€".encode()})
    columns = ["png", "cls", "seg.npy", "json", "txt"]
    theirs = list(wds.WebDataset(str(path), shardshuffle=False).decode("pil").to_tuple(*columns))
    ours = list(Shards(path, columns))  # type: ignore[call-overload]
    assert len(ours) == len(theirs) == 20
    for mine, other in zip(ours, theirs, strict=True):
        assert np.array_equal(np.asarray(mine[0]), np.asarray(other[0]))
        assert np.array_equal(mine[2], other[2])
        assert (mine[1], *mine[3:]) == (other[1], *other[3:])
    raw = Shards(path, decode=dict.fromkeys(columns, bytes))
    for number, other in enumerate(wds.WebDataset(str(path), shardshuffle=False)):
        assert raw[number] == {
            name: value for name, value in other.items() if name not in ("__url__", "__local_path__")
        }


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_headers_of_every_kind_are_read_as_tarfile_reads_them(tmp_path: Path, form: int) -> None:
    """Long names, names that are not ASCII, fractions of seconds; folders, devices, links of no sample."""
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=form) as tar:
        for number in range(12):
            name = ("é/" * (number % 3)) + "d/" * (45 if number % 2 else 1) + f"{number}.bin"
            member = tarfile.TarInfo(name)
            member.size, member.mtime = number * 300, 1.5 + number
            tar.addfile(member, io.BytesIO(bytes([number]) * member.size))
            for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE):
                other = tarfile.TarInfo(f"other-{number}-{kind.decode()}")
                other.type, other.linkname = kind, "l" * (120 if form != tarfile.USTAR_FORMAT else 10)
                tar.addfile(other)
    content = path.read_bytes()
    found = [member for member in tar_members(lambda at, stop: content[at:stop], 0, len(content)) if member]
    with tarfile.open(path) as tar:
        expected = [(each.name, each.offset_data, each.offset_data + each.size) for each in tar if each.isreg()]
    assert [(each.name, each.start, each.stop) for each in found] == expected
    assert len(expected) == 12


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_every_type_of_a_table_is_as_pyarrow_reads_it(tmp_path: Path, kind: str) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed; pip install pyarrow")
    import datetime
    import decimal

    numbers = range(50)
    columns = {
        "text": ["é" * number if number % 3 else None for number in numbers],
        "nested": [{"bytes": bytes([number]), "path": None} for number in numbers],
        "list": [[0.5 * part for part in range(number % 4)] for number in numbers],
        "day": [datetime.date(2026, 1, 1) + datetime.timedelta(number) for number in numbers],
        "money": [decimal.Decimal(number) / 4 for number in numbers],
        "when": [datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc)] * 50,
        "yes": [number % 2 == 0 for number in numbers],
    }
    table = pyarrow.table(columns)
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        from pyarrow import parquet

        table = table.append_column("word", pyarrow.array(["a", "b"] * 25).dictionary_encode())
        parquet.write_table(table, path, row_group_size=8)
    else:  # the other of Arrow's two layouts, the one with a footer
        with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=8)
    rows = table.to_pylist()
    assert list(Shards(path)) == rows  # type: ignore[call-overload]
    assert list(Shards(path, "text")) == columns["text"]  # type: ignore[call-overload]
    assert Shards(path, ["yes", "text"])[4] == (True, columns["text"][4])
    lengths = Shards(path, ["list"], decode={"list": len})
    assert [item for (item,) in lengths] == [number % 4 for number in numbers]  # type: ignore[attr-defined]


def test_hugging_faces_own_files(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed; pip install datasets")
    theirs = datasets.Dataset.from_dict({"text": [f"line {number}" for number in range(90)], "label": [*range(90)]})
    theirs.save_to_disk(tmp_path / "saved", num_shards=3)
    ours = Shards(tmp_path / "saved")
    assert [ours[number] for number in range(90)] == list(datasets.load_from_disk(tmp_path / "saved"))


def test_mds_is_as_its_own_reader(tmp_path: Path) -> None:
    streaming = pytest.importorskip("streaming", reason="mosaicml-streaming is not installed")
    columns = {"a": "bytes", "b": "int", "c": "str", "d": "json", "e": "float32", "f": "png", "g": "pil"}
    picture = Image.fromarray(np.arange(60, dtype=np.uint8).reshape(4, 5, 3))
    rows = [
        {"a": bytes([n]) * n, "b": n, "c": "é" * n, "d": [n], "e": np.float32(n), "f": picture, "g": picture}
        for n in range(30)
    ]
    with streaming.MDSWriter(out=str(tmp_path / "mds"), columns=columns, size_limit=4000) as writer:
        for row in rows:
            writer.write(row)
    ours = Shards(tmp_path / "mds")
    assert len(ours) == 30
    for mine, row in zip(ours, rows, strict=True):  # type: ignore[call-overload]
        assert np.array_equal(np.asarray(mine.pop("f")), np.asarray(picture))
        assert np.array_equal(np.asarray(mine.pop("g")), np.asarray(picture))
        assert mine == {name: row[name] for name in "abcde"}


def test_names_patterns_and_folders(tmp_path: Path) -> None:
    items = make_items(120)
    paths = write_shards(tmp_path / "s", "tar", items)
    (tmp_path / "s" / "notes.txt").write_text("no shard")
    for name in (tmp_path / "s", str(tmp_path / "s" / "*.tar"), str(tmp_path / "s" / "{000..002}.tar"), paths):
        assert len(Shards(name)) == 120
    assert len(Shards(str(tmp_path / "s" / "{001..002}.tar"))) == 80
    assert Shards(paths[::-1], COLUMNS)[0] == items[80]
    assert repr(Shards(paths, "cls")) == "Shards(3 × Tar, num_samples=120, columns=cls)"
    with pytest.raises(DataError, match="check the path"):
        Shards(str(tmp_path / "nothing-*.tar"))
    with pytest.raises(DataError, match=r"absent\.tar.*No such file"):
        Shards(tmp_path / "absent.tar")
    (tmp_path / "s" / "a.csv").write_text("a,b")
    with pytest.raises(
        ConfigError, match=r"shards that end in \.arrow, \.lance, \.lmdb, \.mdb, \.mds, \.parquet, \.tar, \.zip.*a\.csv"
    ):
        Shards(tmp_path / "s" / "a.csv")
    write_zip(tmp_path / "s" / "z.zip", items[:3])
    with pytest.raises(ConfigError, match=r"shards of one kind, got 'tar, zip'.*ConcatDataset"):
        Shards(tmp_path / "s")


@pytest.mark.parametrize("kind", KINDS)
def test_a_shard_that_is_not_what_its_index_says_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    paths = write_shards(tmp_path / "shards", kind, make_items(NUM_SAMPLES))
    Shards(paths)
    items = make_items(PER_SHARD + 3)[3:]
    WRITERS[kind](paths[1], items)
    with pytest.raises(
        DataError, match=f"{re.escape(str(paths[1]))} to be what it was when its index was made"
    ) as info:
        Shards(paths)
    _path_in(str(info.value)).unlink()
    assert open_shards(paths)[PER_SHARD] == items[0]


@pytest.mark.parametrize("kind", KINDS)
def test_shards_that_are_copied_again_are_read(tmp_path: Path, kind: str) -> None:
    """As a job does that stages them on its node's disk as it begins."""
    paths = write_shards(tmp_path / "shards", kind, make_items(NUM_SAMPLES))
    before = open_shards(paths)
    for path in paths:
        os.utime(path, ns=(1, 1))
    again = open_shards(paths)
    assert again.__getitems__(range(NUM_SAMPLES)) == read_shards(paths)
    assert again.fingerprint != before.fingerprint  # what was cached of the others is not taken for theirs
    with pytest.raises(DataError, match="when its index was made"):
        before[0]  # a run that reads them now has another shard in its hands


def test_one_cure_is_enough_for_all_shards_that_changed(tmp_path: Path) -> None:
    paths = write_shards(tmp_path / "shards", "tar", make_items(NUM_SAMPLES))
    Shards(paths)
    write_shards(tmp_path / "shards", "tar", make_items(NUM_SAMPLES)[::-1])
    message = rf"{re.escape(str(paths[0]))} and {len(paths) - 1} others to be what it was"
    with pytest.raises(DataError, match=message) as info:
        Shards(paths)
    found = re.search(r"remove (\S+\.index) and begin anew", str(info.value))
    assert found is not None
    for each in glob.glob(found[1]):
        os.unlink(each)
    assert open_shards(paths).__getitems__(range(NUM_SAMPLES)) == read_shards(paths)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["in place", "replaced"])
def test_a_shard_that_changes_in_mid_run_is_refused_by_name(tmp_path: Path, kind: str, way: str) -> None:
    """Another sample would be there; it is no bad sample that could be skipped."""
    paths = write_shards(tmp_path / "shards", kind, make_items(NUM_SAMPLES))
    dataset = ShadeDataset(open_shards(paths), "memory://?capacity=1", on_bad_sample="skip")
    assert dataset[PER_SHARD][1] == PER_SHARD
    others = make_items(2 * PER_SHARD)[::-1]
    target = paths[1] if way == "in place" else tmp_path / f"new.{kind}"
    WRITERS[kind](target, others[:PER_SHARD])
    os.utime(target, ns=(1, 1))
    os.replace(target, paths[1])
    with pytest.raises(DataError, match="when its index was made") as info:
        dataset.__getitems__([0, PER_SHARD + 1])
    assert not isinstance(info.value, BadSampleError)
    assert dataset[0][1] == 0  # the other shards are read
    dataset.close()
    _path_in(str(info.value)).unlink()
    assert open_shards(paths)[PER_SHARD] == read_shards(paths)[PER_SHARD] != (make_items(NUM_SAMPLES)[PER_SHARD])


@pytest.mark.parametrize("kind", ["tar", "zip", "parquet", "arrow"])
def test_changed_bytes_are_found_where_size_and_time_are_the_same(tmp_path: Path, kind: str) -> None:
    path = write_shards(tmp_path / "shards", kind, make_items(30), 30)[0]
    shards, before = open_shards(path), path.stat()
    content = path.read_bytes()
    path.write_bytes(content[:64] + bytes(len(content) - 128) + content[-64:])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(DataError, match=rf"the sample of its index at byte \d+ of {re.escape(str(path))}") as info:
        shards.__getitems__(range(30))
    path.write_bytes(content)  # the cure: restore the shard
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert _path_in(str(info.value)).exists()
    assert shards.__getitems__(range(30)) == read_shards([path])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", [0.0, 0.3, 0.6, 0.98])
def test_a_truncated_shard_is_refused_by_name(tmp_path: Path, kind: str, part: float) -> None:
    path = write_shards(tmp_path / "shards", kind, make_items(30), 30)[0]
    content = path.read_bytes()
    path.write_bytes(content[: int(part * len(content.rstrip(b"\0")))])  # a tar's end is empty
    with pytest.raises(DataError, match=rf"{re.escape(str(path))}.*copy it again"):
        Shards(path)
    path.write_bytes(content)  # the cure
    assert len(Shards(path)) == 30


def test_a_tar_that_ends_between_files_is_refused_and_the_cure_adds_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    write_tar(path, make_items(10))
    with tarfile.open(path) as tar:
        last = tar.getmembers()[-1]
    os.truncate(path, last.offset)
    with pytest.raises(DataError, match=r"end with an empty block.*truncate -s \+1024 \S+a\.tar"):
        Shards(path)
    os.truncate(path, path.stat().st_size + 1024)  # the cure
    shards = Shards(path, "bin")
    assert len(shards) == 10
    assert shards[9] == make_items(10)[9][0]


def test_a_compressed_tar_is_refused_by_name(tmp_path: Path) -> None:
    plain = tmp_path / "a.tar"
    write_tar(plain, make_items(5))
    content = plain.read_bytes()
    with tarfile.open(tmp_path / "b.tar.gz", "w:gz") as tar:
        tar.add(plain, "x.bin")
    with pytest.raises(ConfigError, match="gunzip"):
        Shards(tmp_path / "b.tar.gz")
    shutil.move(tmp_path / "b.tar.gz", plain)
    with pytest.raises(DataError, match=r"a\.tar to be a plain tar.*gunzip"):
        Shards(plain)
    plain.write_bytes(content)
    assert len(Shards(plain)) == 5


@pytest.mark.parametrize("kind", REMOTE_KINDS)
def test_a_missing_column_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    paths = write_shards(tmp_path / "shards", kind, make_items(50))
    with pytest.raises(DataError, match=rf"a column 'clas' in {re.escape(str(paths[0]))}, got '.*bin, cls'.*'cls'\?"):
        Shards(paths, ["bin", "clas"])
    assert Shards(paths, ["bin", "cls"])[3][1] == 3  # the cure


def test_a_sample_without_a_column_is_a_bad_sample(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        for name in ("0.bin", "0.cls", "1.bin", "2.cls", "2.bin"):
            member = tarfile.TarInfo(name)
            member.size = 1
            tar.addfile(member, io.BytesIO(name[:1].encode()))
    shards = open_shards(path)
    assert shards[2] == (b"2", 2)
    with pytest.raises(BadSampleError, match=r"sample 1 of \S+a\.tar.*it has no 'cls', only __key__, bin.*'skip'"):
        shards[1]
    dataset = ShadeDataset(shards, "memory://", on_bad_sample="skip")
    assert [item[1] for item in dataset.__getitems__([0, 1, 2])] == [0, 2, 2]
    assert dataset.stats()["bad_samples"] == 1
    dataset.close()


def test_a_damaged_index_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_shards(tmp_path / "shards", "tar", make_items(30), 30)[0]
    Shards(path, index=tmp_path / "index")
    (kept,) = (tmp_path / "index").glob("*.index")
    content = bytearray(kept.read_bytes())
    for damaged in (b"", bytes(content[: len(content) // 2]), bytes([*content[:40], content[40] ^ 1, *content[41:]])):
        caplog.clear()
        kept.write_bytes(damaged)
        assert open_shards(path, index=tmp_path / "index")[7][1] == 7
        assert "is damaged" in caplog.text
        assert kept.read_bytes() == content


@pytest.mark.parametrize(
    ("name", "library", "reads", "extra"),
    [("a.parquet", "pyarrow", "Parquet and Arrow", "parquet"), ("a.mdb", "lmdb", "LMDB", "lmdb")],
)
def test_without_a_library_the_command_that_installs_it_is_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, library: str, reads: str, extra: str
) -> None:
    (tmp_path / name).write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=rf"{library}, which reads {reads}.*'torch-shade\[{extra}\]'"):
        Shards(tmp_path / name)


def test_a_folder_of_lmdb_and_what_it_cannot_be(tmp_path: Path) -> None:
    lmdb = pytest.importorskip("lmdb", reason="lmdb is not installed; pip install lmdb")
    with lmdb.open(str(tmp_path / "base"), map_size=1 << 24) as env, env.begin(write=True) as transaction:
        transaction.put(b"one", b"1")
        transaction.put("zwö".encode(), b"2" * 100_000)
    shards = Shards(tmp_path / "base")  # beside its lock.mdb
    assert list(shards) == [{"__key__": "one", "value": b"1"}, {"__key__": "zwö", "value": b"2" * 100_000}]  # type: ignore[call-overload]
    with lmdb.open(str(tmp_path / "empty"), map_size=1 << 24) as env, env.begin(write=True) as transaction:
        for key in (b"a", b"b", b"c"):
            transaction.put(key, b"")
    for _ in range(2):  # with a new index, and with a kept one
        assert list(Shards(tmp_path / "empty", ["__key__", "value"])) == [("a", b""), ("b", b""), ("c", b"")]  # type: ignore[call-overload]
    fsspec.filesystem("memory").pipe_file("/base/data.mdb", b"1")
    with pytest.raises(ConfigError, match=r"an LMDB file on this machine.*copy it to a local disk"):
        Shards("memory://base/data.mdb")


def test_the_disk_serves_later_epochs_and_jobs_without_the_shards(tmp_path: Path) -> None:
    paths = write_shards(tmp_path / "shards", "tar", make_items(200))
    expected = read_shards(paths)
    disk = f"{tmp_path}/disk?capacity=10MiB"
    first = open_shards(paths, disk=disk)
    dataset = ShadeDataset(first, "memory://?capacity=1")
    order = np.random.default_rng(1).permutation(200)
    for batch in order.reshape(-1, 8).tolist():
        assert [item[:2] for item in dataset.__getitems__(batch)] == [expected[number] for number in batch]
    counts = dataset.stats()
    # Besides the probes: a request for each block, here a shard.
    assert counts["origin_reads"] <= 2 * 16 + len(paths)
    assert counts["disk_hits"] == counts["hits"] >= 200 - 5 * 8
    dataset.close()
    again = open_shards(paths, disk=disk)
    found = again.read_near(range(200))
    assert [again.item(number, found[number]) for number in range(200)] == expected
    again.close()


def test_a_prefix_reads_shards_in_batches_and_its_results_are_cached(tmp_path: Path) -> None:
    paths = write_shards(tmp_path / "shards", "tar", make_items(200))
    expected = read_shards(paths)
    shards = open_shards(paths, disk=f"{tmp_path}/disk?capacity=10MiB")
    dataset = ShadeDataset(shards, "memory://", working_set_fraction=1.0, prefix=len)
    for _ in range(2):
        found = dataset.__getitems__(range(200))
        assert found == [(len(content), number, number) for content, number in expected]
    counts = dataset.stats()
    assert counts["hits"] == counts["misses"] == 200
    assert len(paths) <= counts["origin_reads"] <= 16 + len(paths)
    dataset.close()


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_a_small_disk_keeps_a_part_of_the_blocks(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(index, "BLOCK_BYTES", 4096)
    paths = write_shards(tmp_path / "shards", kind, make_items(400))
    expected = read_shards(paths)
    shards = open_shards(paths, disk=f"{tmp_path}/disk?capacity=200KiB")
    for _ in range(2):
        for first in range(0, 400, 8):
            wanted = range(first, first + 8)
            assert shards.__getitems__(wanted) == expected[first : first + 8]
    kept = set(shards.read_near(range(400)))
    assert 40 < len(kept) < 300
    again = open_shards(paths, disk=f"{tmp_path}/disk?capacity=200KiB")
    again.__getitems__(range(400))
    assert set(again.read_near(range(400))) == kept  # always the same
    for each in (shards, again):
        each.close()


def test_a_full_or_failing_disk_costs_time_and_no_sample(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = write_shards(tmp_path / "shards", "tar", make_items(200))
    expected = read_shards(paths)
    shards = open_shards(paths, disk=f"{tmp_path}/disk?capacity=10MiB")
    tier: Any = shards._blocks
    tier._store._files()._max_bytes = 20_000  # others have filled it
    assert shards.__getitems__(range(200)) == expected
    assert "is full; samples that are not there are read from their shards" in caplog.text
    assert 0 < len(shards.read_near(range(200))) < 200
    caplog.clear()
    shards.close()  # every call of the store fails from here on
    tier._is_full = False
    assert shards.__getitems__(range(200)) == expected
    assert "samples are read from their shards for 30 s" in caplog.text
    shards.close()


def test_a_damaged_entry_of_the_disk_is_read_again(tmp_path: Path) -> None:
    paths = write_shards(tmp_path / "shards", "tar", make_items(80))
    expected = read_shards(paths)
    shards = open_shards(paths, disk=f"{tmp_path}/disk?capacity=10MiB")
    shards.__getitems__(range(80))
    (entries,) = (tmp_path / "disk").glob("*.entries")
    content = bytearray(entries.read_bytes())
    content[200::1000] = bytes(each ^ 255 for each in content[200::1000])
    entries.write_bytes(content)
    assert len(shards.read_near(range(80))) < 80
    assert shards.__getitems__(range(80)) == expected
    assert len(shards.read_near(range(80))) == 80
    shards.close()


def test_only_the_chosen_columns_of_a_parquet_file_are_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed; pip install pyarrow")
    from pyarrow import parquet

    rng = np.random.default_rng(0)
    large = [rng.bytes(10_000) for _ in range(60)]
    table = pyarrow.table({"before": large, "text": [str(number) for number in range(60)], "after": large})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=20)
    counted = [0, 0]

    def count(num_reads: int, num_bytes: int) -> None:
        counted[0] += num_reads
        counted[1] += num_bytes

    Shards(tmp_path / "a.parquet", "text").read(range(60), count)
    assert counted[0] == 3
    assert counted[1] < 2000


@pytest.mark.parametrize("kind", KINDS)
def test_the_sizes_are_estimated_the_same_with_a_cold_and_a_warm_disk(tmp_path: Path, kind: str) -> None:
    """Ranks must plan with the same sizes."""
    paths = write_shards(tmp_path / "shards", kind, make_items(NUM_SAMPLES))
    sizes, lengths = [], np.array([len(content) for content, _ in read_shards(paths)])
    for disk in (None, f"{tmp_path}/disk?capacity=10MiB", f"{tmp_path}/disk?capacity=10MiB"):
        shards = open_shards(paths, disk=disk)
        sizes.append(shards.probe()[0])
        shards.close()
    assert np.array_equal(sizes[0], sizes[1])
    assert np.array_equal(sizes[0], sizes[2])
    assert (sizes[0] >= lengths).all()
    assert sizes[0].mean() < 6 * lengths.mean()


def test_a_folder_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    paths = write_shards(tmp_path / "shards", "tar", make_items(10))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"a folder for the index.*name another one: index="):
        Shards(paths, index=tmp_path / "file" / "index")
    assert len(Shards(paths, index=tmp_path / "other")) == 10  # the cure


def test_neighbours_are_read_together(tmp_path: Path) -> None:
    paths = write_shards(tmp_path / "shards", "tar", make_items(80))
    shards, counted = Shards(paths), [0]

    def count(num_reads: int, num_bytes: int) -> None:
        counted[0] += num_reads

    shards.read(range(30, 50), count)
    assert counted == [2]  # a part of each of two shards
    assert coalesced([(10, 20), (0, 5), (24, 30), (50, 60)], 5) == [(0, 30), (50, 60)]
    assert coalesced([(0, 100), (10, 20)], 0) == [(0, 100)]
