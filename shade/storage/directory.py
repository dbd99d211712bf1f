"""Stores files in a folder of a file system: written under another name, synced, renamed, the folders synced too.

A crash leaves the old content or the new one under a name, and perhaps a partial file that `sweep` recognises. Cost:
one fsync of the file and one of each folder up to the root, 0.3 ms each on an idle disk.

The commit of a name is: `FileOperations.create` a file of a name that no reader uses, `NewFile.write` all of it,
`NewFile.sync`, `FileOperations.rename` it over the final name, `FileOperations.sync_directory` up to the root. Only
these calls decide what survives a crash, so a simulated disk that implements them (and drops, tears and reorders what
was not synced) tests the real code. The assumptions about a file system are:

1. What was written to a file is there after its `sync` has returned.
2. `rename` is atomic: the name means the old file or the new one, after a crash too.
3. Creations, renames and removals in a folder are there after `sync_directory` of that folder has returned.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Protocol, TypeAlias

from typing_extensions import override

from shade.errors import ConfigError, StorageError
from shade.storage.base import VOLUMES, Volume
from shade.storage.direct import DirectFile
from shade.storage.names import check_name, failure, is_partial, partial_name
from shade.types import Bytes

_TRIES: Final = 5
"""How often another process may remove a folder between its creation and its use."""
_Paths: TypeAlias = list[str]


_NO_SUCH_THING = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)


class NewFile(Protocol):
    """A file that is written once, from beginning to end."""

    def write(self, part: memoryview) -> None:
        """Appends all bytes."""
        ...

    def sync(self) -> None:
        """Returns when everything written is on the medium; nothing is written afterwards."""
        ...

    def close(self) -> None:
        """Closes the descriptor without a sync. Safe to call twice."""
        ...


class FileOperations(Protocol):
    """The calls that a `DirectoryVolume` makes to a file system, by absolute paths.

    Raises:
        OSError: By any method, with its errno. The change may have happened or not.
    """

    def make_directory(self, path: str) -> bool:
        """Makes a folder; returns False if it exists."""
        ...

    def create(self, path: str) -> NewFile:
        """Returns a new empty file; raises FileExistsError if the path exists."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Moves a file over another or to a new path, atomically."""
        ...

    def sync_directory(self, path: str) -> None:
        """Returns when the names in the folder are on the medium."""
        ...

    def remove(self, path: str) -> bool:
        """Removes a file; returns False if there is none."""
        ...

    def remove_directory(self, path: str) -> bool:
        """Removes an empty folder; returns False if it is not empty or missing."""
        ...

    def size_bytes(self, path: str) -> int | None:
        """Returns the length of a file, or None if there is none."""
        ...

    def read_into(self, path: str, start: int, buffer: memoryview) -> int:
        """Fills the buffer from an offset; returns the number of bytes, fewer at the end of the file."""
        ...

    def entries(self, path: str) -> list[tuple[str, bool]]:
        """Returns the names in a folder, each with whether it is a folder; none if the folder is missing."""
        ...

    def free_bytes(self, path: str) -> int:
        """Returns the bytes that this user may still write; raises FileNotFoundError for a missing path."""
        ...


class OSFileOperations:
    """The real file system."""

    def make_directory(self, path: str) -> bool:
        try:
            os.mkdir(path)
        except FileExistsError:
            if os.path.isdir(path):
                return False
            raise
        return True

    def create(self, path: str) -> NewFile:
        return DirectFile(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))

    def rename(self, old: str, new: str) -> None:
        os.replace(old, new)

    def sync_directory(self, path: str) -> None:
        # A file system that cannot sync folders (some FUSE, CIFS) is accepted.
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        except OSError as error:
            if error.errno not in _NO_SUCH_THING:
                raise
        finally:
            os.close(folder)

    def remove(self, path: str) -> bool:
        try:
            os.unlink(path)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return False
        return True

    def remove_directory(self, path: str) -> bool:
        try:
            os.rmdir(path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise
            return False
        return True

    def size_bytes(self, path: str) -> int | None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = os.stat(path)
            return found.st_size if stat.S_ISREG(found.st_mode) else None
        return None

    def read_into(self, path: str, start: int, buffer: memoryview) -> int:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            done = 0
            while done < len(buffer):
                got = os.preadv(file, [buffer[done:]], start + done)
                if not got:
                    break
                done += got
            return done
        finally:
            os.close(file)

    def entries(self, path: str) -> list[tuple[str, bool]]:
        # A link to a folder does not count as a folder, so a walk cannot loop.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as found:
            return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]
        return []

    def free_bytes(self, path: str) -> int:
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize


