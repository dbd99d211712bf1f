"""Reads for the parent of a `ReaderProcess`, until that closes the control socket."""

from __future__ import annotations

import json
import logging
import os
import pickle
import select
import signal
import socket
import threading
from collections import deque
from contextlib import suppress
from typing import Final

from typing_extensions import override

from shade.data._origin.origin import ByteRange
from shade.data._origin.reader_process import described, receive, send
from shade.data._origin.url_origin import UrlReads

_LOOK_SECONDS: Final = 5.0
"""Between looks for the parent: where it is killed, its own forks may keep the control socket open."""


class _Said(logging.Handler):
    """Keeps what is to be said by the parent."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: deque[tuple[int, str]] = deque()

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelno, record.getMessage()))

    def taken(self) -> list[tuple[int, str]]:
        """Returns what was said since the last call."""
        found = []
        with suppress(IndexError):
            while True:
                found.append(self.lines.popleft())
        return found


def serve(descriptor: int) -> None:
    """Serves a control socket to its end, and ends the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the parent, too
    parent, said = os.getppid(), _Said()
    logging.getLogger("shade").addHandler(said)
    control = socket.socket(fileno=descriptor)
    origin = UrlReads(*pickle.loads(receive(control)), never_forks=True)
    control.sendall(b"+")
    while os.getppid() == parent:
        if select.select([control], [], [], _LOOK_SECONDS)[0]:
            message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not message:
                break
            link = socket.socket(fileno=descriptors[0])
            threading.Thread(target=_answer, args=(link, origin, said), daemon=True).start()
    os._exit(0)  # nothing waits for the reads under way


def _answer(link: socket.socket, origin: UrlReads, said: _Said) -> None:
    with link, suppress(ConnectionError):
        while True:
            paths, sizes = json.loads(receive(link))
            results = origin.read_many([each if isinstance(each, str) else ByteRange(*each) for each in paths], sizes)
            found = [described(each) if isinstance(each, OSError) else len(each) for each in results]
            send(link, json.dumps({"results": found, "log": said.taken()}).encode())
            for each in results:
                if not isinstance(each, OSError):
                    link.sendall(each)
