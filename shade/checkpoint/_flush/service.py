"""Runs the flusher as a process: finds dirty snapshots in a store, makes them durable, and outlives their run.

``python -m shade.checkpoint._flush.service`` (for users: ``shade checkpoint flush``) serves one run, or every run that
it finds in a store, in one thread. It may be killed at any moment: see `_flush.flusher`. One that `start_flusher`
started ends when everything is durable and the run has called `mark_ended` or has been silent for long.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import IO, Final

from tqdm.contrib.logging import logging_redirect_tqdm

from shade.checkpoint._buffer.shared_memory_folder import flusher_log, open_log, remove_log
from shade.checkpoint._flush.flusher import Flusher
from shade.checkpoint._format.retention import DEFAULT, Keep
from shade.checkpoint._tiers.memory import MemoryTier
from shade.checkpoint._tiers.run_lock import ENDED, FLUSHER, TRAINER, RunLock, is_held, runs_in_store, spread_keys
from shade.checkpoint._tiers.storage import StorageTier
from shade.errors import CheckpointError, ConfigError, RunInUseError, ShadeError, StorageError, StoreError
from shade.process import is_running, start_detached
from shade.storage import open_volume
from shade.store import Store, StoreURL, open_store

STORE_VARIABLE: Final = "SHADE_FLUSH_STORE"
STORAGE_VARIABLE: Final = "SHADE_FLUSH_PERSIST"
"""Environment variables that pass addresses: they may hold passwords, and a command line is visible to all users."""
_START_SECONDS: Final = 120.0
"""Python and what it imports may come from a busy file system."""
_POLL_SECONDS: Final = 0.05

logger = logging.getLogger("shade.checkpoint")


# ── called by runs ──────────────────────────────────────────────────────────────────────────────────────────────────


def is_served(store: Store, run: str) -> bool:
    """Returns whether a live flusher holds the run's lock; takes a second as a rule, and three at most. Raises
    `StoreError` if the store does not answer."""
    return is_held(store, run, FLUSHER)


def mark_started(store: Store, run: str) -> None:
    """Removes the end mark of a run; call it before `is_served`."""
    store.delete_many(spread_keys(run, ENDED))


def mark_ended(store: Store, run: str) -> None:
    """Writes the end mark of a run: its flusher may end when everything is durable."""
    store.set_many(dict.fromkeys(spread_keys(run, ENDED), b"1"))


def start_flusher(store_url: str, persist_url: str, run: str, keep: str = DEFAULT, *, log: Path | None = None) -> int:
    """Starts a detached flusher, waits until it serves, and returns its process id. The store's password is passed
    through the environment. Without a ``log`` it writes one in this machine's shared memory, which it removes when it
    ends with everything durable.

    Raises ConfigError if the log cannot be written or the store ends with this process, and CheckpointError, with
    the end of its log, if it ended at once or is not ready after 120 s; none is left then.
    """
    url = StoreURL.parse(store_url)
    if url.scheme in ("memory", "local"):
        cure = "name a server that outlives this process: unix://, redis:// or redis+cluster://"
        raise ConfigError.of("a store that other processes reach by its URL", store_url, cure)
    given = {STORE_VARIABLE: url.reveal(), STORAGE_VARIABLE: persist_url}
    # Where the package lies, for a clone that is not installed.
    home = str(Path(str(files("shade"))).parent)
    paths = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", __name__, f"--run={run}", f"--keep={keep}"]
    path = flusher_log(run) if log is None else log
    if log is None:
        command.append(f"--temporary-log={path}")
    keys = spread_keys(run, FLUSHER)
    with open_store(url, timeout_seconds=TIMEOUT_SECONDS) as store, _opened(path) as errors:
        stale = store.get_many(keys)
        begin = errors.seek(0, os.SEEK_END)
        process_id = start_detached(command, errors, {**os.environ, **given, "PYTHONPATH": paths})
        deadline = time.monotonic() + _START_SECONDS
        try:
            while not any(now not in (None, before) for now, before in zip(store.get_many(keys), stale, strict=True)):
                if not is_running(process_id) or time.monotonic() > deadline:
                    errors.seek(begin)
                    got = errors.read().decode(errors="replace").strip()[-1000:] or "silence"
                    raise CheckpointError.of("a flusher that starts", got, f"mend that; its log is {path}")
                time.sleep(_POLL_SECONDS)
        except BaseException:
            # Else it would serve the run for ever, of a script that continues without it or ends.
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
            raise
    return process_id


def _opened(log: Path) -> IO[bytes]:
    try:
        return open_log(log)
    except OSError as error:
        raise ConfigError.of("a log that can be written", f"{log}: {error.strerror}", "name another") from error


# ── the process ─────────────────────────────────────────────────────────────────────────────────────────────────────


def flush(
    store_url: str, persist_url: str, run: str | None, keep: str, *, once: bool = False, until_ended: bool = False
) -> int:
    """Serves a run, or every run in the store, until a signal: SIGTERM and SIGINT end it promptly, a second one at
    once. With ``once`` it ends when everything is durable, with ``until_ended`` when the run has ended too. Returns the
    exit code: 0, or 1 if something is not durable. Raises as `serve`."""
    if until_ended and run is None:
        raise ConfigError.of("--until-ended with a --run", "none", "name the run whose end to wait for")
    rules = Keep.parse(keep)
    stop = threading.Event()

    def on_signal(number: int, frame: object) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with logging_redirect_tqdm([logger]):
            durable = serve(
                store_url,
                persist_url,
                run=run,
                keep=rules,
                until=Until.DRAINED if once else Until.ENDED if until_ended else Until.STOPPED,
                stop=stop,
            )
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
        for number, handling in before.items():
            signal.signal(number, handling)
    return 0 if durable else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the process that `start_flusher` starts; addresses come from the environment. Returns as `flush`, or 2 if it
    cannot begin, with the reason on standard error."""
    parser = argparse.ArgumentParser(
        prog="shade.checkpoint._flush.service", description="Makes one run's snapshots durable."
    )
    parser.add_argument("--run", required=True)
    parser.add_argument("--keep", required=True)
    parser.add_argument("--temporary-log", type=Path, help="the file that standard error goes to; removed at the end")
    given = parser.parse_args(arguments)
    try:
        code = flush(os.environ[STORE_VARIABLE], os.environ[STORAGE_VARIABLE], given.run, given.keep, until_ended=True)
        if code == 0 and given.temporary_log is not None:
            remove_log(given.temporary_log, sys.stderr.fileno())
        return code
    except KeyError as error:
        sys.stderr.write(f"expected {error.args[0]} in the environment; use `shade checkpoint flush` by hand\n")
    except ShadeError as error:
        sys.stderr.write(f"{' '.join(str(error).split())}\n")
    return 2


