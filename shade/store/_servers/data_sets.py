"""Which data sets have entries in a server, and which processes use them: those that no process uses make room.

A server that outlives its jobs would fill with the entries of yesterday's contents, each under a name of its own, and
decline today's. So each process that opens a data set's cache leaves a mark beside the entries: who it is, and when it
used them last. As a data set is entered for which the server has too little room, the entries of others leave, those
first whose use was longest ago, until there is room.

A process of this machine uses its data sets as long as it lives; one of another machine, as long as its mark is younger
than `IN_USE_SECONDS`. Invariant: what is no data set's, such as a snapshot, is never removed.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import secrets
import time
import weakref
from dataclasses import dataclass
from typing import Final

from shade.errors import StoreError
from shade.process import start_of, this_machine
from shade.store.base import Store

logger = logging.getLogger("shade.store")

IN_USE_SECONDS: Final = 3600.0
RENEW_SECONDS: Final = 600.0
"""A mark is written again after so long; six times before it counts as left behind."""
_MARK: Final = ":counter:user-"
_KEYS_AT_ONCE: Final = 1000
_open_here: weakref.WeakValueDictionary[str, DataSetMarks] = weakref.WeakValueDictionary()
"""By name: the marks of this process's stores that are open."""


@dataclass(frozen=True)
class DataSetUse:
    """A data set with entries in a server."""

    namespace: str
    last_use: float
    """Unix seconds."""
    is_used: bool


class DataSetMarks:
    """The marks of one store in one process, and of its children. ``store`` is the server's."""

    def __init__(self, store: Store) -> None:
        self._store = weakref.proxy(store)
        self._name = secrets.token_hex(8)
        self._process, self._started = os.getpid(), start_of(os.getpid()) or ""
        self._entered: list[str] = []
        self._due = float("inf")

    def enter(self, namespace: str, wanted_bytes: int, held_bytes: int) -> None:
        """Marks a data set as used, and makes room for it. What the server does not do is done without."""
        try:
            self._entered.append(namespace)
            _open_here[self._name] = self
            self._mark()
            self._make_room(namespace, wanted_bytes - held_bytes)
        except StoreError as error:
            logger.debug("unused data sets keep their entries: %s", error)

    def renew(self) -> None:
        """Marks what is used again, if that was long ago."""
        if time.monotonic() >= self._due:
            try:
                self._mark()
            except StoreError as error:
                logger.debug("data sets are not marked as used: %s", error)

    def leave(self) -> None:
        """Takes the marks back, without which the entries are unused. Does nothing in a child."""
        if self._entered and self._process == os.getpid():
            left = [self._key(each) for each in self._entered]
            self._entered = []
            _open_here.pop(self._name, None)
            try:
                self._store.set_many(dict.fromkeys(left, self._text(started="left")))
            except StoreError as error:
                logger.debug("a mark stays behind, and ends with its process: %s", error)

    def _key(self, namespace: str) -> str:
        return f"shade:{namespace}{_MARK}{self._name}"

    def _text(self, started: str) -> bytes:
        return json.dumps([this_machine(), self._process, started, self._name, time.time()]).encode()

    def _mark(self) -> None:
        self._due = time.monotonic() + RENEW_SECONDS
        self._store.set_many(dict.fromkeys(map(self._key, self._entered), self._text(self._started)))

    def _make_room(self, namespace: str, wanted_bytes: int) -> None:
        free_bytes = self._store.stats().free_bytes
        if free_bytes is None or free_bytes >= wanted_bytes:
            return
        unused = [each for each in data_sets_in(self._store) if not each.is_used and each.namespace != namespace]
        for each in unused:
            removed_bytes = self._remove(each.namespace)
            logger.info(
                "%s: the entries of data set %s, which no process uses, made room", self._store.url, each.namespace
            )
            # A server gives memory back in the background.
            free_bytes = max(free_bytes + removed_bytes, self._store.stats().free_bytes or 0)
            if free_bytes >= wanted_bytes:
                return
        logger.warning(
            "%s has %d MiB free for a data set that may take %d MiB more, and nothing unused to remove; what finds no "
            "room is read from the data set: raise maxmemory, or give each data set a smaller ?capacity=",
            *(self._store.url, free_bytes >> 20, wanted_bytes >> 20),
        )

    def _remove(self, namespace: str) -> int:
        removed_bytes = 0
        for prefix in prefixes_of(namespace):
            keys = self._store.scan(prefix)
            while part := list(itertools.islice(keys, _KEYS_AT_ONCE)):
                lengths = self._store.delete_many(part)
                removed_bytes += sum(
                    self._store.stored_bytes(len(key), length)
                    for key, length in zip(part, lengths, strict=True)
                    if length >= 0
                )
        return removed_bytes


def prefixes_of(namespace: str) -> list[str]:
    """Returns how the keys of a data set's entries begin: those of one job, and those in the slots of several."""
    return [f"shade:{namespace}{mark}" for mark in ":."]


def data_sets_in(store: Store) -> list[DataSetUse]:
    """Returns the data sets with entries, those first whose use was longest ago. Raises StoreError."""
    keys = [key for key in store.scan("shade:") if _MARK in key]
    uses: dict[str, list[tuple[float, bool]]] = {}
    for key, mark in zip(keys, store.get_many(keys) if keys else (), strict=True):
        if mark is not None:
            uses.setdefault(key.split(":")[1], []).append(_parsed(mark))
    found = [
        DataSetUse(namespace, max(at for at, _ in marks), any(is_used for _, is_used in marks))
        for namespace, marks in uses.items()
    ]
    return sorted(found, key=lambda each: each.last_use)


def _parsed(mark: bytes) -> tuple[float, bool]:
    """Returns when a mark was written, and whether its process still uses the data set."""
    try:
        machine, process, started, name, at = json.loads(mark)
        if started == "left":
            return float(at), False
        if machine and machine == this_machine():
            is_open = name in _open_here if process == os.getpid() else True
            return float(at), is_open and start_of(process) == started
        return float(at), time.time() - at < IN_USE_SECONDS
    except (ValueError, TypeError, OverflowError, RecursionError):
        return 0.0, False
