"""Turns the official CIFAR-10 archive into two image folders: train/<class>/… and test/<class>/…

    python benchmarks/prepare_CIFAR10.py -train_src DIR -test_src DIR -train_dest DIR -test_dest DIR

A source is a folder that holds ``cifar-10-python.tar.gz`` or, extracted, ``cifar-10-batches-py``; with neither, the
archive is downloaded into it. Every byte is checked against the official MD5 sums before it is read: the batches are
pickles, and a pickle can run code. Even then they are read by an unpickler that knows numpy arrays and nothing else.

Every PNG is written under another name and renamed, so a file that is there is whole. Stopped in the middle, the next
run writes what is missing; a complete folder is recognised by ``.cifar10.json``, written last, and left alone.

Price: 60,000 small files, about 150 MB and a minute. Errors are one line; the exit status is then 2.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import pickle
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from tqdm import tqdm

from shade.errors import DataError, ShadeError

ARCHIVE = "cifar-10-python.tar.gz"
FOLDER = "cifar-10-batches-py"
MARKER = ".cifar10.json"
SPLITS = {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)}
OFFICIAL_MD5 = {
    ARCHIVE: "c58f30108f718f92721af3b95e74349a",
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
    "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
}
"""As torchvision has them (a test compares)."""

NUMPY_NAMES = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
}
"""All that the official batches refer to, under the names numpy 1 and 2 give it."""


class ArrayUnpickler(pickle.Unpickler):
    """Reads dicts, lists, numbers, strings and numpy arrays; refuses whatever else a pickle names."""

    def find_class(self, module: str, name: str) -> Any:
        """Looks a name up, if it is on the list."""
        if (module, name) not in NUMPY_NAMES:
            raise DataError.of(
                "a pickle of numpy arrays", f"{module}.{name}", "this is not a CIFAR-10 batch; remove it"
            )
        if name == "_reconstruct":
            return np.empty(0).__reduce__()[0]
        return getattr(np, name)


@dataclass(frozen=True)
class Batches:
    """The verified files of one source."""

    read: Callable[[str], bytes]
    """Name of a batch → its content, checked."""

    def images(self, split: str) -> Iterator[tuple[npt.NDArray[np.uint8], str]]:
        """Images (32, 32, 3) with their class names, in the official order."""
        classes = [str(name) for name in _unpickle(self.read("batches.meta"))["label_names"]]
        for name in SPLITS[split]:
            batch = _unpickle(self.read(name))
            pixels = np.asarray(batch["data"], dtype=np.uint8).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
            for image, label in zip(pixels, batch["labels"], strict=True):
                yield image, classes[label]


def open_source(source: Path, md5: dict[str, str]) -> Batches:
    """Finds and verifies the archive or the extracted folder in a source folder, downloading it if neither is there.

    Args:
        source: The folder.
        md5: Name → expected checksum.

    Returns:
        The batches, each verified before it is handed out.

    Raises:
        DataError: Nothing there and no network, or a checksum that differs.
    """
    folder = source if source.name == FOLDER else source / FOLDER
    archive = source if source.name == ARCHIVE else source / ARCHIVE
    if not archive.is_file() and folder.is_dir():
        return Batches(lambda name: _checked((folder / name).read_bytes(), name, md5, folder))
    if not archive.is_file():
        _download(source, md5[ARCHIVE])
    content = _checked(archive.read_bytes(), ARCHIVE, md5, source)
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        files = {Path(m.name).name: f.read() for m in tar if m.isfile() and (f := tar.extractfile(m)) is not None}
    return Batches(lambda name: _checked(files.get(name, b""), name, md5, archive))


def _checked(content: bytes, name: str, md5: dict[str, str], where: Path) -> bytes:
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != md5[name]:
        cure = f"{where} is damaged, half downloaded or not CIFAR-10: remove it and fetch it again"
        raise DataError.of(f"{name} with MD5 {md5[name]}", found, cure)
    return content


def _download(source: Path, md5: str) -> None:
    from torchvision.datasets import CIFAR10
    from torchvision.datasets.utils import download_url

    try:
        download_url(CIFAR10.url, str(source), filename=ARCHIVE, md5=md5)
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"expected {ARCHIVE} or {FOLDER} in {source}, found neither, and downloading {CIFAR10.url} failed "
            f"({error}); fetch it on another machine and put it there"
        ) from None


def _unpickle(content: bytes) -> dict[str, Any]:
    value = ArrayUnpickler(io.BytesIO(content), encoding="latin1").load()
    if not isinstance(value, dict):
        raise DataError.of("a batch that is a dict", type(value).__name__, "this is not CIFAR-10")
    return value


def write_split(split: str, dest: Path, open_batches: Callable[[], Batches]) -> str:
    """Fills an image folder with one split, writing only what is missing.

    Args:
        split: ``"train"`` or ``"test"``.
        dest: The image folder; made if absent.
        open_batches: Gives the source; not called when ``dest`` is complete.

    Returns:
        A line that says what was done.

    Raises:
        DataError: The source is not there or not what it should be, or ``dest`` holds the other split.
        OSError: The disk refused.
    """
    marker = dest / MARKER
    there = {path.relative_to(dest).as_posix() for path in dest.glob("*/*.png")}
    if marker.is_file():
        complete = json.loads(marker.read_bytes())
        if complete["split"] != split:
            raise DataError.of(f"an empty folder or a {split} one", f"{dest} ({complete['split']})", "name another")
        if complete["images"] == len(there):
            return f"{split}: {len(there):,} images already in {dest}"
    for leftover in dest.glob("*/.*.tmp"):
        leftover.unlink()
    batches = open_batches()
    num_images = num_written = 0
    for number, (image, name) in enumerate(tqdm(batches.images(split), desc=f"{split} → {dest}", unit=" images")):
        num_images += 1
        relative = f"{name}/{number:05d}.png"
        if relative in there:
            continue
        if not (dest / name).is_dir():
            (dest / name).mkdir(parents=True)
        png = io.BytesIO()
        Image.fromarray(image).save(png, "png")
        _replace(dest / relative, png.getvalue())
        num_written += 1
    _replace(marker, json.dumps({"split": split, "images": num_images}).encode())
    return f"{split}: {num_written:,} of {num_images:,} images written to {dest}"


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


def prepare(train_src: Path, test_src: Path, train_dest: Path, test_dest: Path, md5: dict[str, str]) -> list[str]:
    """Writes both splits; the sums are an argument only so that a test can bring an archive of its own."""
    if train_dest.resolve() == test_dest.resolve():
        raise DataError.of("two different destinations", str(train_dest), "training images are no test images")
    opened: dict[Path, Batches] = {}

    def batches_of(source: Path) -> Batches:
        if source not in opened:
            opened[source] = open_source(source, md5)
        return opened[source]

    return [
        write_split("train", train_dest, lambda: batches_of(train_src)),
        write_split("test", test_dest, lambda: batches_of(test_src)),
    ]


def main(argv: list[str] | None = None, md5: dict[str, str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="prepare_CIFAR10.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, meaning in (
        ("train_src", "folder with the archive, or where to download it"),
        ("test_src", "the same for the test images; usually the same folder"),
        ("train_dest", "image folder to write the 50,000 training images to"),
        ("test_dest", "image folder to write the 10,000 test images to"),
    ):
        flag = name.replace("_", "-")
        parser.add_argument(f"-{name}", f"--{name}", f"--{flag}", required=True, type=Path, metavar="DIR", help=meaning)
    options = parser.parse_args(argv)
    paths = (options.train_src, options.test_src, options.train_dest, options.test_dest)
    try:
        for line in prepare(*paths, md5=md5 or OFFICIAL_MD5):
            print(line)
    except (ShadeError, OSError, tarfile.TarError, pickle.UnpicklingError) as error:
        print(f"prepare_CIFAR10: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
