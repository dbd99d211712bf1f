"""What a snapshot belongs to: the storage and the run together, under one random name that lies in the storage.

The first process that saves a run into a storage writes the name beside the run's snapshots. Memory that no caller
names, this machine's, lies under it: what another storage's run left there is another's, and so is what a folder left
that was emptied since. Without storage, snapshots belong to the job: its store and the run id that it was given, or
else the command that began it. Decision 0056.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import sys
from typing import Final

import msgspec

from shade.checkpoint._tiers.memory import MemoryTier
from shade.checkpoint._tiers.run_lock import spread_keys
from shade.errors import ConfigError, StorageError
from shade.storage import Volume, open_volume
from shade.store import StoreURL

_FILE: Final = "identity"
_NAME: Final = re.compile(r"[0-9a-f]{16}")
_BOUND: Final = "storage"
"""Name of the note in a store that says beside which storage a run's memory was filled."""

logger = logging.getLogger("shade.checkpoint")


def of_storage(volume: Volume, run: str, *, make: bool = False) -> str | None:
    """Returns the identity of a run in a storage; None if no process has saved there. With ``make`` it is then made,
    which only the holder of the run lock may ask for. Raises `StorageError`."""
    name = f"{run}/{_FILE}"
    found = None
    if volume.size_bytes(name) is not None:
        found = volume.read(name).decode(errors="replace").strip()
    if found is None or not _NAME.fullmatch(found):
        if not make:
            return None
        found = secrets.token_hex(8)
        volume.write(name, [found.encode()])
    number = volume.file_number(name)
    return found if number is None else f"{found}-{number:x}"


def of_job(run: str | None, store_url: str | StoreURL | None) -> str:
    """Returns the identity of a job without storage: that of its store and run id, or without a run id (None) also of
    the command and the folder that began it."""
    store = str(StoreURL.parse(store_url) if isinstance(store_url, str) else store_url)
    begun_by = [os.getcwd(), sys.argv] if run is None else run
    return f"job-{hashlib.sha256(json.dumps([store, begun_by]).encode()).hexdigest()[:16]}"


def find(run: str, store_url: str | None, persist_to: str | os.PathLike[str] | None) -> str | None:
    """Returns the identity of a run that was given these locations and its id; None if the storage has none, or does
    not answer."""
    if persist_to is None:
        return of_job(run, store_url)
    with contextlib.suppress(StorageError), open_volume(persist_to) as volume:
        return of_storage(volume, run)
    return None


def bind(memory: MemoryTier, identity: str, storage_url: str, *, is_named: bool) -> None:
    """Notes in a store beside which storage a run saves.

    Where the store holds the run's snapshots of another storage, a run id that was left alone is refused, by a
    ConfigError: the other may be another project's. One that was named says that it is the same job, which has lost
    its disk, say.
    """
    keys = spread_keys(memory.run, _BOUND)
    notes = (_noted(found) for found in memory.store.get_many(keys) if found is not None)
    note = next((each for each in notes if each is not None), None)
    if note is not None and note[0] != identity and (held := memory.held()):
        newest = max(held.values(), key=lambda record: record.sequence)
        what = f"step {newest.step} of run {memory.run!r}, saved beside {note[1]}"
        free = f"shade checkpoint free {memory.run} --store {memory.store.url}"
        if not is_named:
            cure = f"name this run (run=), or remove the other's ({free})"
            raise ConfigError.of(f"a store without snapshots of another storage than {storage_url}", what, cure)
        logger.warning("cluster memory has %s: it counts as this run's; to begin afresh: %s", what, free)
    if note is None or note[0] != identity:
        memory.store.set_many(dict.fromkeys(keys, json.dumps([identity, storage_url]).encode()))


def _noted(content: bytes) -> tuple[str, str] | None:
    """Returns identity and storage of a note, or None for other bytes."""
    try:
        return msgspec.convert(json.loads(content), tuple[str, str])
    except (ValueError, RecursionError):
        return None
