"""Data sets of combined scripts: each as a user has it, with what opens at the first read; all pickle into workers."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split
from torchvision import transforms
from torchvision.datasets import ImageFolder

SIZE, WIDTH = 20, 6
"""Samples of a data set, and numbers in a sample."""


def numbers(size: int = SIZE) -> torch.Tensor:
    """Row i is sample i."""
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(3))


class LazyZip(Dataset[Any]):
    """Opens its archive at the first read, as many data sets do: a handle that processes share reads wrongly."""

    def __init__(self, path: Path) -> None:
        self.path, self.archive = path, None
        with zipfile.ZipFile(path) as archive:
            self.names = sorted(archive.namelist())

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Any:
        if self.archive is None:
            self.archive = zipfile.ZipFile(self.path)
        return torch.frombuffer(bytearray(self.archive.read(self.names[index])), dtype=torch.float32), index % 2


class ManyItems(Dataset[Any]):
    """Has ``__getitems__``, through which torch reads a batch at once."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return numbers()[index], index % 2

    def __getitems__(self, indices: list[int]) -> list[Any]:
        rows = numbers()
        return [(rows[index], index % 2) for index in indices]


class Mapped(Dataset[Any]):
    """Rows of a memory-mapped file, handed out as they are."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index], index % 2


def write(folder: Path) -> None:
    """Writes the files of every kind into a folder."""
    rows = numbers().numpy()
    np.save(folder / "rows.npy", rows)
    with zipfile.ZipFile(folder / "rows.zip", "w") as archive:
        for index, row in enumerate(rows):
            archive.writestr(f"{index:03d}", row.tobytes())
    rng = np.random.default_rng(5)
    for index in range(SIZE):
        at = folder / "images" / f"class{index % 2}" / f"{index:03d}.png"
        at.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (1, 2, 3), dtype=np.uint8)).save(at)
    (folder / "tars").mkdir()
    for shard in range(2):
        with tarfile.open(folder / "tars" / f"{shard}.tar", "w") as tar:
            for index in range(shard * SIZE // 2, (shard + 1) * SIZE // 2):
                content = io.BytesIO()
                np.save(content, rows[index])
                for name, data in ((f"{index:03d}.npy", content.getvalue()), (f"{index:03d}.cls", b"%d" % (index % 2))):
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    import pyarrow
    import pyarrow.parquet

    (folder / "parquet").mkdir()
    table = pyarrow.table({"x": rows.tolist(), "y": [index % 2 for index in range(SIZE)]})
    pyarrow.parquet.write_table(table, folder / "parquet" / "0.parquet", row_group_size=6)


def _images(folder: Path) -> Any:
    return ImageFolder(str(folder / "images"), transform=None)


def _hugging_face(folder: Path) -> Any:
    import datasets

    datasets.disable_progress_bars()
    rows = {"x": numbers().tolist(), "y": [index % 2 for index in range(SIZE)]}
    return datasets.Dataset.from_dict(rows).with_format("torch")


def _halves(whole: Any) -> Any:
    return ConcatDataset([Subset(whole, range(SIZE // 2)), Subset(whole, range(SIZE // 2, SIZE))])


def _split(whole: Any) -> Any:
    return random_split(whole, [SIZE - 4, 4], generator=torch.Generator().manual_seed(1))[0]


def _shards(folder: Path, columns: list[str]) -> Any:
    from shade import Shards

    return Shards(str(folder), columns, index=folder.parent / "index")


KINDS: dict[str, Callable[[Path], Any]] = {
    "tensors": lambda folder: TensorDataset(numbers(), torch.arange(SIZE) % 2),
    "images": _images,
    "split of images": lambda folder: _split(_images(folder)),
    "halves of images": lambda folder: _halves(_images(folder)),
    "lazy zip": lambda folder: LazyZip(folder / "rows.zip"),
    "split of lazy zip": lambda folder: _split(LazyZip(folder / "rows.zip")),
    "many items": lambda folder: ManyItems(),
    "split of many items": lambda folder: _split(ManyItems()),
    "mapped": lambda folder: Mapped(folder / "rows.npy"),
    "hugging face": _hugging_face,
    "tars": lambda folder: _shards(folder / "tars", ["npy", "cls"]),
    "parquet": lambda folder: _shards(folder / "parquet", ["x", "y"]),
}
"""Makes a data set from the folder that `write` has filled."""

_to_tensor = transforms.ToTensor()


def first(sample: Any) -> Any:
    """The transform of all scripts: a picture becomes a tensor, anything else stays."""
    return _to_tensor(sample).flatten() if isinstance(sample, Image.Image) else sample


def collate(batch: list[Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs (B, WIDTH), labels (B,) and indices (B,) of whatever the kind hands out."""
    rows, labels, indices = [], [], []
    for *parts, index in batch:
        x, y = parts if len(parts) == 2 else (parts[0]["x"], parts[0]["y"])
        rows.append(torch.as_tensor(np.array(x), dtype=torch.float32))
        labels.append(int(y))
        indices.append(int(index))
    return torch.stack(rows), torch.tensor(labels), torch.tensor(indices)


def plain_batch(dataset: Any, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The same batch, read from the data set itself."""
    batch = []
    for index in indices:
        item = dataset[index]
        parts = item if isinstance(item, tuple) else (item,)
        batch.append((first(parts[0]), *parts[1:], index))
    x, y, _ = collate(batch)
    return x, y
