"""Everything that a `DirectoryVolume` asks of a file system, and the real one, whose `DirectFile` bypasses the page
cache.

A name is committed by five calls: `FileOperations.create` under a name that no caller reads, `NewFile.write`,
`NewFile.sync`, `FileOperations.rename` over the final name, `FileOperations.sync_directory` up to the root. These calls
alone decide what survives a crash, so a simulated disk that implements them (and drops, tears and reorders whatever was
not synced) tests the real code above. They assume of a file system only this:

1. What was written to a file is there after its `sync` has returned.
2. `rename` is atomic: the name means the old file or the new one, after a crash too.
3. Creations, renames and removals in a folder are there after `sync_directory` of that folder has returned.

Why direct: a shard is written once and not read again soon. Through the page cache the kernel copies its bytes, evicts
cached training data, and takes 0.3 processor seconds a gigabyte from the training; with ``O_DIRECT`` the disk fetches
them from the caller's memory for a tenth of that (decision 0009). ``O_DIRECT`` wants addresses, offsets and lengths
that are multiples of 4096. Long parts that comply, such as chunks of a shared buffer, are written from where they lie;
others are gathered in an aligned buffer first, at the price of one copy. The ragged end, and small files, go through
the page cache; so does everything if the file system refuses ``O_DIRECT``, each piece flushed as soon as it is written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
from typing import Final, Protocol

import numpy as np
from typing_extensions import override

_NO_SUCH_THING = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)


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
        """Ignores a file system that cannot sync folders (some FUSE, CIFS): it has none to sync."""
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        except OSError as error:
            if error.errno not in _NO_SUCH_THING:
                raise
        finally:
            os.close(folder)

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
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # One call may return less than asked for: the kernel stops at 2 GiB, a signal anywhere.
            done = 0
            while done < len(buffer):
                got = os.preadv(file, [buffer[done:]], start + done)
                if not got:
                    break
                done += got
            return done
        finally:
            os.close(file)

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


def _is_aligned(content: memoryview) -> bool:
    return int(np.frombuffer(content, dtype=np.uint8).ctypes.data) % ALIGNMENT == 0
