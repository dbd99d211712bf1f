"""The folder of a run's shared-memory buffers, and its records; without PyTorch, for launchers and tools.

The buffers lie in the machine's shared memory, under the user, the run id and the identity of run and storage
(`_tiers.identity`). `_buffer.shared_memory_tier` writes them and says what the files are. What a killed run has left is
removed by a later one after an hour, unless its newest snapshot lies nowhere else.

The logs of flushers lie beside the runs' folders, each locked (flock, shared) as long as a flusher has it open, and
removed under an exclusive lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import IO, Final

from shade.checkpoint._format.manifest import Commit
from shade.errors import ConfigError, CorruptCheckpointError

ABOUT: Final = "about"
"""Name of the file that says whose folder it is."""
KEPT_SECONDS: Final = 3600.0
"""Time within which a run that was killed is begun again, as a rule, and reads shared memory."""
claimed: Final[set[tuple[int, Path]]] = set()
"""Locked files of this process, with its id. To open and close such a file again would take its lock away."""
_RUN_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_run_name(run: str) -> None:
    """Refuses a run id that cannot be the name of a folder, and a part of keys and of objects' names."""
    if not _RUN_NAME.fullmatch(run):
        raise ConfigError.of("a run id of letters, digits, '.', '_' and '-'", run, "choose another")


def shared_memory() -> Path:
    """Returns the machine's shared memory, or the temporary folder where there is none."""
    return Path("/dev/shm") if os.access("/dev/shm", os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


def own_folder(run: str, parent: Path | None = None) -> Path:
    """Returns the path of a run's folder, which need not exist; by default in the machine's shared memory."""
    return (parent or shared_memory()) / f"shade-{os.getuid()}" / run


def own_records(folder: Path, run: str, damaged: list[str] | None = None) -> dict[str, Commit]:
    """Returns the record of each location in a run's folder; of two records for one location the newer one.

    ``damaged`` receives the names of records that cannot be read.
    """
    found: dict[str, Commit] = {}
    for path in sorted(folder.glob("rank-*.commit")):
        location = path.name.split(".")[1]
        try:
            record = Commit.parse(path.read_bytes())
        except FileNotFoundError:
            continue
        except (OSError, CorruptCheckpointError):
            if damaged is not None:
                damaged.append(path.name)
            continue
        if record.run == run and (location not in found or record.sequence > found[location].sequence):
            found[location] = record
    return found


@dataclass(frozen=True)
class Held:
    """What one run has in this machine's shared memory: memory that stays taken until it is removed."""

    folder: Path
    run: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers."""
        total = 0
        for path in self.folder.glob("*.data"):
            with contextlib.suppress(FileNotFoundError):  # its run removes it
                total += path.stat().st_blocks * 512
        return total

    @property
    def about(self) -> str:
        """Whose it is: an address of storage, or a command."""
        with contextlib.suppress(OSError):
            return (self.folder / ABOUT).read_text()
        return ""

    @property
    def newest(self) -> Commit | None:
        """Record of the newest snapshot."""
        return max(own_records(self.folder, self.run).values(), key=lambda record: record.sequence, default=None)

    @property
    def is_elsewhere(self) -> bool:
        """Whether its newest snapshot lies in another tier as well, or there is none."""
        marked = 0
        for path in self.folder.glob("rank-*.elsewhere"):
            with contextlib.suppress(FileNotFoundError):
                marked = max(marked, int(path.read_text() or "0"))
        newest = self.newest
        return newest is None or newest.sequence <= marked

    @property
    def is_old(self) -> bool:
        """Whether nothing was written there for long."""
        return time.time() - max(path.stat().st_mtime for path in self.folder.iterdir()) > KEPT_SECONDS

    @property
    def is_in_use(self) -> bool:
        """Whether a live process uses it."""
        with self._locks() as locked:
            return not locked

    def free(self) -> bool:
        """Removes it; returns False if a live process uses it."""
        with self._locks() as locked:
            if locked:
                remove_folder(self.folder)
            return locked

    @contextlib.contextmanager
    def _locks(self) -> Iterator[bool]:
        """Holds the locks of all ranks; yields False if a live process holds one."""
        with contextlib.ExitStack() as held:
            is_free = True
            for path in self.folder.glob("rank-*.claim.lock"):
                is_free = is_free and (os.getpid(), path) not in claimed
                with contextlib.suppress(FileNotFoundError):
                    try:
                        if is_free:
                            fcntl.lockf(held.enter_context(path.open("r+b")), fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except (BlockingIOError, PermissionError):
                        is_free = False
            yield is_free


def held_here() -> Iterator[Held]:
    """Yields what each run has in shared memory, in the order of their ids."""
    folder = own_folder("")
    # pathlib's own would raise where another process removes a folder meanwhile.
    for place in sorted(glob(f"*/*/{ABOUT}", root_dir=folder)):
        yield Held((folder / place).parent, Path(place).parts[0])


def sweep_memory() -> None:
    """Removes what runs that were killed have left, as the top of the file says."""
    for each in held_here():
        with contextlib.suppress(OSError, ValueError):  # another process removes it as well
            if each.is_old and each.is_elsewhere:
                each.free()


def remove_folder(folder: Path, *, is_empty: bool = False) -> None:
    """Removes the folder of a run's buffers, and the run's if there is no other in it."""
    with contextlib.suppress(OSError):
        if is_empty:
            folder.rmdir()  # fails if a rank has begun meanwhile
        else:
            shutil.rmtree(folder, ignore_errors=True)
        folder.parent.rmdir()


def flusher_log(run: str) -> Path:
    """Returns where the flusher that a run starts by itself writes."""
    return own_folder("") / f"flusher-{run}.log"


def open_log(path: Path) -> IO[bytes]:
    """Opens a flusher's log to append to it, locked until it is closed here and in processes that inherit it."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        log = path.open("a+b")
        fcntl.flock(log, fcntl.LOCK_SH)
        if _is_at(log.fileno(), path):
            return log
        log.close()  # a flusher that ended has removed it in between


def remove_log(path: Path, descriptor: int) -> None:
    """Removes a flusher's log, which is open in this process, unless another process has it open."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(descriptor, path):
            path.unlink()


def sweep_logs() -> None:
    """Removes the logs of flushers that were killed on this machine; logs of live ones stay."""
    for path in own_folder("").glob("flusher-*.log"):
        with contextlib.suppress(OSError), path.open("ab") as log:
            remove_log(path, log.fileno())


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file still has that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
