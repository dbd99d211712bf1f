"""A real web server with a folder behind it, that counts, waits and fails as told."""

from __future__ import annotations

import contextlib
import http.server
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder; counts, waits and fails as told."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        server: Any = self.server
        with server.lock:
            server.reads.append(self.path)
            server.at_once += 1
            server.most = max(server.most, server.at_once)
            fails = server.failures.get(self.path, 0)
            server.failures[self.path] = fails - 1
        time.sleep(server.seconds)
        try:
            if fails > 0:
                self._refuse()
            elif "Range" in self.headers and server.serves_ranges:
                self._send_range(self.headers["Range"])
            else:
                super().do_GET()
        finally:
            with server.lock:
                server.at_once -= 1

    def do_HEAD(self) -> None:
        server: Any = self.server
        if server.failures.get(self.path, 0) > 0:
            self._refuse()
        else:
            super().do_HEAD()

    def _refuse(self) -> None:
        server: Any = self.server
        self.send_response(server.refuses_with)
        self.send_header("Retry-After", server.retry_after)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send_range(self, wanted: str) -> None:
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        with open(self.translate_path(self.path), "rb") as file:
            file.seek(int(first))
            content = file.read(int(last) + 1 - int(first))
        self.send_response(206)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Range", f"bytes {first}-{last}/*")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


class WebServer(http.server.ThreadingHTTPServer):
    """On a port of its own."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder: Path, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), partial(Handler, directory=str(folder)))
        self.lock, self.seconds = threading.Lock(), 0.0
        self.reads: list[str] = []
        self.failures: dict[str, int] = {}
        self.at_once = self.most = 0
        self.serves_ranges = True
        self.refuses_with, self.retry_after = 503, "0"
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


@contextlib.contextmanager
def serving(folder: Path, port: int = 0) -> Iterator[WebServer]:
    """The folder, served until the end of the block."""
    with WebServer(folder, port) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()
