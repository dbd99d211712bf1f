"""RemoteImageFolder: ImageFolder's samples, numbering and order, behind a web server and in a bucket."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from torchvision import transforms
from torchvision.datasets import ImageFolder

from shade import RemoteImageFolder, ShadeDataset, ShadeLoader, ShadeSampler
from shade.data._origin.url_origin import describe_many
from shade.errors import BadSampleError, DataError
from tests.support.data_plane import make_pictures
from tests.support.storage_servers import BUCKET, S3Server
from tests.support.web_server import serving

VIEW = transforms.Compose([transforms.RandomResizedCrop(8), transforms.ToTensor()])


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = make_pictures(tmp_path / "site" / "train", 24, mixed=True)
    (root / "class0" / "inner").mkdir()
    os.rename(root / "class0" / "00002.bmp", root / "class0" / "inner" / "deep.bmp")
    (root / "class0" / "notes.txt").write_text("no picture")
    return root


@pytest.fixture(params=["http", "s3", "memory"])
def url(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The folder, behind a server of each kind."""
    if request.param == "http":
        with serving(folder.parent) as server:
            yield f"{server.url}/train"
        return
    if request.param == "s3":
        with contextlib.suppress(FileExistsError):  # the server outlives a test
            request.getfixturevalue("s3").make_bucket(monkeypatch)
    place = f"s3://{BUCKET}/train" if request.param == "s3" else "memory://train"
    file_system = fsspec.filesystem(request.param, **({"skip_instance_cache": True} if request.param == "s3" else {}))
    file_system.put(str(folder) + "/", place + "/", recursive=True)
    yield place
    file_system.rm(place, recursive=True)


@pytest.mark.multiprocess
def test_it_is_imagefolder(folder: Path, url: str) -> None:
    local, remote = ImageFolder(str(folder)), RemoteImageFolder(url)
    assert remote.classes == local.classes
    assert remote.class_to_idx == local.class_to_idx
    assert remote.targets == local.targets
    assert len(remote) == len(local)
    names = [path.rpartition("/train/")[2] for path, _ in local.samples]
    assert [address.rpartition("train/")[2] for address, _ in remote.samples] == names
    for index in (0, 5, len(local) - 1):
        image, target = remote[index]
        assert target == local[index][1]
        assert np.array_equal(np.asarray(image), np.asarray(local[index][0]))
    remote.origin.close()


@pytest.mark.multiprocess
@pytest.mark.parametrize("workers", [0, 2])
def test_wrapped_it_is_read_in_parallel_and_cached(folder: Path, url: str, workers: int) -> None:
    streams = []
    for inner in (ImageFolder(str(folder)), RemoteImageFolder(url)):
        dataset = ShadeDataset(inner, cache="local://", working_set_fraction=0.5, transform=VIEW)
        sampler = ShadeSampler(dataset, batch_size=6, mode="uniform")
        loader, stream = ShadeLoader(dataset, 6, sampler=sampler, num_workers=workers), []
        for epoch in range(3):
            sampler.set_epoch(epoch)
            stream += [(images.clone(), targets.tolist(), indices.tolist()) for images, targets, indices in loader]
        totals = dataset.cache.residency.totals()
        assert totals["hits"] > 10
        assert totals["origin_reads"] == totals["misses"]
        streams.append(stream)
        sampler.close()
        dataset.close()
    for (mine, *rest), (theirs, *others) in zip(*streams, strict=True):
        assert torch.equal(mine, theirs)
        assert rest == others


@pytest.mark.multiprocess
def test_a_file_that_changed_is_another_data_set(folder: Path, url: str) -> None:
    def fingerprint() -> str:
        dataset = ShadeDataset(RemoteImageFolder(url), cache=None)
        dataset.close()
        return dataset.source.fingerprint

    before = fingerprint()
    assert fingerprint() == before
    if url.startswith("http"):
        changed = folder / "class1" / "00001.bmp"
        content = changed.read_bytes()
        changed.write_bytes(content[:-3] + b"\x01\x02\x03")
        os.utime(changed, (1, 1))
        assert fingerprint() != before
        return
    file_system = fsspec.filesystem(url.partition("://")[0])
    file_system.invalidate_cache()
    path = f"{url}/class1/00001.bmp"
    content = file_system.cat_file(path)
    file_system.pipe_file(path, content[:-3] + b"\x01\x02\x03")
    file_system.invalidate_cache()
    assert fingerprint() != before


@pytest.mark.multiprocess
def test_any_data_set_of_urls(url: str) -> None:
    """No RemoteImageFolder: a data set of (URL, class) pairs."""

    class Listed(ImageFolder):
        def __init__(self) -> None:
            listed = RemoteImageFolder(url)
            self.samples, self.transform, self.target_transform = listed.samples, None, None
            self.loader = ImageFolder.__init__.__globals__["default_loader"]

    dataset = ShadeDataset(Listed(), cache="memory://", working_set_fraction=1.0)
    remote = RemoteImageFolder(url)
    for _ in range(2):
        for index, (image, target, _) in enumerate(dataset.__getitems__(list(range(len(remote))))):
            assert target == remote.targets[index]
            if index % 7 == 0:
                assert np.array_equal(np.asarray(image), np.asarray(remote[index][0]))
    assert dataset.cache.residency.totals()["hits"] == len(remote)
    dataset.close()
    remote.origin.close()


def test_a_file_that_is_gone_comes_out_with_its_url(folder: Path) -> None:
    with serving(folder.parent) as server:
        remote = RemoteImageFolder(f"{server.url}/train")
        address, _ = remote.samples[3]
        os.unlink(str(folder.parent) + address.removeprefix(server.url))
        dataset = ShadeDataset(remote, cache=None)
        with pytest.raises(BadSampleError, match=address):
            dataset.__getitems__([1, 3])
        dataset.close()


def test_a_signed_url_is_in_no_message(folder: Path) -> None:
    with serving(folder.parent) as server:
        remote = RemoteImageFolder(f"{server.url}/train")
        signed = [(f"{address}?sig=hunter2", target) for address, target in remote.samples[:4]]
        remote.samples = signed
        dataset = ShadeDataset(remote, cache=None)
        gone = signed[3][0].partition("?")[0]
        os.unlink(str(folder.parent) + gone.removeprefix(server.url))
        with pytest.raises(BadSampleError, match=rf"{gone}\?\*\*\*") as told:
            dataset.__getitems__([1, 3])
        assert "hunter2" not in str(told.value)
        with pytest.raises(DataError, match=rf"{gone}\?\*\*\*") as told:
            describe_many([signed[3][0]], {})
        assert "hunter2" not in str(told.value)
        dataset.close()


def test_what_is_no_image_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "flat").mkdir()
    make_pictures(tmp_path / "flat", 1)
    os.rename(tmp_path / "flat" / "class0" / "00000.bmp", tmp_path / "flat" / "loose.bmp")
    with serving(tmp_path) as server:
        with pytest.raises(DataError, match="class folders"):
            RemoteImageFolder(f"{server.url}/flat")
        with pytest.raises(DataError):
            RemoteImageFolder(f"{server.url}/none")
