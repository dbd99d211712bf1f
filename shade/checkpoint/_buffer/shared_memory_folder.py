"""The folder of a run's shared-memory buffers, and its records; without PyTorch, for launchers and tools.

The buffers lie in the machine's shared memory, under the user and the run id. `_buffer.shared_memory_tier` writes them
and says what the files are. The logs of flushers lie beside the runs' folders, each locked (flock, shared) as long as a
flusher has it open, and removed under an exclusive lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

from shade.checkpoint._format.manifest import Commit
from shade.errors import ConfigError, CorruptCheckpointError

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


def own_records(folder: Path, damaged: list[str] | None = None) -> dict[str, Commit]:
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
        if record.run == folder.name and (location not in found or record.sequence > found[location].sequence):
            found[location] = record
    return found


def leftovers(parent: Path | None = None) -> Iterator[tuple[str, int]]:
    """Yields the runs that have buffers on this machine, and their bytes: memory that stays taken until removed."""
    ours = own_folder("", parent)
    for run in sorted(path for path in ours.iterdir() if path.is_dir()) if ours.is_dir() else ():
        yield run.name, sum(path.stat().st_blocks * 512 for path in run.glob("*.data"))


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
