"""Data sets of every kind that scripts train on, and wrappers around them; all pickle into workers."""

from __future__ import annotations

import atexit
import functools
import random
import shutil
import tempfile
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split
from torchvision import transforms
from torchvision.datasets import ImageFolder

Point = namedtuple("Point", ["x", "y"])


@dataclass
class Record:
    """What some data sets return; no codec knows it."""

    x: int


class Noise:
    """A random transform; leaves the sample as it was beside what it drew."""

    def __call__(self, sample: Any) -> dict[str, Any]:
        drawn = torch.tensor([torch.rand(()).item(), random.random(), np.random.rand()], dtype=torch.float64)
        return {"was": tensor_of(sample), "drawn": drawn}


class Mark:
    """A transform that is not random, and says which one it is."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, sample: Any) -> dict[str, Any]:
        return {"was": tensor_of(sample), "mark": self.number}


def prefixed(sample: Any) -> dict[str, Any]:
    """A prefix: a first step that is not random."""
    return {"first": tensor_of(sample), "kind": type(sample).__name__}


def tensor_of(sample: Any) -> Any:
    """A picture as a tensor; anything else as it is."""
    return torch.from_numpy(np.array(sample)) if isinstance(sample, Image.Image) else sample


def fused(flip: float, size: int) -> Any:
    """A chain that shade recognises and does in one pass."""
    steps = [transforms.Resize((size, size)), transforms.RandomHorizontalFlip(flip), transforms.ToTensor()]
    return transforms.Compose(steps)


TRANSFORMS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "mark": lambda: Mark(1),
    "other mark": lambda: Mark(2),
    "noise": Noise,
    "fused": lambda: fused(0.0, 6),
    "other fused": lambda: fused(1.0, 5),
    "fused noise": lambda: fused(0.5, 6),
}


class Items(Dataset[Any]):
    """Item i is a function of i; ``changed`` are corrected labels."""

    def __init__(self, kind: str, size: int, changed: tuple[int, ...]) -> None:
        self.kind, self.size, self.transform = kind, size, None
        self.labels = [(index * 7 + (100 if index in changed else 0)) % 1000 for index in range(size)]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.size:
            raise IndexError(index)
        item = ITEMS[self.kind](index, self.labels[index])
        transform: Any = self.transform
        if transform is None:
            return item
        return (transform(item[0]), *item[1:]) if isinstance(item, tuple) else transform(item)


def detection(index: int, label: int) -> Any:
    """Boxes of zero, one or two objects; one box has odd strides."""
    num_boxes = index % 3
    boxes = torch.arange(8.0).view(2, 4)[:num_boxes] + index
    labels = torch.full((2,), label)[::2] if num_boxes == 1 else torch.full((num_boxes,), label)
    return torch.full((3, 4 + index % 2, 5), index, dtype=torch.uint8), {"boxes": boxes, "labels": labels}


def odd(index: int, label: int) -> Any:
    """Tensors and arrays that lie in memory as few do."""
    grid = torch.arange(6.0).view(2, 3) + index
    one = torch.full((4,), float(index))[::4]
    arrays = np.asfortranarray(grid.numpy()), np.arange(3, dtype=">i4") + index, np.float16(index)
    tensors = grid.t(), torch.full((1,), float(index)).expand(3), one, torch.tensor(label)
    return (*tensors, grid.to(torch.bfloat16), grid.double(), torch.empty(0, 4), *arrays)


ITEMS: dict[str, Callable[[int, int], Any]] = {
    "dict": lambda i, label: {"x": torch.full((3,), float(i)), "y": label, "name": f"é{i}"},
    "bare tensor": lambda i, label: torch.tensor([float(i), float(label)]),
    "array and label": lambda i, label: (np.full((2, 2), i, dtype=np.float64), np.int64(label)),
    "detection": detection,
    "text": lambda i, label: ("wört " * (i % 4), label),
    "tokens": lambda i, label: [*range(i % 5), label],
    "audio": lambda i, label: (torch.arange(20.0 + i % 3).view(1, -1) + i, 16000, label),
    "triple": lambda i, label: (torch.ones(2) * i, label, f"id{i}"),
    "float target": lambda i, label: (torch.ones(2) * i, label + 0.5),
    "bool target": lambda i, label: (torch.ones(2) * i, label % 2 == 0),
    "string target": lambda i, label: (torch.ones(2) * i, f"class {label}"),
    "no target": lambda i, label: (torch.tensor([i, label]), None),
    "nested": lambda i, label: ((torch.ones(2) * i, [i, {"a": (label,)}]), {"k": b"\x00\xff"}),
    "odd": odd,
    "scalars": lambda i, label: (i, label / 3, True, np.float32(i)),
    "one part": lambda i, label: (torch.tensor([i, label]),),
    "pair as list": lambda i, label: [torch.ones(2) * i, label],
    "namedtuple": lambda i, label: Point(i, label),
    "dataclass": lambda i, label: Record(label),
    "noise inside": lambda i, label: (torch.full((2,), float(i)), label, torch.rand(()).item() + random.random()),
}
FOLDERS = ("folder", "folder of floats", "folder of strings")
KINDS = ("tensors", *FOLDERS, "hugging face", *ITEMS)


@functools.cache
def pictures(size: int, changed: tuple[int, ...]) -> Path:
    """A folder of JPEG and PNG files; it is removed as the process ends."""
    root = Path(tempfile.mkdtemp(prefix="differential-data-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    rng = np.random.default_rng(5)
    for number in range(size):
        pixels = rng.integers(0, 256, (3, 4, 3), dtype=np.uint8)
        image = Image.fromarray(255 - pixels if number in changed else pixels).resize((8 + number % 3, 9))
        (root / f"class{number % 2}").mkdir(exist_ok=True)
        image.save(root / f"class{number % 2}" / (f"{number:03d}.png" if number % 4 == 0 else f"{number:03d}.jpg"))
    return root


@functools.cache
def hugging_face(size: int, changed: tuple[int, ...]) -> Any:
    """A table in memory."""
    import datasets

    datasets.disable_progress_bars()
    labels = Items("dict", size, changed).labels
    columns = {
        "ids": [list(range(i % 4)) for i in range(size)],
        "label": labels,
        "text": [f"t{i}" for i in range(size)],
    }
    return datasets.Dataset.from_dict(columns)


def plain(kind: str, size: int, changed: tuple[int, ...] = ()) -> Any:
    """Makes a data set of this kind."""
    if kind == "tensors":
        return TensorDataset(torch.arange(3.0 * size).view(size, 3), torch.tensor(Items("dict", size, changed).labels))
    if kind == "hugging face":
        return hugging_face(size, changed).with_format(None)  # a copy, whose format may be set in place
    if kind not in FOLDERS:
        return Items(kind, size, changed)
    folder = ImageFolder(str(pictures(size, changed)))
    if kind != "folder":
        turned = (lambda label: label + 0.5) if kind == "folder of floats" else str
        folder.samples = folder.imgs = [(path, turned(label)) for path, label in folder.samples]
    return folder


class Shifted(Dataset[Any]):
    """A wrapper of a user's own, in the order of what is inside, or in another."""

    def __init__(self, dataset: Any, by: int = 0) -> None:
        self.dataset, self.by = dataset, by

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.dataset[(index + self.by) % len(self)]


