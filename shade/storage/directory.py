"""A folder of a file system as a `Volume`, with the file operations that it asks of the system.

A name is committed by five calls: `FileOperations.create` under a name that no caller reads, `NewFile.write`,
`NewFile.sync`, `FileOperations.rename` over the final name, `FileOperations.sync_directory` up to the root. They assume
of a file system only this, which a simulated disk in the tests gives and nothing more:

1. What was written to a file is there after its `sync` has returned.
2. `rename` is atomic: the name means the old file or the new one, after a crash too.
3. Creations, renames and removals in a folder are there after `sync_directory` of that folder has returned.

`DirectFile` bypasses the page cache, since a shard is written once and not read again soon; decision 0009 has what that
saves. `OSFileOperations.read_directly` reads by the same rules, for a shard that one process reads.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Protocol, TypeAlias

import numpy as np
from typing_extensions import override

from shade.errors import ConfigError, StorageError
from shade.process import file_system_of, sync_directory
from shade.storage.base import VOLUMES, Volume, check_name, failure, is_partial, partial_name
from shade.types import Bytes

_TRIES: Final = 5
"""How often other processes may delete a folder between its making and its use."""
_Paths: TypeAlias = list[str]


class NewFile(Protocol):
    """A file being written, from its beginning to its end, once."""

    def write(self, part: memoryview) -> None:
        """Appends all of these bytes."""
        ...

    def sync(self) -> None:
        """Returns when everything written is on the medium. Nothing is written after it."""
        ...

    def close(self) -> None:
        """Frees the descriptor; guarantees nothing. Safe to call twice."""
        ...


class FileOperations(Protocol):
    """A file system, by absolute paths.

    Raises:
        OSError: By any method, with its errno. What the call should have changed may or may not have changed.
    """

    def make_directory(self, path: str) -> bool:
        """Makes one folder; returns False if it is there already."""
        ...

    def create(self, path: str) -> NewFile:
        """Makes a new, empty file; raises FileExistsError if the name is taken."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Moves a file to a new name, atomically replacing a file of that name."""
        ...

    def sync_directory(self, path: str) -> None:
        """Returns when the names in this folder are on the medium."""
        ...

    def remove(self, path: str) -> bool:
        """Deletes a file; returns False if there is none."""
        ...

    def remove_directory(self, path: str) -> bool:
        """Deletes an empty folder; returns False if it is not empty, or missing."""
        ...

    def size_bytes(self, path: str) -> int | None:
        """Returns the length of a file; None if there is none."""
        ...

    def read_into(self, path: str, start: int, buffer: memoryview) -> int:
        """Fills the buffer from an offset; returns how many bytes there were, fewer at the end of the file."""
        ...

    def read_directly(self, path: str, start: int, buffer: memoryview) -> int:
        """As `read_into`, past the page cache where that is possible."""
        ...

    def entries(self, path: str) -> list[tuple[str, bool]]:
        """Lists the names in a folder, each with whether it is a folder; none for a missing folder."""
        ...

    def free_bytes(self, path: str) -> int:
        """Returns the space left to this user; raises FileNotFoundError for a missing path."""
        ...


