"""Ways to hurt a cache in mid-run, each returning what it takes to prove that it happened."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import redis

from shade.store._servers.server import LocalServer


class SlowProxy:
    """A TCP proxy in front of a unix socket that holds back every answer for a while.

    Args:
        target: The server's socket.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self.delay_seconds = 0.0
        self.num_delayed = 0
        """Pieces of answers that were held back."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = [self._listener]
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    @property
    def url(self) -> str:
        """Where to connect to."""
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}"

    def _start(self, target: Callable[..., None], *args: object) -> None:
        self._threads.append(threading.Thread(target=target, args=args, daemon=True, name="slow-proxy"))
        self._threads[-1].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            try:
                server.connect(self._target)
            except OSError:
                client.close()
                server.close()
                continue
            self._open += [client, server]
            asked = threading.Event()
            self._start(self._pump, client, server, asked, False)
            self._start(self._pump, server, client, asked, True)

    def _pump(self, source: socket.socket, sink: socket.socket, asked: threading.Event, is_answer: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 20):
                if not is_answer:
                    asked.set()
                elif self.delay_seconds and asked.is_set():  # once an answer, not once a piece of it
                    asked.clear()
                    self.num_delayed += 1
                    time.sleep(self.delay_seconds)
                sink.sendall(piece)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends all conversations."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(5)  # a conversation that it has just begun would be left open
        for end in self._open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for thread in self._threads:
            thread.join(5)

    def __enter__(self) -> SlowProxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclass
class Patient:
    """A server that a run uses, and how to reach it besides."""

    server: LocalServer
    proxy: SlowProxy
    admin: redis.Redis
    """A connection of our own, past the proxy."""

    @property
    def url(self) -> str:
        """What the run is given."""
        return self.proxy.url

    def samples(self) -> list[bytes]:
        """The keys of all cached samples."""
        return sorted(self.admin.scan_iter("shade:*{*", count=1000))

    def drop_connections(self) -> None:
        """Ends every connection but our own, so that clients have to log in anew."""
        self.admin.client_kill_filter(_type="normal", skipme=True)


@contextlib.contextmanager
def patient(folder: Path) -> Iterator[Patient]:
    """A fresh server behind a proxy."""
    folder.mkdir(exist_ok=True)
    with LocalServer(directory=folder) as server, SlowProxy(server.socket_path) as proxy:
        admin = redis.Redis(unix_socket_path=server.socket_path)
        try:
            yield Patient(server, proxy, admin)
        finally:
            admin.close()
            if server.process_id:
                with contextlib.suppress(ProcessLookupError):
                    server.signal(signal.SIGCONT)
