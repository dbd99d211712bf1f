"""Debian packages as a source of data: fetched by name and version, checked against a hash, unpacked without root.

A task's list (glyphs.json, text.json) names each package with its version and the SHA-256 of its file, so two machines
start from the same bytes. `apt-get download` fetches; packages that already lie in the folder are not fetched again, so
a machine without an index can be given the files.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

_AT_ONCE = 50


class Package(NamedTuple):
    """One Debian package."""

    name: str
    version: str
    sha256: str

    def file_in(self, folder: Path) -> Path | None:
        """Returns its file in a folder, or None."""
        return next(iter(folder.glob(f"{self.name}_*.deb")), None)


class PackageError(Exception):
    """A package could not be had as the list names it."""


def fetch(packages: Sequence[Package], folder: Path) -> None:
    """Fetches what a folder lacks, and checks the hash of every package.

    Raises:
        PackageError: No apt-get, a version that the index does not have, or a file with another hash.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = [package for package in packages if package.file_in(folder) is None]
    if missing and shutil.which("apt-get") is None:
        raise PackageError(f"expected apt-get, got none; put {missing[0].name} and the others into {folder}")
    for start in range(0, len(missing), _AT_ONCE):
        print(f"fetching packages {start + 1} to {min(start + _AT_ONCE, len(missing))} of {len(missing)}", flush=True)
        words = [f"{package.name}={package.version}" for package in missing[start : start + _AT_ONCE]]
        ran = subprocess.run(
            ["apt-get", "download", "-q", *words], cwd=folder, capture_output=True, text=True, check=False
        )
        if ran.returncode:
            cure = f"run apt-get update, on Debian 12, or put the packages into {folder}"
            raise PackageError(f"expected the versions of the list, got: {ran.stderr.strip()}; {cure}")
    for package in packages:
        found = package.file_in(folder)
        if found is None or (got := hashlib.sha256(found.read_bytes()).hexdigest()) != package.sha256:
            at = found or folder
            raise PackageError(f"{at}: expected SHA-256 {package.sha256}, got {got if found else 'no file'}; delete it")


def share_of(name: str) -> float:
    """Returns a number in [0, 1) that a name always has: it decides what is held out for validation."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") / 2**32


@contextmanager
def unpacked(package: Package, folder: Path) -> Iterator[Path]:
    """Yields a temporary folder with a fetched package's files; keeps the copyright file in ``folder/licences``."""
    with tempfile.TemporaryDirectory() as temporary:
        files = Path(temporary) / package.name
        unpack(package, folder / "packages", files)
        (folder / "licences").mkdir(parents=True, exist_ok=True)
        path = files / "usr/share/doc" / package.name / "copyright"
        kept = path.read_text(errors="replace") if path.is_file() else ""
        (folder / "licences" / package.name).write_text(kept)
        yield files


def unpack(package: Package, folder: Path, target: Path) -> None:
    """Unpacks a fetched package into a new folder."""
    file = package.file_in(folder)
    assert file is not None
    target.mkdir(parents=True)
    subprocess.run(["dpkg-deb", "-x", str(file), str(target)], check=True, capture_output=True)
