"""hf:// data sets, on a stand-in of the Hub: the samples of the same local files, at one commit, for few requests."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

from shade import RemoteImageFolder, ShadeDataset, ShadeSampler, Shards
from shade.data._dataset.warm import warm
from shade.data._origin import url_origin
from shade.data._origin.origin import ByteRange
from shade.data._origin.url_origin import UrlOrigin, at_commits
from shade.data._source.source import FileSource
from shade.errors import ConfigError, DataError
from tests.support.data_plane import make_pictures
from tests.support.hub_server import TOKEN, Hub, serving_hub
from tests.support.shards import COLUMNS, make_items, read_shards, write_shards

pytest.importorskip("huggingface_hub")
NAME = "org/set"
ROOT = f"hf://datasets/{NAME}"
NUM = 64


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(url_origin, "PAUSES_SECONDS", (0.01,))
    monkeypatch.setattr(url_origin, "ALONE", 100_000)
    with serving_hub(monkeypatch) as hub:
        yield hub


def shards_of(hub: Hub, tmp_path: Path, kind: str = "tar") -> tuple[list[Any], str]:
    """Commits shards of a kind; returns their samples, and the commit."""
    (tmp_path / kind).mkdir()
    paths = write_shards(tmp_path / kind, kind, make_items(NUM), NUM // 2)
    files = {f"data/{path.name}": path.read_bytes() for path in paths}
    return read_shards(paths), hub.repository(NAME).commit(files | {"README.md": b"of a set"})


def some_numbers(first: int) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table({"n": list(range(first, first + NUM))}), out, row_group_size=8)
    return out.getvalue()


@pytest.mark.parametrize(
    ("kind", "pattern"), [("tar", "data/*"), ("parquet", "data/*"), ("parquet", "data"), ("tar", "data/{names}")]
)
def test_samples_are_those_of_the_files_for_few_requests(hub: Hub, tmp_path: Path, kind: str, pattern: str) -> None:
    expected, _ = shards_of(hub, tmp_path, kind)
    name = (
        f"{ROOT}@main/{pattern}"
        if "{" not in pattern
        else [
            f"{ROOT}/{p}" for p in hub.repository(NAME).commits[hub.repository(NAME).refs["main"]] if p != "README.md"
        ]
    )
    shards = Shards(name, COLUMNS)
    assert len(shards) == NUM
    opening = hub.asked.copy()
    assert opening["info"] <= 3
    assert opening["tree"] <= 3
    assert opening["resolve"] <= 2, "a signed URL serves all ranges of a file"
    assert [shards[index] for index in range(NUM)] == expected
    asked = hub.asked - opening
    assert asked["info"] == asked["tree"] == 0
    assert asked["resolve"] <= 2
    assert asked["data"] <= NUM
    shards.close()


def test_a_branch_that_moves_meanwhile_changes_nothing(hub: Hub, tmp_path: Path) -> None:
    expected, sha = shards_of(hub, tmp_path)
    shards = Shards(f"{ROOT}@main/data/*.tar", COLUMNS)
    hub.repository(NAME).commit({"README.md": b"all gone"})
    assert sha in (shards.revision or "")
    assert shards.__getitems__(list(range(NUM))) == expected
    shards.close()


def test_a_branch_that_moved_between_runs_is_refused_by_name_and_the_old_commit_is_read(hub: Hub) -> None:
    repository = hub.repository(NAME)
    old = repository.commit({"data/a.parquet": some_numbers(0)})
    Shards(f"{ROOT}/data/a.parquet", "n").close()
    repository.commit({"data/a.parquet": some_numbers(0), "README.md": b"more words"})
    same = Shards(f"{ROOT}/data/a.parquet", "n")
    repository.commit({"data/a.parquet": some_numbers(100)})
    with pytest.raises(DataError, match=rf"name what is there still, {ROOT}@{old}/…; or.* remove .*a.parquet-.*index"):
        Shards(f"{ROOT}/data/a.parquet", "n")
    cure = Shards(f"{ROOT}@{old}/data/a.parquet", "n")
    assert cure.__getitems__([0, 1, 63]) == same.__getitems__([0, 1, 63]) == [0, 1, 63]
    assert cure.fingerprint == same.fingerprint, "the content is the same, and so is its place in a cache"


def test_a_run_resumes_at_its_content_alone(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = hub.repository(NAME)
    old = repository.commit({"data/a.parquet": some_numbers(0)})
    states = []
    for number, first in enumerate((0, 0, 100)):
        repository.commit({"data/a.parquet": some_numbers(first), "README.md": b"%d" % number})
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"machine{number}"))
        dataset = ShadeDataset(Shards(f"{ROOT}@main/data/a.parquet", "n"), cache=None)
        sampler = ShadeSampler(dataset, batch_size=4)
        states.append(sampler.state_dict())
        if number < 2:
            sampler.load_state_dict(states[0])
        else:
            with pytest.raises(
                ConfigError, match=rf"revision='{ROOT}@{states[0]['settings']['revision'][len(ROOT) + 1 :]}'"
            ):
                sampler.load_state_dict(states[0])
    assert old not in str(states)


def test_a_signed_url_that_expires_is_asked_for_again(hub: Hub, tmp_path: Path) -> None:
    expected, _ = shards_of(hub, tmp_path)
    hub.uses = 3
    shards = Shards(f"{ROOT}/data/*.tar", COLUMNS)
    assert [shards[index] for index in range(NUM)] == expected
    assert hub.asked["resolve"] > 10
    assert hub.asked["data"] > NUM
    shards.close()


def test_busy_servers_are_asked_again_as_they_wish(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slept: list[float] = []
    hub.repository(NAME).commit({"big.bin": bytes(1000), "small.bin": b"x"})
    (root,) = at_commits([ROOT], {}).values()
    monkeypatch.setattr(url_origin.time, "sleep", slept.append)
    hub.failures = [
        ("resolve", 429, {"RateLimit": '"resolvers";r=0;t=290'}),
        ("resolve", 503, {"Retry-After": "7"}),
        ("data", 503, {}),
    ]
    origin = UrlOrigin()
    assert origin.read_many([f"{root}/big.bin"]) == [bytes(1000)]
    assert origin.read_many([ByteRange(f"{root}/big.bin", 10, 20), f"{root}/small.bin"]) == [bytes(10), b"x"]
    assert [each for each in slept if each >= 1] == [290.0, 7.0]
    assert "X-Sig" not in caplog.text
    origin.close()


def test_a_private_repository_is_read_with_a_token_that_is_never_shown(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.DEBUG, "shade")
    repository = hub.repository(NAME)
    repository.is_private = True
    repository.commit({"data/a.parquet": some_numbers(0)})
    with pytest.raises(DataError, match=rf"to list {ROOT}/data/a.parquet.*check the URL and the login") as told:
        Shards(f"{ROOT}/data/a.parquet", "n")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    shards = Shards(f"{ROOT}/data/a.parquet", "n")
    assert shards[3] == 3
    monkeypatch.setenv("HF_TOKEN", "hf_withdrawn")
    (place,) = at_commits([f"{ROOT}/x"], {"token": TOKEN}).values()
    (error,) = UrlOrigin().read_many([f"{place}/data/a.parquet"])
    assert isinstance(error, PermissionError)
    assert "HF_TOKEN" in str(error)
    for secret in (TOKEN, "hf_withdrawn", "X-Sig"):
        assert secret not in caplog.text + str(told.value) + str(error)
    shards.close()


@pytest.mark.parametrize("options", [{"token": TOKEN}, {}])
def test_a_token_may_be_an_option_or_in_its_file(hub: Hub, tmp_path: Path, options: dict[str, Any]) -> None:
    repository = hub.repository(NAME)
    repository.is_private = True
    repository.commit({"data/a.parquet": some_numbers(0)})
    if not options:
        (tmp_path / "token").write_text(TOKEN)
    shards = Shards(f"{ROOT}/data/a.parquet", "n", options=options)
    assert shards[3] == 3
    shards.close()


def test_a_bucket_is_read_and_its_change_noticed(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = hub.repository("org/pail", "buckets")
    bucket.commit({"data/a.parquet": some_numbers(0)})
    shards = Shards("hf://buckets/org/pail/data/*.parquet", "n")
    assert shards.__getitems__(list(range(NUM))) == list(range(NUM))
    assert shards.revision is None
    bucket.commit({"data/a.parquet": some_numbers(100)})
    with pytest.raises(DataError, match=r"hf://buckets/org/pail/data/a.parquet to be what it was"):
        Shards("hf://buckets/org/pail/data/*.parquet", "n")
    shards.close()
    monkeypatch.delattr("huggingface_hub.hf_file_system.HfFileSystemResolvedBucketPath")
    with pytest.raises(ConfigError, match=r"not 1\.6 or newer.*pip install -U"):
        Shards("hf://buckets/org/pail/data/*.parquet", "n")


@pytest.mark.multiprocess
@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_an_image_folder_is_torchvisions_in_workers_too(hub: Hub, tmp_path: Path, context: str) -> None:
    folder = make_pictures(tmp_path / "train", 24, mixed=True)
    files = {f"train/{path.relative_to(folder)}": path.read_bytes() for path in folder.rglob("*.*")}
    hub.page = 10
    hub.repository(NAME).commit(files)
    local, remote = ImageFolder(str(folder)), RemoteImageFolder(f"{ROOT}@main/train")
    assert hub.asked["tree"] <= 8
    hub.repository(NAME).commit({})
    assert remote.classes == local.classes
    assert remote.targets == local.targets
    assert remote[5][0].tobytes() == local[5][0].tobytes()
    opening = hub.asked.copy()
    dataset = ShadeDataset(remote, cache=None)
    loader = DataLoader(
        dataset,
        batch_size=4,
        sampler=ShadeSampler(dataset, batch_size=4, mode="uniform"),
        num_workers=2,
        collate_fn=list,
        multiprocessing_context=context,
    )
    seen = {index: (picture.tobytes(), target) for batch in loader for picture, target, index in batch}
    assert seen == {index: (picture.tobytes(), target) for index, (picture, target) in enumerate(local)}
    asked = hub.asked - opening
    assert asked["info"] == asked["tree"] == 0
    assert asked["resolve"] <= 24 + 8
    remote.origin.close()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_readers_process_reads_it_too(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repository(NAME).is_private = True
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(url_origin, "ALONE", 1)
    hub.uses = 2
    hub.repository(NAME).commit({f"{n}.bin": b"%d" % n * 500 for n in range(8)})
    (root,) = at_commits([ROOT], {}).values()
    origin, names = UrlOrigin(), [f"{root}/{n}.bin" for n in range(8)]
    origin.read_many(names)
    reader = origin._started()
    assert reader is not None
    while not reader.is_ready:
        os.sched_yield()
    for _ in range(4):
        assert origin._read_apart(names, None) == [b"%d" % n * 500 for n in range(8)]
    found = origin._read_apart([ByteRange(names[3], 5, 9), f"{root}/none.bin"], None)
    assert found is not None
    assert found[0] == b"3333"
    assert isinstance(found[1], FileNotFoundError)
    origin.close()


STREAMED = """
import json, sys
from datasets import load_dataset
from shade import Recorded
stream = load_dataset("parquet", data_files=sys.argv[1], split="train", streaming=True)
recorded = Recorded(stream, sys.argv[2])
recorded.reach(1 << 30)
print(json.dumps([list(stream), [recorded[index] for index in range(len(recorded))]]))
recorded.close()
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_what_datasets_streams_is_the_same_and_is_recorded(hub: Hub, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    hub.repository(NAME).commit({f"data/{n}.parquet": some_numbers(NUM * n) for n in range(2)})
    shards = Shards(f"{ROOT}/data/*.parquet")
    rows = shards.__getitems__(list(range(len(shards))))
    assert len(rows) == 2 * NUM
    # The endpoint is read from the environment when its library is imported.
    command = [sys.executable, "-c", STREAMED, f"{ROOT}/data/*.parquet", str(tmp_path / "recording")]
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout) == [rows, rows]


