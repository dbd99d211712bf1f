"""Lets one live process at a time save under a run id: a note that its owner keeps changing.

Two processes that save under one id would take each other's slots and folders. So rank 0 leaves a note, in the store or
in storage, with its name and a count that goes up every beat. Who finds a note looks whether its owner lives:

* It was on this machine, and that process is gone: the note is dead, and a restart goes on at once.
* It does not change for three beats: dead as well. Clocks of two machines are never compared.
* It changes: `RunInUseError`, with the owner's host and process.

Stories: 1. *Two start at the same moment.* Both write; the later one wins, the earlier reads back a name that is not
its own. 2. *An owner is stopped for longer than three beats and replaced.* When it goes on it finds another name at
its next beat or save, writes nothing any more, and raises. 3. *It had read its own name, and writes a beat just after
it was replaced.* Then the new one finds the old name, and raises: one of the two goes on, never both for longer than a
beat. What they save in that beat is a slot or a folder overwritten by the other, which no digest will match.

A keeper that does not answer is no reason to stop a training: its beats and checks are left out until it is back.
The flusher of a run holds a lease of its own, under another name.

Where the small things of a run lie that must outlive a server: who saves, who flushes, whether it has ended.

Which runs there are: in a store, and in durable storage. For tools; a training run knows its own id.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Final, Protocol
from urllib.parse import quote

from shade.errors import RunInUseError, StorageError, StoreError
from shade.process import start_of, this_machine
from shade.storage import Volume
from shade.store import Store
from shade.store.keys import placement_tags

TRAINER: Final = "lease"
"""What the process that saves keeps alive: see `_tiers.run_lock`."""
FLUSHER: Final = "flusher"
"""What a run's flusher keeps alive."""
ENDED: Final = "ended"
"""What a run leaves when it has ended as it should."""
_NUM_KEYS: Final = 3


