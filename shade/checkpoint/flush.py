"""The flusher as a process: finds dirty snapshots in a store, makes them durable, and outlives whoever made them.

``python -m shade.checkpoint.flush`` (for people: ``shade checkpoint flush``) serves one run, or every run it finds in a
store. It may be killed at any moment: see `shade.checkpoint.flusher`. A `Checkpointer` asks `serving`, and where nobody
serves its run calls `start_flusher`. That one is nobody's child; it ends by itself when everything is durable and the
run has said that it has ended (`mark_ended`), or has been silent for long.

Who ends while another begins: the run removes its end mark, then asks `serving`; the flusher releases its lease, then
looks for the end mark. Whichever way their steps interleave, either the run sees no lease and starts a flusher, or the
flusher sees no mark and goes on.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final

from tqdm.contrib.logging import logging_redirect_tqdm

from shade.checkpoint.flush_service import TIMEOUT_SECONDS, Until, serve
from shade.checkpoint.lease import is_held
from shade.checkpoint.own_memory import flusher_log, open_log, remove_log
from shade.checkpoint.presence import ENDED, FLUSHER, spread_keys
from shade.checkpoint.progress import Bar
from shade.checkpoint.retention import DEFAULT, Keep
from shade.errors import CheckpointError, ConfigError, ShadeError
from shade.process import is_running, start_detached
from shade.store import Store, StoreURL, open_store

STORE_VARIABLE: Final = "SHADE_FLUSH_STORE"
STORAGE_VARIABLE: Final = "SHADE_FLUSH_PERSIST"
"""How `start_flusher` passes addresses: they may hold passwords, and everybody can read a command line."""
_START_SECONDS: Final = 30.0
_POLL_SECONDS: Final = 0.05

logger = logging.getLogger("shade.checkpoint")


# ── what others ask and say ─────────────────────────────────────────────────────────────────────────────────────────


def serving(store: Store, run: str) -> bool:
    """Whether a flusher serves a run. Takes a second as a rule, and three at most.

    Args:
        store: Where its snapshots are.
        run: The run id.

    Returns:
        The answer.

    Raises:
        StoreError: The store does not answer.
    """
    return is_held(store, run, FLUSHER)


def mark_begun(store: Store, run: str) -> None:
    """Says that a run saves snapshots from now on. Before asking `serving`."""
    store.delete_many(spread_keys(run, ENDED))


def mark_ended(store: Store, run: str) -> None:
    """Says that a run saves nothing any more: its flusher may end when everything is durable."""
    store.set_many(dict.fromkeys(spread_keys(run, ENDED), b"1"))


def start_flusher(store_url: str, persist_url: str, run: str, keep: str = DEFAULT, *, log: Path | None = None) -> int:
    """Starts a flusher that outlives this process, and waits until it serves.

    Args:
        store_url: With its password, if it has one: it is passed on out of sight.
        persist_url: Durable storage; a relative path is one from here.
        run: The run id.
        keep: See `Keep.parse`.
        log: Where it writes; appended to, its folder made. None: a log in this machine's shared memory, which the
            flusher removes when it ends with everything durable.

    Returns:
        Its process id.

    Raises:
        ConfigError: The log cannot be written, or the store ends with this process.
        CheckpointError: It ended at once, or is not ready after 30 s; the message has the end of its log.
    """
    url = StoreURL.parse(store_url)
    if url.scheme in ("memory", "local"):
        cure = "name a server that outlives this process: unix://, redis:// or redis+cluster://"
        raise ConfigError.of("a store that other processes reach by its URL", store_url, cure)
    given = {STORE_VARIABLE: url.reveal(), STORAGE_VARIABLE: persist_url}
    home = str(Path(__file__).parents[2])
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
        while not any(now not in (None, before) for now, before in zip(store.get_many(keys), stale, strict=True)):
            if not is_running(process_id) or time.monotonic() > deadline:
                errors.seek(begin)
                told = errors.read().decode(errors="replace").strip()[-1000:]
                raise CheckpointError.of("a flusher that starts", told or "silence", f"mend that; its log is {path}")
            time.sleep(_POLL_SECONDS)
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
    """Serves until told to stop: SIGTERM and SIGINT end it promptly, a second one at once.

    Args:
        store_url: Where snapshots are.
        persist_url: Where they go.
        run: Whose; None: every run in the store.
        keep: See `Keep.parse`.
        once: End when everything is durable.
        until_ended: End when the run is over, and durable.

    Returns:
        The exit code: 0, or 1 where something is not durable.

    Raises:
        ShadeError: See `serve`.
    """
    if until_ended and run is None:
        raise ConfigError.of("--until-ended with a --run", "none", "name the run whose end to wait for")
    rules = Keep.parse(keep)
    stop = threading.Event()

    def told(number: int, frame: object) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, told) for number in (signal.SIGTERM, signal.SIGINT)}
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
                progress=Bar(),
            )
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
        for number, handling in before.items():
            signal.signal(number, handling)
    return 0 if durable else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """The process that `start_flusher` starts; addresses come from the environment.

    Args:
        arguments: Instead of the command line's own.

    Returns:
        As `flush`; 2 where it cannot begin: the reason is on standard error.
    """
    parser = argparse.ArgumentParser(prog="shade.checkpoint.flush", description="Makes one run's snapshots durable.")
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


if __name__ == "__main__":
    sys.exit(main())