@VOLUMES.register("local")
@VOLUMES.register("file")
class DirectoryVolume(Volume):
    """Stores files by their paths below a folder, which the first write creates.

    Args:
        url: A path, or ``file://`` and a path; ``~`` is the home folder.
        operations: The file system; the real one by default.

    Raises:
        ConfigError: The URL is no path.
    """

    def __init__(self, url: str, operations: FileOperations | None = None) -> None:
        path = url.partition("://")[2] if "://" in url else url
        if not path or "\0" in path:
            raise ConfigError.of("the path of a folder", url, "write one such as /mnt/checkpoints")
        self._root = os.path.abspath(os.path.expanduser(path))
        self._operations: FileOperations = operations or OSFileOperations()
        self._closed = False
        self.url = f"file://{self._root}"

    @override
    def write(self, name: str, parts: Iterable[Bytes]) -> int:
        # If the last step fails, the sync of the folders, the new content may stay in place.
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

    @override
    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        self._check_open()
        with self._translating(f"to read {name}"):
            num_bytes = self._operations.read_into(self._path(check_name(name)), start, buffer)
        if num_bytes < len(buffer):
            raise StorageError(
                f"expected {start + len(buffer)} bytes in {name} of {self.url}, got {start + num_bytes} at most; "
                "it was cut off or is another file"
            )

    @override
    def read_many(self, names: Sequence[str]) -> Sequence[bytes | None]:
        return [self._read_whole(name) for name in names]

    @override
    def size_bytes(self, name: str) -> int | None:
        self._check_open()
        with self._translating(f"to look for {name}"):
            return self._operations.size_bytes(self._path(check_name(name)))

    @override
    def list(self, prefix: str = "") -> list[str]:
        return sorted(name for name in self._walk(prefix) if not is_partial(name))

    @override
    def leftovers(self, prefix: str = "") -> Sequence[str]:
        return sorted(name for name in self._walk(prefix) if is_partial(name))

    @override
    def delete_many(self, names: Sequence[str]) -> int:
        # Each removal is on the medium before the next one begins.
        self._check_open()
        return sum(self._remove(check_name(name)) for name in names)

    @override
    def sweep(self, prefix: str = "") -> int:
        return sum(self._remove(name) for name in self.leftovers(prefix))

    @override
    def free_bytes(self) -> int | None:
        self._check_open()
        path = self._root
        with self._translating("to ask for free space"):
            while True:
                try:
                    return self._operations.free_bytes(path)
                except FileNotFoundError:  # the first write creates the root; until then its parent counts
                    if path == os.path.dirname(path):
                        raise
                    path = os.path.dirname(path)

    @override
    def ping(self) -> None:
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
            raise StorageError(
                f"expected to read back what was written to {self.url}, got {bytes(content)!r}; check this disk"
            )

    @override
    def close(self) -> None:
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
        """Creates a file and its folders; returns also the created folders."""
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
        """Writes and syncs the parts; an error of the parts themselves is raised unchanged."""
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
        """Syncs the folder, its parents up to the root, and the parents of folders that were just created.

        Existing parents too: another writer may have created them a moment ago without a sync yet.
        """
        parts = folder.split("/") if folder else []
        within = ["/".join(parts[:depth]) for depth in range(len(parts), -1, -1)]
        paths = [self._path(each) if each else self._root for each in within]
        for path in dict.fromkeys([*paths, *map(os.path.dirname, reversed(made))]):
            self._operations.sync_directory(path)

    def _remove(self, name: str) -> bool:
        """Removes a file, then the folders that become empty."""
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
        """Yields each file whose name, or whose folder if it is unfinished, starts with the prefix."""
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
