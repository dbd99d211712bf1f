"""Lance in Shards: rows as Lance's own reader takes them, at the version that was found, in no fork of its user."""

from __future__ import annotations

import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from torch.utils.data import DataLoader

from shade import ShadeDataset, ShadeSampler, Shards
from shade.data._shards import lance_tables
from shade.errors import ConfigError, DataError
from tests.support.hub_server import serving_hub
from tests.support.storage_servers import BUCKET, S3Server

lance = pytest.importorskip("lance")
NUM = 300


@pytest.fixture(autouse=True)
def _folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(lance_tables, "_used_by", [])


def table(first: int = 0, num: int = NUM) -> Any:
    n = range(first, first + num)
    return pa.table(
        {
            "n": pa.array(n),
            "bytes": [b"%d" % i * (i % 7) for i in n],
            "text": [None if i % 5 == 0 else f"row {i}" for i in n],
            "list": [[i, i + 1][: i % 3] for i in n],
            "struct": [{"a": i, "b": [str(i)]} for i in n],
            "vector": pa.array([[float(i)] * 4 for i in n], pa.list_(pa.float32(), 4)),
            "half": pa.array(np.arange(num, dtype=np.float16)),
            "kind": pa.array([f"k{i % 3}" for i in n]).dictionary_encode(),
            "time": pa.array(n, pa.timestamp("us", "UTC")),
        }
    )


def written(path: Path, rows: Any = None, **options: Any) -> Any:
    return lance.write_dataset(table() if rows is None else rows, str(path), max_rows_per_file=100, **options)


def test_rows_are_those_that_lance_takes(tmp_path: Path) -> None:
    dataset = written(tmp_path / "a.lance")
    dataset.delete("n % 10 = 3 OR n < 5")
    expected = lance.dataset(str(tmp_path / "a.lance")).to_table().to_pylist()
    shards = Shards(tmp_path / "a.lance")
    assert len(shards) == len(expected) == 266
    order = np.random.default_rng(0).permutation(len(expected)).tolist()
    assert shards.__getitems__(order) == [expected[number] for number in order]
    assert shards[-1] == expected[-1]
    two = Shards(tmp_path / "a.lance", ["text", "n"])
    assert two[7] == (expected[7]["text"], expected[7]["n"])
    assert pickle.loads(pickle.dumps(two))[8] == (expected[8]["text"], expected[8]["n"])
    with pytest.raises(DataError, match=r"a column 'm' in .*a\.lance.*choose among them"):
        Shards(tmp_path / "a.lance", "m")


def test_a_new_version_changes_nothing_of_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.lance"
    written(path)
    shards = Shards(path, "n")
    dataset = ShadeDataset(shards, cache=None)
    state = ShadeSampler(dataset, batch_size=4).state_dict()
    lance.dataset(str(path)).delete("n < 100")
    lance.dataset(str(path)).update({"n": "n + 1000"})
    written(path, table(5000, 100), mode="append")
    assert shards.__getitems__(list(range(NUM))) == list(range(NUM))
    newest = Shards(path, "n")
    assert sorted(newest.__getitems__(list(range(NUM)))) == [*range(1100, 1300), *range(5000, 5100)]
    assert newest.fingerprint != shards.fingerprint
    with pytest.raises(ConfigError, match=r"revision='.*a\.lance\?version=1 .*got '.*a\.lance\?version=4"):
        ShadeSampler(ShadeDataset(newest, cache=None), batch_size=4).load_state_dict(state)
    cure = Shards(path, "n", options={"version": 1})
    assert cure.fingerprint == shards.fingerprint
    ShadeSampler(ShadeDataset(cure, cache=None), batch_size=4).load_state_dict(state)


def test_a_data_set_that_is_written_again_is_another(tmp_path: Path) -> None:
    written(tmp_path / "a.lance")
    before = Shards(tmp_path / "a.lance", "n").fingerprint
    (tmp_path / "a.lance").rename(tmp_path / "old")
    written(tmp_path / "a.lance")
    assert Shards(tmp_path / "a.lance", "n").fingerprint != before