class OSFileOperations(FileOperations):
    """The operating system's file system."""

    @override
    def make_directory(self, path: str) -> bool:
        try:
            os.mkdir(path)
        except FileExistsError:
            if os.path.isdir(path):
                return False
            raise
        return True

    @override
    def create(self, path: str) -> NewFile:
        return DirectFile(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))

    @override
    def rename(self, old: str, new: str) -> None:
        os.replace(old, new)

    @override
    def sync_directory(self, path: str) -> None:
        sync_directory(path)

    @override
    def remove(self, path: str) -> bool:
        try:
            os.unlink(path)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return False
        return True

    @override
    def remove_directory(self, path: str) -> bool:
        try:
            os.rmdir(path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise
            return False
        return True

    @override
    def size_bytes(self, path: str) -> int | None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = os.stat(path)
            return found.st_size if stat.S_ISREG(found.st_mode) else None
        return None

    @override
    def read_into(self, path: str, start: int, buffer: memoryview) -> int:
        return _read(path, 0, start, buffer)

    @override
    def read_directly(self, path: str, start: int, buffer: memoryview) -> int:
        done, length = 0, len(buffer) // ALIGNMENT * ALIGNMENT
        if length >= _WORTH_FLUSHING_BYTES and start % ALIGNMENT == 0 and _is_aligned(buffer):
            try:
                done = _read(path, getattr(os, "O_DIRECT", 0), start, buffer[:length])
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
        if done and done == len(buffer):
            return done
        return done + _read(path, 0, start + done, buffer[done:])

    @override
    def entries(self, path: str) -> list[tuple[str, bool]]:
        """A link to a folder counts as a file, so no walk goes round in circles."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as found:
            return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]
        return []

    @override
    def free_bytes(self, path: str) -> int:
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize


ALIGNMENT: Final = 4096
GATHER_BYTES: Final = 4 * 2**20
_NUMBERED: Final = (
    *("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay"),
    *("nfs", "nfs4", "lustre", "ceph", "gpfs"),
)
"""File systems where a file keeps its inode number over mounts and machines; FUSE, SMB and FAT give others."""
_WORTH_FLUSHING_BYTES: Final = 2**20
"""A part this long is not copied, not even if a short one before it waits in the buffer."""


class DirectFile:
    """A new file, written from its beginning to its end.

    Args:
        file: Descriptor of an empty file, without ``O_DIRECT``; closed by `close`.
    """

    def __init__(self, file: int) -> None:
        self._file: int | None = file
        self._flags = fcntl.fcntl(file, fcntl.F_GETFL)
        self._may_direct = hasattr(os, "O_DIRECT")
        self._is_direct = False
        self._gathered: mmap.mmap | None = None
        self._num_gathered = 0
        self._num_written = 0

    def write(self, part: memoryview) -> None:
        """Appends contiguous bytes; after an OSError the file is of no use."""
        rest = part.cast("B") if part.nbytes else memoryview(b"")
        while rest.nbytes:
            is_long = rest.nbytes >= _WORTH_FLUSHING_BYTES
            if is_long and self._num_gathered % ALIGNMENT == 0 and _is_aligned(rest):
                self._flush()
                length = rest.nbytes // ALIGNMENT * ALIGNMENT
                self._put(rest[:length])
                rest = rest[length:]
                continue
            if self._gathered is None:
                self._gathered = mmap.mmap(-1, GATHER_BYTES)  # pages are aligned, and given as they are touched
            length = min(rest.nbytes, GATHER_BYTES - self._num_gathered)
            self._gathered[self._num_gathered : self._num_gathered + length] = rest[:length]
            self._num_gathered += length
            rest = rest[length:]
            if self._num_gathered == GATHER_BYTES:
                self._flush()

    def sync(self) -> None:
        """Returns when everything written is on the medium; after an OSError the file is of no use."""
        self._flush()
        os.fsync(self._descriptor())

    def close(self) -> None:
        """Frees descriptor and buffer."""
        if self._file is not None:
            file, self._file = self._file, None
            os.close(file)
        self._gathered = None  # unmapped with its last view; the traceback of a failed write still holds one

    def _descriptor(self) -> int:
        assert self._file is not None, "written after close"
        return self._file

    def _flush(self) -> None:
        if self._gathered is not None and self._num_gathered:
            self._put(memoryview(self._gathered)[: self._num_gathered])
            self._num_gathered = 0

    def _put(self, content: memoryview) -> None:
        """Writes at the end: aligned bytes directly if they are long enough to be worth it, the rest through the page
        cache."""
        file = self._descriptor()
        done = 0
        while done < content.nbytes:
            length = (content.nbytes - done) // ALIGNMENT * ALIGNMENT
            direct = self._may_direct and length >= _WORTH_FLUSHING_BYTES and self._num_written % ALIGNMENT == 0
            self._switch(direct)
            piece = content[done : done + length] if self._is_direct else content[done:]
            try:
                count = os.pwrite(file, piece, self._num_written)
            except OSError as error:
                if not self._is_direct or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                self._may_direct = False  # taken when it was switched on, refused now: NFS and FUSE do that
                continue
            if not self._is_direct and count >= _WORTH_FLUSHING_BYTES:
                os.posix_fadvise(file, self._num_written, count, os.POSIX_FADV_DONTNEED)  # starts writing it out
            self._num_written += count
            done += count

    def _switch(self, direct: bool) -> None:
        if direct == self._is_direct:
            return
        try:
            fcntl.fcntl(self._descriptor(), fcntl.F_SETFL, self._flags | os.O_DIRECT if direct else self._flags)
            self._is_direct = direct
        except OSError as error:
            if not direct or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self._may_direct = False


def _read(path: str, flags: int, start: int, buffer: memoryview) -> int:
    """Fills the buffer from an offset; with ``O_DIRECT`` up to what is left of the last block of the file."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        # One call may return less than asked for: the kernel stops at 2 GiB, a signal anywhere.
        done = 0
        while done < len(buffer):
            got = os.preadv(file, [buffer[done:]], start + done)
            done += got
            if not got or (flags and got % ALIGNMENT):
                break
        return done
    finally:
        os.close(file)


def _is_aligned(content: memoryview) -> bool:
    return int(np.frombuffer(content, dtype=np.uint8).ctypes.data) % ALIGNMENT == 0


@VOLUMES.register("local")
@VOLUMES.register("file")
class DirectoryVolume(Volume):
    """Names are paths below a folder, which the first write makes.

    Args:
        url: A path, or ``file://`` and a path; ``~`` is the home folder.
        operations: The file system; the real one by default.

    Raises:
        ConfigError: Not a path.
    """

    def __init__(self, url: str, operations: FileOperations | None = None) -> None:
        path = url.partition("://")[2] if "://" in url else url
        if not path or "\0" in path:
            raise ConfigError.of("the path of a folder", url, "write one such as /mnt/checkpoints")
        self._root = os.path.abspath(os.path.expanduser(path))
        self._operations: FileOperations = operations or OSFileOperations()
        self.url = f"file://{self._root}"

    @override
    def write(self, name: str, parts: Iterable[Bytes]) -> int:
        """A failure of the very last step, the folders' sync, may leave the new content in place."""
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
            # The original error matters more than a failed cleanup; `sweep` finds the rest.
            with contextlib.suppress(OSError):
                self._operations.remove(partial)
            raise
        with self._translating(f"to write {name}"):
            self._sync_up(folder, made)
        return num_bytes

    @override
    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        self._read_by(self._operations.read_into, name, start, buffer)

    @override
    def read_directly(self, name: str, start: int, buffer: memoryview) -> None:
        self._read_by(self._operations.read_directly, name, start, buffer)

    def _read_by(self, read: Callable[[str, int, memoryview], int], name: str, start: int, buffer: memoryview) -> None:
        self._check_open()
        with self._translating(f"to read {name}"):
            num_bytes = read(self._path(check_name(name)), start, buffer)
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
        """Each removal is on the medium before the next one begins."""
        self._check_open()
        return sum(self._remove(check_name(name)) for name in names)

    @override
    def sweep(self, prefix: str = "") -> int:
        num_files = 0
        for folder, names in reversed([*self._tree(prefix)]):
            if f"{folder}/".startswith(prefix):
                num_files += sum(self._remove(name) for name in names if is_partial(name))
                self._remove_empty(folder)  # a process that died after it had removed the last file left it
        return num_files

    @override
    def file_number(self, name: str) -> int | None:
        with contextlib.suppress(OSError):
            if file_system_of(self._root) in _NUMBERED:
                return os.stat(self._path(name)).st_ino
        return None

    @override
    def free_bytes(self) -> int | None:
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
            raise StorageError(f"expected to read back what was written to {self.url}, got {bytes(content)!r}; mend it")

    def _path(self, name: str) -> str:
        return os.path.join(self._root, name)

    @contextlib.contextmanager
    def _translating(self, expected: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise failure(f"{expected} in {self.url}", error, "see the system's log about this disk") from error

    def _create(self, path: str) -> tuple[NewFile, _Paths]:
        """Creates a file and its missing folders; returns the file and the folders made."""
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
        """Writes and syncs; exceptions of the parts themselves pass through unchanged."""
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
        """Syncs the folder, those above it to the root, and those that hold a folder just made.

        All of those above, because another writer may have made them a moment ago and not synced them yet.
        """
        parts = folder.split("/") if folder else []
        within = ["/".join(parts[:depth]) for depth in range(len(parts), -1, -1)]
        paths = [self._path(each) if each else self._root for each in within]
        for path in dict.fromkeys([*paths, *map(os.path.dirname, reversed(made))]):
            self._operations.sync_directory(path)

    def _remove(self, name: str) -> bool:
        """Deletes a file, then the folders that become empty."""
        folder = name.rpartition("/")[0]
        with self._translating(f"to remove {name}"):
            there = self._operations.remove(self._path(name))
            if there:
                self._operations.sync_directory(self._path(folder) if folder else self._root)
        self._remove_empty(folder)
        return there

    def _remove_empty(self, folder: str) -> None:
        """Deletes a folder if it is empty, and those above it that become so."""
        with self._translating(f"to remove {folder}"):
            while folder and self._operations.remove_directory(self._path(folder)):
                folder = folder.rpartition("/")[0]
                self._operations.sync_directory(self._path(folder) if folder else self._root)

    def _walk(self, prefix: str) -> Iterator[str]:
        """Yields every file whose name, or for an unfinished one whose folder, starts with the prefix."""
        for folder, files in self._tree(prefix):
            for name in files:
                if (f"{folder}/" if is_partial(name) and folder else name).startswith(prefix):
                    yield name

    def _tree(self, prefix: str) -> Iterator[tuple[str, Sequence[str]]]:
        """Yields the folders that may hold names with the prefix, each before those in it, with all their files."""
        self._check_open()
        folders = [prefix.rpartition("/")[0]]
        while folders:
            folder = folders.pop()
            with self._translating(f"to list {folder or 'the files'}"):
                entries = self._operations.entries(self._path(folder) if folder else self._root)
            names = [(f"{folder}/{entry}" if folder else entry, is_folder) for entry, is_folder in entries]
            yield folder, [name for name, is_folder in names if not is_folder]
            inner = [name for name, is_folder in names if is_folder]
            folders += [name for name in inner if f"{name}/".startswith(prefix) or prefix.startswith(f"{name}/")]

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
