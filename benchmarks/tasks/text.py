"""Text: pieces of 256 bytes out of the files of 59 Debian packages; what comes next, or which package is it from?

Sources of many programming languages, manuals and markup. One file serves two tasks:

* *Language model*, in bits per byte: `model_parts` splits by package, so validation is text of projects never seen.
* *Classification*: the class is the package, and validation is the files that are `held_out`.

text.json names the packages, each with version and SHA-256, and the SHA-256 of what is written. They were chosen by
hand for variety, from those of Debian 12 without a security update, as such a version stays in the index.

Written to the folder:
    text.npz     pieces uint8 (N, 256), package int64 (N,), held_out bool (N,): of a file kept for validation
    licences/    the copyright file of each package; all are free software by Debian's guidelines
"""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shade.process import replacing
from tasks.packages import Package, PackageError, fetch, share_of, unpacked

LENGTH = 256
LIST = Path(__file__).with_name("text.json")

_PIECES, _HELD_OUT_PIECES = 600, 150
"""Most pieces of one package."""
_HELD_OUT = 0.2

Bytes = npt.NDArray[np.uint8]


class Text(NamedTuple):
    """The pieces of all packages."""

    pieces: Bytes
    """(N, 256)."""
    package: npt.NDArray[np.int64]
    """(N,): which of the packages, in the order of text.json."""
    held_out: npt.NDArray[np.bool_]
    """(N,): of a file kept for validation."""


def load(folder: Path) -> Text:
    """Reads what `prepare` wrote."""
    with np.load(prepare(folder)) as stored:
        return Text(stored["pieces"], stored["package"], stored["held_out"])


def names() -> list[str]:
    """Returns the names of the packages, the classes, in order."""
    return [each["name"] for each in json.loads(LIST.read_text())["packages"]]


def model_parts(text: Text) -> tuple[Bytes, Bytes]:
    """Returns the pieces for training and validation of a language model, split by package."""
    held_out = np.array([share_of(name) < _HELD_OUT for name in names()])
    rows = held_out[text.package]
    return text.pieces[~rows], text.pieces[rows]


def prepare(folder: Path) -> Path:
    """Writes the task into a folder, unless it is there, and returns the path of text.npz.

    Raises:
        PackageError: A package could not be had, or its text differs from that of the list.
    """
    target = folder / "text.npz"
    if target.exists():
        return target
    listed = json.loads(LIST.read_text())
    packages = [Package(each["name"], each["version"], each["sha256"]) for each in listed["packages"]]
    fetch(packages, folder / "packages")
    text = _cut(packages, folder)
    got = hashlib.sha256(b"".join(part.tobytes() for part in text)).hexdigest()
    if got != listed["text_sha256"]:
        raise PackageError(f"expected text with SHA-256 {listed['text_sha256']}, got {got}; report it: it cannot be")
    with replacing(target) as beside, beside.open("wb") as file:
        np.savez(file, **text._asdict())
    return target


def _cut(packages: list[Package], folder: Path) -> Text:
    pieces, owner, held_out = [], [], []
    for number, package in enumerate(packages):
        with unpacked(package, folder) as files:
            for kept, limit in ((False, _PIECES), (True, _HELD_OUT_PIECES)):
                found = _pieces(files, kept, limit)
                pieces.append(found)
                owner.append(np.full(len(found), number))
                held_out.append(np.full(len(found), kept))
    return Text(np.concatenate(pieces), np.concatenate(owner), np.concatenate(held_out))


def _pieces(files: Path, held_out: bool, limit: int) -> Bytes:
    """Returns at most ``limit`` pieces of the files of one part, evenly spread over them: uint8 (n, 256)."""
    found: list[bytes] = []
    for path in sorted(files.rglob("*")):
        name = str(path.relative_to(files))
        if path.is_symlink() or not path.is_file() or "copyright" in name or (share_of(name) < _HELD_OUT) != held_out:
            continue
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
        if _is_text(content):
            found += [content[at : at + LENGTH] for at in range(0, len(content) - LENGTH + 1, LENGTH)]
    picked = [found[i * len(found) // limit] for i in range(limit)] if len(found) > limit else found
    return np.frombuffer(b"".join(picked), np.uint8).reshape(-1, LENGTH)


def _is_text(content: bytes) -> bool:
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return False
    return "\0" not in text and sum(map(text.count, "\n ")) > len(text) / 50
