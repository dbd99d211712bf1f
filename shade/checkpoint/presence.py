"""Who is there: a small value that changes while its owner lives.

Stores know no expiry and machines' clocks differ, so nobody asks how old a mark is: whoever wants to know looks whether
it changes. That takes a moment (one beat as a rule, `STALE_SECONDS` at most), and it makes what a killed process left
behind harmless.

The price: for one beat after an owner that stood still (a stopped process, a cut link) two may think themselves alone.
What they do must be harmless twice; for a flusher it is, as every file appears whole or not at all.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from typing import Final

from shade.errors import StoreError
from shade.store import Store
from shade.store.keys import placement_tags

BEAT_SECONDS: Final = 0.5
STALE_SECONDS: Final = 3.0
"""Without a change for so long: nobody is there."""
_LOOK_SECONDS: Final = 0.05
_NUM_KEYS: Final = 3
FLUSHER: Final = "flusher"
"""Name of what a run's flusher keeps alive."""
TRAINER: Final = "lease"
"""Name of what the run itself keeps alive: `shade.checkpoint.lease`."""
ENDED: Final = "ended"
"""Name of what a run leaves when it has ended as it should."""

logger = logging.getLogger("shade.checkpoint")


def spread_keys(run: str, name: str) -> list[str]:
    """The keys of something small that shall outlive a server: one each in a few distant parts of the key space.

    Args:
        run: The run id.
        name: What it is.

    Returns:
        Three keys, on as many servers of a cluster that has them.
    """
    tags = placement_tags()
    return [f"shade:checkpoint:{run}:{{{tag}}}{name}" for tag in tags[:: -(-len(tags) // _NUM_KEYS)]]


def is_beating(store: Store, keys: Sequence[str]) -> bool:
    """Whether somebody keeps keys alive.

    Args:
        store: Where.
        keys: Of a `Beat`.

    Returns:
        The answer; False at once where there are no such keys.

    Raises:
        StoreError: The store does not answer.
    """
    first = store.get_many(keys)
    deadline = time.monotonic() + STALE_SECONDS
    while any(first) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        if any(now is not None and now != before for now, before in zip(store.get_many(keys), first, strict=True)):
            return True
    return False


class Beat:
    """Keeps keys alive in a thread of its own, from `start` to `stop`; may be started again.

    Args:
        store: Where.
        keys: What for: see `spread_keys`.
    """

    def __init__(self, store: Store, keys: Sequence[str]) -> None:
        self._store, self._keys = store, list(keys)
        self._token = f"{socket.gethostname()} {os.getpid()} {secrets.token_hex(4)}"
        self._count = 0
        self._stop = threading.Event()
        self._lost = False
        self._thread: threading.Thread | None = None

    @property
    def is_ours(self) -> bool:
        """Whether nobody has taken the keys over, as far as is known."""
        return not self._lost

    def start(self) -> bool:
        """Takes the keys.

        Returns:
            Whether we have them; False where somebody keeps them alive already.

        Raises:
            StoreError: The store does not answer.
        """
        if is_beating(self._store, self._keys):
            return False
        self._stop.clear()
        self._lost = False
        self._write()
        self._thread = threading.Thread(target=self._run, name="shade-beat", daemon=True)
        self._thread.start()
        return True

    def stop(self) -> None:
        """Ends the thread and removes the keys, if they are ours still. Safe to call twice."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            try:
                if self._look():
                    self._store.delete_many(self._keys)
            except StoreError as error:
                logger.debug("%s stays behind, and is found stale: %s", self._keys[0], error)

    def _run(self) -> None:
        while not self._stop.wait(BEAT_SECONDS) and not self._lost:
            try:
                if self._look():
                    self._write()
            except StoreError as error:  # a store that restarts has lost them: they are written when it is back
                logger.debug("no beat of %s: %s", self._keys[0], error)

    def _look(self) -> bool:
        token = self._token.encode()
        if any(found is not None and not found.startswith(token) for found in self._store.get_many(self._keys)):
            self._lost = True
        return not self._lost

    def _write(self) -> None:
        self._count += 1
        self._store.set_many(dict.fromkeys(self._keys, f"{self._token} {self._count}".encode()))