def test_a_cache_is_filled_before_the_job(hub: Hub, tmp_path: Path) -> None:
    folder = make_pictures(tmp_path / "train", 24)
    hub.repository(NAME).commit(
        {f"train/{path.relative_to(folder)}": path.read_bytes() for path in folder.rglob("*.*")}
    )

    def job() -> tuple[ShadeDataset, ShadeSampler]:
        data = RemoteImageFolder(f"{ROOT}/train")
        dataset = ShadeDataset(data, cache=None, disk=f"{tmp_path / 'disk'}?capacity=64MiB")
        return dataset, ShadeSampler(dataset, batch_size=4, mode="uniform")

    dataset, sampler = job()
    assert [each.num_read for each in warm(dataset, sampler)] == [24]
    hub.repository(NAME).commit(
        {"README.md": b"gone", **hub.repository(NAME).commits[hub.repository(NAME).refs["main"]]}
    )
    asked = hub.asked["data"]
    dataset, sampler = job()
    assert (
        len([index for batch in DataLoader(dataset, 4, sampler=sampler, collate_fn=list) for *_, index in batch]) == 24
    )
    assert hub.asked["data"] == asked, "another commit with the same files has the same place in the cache"


def test_a_branch_is_read_by_those_alone_who_find_its_commit(hub: Hub) -> None:
    """Such as files that a user's data set names."""
    hub.repository(NAME).commit({"train/a/1.png": bytes(200)})
    named = f"{ROOT}@main/train/a/1.png"
    with pytest.raises(ConfigError, match=rf"files of the Hub at a commit, got '{named}'"):
        FileSource([(named, 0)], bytes)
    (root,) = at_commits([named], {}).values()
    assert FileSource([(f"{root}/train/a/1.png", 0)], bytes).payload_bytes_N.tolist() == [200]


def test_what_is_not_there_is_said_by_name(hub: Hub) -> None:
    hub.repository(NAME).commit({"data/a.parquet": some_numbers(0)})
    for url, words in (
        (f"{ROOT}@v9/data/a.parquet", "revision not found"),
        ("hf://datasets/org/none/a.parquet", "repository not found"),
        (f"{ROOT}/data/b.parquet", "no such file"),
        (f"{ROOT}/none/*.parquet", "shards"),
    ):
        with pytest.raises((DataError, ConfigError), match=words):
            Shards(url, "n")