TIMEOUT_SECONDS: Final = 5.0
"""Longest wait for the store's next bytes: a flusher has time, and a busy server is not a dead one."""
PATIENCE_SECONDS: Final = 600.0
"""A flusher that was started for one run gives up when the run, or its store, has been silent for so long."""
POLL_SECONDS: Final = 0.2
DISCOVER_SECONDS: Final = 10.0


class Until(enum.Enum):
    """Condition under which `serve` returns."""

    STOPPED = "stopped"
    """On a signal only."""
    DRAINED = "drained"
    """When everything is durable."""
    ENDED = "ended"
    """When everything is durable and the run has ended."""


def serve(
    store_url: str,
    persist_url: str,
    *,
    run: str | None = None,
    keep: Keep | None = None,
    until: Until = Until.STOPPED,
    stop: threading.Event | None = None,
    patience_seconds: float = PATIENCE_SECONDS,
) -> bool:
    """Flushes until nothing is left to wait for, as ``until`` says; returns whether everything that was found is
    durable. Without a ``run`` it serves every run found in the store, now and later, that no other flusher serves.
    ``stop`` ends it promptly: a write in progress is abandoned, its slot stays dirty.

    Raises ConfigError for an invalid URL, StoreError or StorageError if one does not answer at the start (later it
    is waited for), and CheckpointError if another flusher serves the run, or has taken it over.
    """
    stop = stop or threading.Event()
    with contextlib.ExitStack() as resources:
        store = resources.enter_context(open_store(store_url, timeout_seconds=TIMEOUT_SECONDS))
        store.ping()
        with open_volume(persist_url) as volume:
            volume.ping()
            logger.info("from %s to %s", store.url, volume.url)
        service = resources.enter_context(_FlushService(store, persist_url, keep or Keep.parse(DEFAULT), stop))
        if run is not None:
            service.add(run)
        discovered = -float("inf")
        while not stop.is_set():
            if run is None and time.monotonic() - discovered > DISCOVER_SECONDS:
                service.discover()
                discovered = time.monotonic()
            if service.poll():
                continue
            if run is not None and run not in service.served:
                raise _served_by_other(run)
            if until is Until.DRAINED and (service.is_drained or service.is_stuck(patience_seconds)):
                break
            if until is Until.ENDED and run is not None and service.is_finished(run, patience_seconds):
                break
            stop.wait(POLL_SECONDS)
        return service.is_drained


