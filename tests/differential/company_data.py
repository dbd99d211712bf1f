"""Data sets of combined scripts: each as a user has it, with what opens at the first read; all pickle into workers."""

from __future__ import annotations

import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Sampler, Subset, TensorDataset, random_split
from torchvision import transforms
from torchvision.datasets import ImageFolder

from tests.differential.company_writers import COLUMNS, DECODE, WRITERS, write_shards

if TYPE_CHECKING:
    from tests.differential.company_script import Script

SIZE, WIDTH = 20, 6
"""Samples of a data set, and numbers in a sample."""


def numbers() -> torch.Tensor:
    """Row i is sample i."""
    return torch.randn(SIZE, WIDTH, generator=torch.Generator().manual_seed(3))


class Items(Dataset[Any]):
    """A data set of the user's own."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: Any) -> Any:
        return numbers()[index], index % 2


class LazyZip(Items):
    """Opens its archive at the first read, as many data sets do: a handle that processes share reads wrongly."""

    def __init__(self, path: Path) -> None:
        self.path, self.archive = path, None
        with zipfile.ZipFile(path) as archive:
            self.names = sorted(archive.namelist())

    def __getitem__(self, index: int) -> Any:
        if self.archive is None:
            self.archive = zipfile.ZipFile(self.path)
        return torch.frombuffer(bytearray(self.archive.read(self.names[index])), dtype=torch.float32), index % 2


class OpenFile(Items):
    """Has a file open from the beginning, and moves on from where it stands in it: not for workers."""

    def __init__(self, path: Path) -> None:
        self.file, self.at = path.open("rb", buffering=0), 0

    def __getitem__(self, index: int) -> Any:
        self.file.seek((index - self.at) * WIDTH * 4, 1)
        self.at = index + 1
        return torch.frombuffer(bytearray(self.file.read(WIDTH * 4)), dtype=torch.float32), index % 2


class ManyItems(Items):
    """Has ``__getitems__``, through which torch reads a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        rows = numbers()
        return [(rows[index], index % 2) for index in indices]


class OnlyManyItems(ManyItems):
    """Is read in batches alone, which torch's DataLoader does."""

    def __getitem__(self, index: Any) -> Any:
        raise NotImplementedError("read a batch")


class Uneven(Items):
    """Some samples take longer than others."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.05 * (index % 5 == 0))
        return super().__getitem__(index)


class Keyed(Items):
    """Samples have a number and a size as their key."""

    def __getitem__(self, index: Any) -> Any:
        number, _ = index if isinstance(index, tuple) else (index, 1)
        return super().__getitem__(number)


class Keys(Sampler[Any]):
    """Makes keys of a sampler's numbers."""

    def __init__(self, numbers: Any) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[Any]:
        return ((number, 1) for number in self.numbers)


class Mapped(Dataset[Any]):
    """Rows of a memory-mapped file, handed out as they are."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index], index % 2


def write(folder: Path) -> None:
    """Writes the files of the kinds that no other program writes."""
    rows = numbers().numpy()
    np.save(folder / "rows.npy", rows)
    (folder / "rows.bin").write_bytes(rows.tobytes())
    with zipfile.ZipFile(folder / "rows.zip", "w") as archive:
        for index, row in enumerate(rows):
            archive.writestr(f"{index:03d}", row.tobytes())
    rng = np.random.default_rng(5)
    for index in range(SIZE):
        at = folder / "images" / f"class{index % 2}" / f"{index:03d}.png"
        at.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (1, 2, 3), dtype=np.uint8)).save(at)


def _shards_folder(script: Script, data: Path) -> Path:
    return data / script.data / script.writer.replace(",", "").replace(" ", "-")


def write_for(script: Script, data: Path) -> None:
    """Writes what a script's data set lies in, where that is not there yet."""
    if script.data in WRITERS:
        write_shards(_shards_folder(script, data), script.data, script.writer, numbers().numpy())


def _tensors() -> Any:
    return TensorDataset(numbers(), torch.arange(SIZE) % 2)


def _hugging_face(folder: Path) -> Any:
    import datasets

    datasets.disable_progress_bars()
    rows = {"x": numbers().tolist(), "y": [index % 2 for index in range(SIZE)]}
    return datasets.Dataset.from_dict(rows).with_format("torch")


def _remote(folder: Path, name: str) -> Any:
    from shade import RemoteImageFolder

    return RemoteImageFolder((folder / name).read_text())


KINDS: dict[str, Callable[[Path], Any]] = {
    "tensors": lambda folder: _tensors(),
    "images": lambda folder: ImageFolder(str(folder / "images"), transform=None),
    "lazy zip": lambda folder: LazyZip(folder / "rows.zip"),
    "open file": lambda folder: OpenFile(folder / "rows.bin"),
    "many items": lambda folder: ManyItems(),
    "only many items": lambda folder: OnlyManyItems(),
    "uneven": lambda folder: Uneven(),
    "keyed": lambda folder: Keyed(),
    "mapped": lambda folder: Mapped(folder / "rows.npy"),
    "hugging face": _hugging_face,
    "remote images": lambda folder: _remote(folder, "server"),
    "images of a busy server": lambda folder: _remote(folder, "busy-server"),
}
"""Makes a data set from the folder that `write` has filled; those of `WRITERS` come beside them."""


def _wrapped(script: Script, whole: Any) -> Any:
    if script.wrapper == "split":
        return random_split(whole, [SIZE - 4, 4], generator=torch.Generator().manual_seed(1))[0]
    if script.wrapper == "halves":
        return ConcatDataset([Subset(whole, range(SIZE // 2)), Subset(whole, range(SIZE // 2, SIZE))])
    return whole


def num_samples(script: Script) -> int:
    """Samples of a script's data set."""
    return SIZE - 4 * (script.wrapper == "split")


def open_data(script: Script, data: Path, own: Path) -> Any:
    """Makes a script's data set.

    Args:
        script: The script.
        data: What `write` and `write_for` have filled.
        own: The script's own folder.
    """
    if script.data not in WRITERS:
        return _wrapped(script, KINDS[script.data](data))
    from shade import Shards

    columns, decode = COLUMNS[script.data], DECODE.get(script.data)
    return _wrapped(script, Shards(_shards_folder(script, data), columns, decode=decode, index=own / "index"))


def plain_data(script: Script, data: Path) -> Any:
    """The samples of `open_data` without shade. Of shards, what was given to their writer."""
    if script.data in WRITERS or script.data == "only many items":
        return _wrapped(script, _tensors())
    return _wrapped(script, KINDS["images" if "images" in script.data else script.data](data))


_to_tensor = transforms.ToTensor()


def first(sample: Any) -> Any:
    """The transform of all scripts: a picture becomes a tensor, anything else stays."""
    return _to_tensor(sample).flatten() if isinstance(sample, Image.Image) else sample


def collate(batch: list[Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs (B, WIDTH), labels (B,) and indices (B,) of whatever the kind hands out."""
    rows, labels, indices = [], [], []
    for *parts, index in batch:
        if len(parts) == 2:
            x, y = parts
        else:
            (part,) = parts
            x, y = (part["x"], part["y"]) if isinstance(part, dict) else (part[:-1], part[-1])
        rows.append(torch.as_tensor(np.array(x), dtype=torch.float32))
        labels.append(int(y))
        indices.append(index[0] if isinstance(index, tuple) else int(index))
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
