"""Sends a rank's reports to the telemetry server, without making the training wait.

`TelemetryClient.report` puts a report into a bounded queue and returns; a thread sends the queue twice a second, in one
request. A server that is slow or absent does not affect the training: the client logs one warning, retries at growing
intervals, and drops and counts the oldest reports that no longer fit the queue.

A request that timed out may have arrived; it is sent again, and the server ignores reports that it has seen.
"""

from __future__ import annotations

import http.client
import json
import logging
import threading
from collections import deque
from typing import Any, Final
from urllib.parse import urlsplit

from shade.control import message
from shade.control.server import token_given
from shade.errors import ConfigError, shown_url
from shade.types import StepReport

QUEUE_LENGTH: Final = 1024
"""Most reports that wait to be sent: minutes of training, 0.5 MB."""
_BATCH: Final = 256
_INTERVAL_SECONDS: Final = 0.5
_MOST_INTERVAL_SECONDS: Final = 30.0
_TIMEOUT_SECONDS: Final = 5.0

logger = logging.getLogger("shade.control")


class TelemetryClient:
    """Sends one rank's reports. Connects only when there is something to send.

    Args:
        url: The server's, ``http://host:port``.
        token: The server's token; by default the environment's.

    Raises:
        ConfigError: The URL is not valid, or the token cannot be sent.
    """

    def __init__(self, url: str, *, token: str | None = None) -> None:
        self._host, self._port = _address(url)
        self._headers = _headers(token)
        self._queue: deque[StepReport] = deque()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._is_lost = False
        self.num_sent = 0
        self.num_dropped = 0
        """Reports that were never sent. Not 0: the server was away for long, or the link is full."""
        self._thread = threading.Thread(target=self._run, name="shade-telemetry-client", daemon=True)
        self._thread.start()

    def report(self, report: StepReport) -> None:
        """Queues a report and returns at once."""
        with self._lock:
            if len(self._queue) >= QUEUE_LENGTH:
                self._queue.popleft()
                self.num_dropped += 1
            self._queue.append(report)
        self._wake.set()

    def close(self, timeout_seconds: float = 2.0) -> None:
        """Sends the rest of the queue, if the thread ends within the timeout. Safe to call twice."""
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout_seconds)

    def __enter__(self) -> TelemetryClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        interval = _INTERVAL_SECONDS
        while True:
            self._wake.wait()
            self._closing.wait(interval)
            if self._send():
                interval = _INTERVAL_SECONDS
            elif self._closing.is_set():
                break
            else:
                interval = min(2 * interval, _MOST_INTERVAL_SECONDS)
            with self._lock:
                if self._queue:
                    continue
                self._wake.clear()
            if self._closing.is_set():
                break
        with self._lock:
            self.num_dropped += len(self._queue)
            self._queue.clear()

    def _send(self) -> bool:
        """Sends the oldest reports; returns False if that failed."""
        with self._lock:
            batch = [self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))]
        if not batch:
            return True
        try:
            _request(self._host, self._port, "POST", "/reports", self._headers, b"".join(map(message.line, batch)))
        except (OSError, http.client.HTTPException) as error:
            with self._lock:
                room = QUEUE_LENGTH - len(self._queue)
                self.num_dropped += max(len(batch) - room, 0)
                self._queue.extendleft(reversed(batch[max(len(batch) - room, 0) :]))
            if not self._is_lost:
                self._is_lost = True
                what = f"http://{self._host}:{self._port}"
                logger.warning(
                    "telemetry cannot be sent to %s (%s); training continues, and the client retries", what, error
                )
            return False
        if self._is_lost:
            self._is_lost = False
            logger.info("telemetry is sent again after %d dropped reports", self.num_dropped)
        self.num_sent += len(batch)
        return True


def fetch_state(url: str, *, token: str | None = None) -> dict[str, Any]:
    """Returns `History.state` of the server at ``http://host:port``; raises `ConfigError` if none answers there."""
    host, port = _address(url)
    try:
        state = json.loads(_request(host, port, "GET", "/state", _headers(token)))
        if not isinstance(state, dict) or not isinstance(state.get("ranks"), list):
            raise ValueError("its answer is not a telemetry state")
    except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
        cure = f"{error}; see the run's log for its address"
        raise ConfigError.of("a telemetry server", shown_url(url), cure) from None
    return state


_PATHS = ("", "/", "/metrics")
"""Paths that may follow the address; the log of a run names the page of its figures."""


def _address(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if host is None or port is None or parts.scheme != "http" or parts.path not in _PATHS or parts.username:
        raise ConfigError.of("a telemetry server's URL", shown_url(url), "write it as http://10.0.0.1:9090")
    return host, port


def _headers(token: str | None) -> dict[str, str]:
    token = token_given(token)
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def _request(host: str, port: int, method: str, path: str, headers: dict[str, str], body: bytes | None = None) -> bytes:
    """Sends one request on a new connection and returns the body; raises `OSError` unless the answer is 200."""
    connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_SECONDS)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        content = answer.read(64 << 20)
        if answer.status != 200:
            raise OSError(f"{answer.status}: {' '.join(content[:200].decode(errors='replace').split())}")
        return content
    finally:
        connection.close()
