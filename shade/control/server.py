"""Hears from every rank what its steps cost, and tells whoever asks: the controller, ``shade top``, Prometheus.

HTTP, from the standard library: ranks ``POST /reports`` lines of JSON, ``GET /state`` is the latest as JSON,
``GET /metrics`` a page for Prometheus. One small server, usually in a thread of rank 0, asked a few times a second. The
controller takes the new reports out with `TelemetryServer.drain`.

Safe to leave running: memory is bounded (steps per rank, ranks, bytes per request, requests at once), a connection that
says nothing is dropped, nothing is unpickled. Beyond this machine it listens only with a token, from the environment
(`TOKEN_VARIABLE`), which every request must bear. The price of plain HTTP: whoever can read the wire can read the token
and the metrics. They are no secrets, but a network that is not yours wants a tunnel.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn
from typing import Any, Final

from shade.control import message
from shade.control.history import History
from shade.errors import ConfigError, DataError
from shade.types import Clock, Decision, StepReport

TOKEN_VARIABLE: Final = "SHADE_TELEMETRY_TOKEN"
"""Environment variable: what every request must bear, where it is set."""
MOST_BODY_BYTES: Final = 1 << 20
_MOST_CONNECTIONS: Final = 64
_MOST_UNREAD: Final = 4096
"""Reports for the controller; where there is none, the oldest make room."""
_TIMEOUT_SECONDS: Final = 5.0

logger = logging.getLogger("shade.control")


class TelemetryServer:
    """Listens from the moment it is made, until it is closed.

    Args:
        host: Address to listen at.
        port: 0 for a free one.
        token: What requests must bear; by default the environment's.
        clock: Seconds that only grow.
        page: What `/metrics` answers; by default what was reported here.

    Raises:
        ConfigError: It would listen beyond this machine without a token, or cannot listen there.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        token: str | None = None,
        clock: Clock = time.monotonic,
        page: Callable[[], str] | None = None,
    ) -> None:
        token = token_given(token)
        if token is None and not is_loopback(host):
            raise ConfigError.of(f"a token in {TOKEN_VARIABLE}, to listen at {host}", token, "set it for all ranks")
        self._history = History(clock)
        self._page = page
        self._unread: deque[StepReport] = deque(maxlen=_MOST_UNREAD)
        self._lock = threading.Lock()
        self.num_refused = 0
        """Lines that were no reports. Not 0: something else is sending, or another version is."""
        try:
            self._http = _Http(host, port, self, token)
        except (OSError, OverflowError) as error:
            raise ConfigError.of("an address to listen at", f"{host}:{port}", f"{error}; name another") from None
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._http.server_address[1]}"
        """Where clients find it; with a wildcard address, put this machine's name in its place."""
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.1}, name="shade-telemetry", daemon=True
        )
        self._thread.start()

    def hear(self, told: StepReport | Decision) -> None:
        """Takes in a report or a decision, from the network or from this process."""
        with self._lock:
            if isinstance(told, Decision):
                self._history.decided(told)
            elif self._history.add(told):
                self._unread.append(told)

    def hear_lines(self, body: bytes) -> int:
        """Takes in lines; those that are none are counted.

        Args:
            body: Lines of JSON.

        Returns:
            How many were good.
        """
        good = 0
        for data in body.splitlines():
            try:
                self.hear(message.read(data))
                good += 1
            except DataError as error:
                with self._lock:
                    self.num_refused += 1
                    is_first = self.num_refused == 1
                if is_first:
                    logger.warning("a line of telemetry is refused, and others will be without a word: %s", error)
        return good

    def drain(self) -> list[StepReport]:
        """The reports that came in since the last call, in the order in which they came."""
        with self._lock:
            found = list(self._unread)
            self._unread.clear()
        return found

    def state(self) -> dict[str, Any]:
        """As `History.state`, and how many lines were refused."""
        with self._lock:
            return {**self._history.state(), "num_refused": self.num_refused}

    def prometheus(self) -> str:
        """The page that was given, or else as `History.prometheus`."""
        if self._page is not None:
            return self._page()
        with self._lock:
            return self._history.prometheus()

    def close(self) -> None:
        """Stops listening; drops who is connected. Safe to call twice."""
        self._http.shutdown()
        self._thread.join()
        self._http.drop_all()
        self._http.server_close()

    def __enter__(self) -> TelemetryServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def token_given(token: str | None) -> str | None:
    """The token, or else the environment's, or else None.

    Args:
        token: From the caller.

    Returns:
        What requests shall bear.

    Raises:
        ConfigError: A header of HTTP cannot carry it; it is not shown.
    """
    token = token or os.environ.get(TOKEN_VARIABLE) or None
    if token is not None and not (token.isascii() and token.isprintable() and token == token.strip()):
        raise ConfigError.of("a token of printable ASCII", "another", f"write another to {TOKEN_VARIABLE}")
    return token


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Http(ThreadingMixIn, HTTPServer):
    """A thread a request, at most so many at once; who comes when all are busy is hung up on, and comes again."""

    daemon_threads = False
    request_queue_size = 128

    def __init__(self, host: str, port: int, telemetry: TelemetryServer, token: str | None) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.telemetry = telemetry
        self.authorization = None if token is None else f"Bearer {token}".encode("ascii")
        self._connected: set[socket.socket] = set()
        self._guard = threading.Lock()
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Without the look-up of its own name, which may take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._guard:
            is_welcome = len(self._connected) < _MOST_CONNECTIONS
            if is_welcome:
                self._connected.add(request)
        if is_welcome:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        with self._guard:
            self._connected.discard(request)
        super().shutdown_request(request)

    def drop_all(self) -> None:
        """Hangs up, so that no thread is left waiting for somebody to speak."""
        with self._guard:
            for each in self._connected:
                try:
                    each.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever hangs up in mid-sentence is none of our business."""
        logger.debug("a telemetry connection from %s broke", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = _TIMEOUT_SECONDS
    server: _Http

    def do_GET(self) -> None:
        if not self._may():
            return
        if self.path == "/state":
            self._answer(200, "application/json", json.dumps(self.server.telemetry.state()))
        elif self.path == "/metrics":
            self._answer(200, "text/plain; version=0.0.4; charset=utf-8", self.server.telemetry.prometheus())
        else:
            self._answer(404, "text/plain", "there are /state and /metrics\n")

    def do_POST(self) -> None:
        if not self._may():
            return
        length = self.headers.get("Content-Length", "")
        if self.path != "/reports":
            self._answer(404, "text/plain", "there is /reports\n")
        elif not (length.isascii() and length.isdigit() and len(length) < 10 and int(length) <= MOST_BODY_BYTES):
            self._answer(413, "text/plain", f"say how many bytes, at most {MOST_BODY_BYTES}\n")
        else:
            body = self.rfile.read(int(length))
            if len(body) == int(length):  # else the sender is gone, and will say it all again
                self._answer(200, "application/json", json.dumps({"good": self.server.telemetry.hear_lines(body)}))

    def _may(self) -> bool:
        wanted, given = self.server.authorization, self.headers.get("Authorization", "")
        if wanted is None or hmac.compare_digest(given.encode("utf-8", "replace"), wanted):
            return True
        self._answer(401, "text/plain", f"send the token of {TOKEN_VARIABLE} as a bearer token\n")
        return False

    def _answer(self, code: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        return "shade"

    def log_message(self, format: str, *args: object) -> None:
        logger.debug("telemetry: " + format, *args)
