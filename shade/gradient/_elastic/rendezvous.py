"""Where ranks find each other again: a key-value store on a machine that outlives them, asked through one thread.

Ranks that have lost one of them cannot ask each other who is left: they would need the group that has just broken. So
they meet at a third place, PyTorch's ``TCPStore`` in a process that trains nothing::

    python -m shade.gradient._elastic.rendezvous 29600            # on the machine that is lost last

What is said there is little: a line a second from each rank (that it lives, and what it would take with it), and a few
words when a group forms. Gradients never pass there, and while nobody comes or goes training needs it for nothing.

All questions go through one thread, for the store's client waits without limit: on a line that has been cut, for a
quarter of an hour. Whoever asks waits for the thread, and no longer than he said.

A rank is *silent* when its line has not changed for some seconds by this rank's own clock; clocks are never compared.
The store trusts whoever can reach it, as torch.distributed's own does: keep it on a network of your own.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import json
import logging
import queue
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch.distributed as dist

from shade.errors import ConfigError, GradientError

HEARTBEAT_SECONDS = 1.0
_CONNECT_SECONDS = 5.0
_CLOSE_SECONDS = 2.0
_PUBLISH: Final = "speak"
"""In the inbox: the next line shall not wait for its second."""
_T = TypeVar("_T")

logger = logging.getLogger("shade.gradient")


def serve(port: int = 0, host: str = "0.0.0.0") -> dist.TCPStore:  # type: ignore[name-defined]
    """Opens a meeting place in this process; it is there as long as what this returns.

    Args:
        port: 0: any that is free.
        host: Address to listen on.

    Returns:
        The store; its ``port`` says where.
    """
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]


class Rendezvous:
    """One rank's line to the meeting place.

    Args:
        address: ``host:port``.
        run: What keys begin with: runs with different names do not see each other.

    Raises:
        ConfigError: Not an address.
    """

    def __init__(self, address: str, run: str) -> None:
        self.id = secrets.token_hex(8)
        """This process, for ever."""
        self.address = address
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise ConfigError.of("the meeting place as host:port", address, "10.0.0.1:29600, say")
        self._host, self._port, self._run = host, int(port), run
        self._inbox: queue.SimpleQueue[tuple[Callable[[Any], Any], concurrent.futures.Future[Any]] | str | None] = (
            queue.SimpleQueue()
        )
        self._status: dict[str, Any] = {}
        self._is_publish_queued = False
        """Whether the order to speak them lies in the inbox: one at a time, however long the line is cut."""
        self._join_key = ""
        self._received: dict[str, tuple[bytes, float]] = {}
        """By rank: its last line, and since when."""
        self._num_heartbeats, self._received_at = 0, 0.0
        self.is_join_requested = False
        """Whether somebody waits at the key that `listen` was told."""
        self._thread = threading.Thread(target=self._serve, name="shade-gradient-meeting", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread that comes back from the store's client into no interpreter aborts

    def client(self, timeout_seconds: float) -> dist.Store:  # type: ignore[name-defined]
        """A connection of its own: for what waits for others in the store, as groups do when they form.

        Args:
            timeout_seconds: Of each of its questions.

        Returns:
            The store, as far as this run sees it.

        Raises:
            RuntimeError: There is nobody.
        """
        store = dist.TCPStore(self._host, self._port, timeout=timedelta(seconds=timeout_seconds))  # type: ignore[attr-defined]
        return dist.PrefixStore(self._run, store)  # type: ignore[attr-defined]

    def ask(self, question: Callable[[Any], _T], seconds: float) -> _T:
        """Has the thread ask the store something.

        Args:
            question: Called with the store, again if the connection broke; must not wait for other ranks.
            seconds: Longest time to wait.

        Returns:
            Its answer.

        Raises:
            GradientError: There was none in time.
        """
        answer: concurrent.futures.Future[_T] = concurrent.futures.Future()
        self._inbox.put((question, answer))
        try:
            return answer.result(seconds)
        except concurrent.futures.TimeoutError:
            answer.cancel()
            raise GradientError(
                f"expected the meeting place at {self.address} to answer within {seconds:.0f} s, got silence; "
                "start it (python -m shade.gradient.rendezvous PORT), or look at the line to it"
            ) from None

    def publish(self, **status: Any) -> None:
        """What others shall know of this rank if it is never heard again; goes out at once.

        Story: a rank was killed half a second after its first words, which were to go out with the next line. So what
        it had kept back was lost, and nobody could say how much.

        Args:
            **words: JSON-plain.
        """
        self._status = status
        if not self._is_publish_queued:
            self._is_publish_queued = True
            self._inbox.put(_PUBLISH)

    def follow(self, join_key: str, ids: Iterable[str]) -> None:
        """Follows other ranks' lines from now on.

        Args:
            bell: Key of a counter: above 0, `is_rung`.
            ids: Whose lines.
        """
        now = time.monotonic()
        self._received = {each: self._received.get(each, (b"", now)) for each in ids if each != self.id}
        self._join_key, self.is_join_requested = join_key, False

    def silence_seconds(self, other: str) -> float:
        """Seconds for which a followed rank's line has been seen unchanged; infinite once it has said good-bye.

        Counted up to the last look: a rank that is cut off itself does not take the others for dead.
        """
        if other == self.id:
            return 0.0
        line, since = self._received[other]
        return float("inf") if line == b"{}" else max(0.0, self._received_at - since)

    def last_status(self, other: str) -> dict[str, Any]:
        """What a followed rank said last; empty: nothing, or it said good-bye."""
        status: dict[str, Any] = json.loads(self._received[other][0] or b"{}")
        return status

    def close(self) -> None:
        """Says good-bye and ends the thread; where the line is cut, it waits 2 seconds for that. Safe to call twice."""
        atexit.unregister(self.close)
        self._inbox.put(None)
        self._thread.join(_CLOSE_SECONDS)

    # ── the thread ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _serve(self) -> None:
        """Answers, and speaks once a second, or when there is something to say; a question is asked again until it is
        answered or nobody waits for it."""
        store: Any = None
        published_at = float("-inf")
        while True:
            if time.monotonic() - published_at >= HEARTBEAT_SECONDS:
                published_at = time.monotonic()
                store = store or self._connect()
                if store is not None and self._try(store, self._publish) is None:
                    store = None
            try:
                request = self._inbox.get(timeout=max(0.0, published_at + HEARTBEAT_SECONDS - time.monotonic()))
            except queue.Empty:
                continue
            if request is None:
                if store is not None:
                    self._try(store, lambda store: store.set(self._heartbeat_key(self.id), "{}"))
                return
            if isinstance(request, str):
                self._is_publish_queued, published_at = False, float("-inf")
                continue
            question, answer = request
            store = store or self._connect()
            found = None if store is None else self._try(store, question)
            if found is None:
                store = None
                time.sleep(HEARTBEAT_SECONDS / 10)
                if not answer.cancelled():
                    self._inbox.put(request)
            elif answer.set_running_or_notify_cancel():
                answer.set_result(found[0])

    def _connect(self) -> Any:
        """A new connection; None if there is nobody."""
        try:
            with socket.create_connection((self._host, self._port), _CONNECT_SECONDS):
                pass  # the store's own way of trying is longer, and loud
            return self.client(_CONNECT_SECONDS)
        except (OSError, RuntimeError) as error:
            logger.info("the meeting place at %s does not answer: %s", self.address, error)
            return None

    def _try(self, store: Any, question: Callable[[Any], _T]) -> tuple[_T] | None:
        """The answer; None if the connection is gone."""
        try:
            return (question(store),)
        except RuntimeError:
            return None

    def _heartbeat_key(self, who: str) -> str:
        return f"line/{who}"

    def _publish(self, store: Any) -> None:
        """This rank's line, and a look at the others'."""
        self._num_heartbeats += 1
        store.set(self._heartbeat_key(self.id), json.dumps({"line": self._num_heartbeats, **self._status}))
        received, join_key = self._received, self._join_key
        for other in received:
            if store.check([self._heartbeat_key(other)]):
                line = store.get(self._heartbeat_key(other))
                if received[other][0] != line:
                    received[other] = line, time.monotonic()
        self._received_at = time.monotonic()
        if join_key and store.add(join_key, 0) > 0 and join_key == self._join_key:
            self.is_join_requested = True


def main() -> None:
    """Keeps a meeting place until it is ended."""
    if len(sys.argv) != 2 or not sys.argv[1].isdecimal():
        sys.exit("usage: python -m shade.gradient.rendezvous PORT")
    store = serve(int(sys.argv[1]))
    sys.stdout.write(f"ranks meet at port {store.port} of this machine; end it with Ctrl-C\n")
    sys.stdout.flush()
    threading.Event().wait()