def spread_keys(run: str, name: str) -> list[str]:
    """The keys of something small, in a few distant parts of the key space.

    Args:
        run: The run id.
        name: What it is.

    Returns:
        Three keys, on as many servers of a cluster that has them.
    """
    tags = placement_tags()
    return [f"shade:checkpoint:{run}:{{{tag}}}{name}" for tag in tags[:: -(-len(tags) // _NUM_KEYS)]]


_STORE_BEAT_SECONDS: Final = 1.0
_STORAGE_BEAT_SECONDS: Final = 5.0
"""A write to a disk or a bucket costs more."""
_BEATS_TO_WAIT: Final = 3
_LOOKS_A_BEAT: Final = 10

logger = logging.getLogger("shade.checkpoint")


@dataclass(frozen=True)
class LockRecord:
    """What an owner says of itself."""

    owner: str
    """Unique."""
    machine: str
    """Boot and process namespace: where a process id means the same as here."""
    host: str
    process_id: int
    started: str
    """When the process started, as the kernel counts: another process with that id has another."""
    beat_seconds: float
    beat: int

    @classmethod
    def parse(cls, content: bytes) -> LockRecord | None:
        """Reads one; None for anything else."""
        try:
            return cls(**json.loads(content))
        except (ValueError, TypeError):
            return None


class _Keeper(Protocol):
    """Where a note is."""

    def read(self) -> bytes | None: ...

    def write(self, content: bytes) -> None: ...

    def remove(self) -> None: ...


class _InStore:
    """Under a few keys, so that it outlives a server."""

    def __init__(self, store: Store, run: str, name: str) -> None:
        self._store, self._keys = store, spread_keys(quote(run, safe=""), name)

    def read(self) -> bytes | None:
        return next((found for found in self._store.get_many(self._keys) if found is not None), None)

    def write(self, content: bytes) -> None:
        self._store.set_many(dict.fromkeys(self._keys, content))

    def remove(self) -> None:
        self._store.delete_many(self._keys)


class _InVolume:
    """In a small file beside the run's snapshots."""

    def __init__(self, volume: Volume, run: str, name: str) -> None:
        self._volume, self._name = volume, f"{run}/{name}.json"

    def read(self) -> bytes | None:
        return None if self._volume.size_bytes(self._name) is None else self._volume.read(self._name)

    def write(self, content: bytes) -> None:
        self._volume.write(self._name, [content])

    def remove(self) -> None:
        self._volume.delete_many([self._name])


def _keeper_of(keeper: Store | Volume, run: str, name: str) -> _Keeper:
    return _InStore(keeper, run, name) if isinstance(keeper, Store) else _InVolume(keeper, run, name)


def is_held(keeper: Store | Volume, run: str, name: str = TRAINER) -> bool:
    """Whether a live process has a lease. Takes a beat as a rule, and three at most.

    Args:
        keeper: Where.
        run: The run id.
        name: Of the lease.

    Returns:
        The answer.

    Raises:
        StoreError: The store does not answer.
        StorageError: The storage does not answer.
    """
    return _living_owner(_keeper_of(keeper, run, name)) is not None


class RunLock:
    """The right to save under a run id, from ``with`` or `acquire` on until `release`; may be acquired again.

    Args:
        keeper: A store, or storage: the same for all who could save under this id.
        run: The run id.
        name: Of the lease: the right to save, or another.
        beat_seconds: Between two signs of life; by default 1 in a store, 5 in storage.
    """

    def __init__(
        self, keeper: Store | Volume, run: str, *, name: str = TRAINER, beat_seconds: float | None = None
    ) -> None:
        self._run = run
        self._keeper = _keeper_of(keeper, run, name)
        default = _STORE_BEAT_SECONDS if isinstance(keeper, Store) else _STORAGE_BEAT_SECONDS
        self._beat_seconds = beat_seconds or default
        self._owner = secrets.token_hex(16)
        self._replaced_by: LockRecord | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Takes the right, from nobody or from the dead; waits at most three beats to tell.

        Raises:
            RunInUseError: A live process has it.
            StoreError: The store does not answer.
            StorageError: The storage does not answer.
        """
        living = _living_owner(self._keeper)
        if living is not None:
            raise self._in_use(living)
        self._stop.clear()
        self._replaced_by = None
        self._write(0)
        winner = self._found()
        if winner is not None and winner.owner != self._owner:
            raise self._in_use(winner)
        self._thread = threading.Thread(target=self._beat, name="shade-lease", daemon=True)
        self._thread.start()

    @property
    def is_ours(self) -> bool:
        """Whether no other name was found at the last beat; costs nothing."""
        return self._replaced_by is None

    def check(self) -> None:
        """Makes sure that the right is still ours; before each save. A keeper that does not answer has no say.

        Raises:
            RunInUseError: Another process has it now.
        """
        if self._replaced_by is None:
            try:
                self._look()
            except (StoreError, StorageError) as error:
                logger.debug("the lease on %s cannot be checked: %s", self._run, error)
        if self._replaced_by is not None:
            raise self._in_use(self._replaced_by)

    def release(self) -> None:
        """Gives the right back. Safe to call twice."""
        self._stop.set()
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        try:
            if self._look():
                self._keeper.remove()
        except (StoreError, StorageError) as error:
            logger.debug("the lease on %s stays behind, and is found dead: %s", self._run, error)

    def __enter__(self) -> RunLock:
        self.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    def _beat(self) -> None:
        count = 0
        while not self._stop.wait(self._beat_seconds):
            count += 1
            try:
                if not self._look():
                    return
                self._write(count)
            except (StoreError, StorageError) as error:
                logger.debug("no beat of the lease on %s: %s", self._run, error)

    def _look(self) -> bool:
        """False, for good, once another's name was found; a note that is gone (an emptied store) is written again."""
        found = self._found()
        if found is not None and found.owner != self._owner:
            self._replaced_by = found
        return self._replaced_by is None

    def _found(self) -> LockRecord | None:
        return _note_in(self._keeper)

    def _write(self, count: int) -> None:
        pid = os.getpid()
        started = start_of(pid) or ""
        note = LockRecord(self._owner, this_machine(), socket.gethostname(), pid, started, self._beat_seconds, count)
        self._keeper.write(json.dumps(asdict(note)).encode())

    def _in_use(self, other: LockRecord) -> RunInUseError:
        got = f"expected a run id of one's own, got {self._run!r}, which host {other.host}, process {other.process_id} "
        return RunInUseError(f"{got}saves under; choose another id, or end that process")


def _note_in(keeper: _Keeper) -> LockRecord | None:
    content = keeper.read()
    return None if content is None else LockRecord.parse(content)


def _living_owner(keeper: _Keeper) -> LockRecord | None:
    """Who is seen to live; None where nobody is."""
    found = _note_in(keeper)
    if found is None or _has_ended(found):
        return None
    deadline = time.monotonic() + _BEATS_TO_WAIT * found.beat_seconds
    while time.monotonic() < deadline:
        time.sleep(found.beat_seconds / _LOOKS_A_BEAT)
        now = _note_in(keeper)
        if now is None or _has_ended(now):
            return None
        if now != found:
            return now
    return None


def _has_ended(note: LockRecord) -> bool:
    """Whether its owner was on this machine and is no more."""
    return bool(note.machine) and note.machine == this_machine() and start_of(note.process_id) != note.started


_PREFIX = "shade:checkpoint:"


def runs_in_store(store: Store) -> list[str]:
    """Ids of runs that have anything in a store's memory.

    Args:
        store: Searched key by key: a second for a few million.

    Returns:
        Sorted.
    """
    return sorted({key[len(_PREFIX) :].partition(":")[0] for key in store.scan(_PREFIX)})


def runs_in_volume(volume: Volume) -> list[str]:
    """Ids of runs that have a committed snapshot in durable storage.

    Args:
        volume: Listed as a whole.

    Returns:
        Sorted.
    """
    parts = [name.split("/") for name in volume.list()]
    return sorted({part[0] for part in parts if len(part) == 3 and part[2] == "commit.json"})
