"""Lets one live process at a time save under a run id, by a lock record that its owner keeps changing.

Rank 0 writes a record, in the store or in storage, with its name and a count that rises with every heartbeat. Its owner
is dead if it was on this machine and its process is gone, or if the record does not change for three heartbeats. Else
`RunInUseError` names the owner's host and process.

Of two processes that take a lock at once the later write wins; the other reads back a foreign name, at the latest one
heartbeat later, and raises. A slot or folder that both wrote in that time matches no digest. A store that does not
answer does not stop a training. The flusher of a run holds a second lock, and `ENDED` marks a run that ended normally.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Final
from urllib.parse import quote

import msgspec

from shade.errors import RunInUseError, StorageError, StoreError
from shade.process import start_of, this_machine
from shade.storage import Volume
from shade.store import Store
from shade.store.keys import placement_tags

TRAINER: Final = "lease"
"""Name of the lock of the process that saves."""
FLUSHER: Final = "flusher"
"""Name of the lock of the run's flusher."""
ENDED: Final = "ended"
"""Name of the mark that a run leaves when it ends normally."""
_NUM_KEYS: Final = 3


def spread_keys(run: str, name: str) -> list[str]:
    """Returns three keys for a small value of a run, on as many servers of a cluster if it has them."""
    tags = placement_tags()
    return [f"shade:checkpoint:{run}:{{{tag}}}{name}" for tag in tags[:: -(-len(tags) // _NUM_KEYS)]]


_STORE_HEARTBEAT_SECONDS: Final = 1.0
_STORAGE_HEARTBEAT_SECONDS: Final = 5.0
"""Longer than in a store, because a write to a disk or a bucket costs more."""
_HEARTBEATS_TO_WAIT: Final = 3
_READS_PER_HEARTBEAT: Final = 10

logger = logging.getLogger("shade.checkpoint")


@dataclass(frozen=True)
class LockRecord:
    """What an owner writes. The field names are the keys of the JSON record."""

    owner: str
    """A random name."""
    machine: str
    """Boot and process namespace: equal where a process id means the same as here."""
    host: str
    process_id: int
    started: str
    """Start time of the process as the kernel counts it: distinguishes a reused process id."""
    beat_seconds: float
    beat: int

    @classmethod
    def parse(cls, content: bytes) -> LockRecord | None:
        """Reads a record; returns None for anything else."""
        try:
            found = msgspec.json.decode(content, type=cls)
        except (ValueError, RecursionError):
            return None
        return found if 0 < found.beat_seconds <= 3600 and 0 <= found.process_id < 2**63 else None


@dataclass(frozen=True)
class _LockBackend:
    """The place of a lock record."""

    read: Callable[[], bytes | None]
    write: Callable[[bytes], object]
    remove: Callable[[], object]

    @classmethod
    def of(cls, backend: Store | Volume, run: str, name: str) -> _LockBackend:
        """Returns a few keys of a store, so that it outlives a server, or a small file beside the run's snapshots."""
        if isinstance(backend, Store):
            keys = spread_keys(quote(run, safe=""), name)
            return cls(
                lambda: next((found for found in backend.get_many(keys) if found is not None), None),
                lambda content: backend.set_many(dict.fromkeys(keys, content)),
                lambda: backend.delete_many(keys),
            )
        file = f"{run}/{name}.json"
        return cls(
            lambda: None if backend.size_bytes(file) is None else backend.read(file),
            lambda content: backend.write(file, [content]),
            lambda: backend.delete_many([file]),
        )


def is_held(backend: Store | Volume, run: str, name: str = TRAINER) -> bool:
    """Returns whether a live process holds a lock; takes one heartbeat as a rule, and three at most. Raises StoreError
    or StorageError if store or storage does not answer."""
    return _live_owner(_LockBackend.of(backend, run, name)) is not None


class RunLock:
    """Holds the right to save under a run id, from ``with`` or `acquire` until `release`; may be acquired again. The
    store or volume is the same for every process that could save under this id."""

    def __init__(
        self, backend: Store | Volume, run: str, *, name: str = TRAINER, heartbeat_seconds: float | None = None
    ) -> None:
        self._run = run
        self._backend = _LockBackend.of(backend, run, name)
        default = _STORE_HEARTBEAT_SECONDS if isinstance(backend, Store) else _STORAGE_HEARTBEAT_SECONDS
        self._heartbeat_seconds = heartbeat_seconds or default
        self._owner = secrets.token_hex(16)
        self._replaced_by: LockRecord | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Takes the lock if no live process holds it; waits three heartbeats at most to find out. Raises RunInUseError
        if one does, and StoreError or StorageError if store or storage does not answer."""
        live = _live_owner(self._backend)
        if live is not None:
            raise self._in_use(live)
        self._stop.clear()
        self._replaced_by = None
        self._write(0)
        # Of two processes that start at the same moment the later write wins; the earlier one reads a foreign name
        # here.
        winner = _read_record(self._backend)
        if winner is not None and winner.owner != self._owner:
            raise self._in_use(winner)
        self._thread = threading.Thread(target=self._send_heartbeats, name="shade-run-lock", daemon=True)
        self._thread.start()

    @property
    def is_ours(self) -> bool:
        """Whether no other owner was found at the last heartbeat; needs no I/O."""
        return self._replaced_by is None

    def check(self) -> None:
        """Raises RunInUseError if another process holds the lock now; called before each save. A store that does not
        answer is ignored."""
        if self._replaced_by is None:
            try:
                self._check_owner()
            except (StoreError, StorageError) as error:
                logger.debug("the run lock of %s cannot be checked: %s", self._run, error)
        if self._replaced_by is not None:
            raise self._in_use(self._replaced_by)

    def release(self) -> None:
        """Releases the lock. Safe to call twice."""
        self._stop.set()
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        try:
            if self._check_owner():
                self._backend.remove()
        except (StoreError, StorageError) as error:
            logger.debug("the run lock of %s stays, and will be found dead: %s", self._run, error)

    def __enter__(self) -> RunLock:
        self.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    def _send_heartbeats(self) -> None:
        count = 0
        while not self._stop.wait(self._heartbeat_seconds):
            count += 1
            try:
                # An owner that was suspended for longer than three heartbeats finds its successor's name, and writes
                # nothing more.
                if not self._check_owner():
                    return
                self._write(count)
            except (StoreError, StorageError) as error:
                logger.debug("no heartbeat of the run lock of %s: %s", self._run, error)

    def _check_owner(self) -> bool:
        """Returns False for good once another owner was found; a missing record (an emptied store) is written again."""
        found = _read_record(self._backend)
        if found is not None and found.owner != self._owner:
            self._replaced_by = found
        return self._replaced_by is None

    def _write(self, count: int) -> None:
        pid = os.getpid()
        started = start_of(pid) or ""
        record = LockRecord(
            self._owner, this_machine(), socket.gethostname(), pid, started, self._heartbeat_seconds, count
        )
        self._backend.write(json.dumps(asdict(record)).encode())

    def _in_use(self, other: LockRecord) -> RunInUseError:
        got = f"expected a run id that no live process uses, got {self._run!r}, which process {other.process_id} on "
        is_here = other.process_id == os.getpid() and other.machine == this_machine()
        cure = "close() its Checkpointer, which is in this process" if is_here else "end that process"
        return RunInUseError(f"{got}host {other.host} saves under; choose another id, or {cure}")


def _read_record(backend: _LockBackend) -> LockRecord | None:
    content = backend.read()
    return None if content is None else LockRecord.parse(content)


def _live_owner(backend: _LockBackend) -> LockRecord | None:
    """Returns the record of the owner if it is alive, else None."""
    found = _read_record(backend)
    # A restart on the same machine continues at once.
    if found is None or _is_dead(found):
        return None
    deadline = time.monotonic() + _HEARTBEATS_TO_WAIT * found.beat_seconds
    while time.monotonic() < deadline:
        time.sleep(found.beat_seconds / _READS_PER_HEARTBEAT)
        now = _read_record(backend)
        if now is None or _is_dead(now):
            return None
        # It lives. The time that counts is that of this process: clocks of two machines are never compared.
        if now != found:
            return now
    return None


def _is_dead(record: LockRecord) -> bool:
    """Returns whether the owner ran on this machine and is gone."""
    return bool(record.machine) and record.machine == this_machine() and start_of(record.process_id) != record.started


_PREFIX = "shade:checkpoint:"


def runs_in_store(store: Store) -> list[str]:
    """Returns the sorted ids of runs that have anything in a store; scans all keys, a second for a few million."""
    return sorted({key[len(_PREFIX) :].partition(":")[0] for key in store.scan(_PREFIX)})


def keys_of_run(store: Store, run: str) -> list[str]:
    """Returns all keys that a run has in a store; scans all keys, as `runs_in_store`."""
    return list(store.scan(f"{_PREFIX}{quote(run, safe='')}:"))


def runs_in_volume(volume: Volume) -> list[str]:
    """Returns the sorted ids of runs that have a committed snapshot in a volume; lists the whole volume."""
    parts = [name.split("/") for name in volume.list()]
    return sorted({part[0] for part in parts if len(part) == 3 and part[2] == "commit.json"})
