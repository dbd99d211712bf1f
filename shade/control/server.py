"""Receives every rank's step reports and serves them to the controller, to ``shade top`` and to Prometheus.

HTTP, from the standard library: ranks ``POST /reports`` with lines of JSON, ``GET /state`` returns the latest state as
JSON, ``GET /metrics`` a page for Prometheus. The state has medians of each rank's last `NUM_STEPS`; Prometheus gets
totals since the start.

Memory is bounded, an idle connection is dropped, and nothing is unpickled. It listens beyond this machine only with a
token, from the environment (`TOKEN_VARIABLE`), which every request must carry. It is plain HTTP: use a tunnel over a
network that is not yours.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
import os
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn
from typing import Any, Final

from shade.control import message
from shade.errors import ConfigError, DataError
from shade.types import Clock, Decision, StepReport

TOKEN_VARIABLE: Final = "SHADE_TELEMETRY_TOKEN"
"""Environment variable: the token that every request must carry, if it is set."""
MOST_BODY_BYTES: Final = 1 << 20
_MOST_CONNECTIONS: Final = 64
_MOST_UNREAD: Final = 4096
"""Reports that wait for the controller; the oldest are dropped first."""
_TIMEOUT_SECONDS: Final = 5.0

NUM_STEPS: Final = 64
"""Steps that are kept of each rank."""
MOST_RANKS: Final = 4096
"""Upper bound of the ranks whose reports are kept: a sender with more is no training."""
COUNTERS: Final = {
    "samples": "Samples trained on.",
    "sent_bytes": "Bytes of compressed gradients sent.",
    "received_bytes": "Bytes of compressed gradients received.",
    "compute_seconds": "Forward and backward.",
    "compress_seconds": "Choosing, coding, decoding and merging; beside the compute.",
    "exchange_seconds": "In collectives; beside the compute where they overlap.",
    "wait_seconds": "Training waited for the exchange: what a better link would save.",
}
"""Totals of each rank, and their help lines."""
GAUGES: Final = {
    "step": "Optimizer steps done.",
    "density": "Kept fraction of the gradient in the last step.",
    "gradient_norm": "Of the last merged gradient.",
    "silent_seconds": "Since this rank's last report. Grows when it is dead, or its reports are dropped.",
}
"""Present values of each rank, and their help lines."""
_SECONDS: Final = ("compute_seconds", "compress_seconds", "exchange_seconds", "wait_seconds")

logger = logging.getLogger("shade.control")


class _Rank:
    def __init__(self) -> None:
        self.recent: deque[StepReport] = deque(maxlen=NUM_STEPS)
        self.totals: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        self.received_at = 0.0


class History:
    """The last reports of every rank, in bounded memory.

    Args:
        clock: A monotonic clock, in seconds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ranks: dict[int, _Rank] = {}
        self._decision: Decision | None = None
        self._num_decisions = 0

    def add(self, report: StepReport) -> bool:
        """Adds a report; returns False if it is known (its sender got no answer) or its rank exceeds `MOST_RANKS`."""
        if report.rank not in self._ranks and len(self._ranks) >= MOST_RANKS:
            return False
        rank = self._ranks.setdefault(report.rank, _Rank())
        rank.received_at = self._clock()
        if report in rank.recent:
            return False
        rank.recent.append(report)
        added = (report.num_samples, report.bytes_sent, report.bytes_received)
        for name, value in zip(COUNTERS, (*added, *(getattr(report, name) for name in _SECONDS)), strict=True):
            rank.totals[name] += value
        return True

    def decided(self, decision: Decision) -> None:
        """Records the latest decision."""
        self._decision = decision
        self._num_decisions += 1

    def state(self) -> dict[str, Any]:
        """Returns plain JSON: ``ranks`` in order, with medians over their last steps, and the last ``decision``."""
        return {
            "ranks": [self._summary(number, self._ranks[number]) for number in sorted(self._ranks)],
            "decision": None if self._decision is None else asdict(self._decision),
            "num_decisions": self._num_decisions,
        }

    def _summary(self, number: int, rank: _Rank) -> dict[str, Any]:
        def median(name: str) -> float:
            return float(statistics.median(getattr(report, name) for report in rank.recent))

        last = rank.recent[-1]
        seconds = {name: median(name) for name in _SECONDS}
        step_seconds = seconds["compute_seconds"] + seconds["wait_seconds"]
        return {
            "rank": number,
            "step": last.step,
            "num_samples": last.num_samples,
            "density": last.density,
            "gradient_norm": last.gradient_norm,
            "silent_seconds": max(0.0, self._clock() - rank.received_at),
            "samples_per_second": median("num_samples") / step_seconds if step_seconds > 0 else 0.0,
            "wait_fraction": seconds["wait_seconds"] / step_seconds if step_seconds > 0 else 0.0,
            "bytes_sent": median("bytes_sent"),
            "bytes_received": median("bytes_received"),
            **seconds,
        }

    def prometheus(self) -> str:
        """Returns the state in Prometheus' text format: ``shade_gradient_density{rank="0"} 0.01``."""
        lines: list[str] = []

        def add(name: str, kind: str, meaning: str, values: dict[int, float]) -> None:
            lines.extend((f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"))
            lines.extend(f'{name}{{rank="{number}"}} {value!r}' for number, value in sorted(values.items()))

        for name, meaning in COUNTERS.items():
            totals = {number: rank.totals[name] for number, rank in self._ranks.items()}
            add(f"shade_gradient_{name}_total", "counter", meaning, totals)
        summaries = {number: self._summary(number, rank) for number, rank in self._ranks.items()}
        for name, meaning in GAUGES.items():
            add(f"shade_gradient_{name}", "gauge", meaning, {number: each[name] for number, each in summaries.items()})
        lines += [
            "# HELP shade_gradient_decisions_total Times that the controller changed density or batches.",
            "# TYPE shade_gradient_decisions_total counter",
            f"shade_gradient_decisions_total {self._num_decisions}",
        ]
        return "\n".join(lines) + "\n"


class TelemetryServer:
    """Listens from its construction until `close`.

    Args:
        host: Address to listen at.
        port: 0 for a free one.
        token: The token that requests must carry; by default the environment's.
        clock: A monotonic clock, in seconds.
        page: Makes the answer of `/metrics`; by default the reports of this server.

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
        """Lines that were not reports. Not 0: another program or another version is sending."""
        try:
            self._http = _Http(host, port, self, token)
        except (OSError, OverflowError) as error:
            raise ConfigError.of("an address to listen at", f"{host}:{port}", f"{error}; name another") from None
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._http.server_address[1]}"
        """The address for clients; replace a wildcard address by this machine's name."""
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.1}, name="shade-telemetry", daemon=True
        )
        self._thread.start()

    def hear(self, item: StepReport | Decision) -> None:
        """Adds a report or a decision, from the network or from this process."""
        with self._lock:
            if isinstance(item, Decision):
                self._history.decided(item)
            elif self._history.add(item):
                self._unread.append(item)

    def hear_lines(self, body: bytes) -> int:
        """Adds lines of JSON, counts those that are no reports or decisions, and returns the number of good ones."""
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
                    logger.warning("refused a line of telemetry; later ones are refused silently: %s", error)
        return good

    def drain(self) -> list[StepReport]:
        """Returns the reports since the last call, in order of arrival."""
        with self._lock:
            found = list(self._unread)
            self._unread.clear()
        return found

    def state(self) -> dict[str, Any]:
        """Returns `History.state` and the number of refused lines."""
        with self._lock:
            return {**self._history.state(), "num_refused": self.num_refused}

    def prometheus(self) -> str:
        """Returns the page of the constructor, by default `History.prometheus`."""
        if self._page is not None:
            return self._page()
        with self._lock:
            return self._history.prometheus()

    def close(self) -> None:
        """Stops listening and drops all connections. Safe to call twice."""
        self._http.shutdown()
        self._thread.join()
        self._http.drop_all()
        self._http.server_close()

    def __enter__(self) -> TelemetryServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def token_given(token: str | None) -> str | None:
    """Returns the token that requests must carry: the caller's, else the environment's, else None.

    Raises `ConfigError`, without showing the token, if an HTTP header cannot carry it.
    """
    token = token or os.environ.get(TOKEN_VARIABLE) or None
    if token is not None and not (token.isascii() and token.isprintable() and token == token.strip()):
        raise ConfigError.of("a token of printable ASCII", "another", f"write another to {TOKEN_VARIABLE}")
    return token


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Http(ThreadingMixIn, HTTPServer):
    """Serves each request in a thread; closes a connection beyond `_MOST_CONNECTIONS`, whose client tries again."""

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
        """Binds without looking up the machine's own name, which may take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._guard:
            has_place = len(self._connected) < _MOST_CONNECTIONS
            if has_place:
                self._connected.add(request)
        if has_place:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        with self._guard:
            self._connected.discard(request)
        super().shutdown_request(request)

    def drop_all(self) -> None:
        """Closes all connections, so that no thread waits for input."""
        with self._guard:
            for each in self._connected:
                try:
                    each.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs a connection that its client has broken; that is not our error."""
        logger.debug("a telemetry connection from %s broke", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = _TIMEOUT_SECONDS
    server: _Http

    def do_GET(self) -> None:
        if not self._is_authorised():
            return
        if self.path == "/state":
            self._answer(200, "application/json", json.dumps(self.server.telemetry.state()))
        elif self.path == "/metrics":
            self._answer(200, "text/plain; version=0.0.4; charset=utf-8", self.server.telemetry.prometheus())
        else:
            self._answer(404, "text/plain", "there are /state and /metrics\n")

    def do_POST(self) -> None:
        if not self._is_authorised():
            return
        length = self.headers.get("Content-Length", "")
        if self.path != "/reports":
            self._answer(404, "text/plain", "there is /reports\n")
        elif not (length.isascii() and length.isdigit() and len(length) < 10 and int(length) <= MOST_BODY_BYTES):
            self._answer(413, "text/plain", f"say how many bytes, at most {MOST_BODY_BYTES}\n")
        else:
            body = self.rfile.read(int(length))
            if len(body) == int(length):  # else the sender is gone, and sends everything again
                self._answer(200, "application/json", json.dumps({"good": self.server.telemetry.hear_lines(body)}))

    def _is_authorised(self) -> bool:
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