@pytest.mark.parametrize("version", ["2.1", "2.2"])
def test_blobs_are_their_bytes(tmp_path: Path, version: str) -> None:
    values = [None if n == 7 else b"%d" % n * (n % 5) for n in range(NUM)]
    field, column = pa.field("v", pa.large_binary(), metadata={"lance-encoding:blob": "true"}), values
    if version == "2.2":
        field, column = lance.blob_field("v"), lance.blob_array(values)
    rows = pa.table({"n": range(NUM), "v": column}, schema=pa.schema([pa.field("n", pa.int64()), field]))
    dataset = written(tmp_path / "a.lance", rows, data_storage_version=version)
    shards = Shards(tmp_path / "a.lance")
    order = [7, 299, 0, 13]
    blobs = [value for _, value in dataset.read_blobs("v", indices=order)]
    assert [item["v"] for item in shards.__getitems__(order)] == blobs == [values[n] for n in order]
    assert Shards(tmp_path / "a.lance", "n").__getitems__(order) == order


def test_a_batch_is_one_take_and_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "a.lance")
    shards, taken, counts = Shards(tmp_path / "a.lance", "bytes"), [], []
    take = lance.LanceDataset.take
    monkeypatch.setattr(lance.LanceDataset, "take", lambda *words, **named: taken.append(1) or take(*words, **named))
    shards.read(list(range(0, NUM, 10)), lambda *each: counts.append(each))
    assert len(taken) == 1
    assert counts[0][0] > 0
    assert counts[0][1] > 0


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_fork_is_refused_and_the_cure_reads(tmp_path: Path) -> None:
    written(tmp_path / "a.lance")
    dataset = ShadeDataset(Shards(tmp_path / "a.lance", "n"), cache=None)

    def numbers(context: str) -> list[int]:
        loader = DataLoader(
            dataset,
            4,
            sampler=ShadeSampler(dataset, batch_size=4, mode="uniform"),
            num_workers=1,
            collate_fn=list,
            multiprocessing_context=context,
        )
        return sorted(n for batch in loader for n, _ in batch)

    with pytest.raises(ConfigError, match=r"no fork of one that has used Lance.*multiprocessing_context='forkserver'"):
        numbers("fork")
    if "forkserver" in multiprocessing.get_all_start_methods():
        assert numbers("forkserver") == list(range(NUM))


def test_what_is_no_lance_is_said_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.lance").mkdir()
    with pytest.raises(DataError, match=r"a Lance data set at .*a\.lance, got .*check the path, the version"):
        Shards(tmp_path / "a.lance")
    written(tmp_path / "b.lance")
    with pytest.raises(DataError, match=r"check the path, the version"):
        Shards(tmp_path / "b.lance", options={"version": 9})


@pytest.mark.multiprocess
def test_it_is_read_in_a_bucket_and_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "a.lance")
    files = {
        f"x.lance/{f.relative_to(tmp_path / 'a.lance')}": f for f in (tmp_path / "a.lance").rglob("*") if f.is_file()
    }
    with serving_hub(monkeypatch) as hub:
        hub.repository("org/set").commit({name: path.read_bytes() for name, path in files.items()})
        shards = Shards("hf://datasets/org/set@main/x.lance", "n")
        written(tmp_path / "a.lance", table(900, 10), mode="overwrite")
        hub.repository("org/set").commit(dict.fromkeys(files, b"other"))
        # The manifest of another commit does not parse.
        assert shards.__getitems__([0, 299, 150]) == [0, 299, 150]
    with S3Server() as server:
        server.make_bucket(monkeypatch)
        options = {"endpoint": server.endpoint, "allow_http": "true", "region": "us-east-1"}
        lance.write_dataset(table(), f"s3://{BUCKET}/x.lance", storage_options=options)
        shards = Shards(f"s3://{BUCKET}/x.lance", "n", options=options)
        assert shards.__getitems__([0, 299, 150]) == [0, 299, 150]
