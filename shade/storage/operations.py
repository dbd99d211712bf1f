"""Everything a `DirectoryVolume` asks of a file system, and nothing else: the ground its promise stands on.

The commit of a name is: `FileOperations.create` a file of a name nobody reads, `NewFile.write` all of it,
`NewFile.sync`, `FileOperations.rename` it over the final name, `FileOperations.sync_directory` up to the root. What
survives a crash is decided by these calls alone, so a simulated disk that implements them (and drops, tears and
reorders whatever was not synced) tests the real code above. Assumed of a file system, and of nothing more:

1. What was written to a file is there after its `sync` has returned.
2. `rename` is atomic: the name means the old file or the new one, after a crash too.
3. Creations, renames and removals in a folder are there after `sync_directory` of that folder has returned.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import Protocol

from shade.storage.direct import DirectFile

_NO_SUCH_THING = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)


class NewFile(Protocol):
    """A file that is being written, from its beginning to its end, once."""

    def write(self, part: memoryview) -> None:
        """Appends all of these bytes."""
        ...

    def sync(self) -> None:
        """Returns when everything written is on the medium. Nothing is written after it."""
        ...

    def close(self) -> None:
        """Frees the descriptor; promises nothing. Safe to call twice."""
        ...


class FileOperations(Protocol):
    """A file system, by absolute paths.

    Raises:
        OSError: By any method, with its errno. What the call should have changed may or may not have changed.
    """

    def make_directory(self, path: str) -> bool:
        """Makes one folder; False where there is one already."""
        ...

    def create(self, path: str) -> NewFile:
        """A new and empty file; FileExistsError where there is anything."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Puts a file in the place of another, atomically, or where there is none."""
        ...

    def sync_directory(self, path: str) -> None:
        """Returns when the names in this folder are on the medium."""
        ...

    def remove(self, path: str) -> bool:
        """Removes a file; False where there is none."""
        ...

    def remove_directory(self, path: str) -> bool:
        """Removes an empty folder; False where it is not empty, or not there."""
        ...

    def size_bytes(self, path: str) -> int | None:
        """Length of a file; None where there is none."""
        ...

    def read_into(self, path: str, start: int, buffer: memoryview) -> int:
        """Fills the buffer from that offset; how many bytes there were, fewer at the end of the file."""
        ...

    def entries(self, path: str) -> list[tuple[str, bool]]:
        """Names in a folder, each with whether it is a folder itself; none where there is no such folder."""
        ...

    def free_bytes(self, path: str) -> int:
        """What this user may still write there; FileNotFoundError where the path is none."""
        ...


class OSFileOperations:
    """The real one."""

    def make_directory(self, path: str) -> bool:
        """See `FileOperations`."""
        try:
            os.mkdir(path)
        except FileExistsError:
            if os.path.isdir(path):
                return False
            raise
        return True

    def create(self, path: str) -> NewFile:
        """See `FileOperations`."""
        return DirectFile(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))

    def rename(self, old: str, new: str) -> None:
        """See `FileOperations`."""
        os.replace(old, new)

    def sync_directory(self, path: str) -> None:
        """See `FileOperations`; a file system that cannot sync folders (some FUSE, CIFS) has none to sync."""
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        except OSError as error:
            if error.errno not in _NO_SUCH_THING:
                raise
        finally:
            os.close(folder)

    def remove(self, path: str) -> bool:
        """See `FileOperations`."""
        try:
            os.unlink(path)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return False
        return True

    def remove_directory(self, path: str) -> bool:
        """See `FileOperations`."""
        try:
            os.rmdir(path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise
            return False
        return True

    def size_bytes(self, path: str) -> int | None:
        """See `FileOperations`."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = os.stat(path)
            return found.st_size if stat.S_ISREG(found.st_mode) else None
        return None

    def read_into(self, path: str, start: int, buffer: memoryview) -> int:
        """See `FileOperations`."""
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
        """See `FileOperations`; a link to a folder is no folder, so no walk goes round in circles."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as found:
            return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]
        return []

    def free_bytes(self, path: str) -> int:
        """See `FileOperations`."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize
