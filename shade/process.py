"""What this process asks of the system: other processes, and files that are replaced whole.

*Processes* end with the one that started them: each child asks the kernel for a signal at that moment (Linux only). A
few outlive it, in a session of their own. *Files* are written beside their name, which begins with a dot and ends in
``.new``, and renamed: a reader finds the old content or the new one. After a power cut a renamed file may be empty,
unless its content was synced before. A file's lock is the kernel's, and ends with the process that holds it. *Folders
that processes share* lie in memory; the last process that leaves one removes it, and what killed processes leave is
removed by the next that needs such a folder.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

_PR_SET_PDEATHSIG = 1
_ENDED = ("Z", "X")
"""States of a process that has ended."""
_NETWORK = (
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "orangefs"),
    *("pvfs2", "ocfs2", "gfs2", "fuse"),
)
_LOCAL_FUSE = ("fuseblk", "fuse.fuse-overlayfs")
_LAUNCH = '"$@" >/dev/null & echo "$!"'


def die_with_parent(parent_pid: int, by: int = signal.SIGTERM) -> None:
    """Asks the kernel for a signal when the parent (strictly: the thread of it that started this process) ends.

    Args:
        parent_pid: Id of the expected parent; if it has ended already, this process gets the signal at once.
        by: The signal.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(by), 0, 0, 0)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), by)


@functools.cache
def keep_fsspec_from_forks() -> None:
    """Makes a forked child release the sockets on which fsspec's thread talks in the parent; called before fsspec is
    used."""
    from fsspec import asyn

    kept: list[Any] = [None]

    def let_go() -> None:
        selector = getattr(kept[0], "_selector", None)
        if selector is None or sys.platform != "linux":
            return
        # The child has copies of the sessions. When they are collected, they close connections: they would say goodbye
        # on the parent's sockets, and take them out of the epoll instance that both processes share, so that the
        # parent's thread would wait for ever. Under the same numbers there is nothing now that the parent has, too.
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for descriptor in [*(selector.get_map() or ())]:
            os.dup2(nothing, descriptor, inheritable=False)
        os.close(nothing)
        with select.epoll() as empty:
            os.dup2(empty.fileno(), selector.fileno(), inheritable=False)

    # Before the fork, because fsspec forgets its loop in the child.
    os.register_at_fork(before=lambda: kept.__setitem__(0, asyn.loop[0]), after_in_child=let_go)


def start_detached(command: Sequence[str], log: IO[bytes], environment: Mapping[str, str] | None = None) -> int:
    """Starts a process that outlives this one, with standard error in ``log`` and ``environment`` as its variables
    (None: those of this process). Returns its process id, which is known before it does anything."""
    launched = subprocess.run(
        ["/bin/sh", "-c", _LAUNCH, "shade-launch", *command],
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log,
        env=environment,
        start_new_session=True,
    )
    return int(launched.stdout)


def this_machine() -> str:
    """Returns a text that is equal for processes that see each other's ids; empty if the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def start_of(process_id: int) -> str | None:
    """Returns the kernel's start time of a live process, as text; None if none has this id. An id is used again."""
    status = _status(process_id)
    return None if status is None or status[0] in _ENDED else status[19]


def is_running(process_id: int) -> bool:
    """Returns whether a process runs; a zombie does not."""
    if not _exists(process_id):
        return False
    status = _status(process_id)
    if status is None:  # gone since it was asked for; or a system that does not show it
        return _exists(process_id)
    return status[0] not in _ENDED


def _status(process_id: int) -> list[str] | None:
    """Returns the fields of proc(5) from the state on; None if there is no such process, or no proc."""
    try:
        status = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return status.rpartition(")")[2].split()