class _ServedRun:
    """One served run: its flusher and its run lock."""

    def __init__(self, store: Store, persist_url: str, run: str, keep: Keep, stop: threading.Event) -> None:
        self._store, self._run = store, run
        self.run_lock = RunLock(store, run, name=FLUSHER)
        self._memory = MemoryTier(store, run)
        self.storage = StorageTier(open_volume(persist_url), run)
        may_write = lambda: self.run_lock.is_ours  # noqa: E731
        self.flusher = Flusher(self._memory, self.storage, keep, stop=stop, may_write=may_write)
        self._trainer: list[bytes | None] = []
        self._trainer_seen = time.monotonic()

    def has_ended(self, patience_seconds: float) -> bool:
        """Returns whether the run has ended, or neither trainer nor store has shown life for long."""
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

    def close(self) -> None:
        """Releases the run."""
        self.run_lock.release()
        self._memory.close()
        self.storage.close()


class _FlushService:
    """The runs that this process serves."""

    def __init__(self, store: Store, persist_url: str, keep: Keep, stop: threading.Event) -> None:
        self._store, self._persist_url, self._keep, self._stop = store, persist_url, keep, stop
        self.served: dict[str, _ServedRun] = {}

    def __enter__(self) -> _FlushService:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for each in self.served.values():
            each.close()

    def add(self, run: str) -> None:
        """Starts to serve a run; raises CheckpointError if another flusher does."""
        each = _ServedRun(self._store, self._persist_url, run, self._keep, self._stop)
        try:
            each.run_lock.acquire()
        except RunInUseError as error:
            each.close()
            raise _served_by_other(run) from error
        except BaseException:
            each.close()
            raise
        self.served[run] = each
        logger.info("serving %s, keeping %s", run, self._keep)
        each.storage.tidy()

    def discover(self) -> None:
        """Serves new runs of the store; skips runs that others serve, and retries failures at the next call."""
        with contextlib.suppress(StoreError):
            for run in runs_in_store(self._store):
                if run not in self.served:
                    with contextlib.suppress(StoreError, StorageError, CheckpointError):
                        self.add(run)

    def poll(self) -> bool:
        """Flushes one snapshot of each run, and releases runs that others have taken over; returns whether any was."""
        done = [each.flusher.poll() is not None for each in self.served.values()]
        for run, each in list(self.served.items()):
            if not each.run_lock.is_ours:
                logger.warning("another flusher serves %s now", run)
                self.served.pop(run).close()
        return any(done)

    @property
    def is_drained(self) -> bool:
        """Whether the last look at each run found nothing dirty."""
        return all(each.flusher.is_drained for each in self.served.values())

    def is_stuck(self, patience_seconds: float) -> bool:
        """Returns whether everything left has been damaged in memory, or out of reach, for long."""
        return all(each.flusher.is_drained or each.flusher.is_stuck(patience_seconds) for each in self.served.values())

    def is_finished(self, run: str, patience_seconds: float) -> bool:
        """Returns whether a run has ended and is durable, or cannot be saved; its lock is then released."""
        each = self.served[run]
        if not each.has_ended(patience_seconds):
            return False
        if not self.is_drained:
            return self.is_stuck(patience_seconds)
        each.run_lock.release()
        # Again after the release: a run that restarted while it saw the lock has started no flusher of its own.
        if each.has_ended(patience_seconds):
            return True
        with contextlib.suppress(RunInUseError):
            each.run_lock.acquire()
            return False
        # Another flusher took the lock.
        return True


def _served_by_other(run: str) -> CheckpointError:
    return CheckpointError.of(
        f"{run!r} without a flusher", "one that serves it", "leave the run to it, or end it first"
    )


if __name__ == "__main__":
    sys.exit(main())