def _split(dataset: Any) -> Any:
    return random_split(dataset, [len(dataset) - 2, 2], generator=torch.Generator().manual_seed(1))[0]


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "subset": lambda inside: Subset(inside, range(1, len(inside))),
    "reversed subset": lambda inside: Subset(inside, range(len(inside) - 1, -1, -1)),
    "concat": lambda inside: ConcatDataset([inside, Subset(inside, [1, 0])]),
    "split": _split,
    "own": Shifted,
    "shifted": lambda inside: Shifted(inside, 3),
}


class Indexed(Dataset[Any]):
    """Plain PyTorch's side of the comparison: the same samples, and the index as shade appends it."""

    def __init__(self, dataset: Any, transform: Any = None, prefix: Any = None) -> None:
        self.dataset, self.transform, self.prefix = dataset, transform, prefix
        targets = dataset.targets if isinstance(dataset, ImageFolder) else None
        if targets is not None and all(type(target) is int for _, target in dataset.samples):
            self.source = SimpleNamespace(target_N=np.array(targets))  # where a ShadeSampler looks for classes

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        item = self.dataset[index]
        parts = item if isinstance(item, tuple) else (item,)
        if self.prefix is not None:
            parts = (self.prefix(parts[0]), *parts[1:])
        return (parts[0] if self.transform is None else self.transform(parts[0]), *parts[1:], index)
