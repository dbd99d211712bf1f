"""Connects ranks through a key-value store on a machine that outlives them, from one thread.

Ranks that have lost one of them cannot ask each other who is left: they would need the group that has just broken. So
they use PyTorch's ``TCPStore`` in a process that does not train::

    python -m shade.gradient.rendezvous 29600            # on the machine that fails last

It carries little: one heartbeat a second from each rank, with its status, and a few keys when a group forms.

A rank is *silent* when its heartbeat has not changed for some seconds by the reader's own clock; clocks are never
compared. The store trusts every client, as torch.distributed's own does: keep it on a private network.
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
"""In the inbox: publish now, not at the next heartbeat."""
_T = TypeVar("_T")

logger = logging.getLogger("shade.gradient")


def serve(port: int = 0, host: str = "0.0.0.0") -> dist.TCPStore:  # type: ignore[name-defined]
    """Starts a rendezvous server in this process (port 0: any free port); it lives as long as the returned store."""
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]


class Rendezvous:
    """One rank's connection to the server at ``host:port``; runs with different names do not see each other."""

    def __init__(self, address: str, run: str) -> None:
        self.id = secrets.token_hex(8)
        """This process's, for good."""
        self.address = address
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise ConfigError.of("the rendezvous server as host:port", address, "10.0.0.1:29600, say")
        self._host, self._port, self._run = host, int(port), run
        self._inbox: queue.SimpleQueue[tuple[Callable[[Any], Any], concurrent.futures.Future[Any]] | str | None] = (
            queue.SimpleQueue()
        )
        self._status: dict[str, Any] = {}
        self._is_publish_queued = False
        """Whether the inbox holds a request to publish: one at a time, however long the line is cut."""
        self._join_key = ""
        self._received: dict[str, tuple[bytes, float]] = {}
        """By process: its last heartbeat, and since when."""
        self._num_heartbeats, self._received_at = 0, 0.0
        self.is_join_requested = False
        """Whether the counter that `follow` named is above 0."""
        # One thread makes all requests, because the store's client waits without limit: on a cut line, a quarter of an
        # hour. Callers wait for the thread, with a limit of their own.
        self._thread = threading.Thread(target=self._serve, name="shade-gradient-rendezvous", daemon=True)
        self._thread.start()
        # A thread that outlives the interpreter in the store's client aborts.
        atexit.register(self.close)

    def client(self, timeout_seconds: float) -> dist.Store:  # type: ignore[name-defined]
        """Opens another connection to this run's keys, for callers that wait for other ranks, as forming groups do."""
        store = dist.TCPStore(self._host, self._port, timeout=timedelta(seconds=timeout_seconds))  # type: ignore[attr-defined]
        return dist.PrefixStore(self._run, store)  # type: ignore[attr-defined]

    def ask(self, question: Callable[[Any], _T], seconds: float) -> _T:
        """Runs a question on the thread, again if the connection broke; `GradientError` without an answer in time.

        The question gets the store, and must not wait for other ranks.
        """
        answer: concurrent.futures.Future[_T] = concurrent.futures.Future()
        self._inbox.put((question, answer))
        try:
            return answer.result(seconds)
        except concurrent.futures.TimeoutError:
            answer.cancel()
            raise GradientError(
                f"expected the rendezvous server at {self.address} to answer within {seconds:.0f} s, got no answer; "
                "start it (python -m shade.gradient.rendezvous PORT), or check the network"
            ) from None

    def publish(self, **status: Any) -> None:
        """Publishes the status that others read if this rank is lost, now and with each heartbeat; JSON-plain."""
        self._status = status
        # Not only with the next heartbeat: a rank was killed half a second after its first status, and no other rank
        # could say how much residual was lost with it.
        if not self._is_publish_queued:
            self._is_publish_queued = True
            self._inbox.put(_PUBLISH)

    def follow(self, join_key: str, ids: Iterable[str]) -> None:
        """Follows other processes' heartbeats, and the counter ``join_key``, from now on."""
        now = time.monotonic()
        self._received = {each: self._received.get(each, (b"", now)) for each in ids if each != self.id}
        self._join_key, self.is_join_requested = join_key, False

    def silence_seconds(self, other: str) -> float:
        """Returns for how long a followed heartbeat has not changed; infinity after a regular close."""
        if other == self.id:
            return 0.0
        line, since = self._received[other]
        # Up to the last reading: a rank that is cut off itself does not take the others for dead.
        return float("inf") if line == b"{}" else max(0.0, self._received_at - since)

    def last_status(self, other: str) -> dict[str, Any]:
        """Returns a followed process's last status; empty if there is none, or after a regular close."""
        status: dict[str, Any] = json.loads(self._received[other][0] or b"{}")
        return status

    def close(self) -> None:
        """Publishes a regular close and ends the thread; waits at most 2 seconds. Safe to call twice."""
        atexit.unregister(self.close)
        self._inbox.put(None)
        self._thread.join(_CLOSE_SECONDS)

    def _serve(self) -> None:
        """Publishes and answers; repeats a question until it is answered or its caller has given up."""
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
        try:
            with socket.create_connection((self._host, self._port), _CONNECT_SECONDS):
                # The store's own attempt takes longer, and logs much.
                pass
            return self.client(_CONNECT_SECONDS)
        except (OSError, RuntimeError) as error:
            logger.info("the rendezvous server at %s does not answer: %s", self.address, error)
            return None

    def _try(self, store: Any, question: Callable[[Any], _T]) -> tuple[_T] | None:
        # In a tuple, because an answer may be None; None: the connection is lost.
        try:
            return (question(store),)
        except RuntimeError:
            return None

    def _heartbeat_key(self, who: str) -> str:
        return f"line/{who}"

    def _publish(self, store: Any) -> None:
        self._num_heartbeats += 1
        store.set(self._heartbeat_key(self.id), json.dumps({"line": self._num_heartbeats, **self._status}))
        received, join_key = self._received, self._join_key
        for other in received:
            if store.check([self._heartbeat_key(other)]):
                line = store.get(self._heartbeat_key(other))
                if received[other][0] != line:
                    received[other] = line, time.monotonic()
        self._received_at = time.monotonic()
        # `follow` may have changed the key meanwhile, on another thread.
        if join_key and store.add(join_key, 0) > 0 and join_key == self._join_key:
            self.is_join_requested = True


def main() -> None:
    """Runs a rendezvous server until it is stopped."""
    if len(sys.argv) != 2 or not sys.argv[1].isdecimal():
        sys.exit("usage: python -m shade.gradient.rendezvous PORT")
    store = serve(int(sys.argv[1]))
    sys.stdout.write(f"ranks meet at port {store.port} of this machine; end it with Ctrl-C\n")
    sys.stdout.flush()
    threading.Event().wait()