def _exists(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yields a path beside a file, or a folder that does not exist; at the end what was written there takes its place.

    Args:
        path: Path of the file or folder. Its parent exists.
        durable: Whether it has to be there after a power cut.

    Yields:
        Where to write. After an exception, nothing is replaced.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    try:
        yield beside
        for each in (beside, *beside.rglob("*")) if durable else ():
            _sync(each)
        beside.replace(path)
    except BaseException:
        _remove(beside)
        raise
    if durable:
        _sync(path.parent)


def remove_leftovers(path: Path) -> None:
    """Removes what processes that were killed have left beside a path."""
    if path.parent.is_dir():
        for each in path.parent.iterdir():
            if each.name.startswith(f".{path.name}.") and each.name.endswith(".new"):
                _remove(each)


def _remove(path: Path) -> None:
    """Removes a file or a folder; does nothing if there is none."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Syncs a folder. Ignores a file system that cannot sync folders (some FUSE, CIFS): it has none to sync."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(folder)


def _sync(path: Path) -> None:
    if path.is_dir():
        return sync_directory(path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def file_system_of(path: str, mounts: str = "/proc/self/mountinfo") -> str:
    """Returns the type of the file system that a path is on, as the mount table names it; empty where there is no
    table."""
    try:
        with open(mounts, encoding="utf-8", errors="surrogateescape") as table:
            lines = table.read().splitlines()
    except OSError:
        return ""
    real, best, kind = os.path.realpath(path), "", ""
    for line in lines:
        before, _, after = line.partition(" - ")
        point = before.split()[4].encode("utf-8", "surrogateescape").decode("unicode_escape")
        if (real + "/").startswith(point.rstrip("/") + "/") and len(point) >= len(best):
            best, kind = point, after.split()[0]
    return kind


def is_network(kind: str) -> bool:
    """Returns whether files of a type of file system, as `file_system_of` returns it, may be on another machine."""
    return kind.partition(".")[0] in _NETWORK and kind not in _LOCAL_FUSE


@contextmanager
def exclusive_lock(path: str) -> Iterator[None]:
    """Holds the lock of a file, which is made, against all other processes; waits for it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


_held: dict[tuple[int, str], list[int]] = {}
"""By process and folder: the file whose lock says that the process uses the folder, and how often it has entered."""


def enter_folder(folder: str) -> None:
    """Makes a folder that processes share, or joins those that use it. A lock says who does; children do not inherit
    it, and it ends with the process. See `leave_folder`."""
    mine = _held.setdefault((os.getpid(), folder), [])
    while not mine:
        with suppress(FileNotFoundError):  # another process removed the folder before it was locked
            os.makedirs(folder, mode=0o700, exist_ok=True)
            users = os.open(os.path.join(folder, "users"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.lockf(users, fcntl.LOCK_SH)
            if os.fstat(users).st_nlink:
                mine += [users, 0]
            else:
                os.close(users)
    mine[1] += 1


def leave_folder(folder: str, process: int) -> None:
    """Leaves a folder that a process entered; the last one that leaves it removes it. Does nothing in other
    processes."""
    if process != os.getpid():
        return
    mine = _held[process, folder]
    mine[1] -= 1
    if not mine[1]:
        del _held[process, folder]
        os.close(mine[0])
        remove_unused(folder)


def remove_unused(folder: str) -> None:
    """Removes a folder that processes share, unless one uses it: what killed processes have left."""
    if (os.getpid(), folder) in _held:  # its own lock would not keep this process from it
        return
    with suppress(OSError):
        users = os.open(os.path.join(folder, "users"), os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.lockf(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(users)


_file_memory: dict[int, range] = {}
"""Addresses at which a file is mapped from its beginning, by its descriptor."""


def register_file_memory(descriptor: int, address: int, num_bytes: int) -> None:
    """Remembers memory that is a shared mapping of a file from its beginning, so that what lies there may be sent from
    the file. Neither is given back before `unregister_file_memory`."""
    _file_memory[descriptor] = range(address, address + num_bytes)


def unregister_file_memory(descriptor: int) -> None:
    """Forgets a file's memory. Safe to call without `register_file_memory`."""
    _file_memory.pop(descriptor, None)


def position_in_file(piece: bytes | bytearray | memoryview) -> tuple[int, int] | None:
    """Returns the descriptor and the offset of the file that a piece lies in; None if it lies in none."""
    if not _file_memory or not isinstance(piece, memoryview) or piece.readonly:
        return None
    address = ctypes.addressof(ctypes.c_char.from_buffer(piece))
    for descriptor, memory in list(_file_memory.items()):
        if address in memory and address + piece.nbytes <= memory.stop:
            return descriptor, address - memory.start
    return None
