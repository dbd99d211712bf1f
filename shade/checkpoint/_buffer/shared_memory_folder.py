"""Where own memory is, and what a look from outside tells of it: without PyTorch, for launchers and tools.

A run's buffers lie in a folder of the machine's shared memory, under its user and its id; `_buffer.shared_memory_tier`
writes them and says what the files are.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from shade.checkpoint._format.manifest import Commit
from shade.errors import ConfigError, CorruptCheckpointError

_RUN_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_run_name(run: str) -> None:
    """A run id becomes a folder, and a part of keys and of objects' names.

    Args:
        run: What the user calls the run.

    Raises:
        ConfigError: It cannot be used so.
    """
    if not _RUN_NAME.fullmatch(run):
        raise ConfigError.of("a run id of letters, digits, '.', '_' and '-'", run, "choose another")


def shared_memory() -> Path:
    """Where buffers go: the machine's shared memory, or the temporary folder where there is none."""
    return Path("/dev/shm") if os.access("/dev/shm", os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


def own_folder(run: str, parent: Path | None = None) -> Path:
    """A run's folder.

    Args:
        run: The run id.
        parent: By default the machine's shared memory.

    Returns:
        Its path; there may be nothing.
    """
    return (parent or shared_memory()) / f"shade-{os.getuid()}" / run


def own_records(folder: Path, damaged: list[str] | None = None) -> dict[str, Commit]:
    """The snapshots in a run's folder; of two records for one place the newer counts.

    Args:
        folder: See `own_folder`.
        damaged: Takes the names of records that cannot be read.

    Returns:
        Each place with its record.
    """
    found: dict[str, Commit] = {}
    for path in sorted(folder.glob("rank-*.commit")):
        place = path.name.split(".")[1]
        try:
            record = Commit.parse(path.read_bytes())
        except FileNotFoundError:
            continue
        except (OSError, CorruptCheckpointError):
            if damaged is not None:
                damaged.append(path.name)
            continue
        if record.run == folder.name and (place not in found or record.sequence > found[place].sequence):
            found[place] = record
    return found


def leftovers(parent: Path | None = None) -> Iterator[tuple[str, int]]:
    """Runs that have buffers on this machine, with their bytes: memory that nobody gets back until they are removed.

    Args:
        parent: See `own_folder`.

    Yields:
        Run id and bytes.
    """
    ours = own_folder("", parent)
    for run in sorted(ours.iterdir()) if ours.is_dir() else ():
        yield run.name, sum(path.stat().st_blocks * 512 for path in run.glob("*.data"))
