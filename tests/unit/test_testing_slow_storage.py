"""SlowStorage: every reader of the folder waits, in every process, and nothing else does."""

from __future__ import annotations

import builtins
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from shade import ShadeDataset
from shade.testing import SlowStorage

OPEN_SECONDS = 0.05


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("slow", "slower"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"x" * 1000)
    return tmp_path / "slow"


def read(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read()


@pytest.mark.parametrize("reader", [read, Path.read_bytes])
def test_an_open_below_the_folder_waits_and_is_counted(folder: Path, reader: Callable[[Path], bytes]) -> None:
    true_open = builtins.open
    with SlowStorage(folder, OPEN_SECONDS, 1e9) as storage:
        began = time.monotonic()
        assert reader(folder / "file") == b"x" * 1000
        assert time.monotonic() - began >= OPEN_SECONDS
        assert (storage.num_opens, storage.num_bytes) == (1, 1000)
        reader(folder.parent / "slower" / "file")
        (folder / "new").write_bytes(b"y")
        assert (storage.num_opens, storage.num_bytes) == (1, 1000), "another folder, and writing"
    assert builtins.open is true_open
    reader(folder / "file")
    assert storage.num_opens == 1


@pytest.mark.multiprocess
def test_all_processes_share_one_pipe_and_one_count(folder: Path) -> None:
    with SlowStorage(folder, 0.0, 10_000.0) as storage:  # 0.1 s a file
        began = time.monotonic()
        children = [multiprocessing.get_context("fork").Process(target=read, args=(folder / "file",)) for _ in range(3)]
        for child in children:
            child.start()
        read(folder / "file")
        for child in children:
            child.join()
        assert [child.exitcode for child in children] == [0] * 3
        assert time.monotonic() - began >= 0.4
        assert (storage.num_opens, storage.num_bytes) == (4, 4000)


@pytest.mark.multiprocess
def test_a_plain_loader_and_shade_are_slowed_alike_and_count_the_same(tmp_path: Path) -> None:
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import ToTensor

    from tests.support.launching import make_images

    images = make_images(tmp_path / "images", num_classes=2, per_class=4)
    plain = ImageFolder(str(images), ToTensor())
    through = ShadeDataset(ImageFolder(str(images)), cache="memory://", transform=ToTensor())
    counts = []
    for loader in (DataLoader(plain, 4, num_workers=1, multiprocessing_context="fork"), DataLoader(through, 4)):
        with SlowStorage(images, 0.001, 1e9) as storage:
            assert len(list(loader)) == 2
            counts.append((storage.num_opens, storage.num_bytes))
    assert through.cache is not None
    totals = through.cache.residency.totals()
    assert counts == [(8, sum(path.stat().st_size for path in images.rglob("*.png")))] * 2
    assert (totals["origin_reads"], totals["origin_bytes"]) == counts[0]
    through.close()
