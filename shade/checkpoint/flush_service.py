"""Serves runs with flushers: finds them, announces itself, takes turns, and knows when its work is done.

One thread for all runs of a store: they share a network and a disk anyway. A lease is held on each run served, so
that a second flusher leaves it alone, whether that one serves one run or all. Nothing here ends because a store or a
storage is away for a while, except a flusher that was started for one run, whose store has been silent for long.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
import time
from types import TracebackType
from typing import Final

from shade.checkpoint.flusher import Flusher
from shade.checkpoint.lease import Lease
from shade.checkpoint.memory_tier import MemoryTier
from shade.checkpoint.presence import ENDED, FLUSHER, TRAINER, spread_keys
from shade.checkpoint.progress import Progress
from shade.checkpoint.retention import DEFAULT, Keep
from shade.checkpoint.runs import runs_in_store
from shade.checkpoint.storage_tier import StorageTier
from shade.errors import CheckpointError, RunInUseError, StorageError, StoreError
from shade.storage import open_volume
from shade.store import Store, open_store

TIMEOUT_SECONDS: Final = 5.0
"""Of a wait for the store's next bytes: a flusher is in no hurry, and a busy server no dead one."""
PATIENCE_SECONDS: Final = 600.0
"""So long may a run, or its store, be silent before a flusher that was started for it gives it up."""
POLL_SECONDS: Final = 0.2
DISCOVER_SECONDS: Final = 10.0

logger = logging.getLogger("shade.checkpoint")


class Until(enum.Enum):
    """When serving ends by itself."""

    STOPPED = "stopped"
    """Never."""
    DRAINED = "drained"
    """When everything is durable."""
    ENDED = "ended"
    """When everything is durable and the run is over."""


def serve(
    store_url: str,
    persist_url: str,
    *,
    run: str | None = None,
    keep: Keep | None = None,
    until: Until = Until.STOPPED,
    stop: threading.Event | None = None,
    patience_seconds: float = PATIENCE_SECONDS,
    progress: Progress | None = None,
) -> bool:
    """Flushes until there is nothing left to wait for.

    Args:
        store_url: Where snapshots are.
        persist_url: Where they go.
        run: The run to serve; None: every run found in the store, now and later, that nobody else serves.
        keep: What stays in storage.
        until: When to end; `Until.ENDED` is for one run.
        stop: Ends it promptly; a write in the middle is given up, its slot stays dirty.
        patience_seconds: See `PATIENCE_SECONDS`.
        progress: Is told of each snapshot and chunk.

    Returns:
        Whether everything that was found is durable.

    Raises:
        ConfigError: A URL that cannot be.
        StoreError: The store does not answer at the start. Later that is waited out.
        StorageError: The same of storage.
        CheckpointError: Another flusher serves the run, or has taken it over.
    """
    stop = stop or threading.Event()
    with contextlib.ExitStack() as resources:
        store = resources.enter_context(open_store(store_url, timeout_seconds=TIMEOUT_SECONDS))
        store.ping()
        with open_volume(persist_url) as volume:
            volume.ping()
            logger.info("from %s to %s", store.url, volume.url)
        service = resources.enter_context(_Service(store, persist_url, keep or Keep.parse(DEFAULT), stop, progress))
        if run is not None:
            service.take(run)
        discovered = -float("inf")
        while not stop.is_set():
            if run is None and time.monotonic() - discovered > DISCOVER_SECONDS:
                service.discover()
                discovered = time.monotonic()
            if service.turn():
                continue
            if run is not None and run not in service.served:
                raise _taken(run)
            if until is Until.DRAINED and (service.is_drained or service.is_hopeless(patience_seconds)):
                break
            if until is Until.ENDED and run is not None and service.is_finished(run, patience_seconds):
                break
            stop.wait(POLL_SECONDS)
        return service.is_drained


