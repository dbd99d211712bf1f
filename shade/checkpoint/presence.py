"""Who is there: a key whose value changes while its owner lives.

Stores know no expiry and machines' clocks differ, so nobody asks how old a mark is: whoever wants to know looks whether
it changes. That takes a moment (`STALE_SECONDS` at most, one beat as a rule), and it is what makes a mark left behind by
a killed process harmless. Invariant: once `Beat.is_ours` has been False it stays so.

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
from typing import Final

from shade.errors import StoreError
from shade.store import Store

BEAT_SECONDS: Final = 0.5
STALE_SECONDS: Final = 3.0
"""Without a change for so long: nobody is there."""
_LOOK_SECONDS: Final = 0.05

logger = logging.getLogger("shade.checkpoint")


def is_beating(store: Store, key: str) -> bool:
    """Whether somebody keeps a key alive.

    Args:
        store: Where.
        key: Of a `Beat`.

    Returns:
        The answer; False at once where there is no such key.

    Raises:
        StoreError: The store does not answer.
    """
    (first,) = store.get_many([key])
    deadline = time.monotonic() + STALE_SECONDS
    while first is not None and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        (now,) = store.get_many([key])
        if now != first:
            return now is not None
    return False


class Beat:
    """Keeps a key alive in a thread of its own, from `start` to `stop`.

    Args:
        store: Where; used by this thread alone.
        key: What for.
    """

    def __init__(self, store: Store, key: str) -> None:
        self._store, self.key = store, key
        self._token = f"{socket.gethostname()} {os.getpid()} {secrets.token_hex(4)}"
        self._count = 0
        self._stop = threading.Event()
        self._lost = False
        self._thread: threading.Thread | None = None

    @property
    def is_ours(self) -> bool:
        """Whether nobody has taken the key over, as far as is known."""
        return not self._lost

    def start(self) -> bool:
        """Takes the key.

        Returns:
            Whether we have it; False where somebody keeps it alive already.

        Raises:
            StoreError: The store does not answer.
        """
        if is_beating(self._store, self.key):
            return False
        self._write()
        self._thread = threading.Thread(target=self._run, name="shade-beat", daemon=True)
        self._thread.start()
        return True

    def stop(self) -> None:
        """Ends the thread and removes the key, if it is ours still. Safe to call twice."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            try:
                if self._look():
                    self._store.delete_many([self.key])
            except StoreError as error:
                logger.debug("%s stays behind, and is found stale: %s", self.key, error)

    def _run(self) -> None:
        while not self._stop.wait(BEAT_SECONDS) and not self._lost:
            try:
                if self._look():
                    self._write()
            except StoreError as error:  # a store that restarts has lost the key: it is written when it is back
                logger.debug("no beat of %s: %s", self.key, error)

    def _look(self) -> bool:
        (found,) = self._store.get_many([self.key])
        if found is not None and not found.startswith(self._token.encode()):
            self._lost = True
        return not self._lost

    def _write(self) -> None:
        self._count += 1
        self._store.set_many({self.key: f"{self._token} {self._count}".encode()})
