"""A folder of a file system as a `Volume`: written beside, synced, renamed over, the folders synced too.

The order is the whole of it, and `shade.storage.operations` names what it relies on. A crash leaves the old content or
the new one under the name, and perhaps a file that `sweep` recognises. Price: one fsync of the file and one of each
folder from there to the root, 0.3 ms apiece on a disk that has nothing else to write.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeAlias

from shade.errors import ConfigError, StorageError
from shade.storage.base import VOLUMES, Volume
from shade.storage.names import check_name, failure, is_partial, partial_name
from shade.storage.operations import FileOperations, NewFile, OSFileOperations
from shade.types import Bytes

_TRIES: Final = 5
"""How often a folder may be removed by others between its making and its use."""
_Paths: TypeAlias = list[str]


@VOLUMES.register("local")
@VOLUMES.register("file")
class DirectoryVolume(Volume):
    """Names are paths below a folder, which is made by the first write.

    Args:
        url: A path, or ``file://`` and a path; ``~`` is the home folder.
        operations: Whom it asks to do things; the real file system by default.

    Raises:
        ConfigError: Not a path.
    """

    def __init__(self, url: str, operations: FileOperations | None = None) -> None:
        path = url.partition("://")[2] if "://" in url else url
        if not path or "\0" in path:
            raise ConfigError.of("the path of a folder", url, "write one such as /mnt/checkpoints")
        self._root = os.path.abspath(os.path.expanduser(path))
        self._operations: FileOperations = operations or OSFileOperations()
        self._closed = False
        self.url = f"file://{self._root}"

    def write(self, name: str, parts: Iterable[Bytes]) -> int:
        """See `Volume`. A failure of the very last step, the folders' sync, may leave the new content in place."""
        self._check_open()
        folder = check_name(name).rpartition("/")[0]
        partial = self._path(partial_name(folder))
        with self._translating(f"to write {name}"):
            file, made = self._create(partial)
        try:
            num_bytes = self._fill(file, parts, name)
            with self._translating(f"to write {name}"):
                self._operations.rename(partial, self._path(name))
        except BaseException:
            with contextlib.suppress(OSError):
                self._operations.remove(partial)
            raise
        with self._translating(f"to write {name}"):
            self._sync_up(folder, made)
        return num_bytes

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """See `Volume`."""
        self._check_open()
        with self._translating(f"to read {name}"):
            num_bytes = self._operations.read_into(self._path(check_name(name)), start, buffer)
        if num_bytes < len(buffer):
            raise StorageError(
                f"expected {start + len(buffer)} bytes in {name} of {self.url}, got {start + num_bytes} at most; "
                "it was cut off or is another file"
            )

    def read_many(self, names: Sequence[str]) -> Sequence[bytes | None]:
        """See `Volume`."""
        return [self._read_whole(name) for name in names]

    def size_bytes(self, name: str) -> int | None:
        """See `Volume`."""
        self._check_open()
        with self._translating(f"to look for {name}"):
            return self._operations.size_bytes(self._path(check_name(name)))

    def list(self, prefix: str = "") -> list[str]:
        """See `Volume`."""
        return sorted(name for name in self._walk(prefix) if not is_partial(name))

    def leftovers(self, prefix: str = "") -> Sequence[str]:
        """See `Volume`."""
        return sorted(name for name in self._walk(prefix) if is_partial(name))

    def delete_many(self, names: Sequence[str]) -> int:
        """See `Volume`; each removal is on the medium before the next one begins."""
        self._check_open()
        return sum(self._remove(check_name(name)) for name in names)

    def sweep(self, prefix: str = "") -> int:
        """See `Volume`."""
        return sum(self._remove(name) for name in self.leftovers(prefix))

    def free_bytes(self) -> int | None:
        """See `Volume`."""
        self._check_open()
        path = self._root
        with self._translating("to ask for free space"):
            while True:
                try:
                    return self._operations.free_bytes(path)
                except FileNotFoundError:  # the root is made by the first write; its parent is where it will be
                    if path == os.path.dirname(path):
                        raise
                    path = os.path.dirname(path)

    def ping(self) -> None:
        """See `Volume`."""
        self._check_open()
        probe, content = self._path(partial_name("")), bytearray(5)
        with self._translating("to write a small file"):
            file, made = self._create(probe)
        try:
            self._fill(file, [b"shade"], "a small file")
            with self._translating("to sync a folder"):
                self._sync_up("", made)
            with self._translating("to read what was just written"):
                self._operations.read_into(probe, 0, memoryview(content))
        finally:
            with self._translating("to remove a small file"):
                self._operations.remove(probe)
        if content != b"shade":
            raise StorageError(f"expected to read back what was written to {self.url}, got {bytes(content)!r}; mend it")

    def close(self) -> None:
        """See `Volume`."""
        self._closed = True

    def _path(self, name: str) -> str:
        return os.path.join(self._root, name)

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError(f"expected an open volume, got {self.url} after close(); open it again")

    @contextlib.contextmanager
    def _translating(self, expected: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise failure(f"{expected} in {self.url}", error, "see the system's log about this disk") from error

    def _create(self, path: str) -> tuple[NewFile, _Paths]:
        """A new file, its folders made; also those made."""
        made: _Paths = []
        for remaining in reversed(range(_TRIES)):
            try:
                return self._operations.create(path), made
            except FileNotFoundError:
                if not remaining:
                    raise
                self._make_folders(os.path.dirname(path), made)
        raise AssertionError("the loop returns or raises")

    def _make_folders(self, path: str, made: _Paths) -> None:
        try:
            if self._operations.make_directory(path):
                made.append(path)
        except FileNotFoundError:
            parent = os.path.dirname(path)
            if parent == path:
                raise
            self._make_folders(parent, made)
            if self._operations.make_directory(path):
                made.append(path)

    def _fill(self, file: NewFile, parts: Iterable[Bytes], name: str) -> int:
        """Writes and syncs; what the parts themselves raise goes through unchanged."""
        num_bytes = 0
        try:
            for part in parts:
                with self._translating(f"to write {name}"):
                    file.write(memoryview(part))
                num_bytes += memoryview(part).nbytes
            with self._translating(f"to write {name}"):
                file.sync()
        finally:
            with self._translating(f"to close {name}"):
                file.close()
        return num_bytes

    def _sync_up(self, folder: str, made: Sequence[str]) -> None:
        """Syncs the folder, those above it to the root, and those that hold a folder that was just made.

        Those above too, made by us or not: another writer may have made them a moment ago and not synced them yet.
        """
        parts = folder.split("/") if folder else []
        within = ["/".join(parts[:depth]) for depth in range(len(parts), -1, -1)]
        paths = [self._path(each) if each else self._root for each in within]
        for path in dict.fromkeys([*paths, *map(os.path.dirname, reversed(made))]):
            self._operations.sync_directory(path)

    def _remove(self, name: str) -> bool:
        """Removes a file, then the folders that it leaves empty."""
        folder = name.rpartition("/")[0]
        with self._translating(f"to remove {name}"):
            there = self._operations.remove(self._path(name))
            if there:
                self._operations.sync_directory(self._path(folder) if folder else self._root)
            while folder and self._operations.remove_directory(self._path(folder)):
                folder = folder.rpartition("/")[0]
                self._operations.sync_directory(self._path(folder) if folder else self._root)
        return there

    def _walk(self, prefix: str) -> Iterator[str]:
        """Every file whose name, or for an unfinished one whose folder, starts with the prefix."""
        self._check_open()
        folders = [prefix.rpartition("/")[0]]
        while folders:
            folder = folders.pop()
            with self._translating(f"to list {folder or 'the files'}"):
                entries = self._operations.entries(self._path(folder) if folder else self._root)
            for entry, is_folder in entries:
                name = f"{folder}/{entry}" if folder else entry
                if is_folder and (f"{name}/".startswith(prefix) or prefix.startswith(f"{name}/")):
                    folders.append(name)
                elif not is_folder and (f"{folder}/" if is_partial(name) and folder else name).startswith(prefix):
                    yield name

    def _read_whole(self, name: str) -> bytes | None:
        num_bytes = self.size_bytes(name)
        if num_bytes is None:
            return None
        buffer = bytearray(num_bytes)
        with self._translating(f"to read {name}"):
            try:
                found = self._operations.read_into(self._path(name), 0, memoryview(buffer))
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.EIO):
                    raise
                return None
        return bytes(buffer[:found])