class _Served:
    """One run: its flusher, and the lease that tells others to leave it to us."""

    def __init__(
        self, store: Store, persist_url: str, run: str, keep: Keep, stop: threading.Event, progress: Progress | None
    ) -> None:
        self._store, self._run = store, run
        self.lease = Lease(store, run, name=FLUSHER)
        self._memory = MemoryTier(store, run)
        self._storage = StorageTier(open_volume(persist_url), run)
        self.flusher = Flusher(
            self._memory, self._storage, keep, stop=stop, may_write=lambda: self.lease.is_ours, progress=progress
        )
        self._trainer: list[bytes | None] = []
        self._trainer_seen = time.monotonic()

    def tidy(self) -> None:
        """Removes what earlier flushers died in the middle of."""
        self._storage.tidy()

    def is_over(self, patience_seconds: float) -> bool:
        """Whether nobody will save into this run any more, as far as one can tell."""
        now = time.monotonic()
        try:
            if any(self._store.get_many(spread_keys(self._run, ENDED))):
                return True
            trainer = self._store.get_many(spread_keys(self._run, TRAINER))
        except StoreError:
            return now - self.flusher.last_contact > patience_seconds
        if trainer != self._trainer:
            self._trainer, self._trainer_seen = trainer, now
        return now - self._trainer_seen > patience_seconds

    def end(self) -> None:
        """Lets go of it."""
        self.lease.release()
        self._memory.close()
        self._storage.close()


class _Service:
    """The runs that are served."""

    def __init__(
        self, store: Store, persist_url: str, keep: Keep, stop: threading.Event, progress: Progress | None
    ) -> None:
        self._store, self._persist_url, self._keep, self._stop, self._progress = (
            store,
            persist_url,
            keep,
            stop,
            progress,
        )
        self.served: dict[str, _Served] = {}

    def __enter__(self) -> _Service:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for each in self.served.values():
            each.end()

    def take(self, run: str) -> None:
        """Serves a run from now on.

        Args:
            run: Its id.

        Raises:
            CheckpointError: Another flusher does.
        """
        each = _Served(self._store, self._persist_url, run, self._keep, self._stop, self._progress)
        try:
            each.lease.acquire()
        except RunInUseError as error:
            each.end()
            raise _taken(run) from error
        except BaseException:
            each.end()
            raise
        self.served[run] = each
        logger.info("serving %s, keeping %s", run, self._keep)
        each.tidy()

    def discover(self) -> None:
        """Serves what else has come into the store; not what others serve, and what fails now is found again."""
        with contextlib.suppress(StoreError):
            for run in runs_in_store(self._store):
                if run not in self.served:
                    with contextlib.suppress(StoreError, StorageError, CheckpointError):
                        self.take(run)

    def turn(self) -> bool:
        """One snapshot of each run; runs that others have taken over are let go.

        Returns:
            Whether anything was done.
        """
        done = [each.flusher.turn() is not None for each in self.served.values()]
        for run, each in list(self.served.items()):
            if not each.lease.is_ours:
                logger.warning("another flusher serves %s now", run)
                self.served.pop(run).end()
        return any(done)

    @property
    def is_drained(self) -> bool:
        """Whether nothing dirty was left at the last look."""
        return all(each.flusher.is_drained for each in self.served.values())

    def is_hopeless(self, patience_seconds: float) -> bool:
        """Whether all that is left has been damaged in memory, or out of reach, for long."""
        return all(
            each.flusher.is_drained or each.flusher.is_hopeless(patience_seconds) for each in self.served.values()
        )

    def is_finished(self, run: str, patience_seconds: float) -> bool:
        """Whether a run is over and durable, or beyond help.

        Its lease is released then, and nobody has come back meanwhile who might have seen it.

        Args:
            run: Its id.
            patience_seconds: See `PATIENCE_SECONDS`.

        Returns:
            The answer.
        """
        each = self.served[run]
        if not each.is_over(patience_seconds):
            return False
        if not self.is_drained:
            return self.is_hopeless(patience_seconds)
        each.lease.release()
        if each.is_over(patience_seconds):
            return True
        with contextlib.suppress(RunInUseError):
            each.lease.acquire()
            return False
        return True  # somebody else was quicker


def _taken(run: str) -> CheckpointError:
    return CheckpointError.of(
        f"{run!r} without a flusher", "one that serves it", "leave it to that one, or end it first"
    )
