"""A process that reads URLs for a training process, whose interpreter an object then costs next to nothing.

A client of a bucket takes 0.2 to 2 ms of an interpreter for an object. Here a training process sends a batch's URLs
through a socket and gets their bytes. The other process (`reader_main`) never forks, so it may use clients that a fork
breaks. It ends when its parent's end of the control socket closes. Decision 0060.

A conversation belongs to one thread at a time. A message is its length, 8 bytes, and JSON; contents follow an answer.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from shade.data._origin.origin import FileOrRange

logger = logging.getLogger("shade.data")

LENGTH: Final = 8
_SOCKET_BYTES: Final = 1 << 20
"""Buffer of a conversation's socket. The default is a fifth of it, and a batch has more."""
_MAIN: Final = "import sys; sys.path[:] = {path!r}; from shade.data._origin.reader_main import serve; serve({number})"
_END_SECONDS: Final = 2.0


class ReaderLostError(Exception):
    """The other process does not answer any more."""


class ReaderProcess:
    """A process that reads; belongs to the process that has made it, and to any number of its threads.

    Args:
        options: For fsspec.
        num_threads: Upper limit of concurrent reads, ≥ 1.

    Raises:
        OSError: It cannot be started.
        pickle.PicklingError, TypeError, AttributeError: An option cannot be sent to it.
    """

    def __init__(self, options: Mapping[str, Any], num_threads: int) -> None:
        settings = pickle.dumps((dict(options), num_threads))
        self._control, theirs = socket.socketpair()
        with theirs:
            command = _MAIN.format(path=sys.path, number=theirs.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._owner = os.getpid()
        self._idle: list[socket.socket] = []
        self._is_ready = False
        send(self._control, settings)

    @property
    def is_ready(self) -> bool:
        """Returns whether it has started. Raises ReaderLostError if it has ended."""
        if not self._is_ready:
            try:
                # It says so once; another thread may have heard it since.
                self._is_ready = bool(self._control.recv(1, socket.MSG_DONTWAIT))
            except BlockingIOError:
                return self._is_ready
            except OSError as error:
                raise ReaderLostError(str(error)) from error
            if not self._is_ready:
                raise ReaderLostError("it has not started")
        return self._is_ready

    def read(self, paths: Sequence[FileOrRange], sizes: Sequence[int] | None) -> list[bytes | OSError]:
        """Reads as `Origin.read_many` does; raises ReaderLostError if the process ends meanwhile."""
        try:
            link = self._idle.pop()
        except IndexError:
            link = self._connected()
        try:
            send(link, json.dumps([paths, sizes]).encode())
            answer = json.loads(receive(link))
            lengths = [each if isinstance(each, int) else 0 for each in answer["results"]]
            content = memoryview(_exactly(link, sum(lengths)))
        except (OSError, ValueError) as error:
            link.close()
            raise ReaderLostError(str(error)) from error
        self._idle.append(link)
        for level, text in answer["log"]:
            logger.log(level, "%s", text)
        ends = itertools.accumulate(lengths)
        return [
            bytes(content[end - each : end]) if isinstance(each, int) else _error(*each)
            for each, end in zip(answer["results"], ends, strict=True)
        ]

    def _connected(self) -> socket.socket:
        mine, theirs = socket.socketpair()
        with theirs:
            for each in (mine, theirs):
                for kind in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                    each.setsockopt(socket.SOL_SOCKET, kind, _SOCKET_BYTES)
            try:
                socket.send_fds(self._control, [b"+"], [theirs.fileno()])
            except OSError as error:
                mine.close()
                raise ReaderLostError(str(error)) from error
        return mine

    def close(self) -> None:
        """Ends the process. Safe to call twice; in a fork's child it ends nothing."""
        self._control.close()
        while self._idle:
            self._idle.pop().close()
        if self._owner == os.getpid():
            try:
                self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def send(link: socket.socket, content: bytes) -> None:
    """Sends a message."""
    link.sendall(len(content).to_bytes(LENGTH, "little") + content)


def receive(link: socket.socket) -> bytearray:
    """Receives a message; raises EOFError, an OSError here, if the other side has closed."""
    return _exactly(link, int.from_bytes(_exactly(link, LENGTH), "little"))


def _exactly(link: socket.socket, count: int) -> bytearray:
    content = bytearray(count)
    view, done = memoryview(content), 0
    while done < count:
        num_bytes = link.recv_into(view[done:], flags=socket.MSG_WAITALL)
        if not num_bytes:
            raise ConnectionError("the other process has ended")
        done += num_bytes
    return content


def _error(kind: str, number: int | None, text: str, path: str | None) -> OSError:
    if number is None:
        return KINDS[kind](text)
    return KINDS[kind](number, text, path)


def described(error: OSError) -> list[Any]:
    """Returns what makes an error again in the parent."""
    kind = next(each.__name__ for each in type(error).__mro__ if KINDS.get(each.__name__) is each)
    if error.errno is None:
        return [kind, None, str(error), None]
    return [kind, error.errno, error.strerror or str(error), error.filename and str(error.filename)]


class UnansweredError(OSError):
    """A server stayed busy or silent for longer than it is waited for."""


KINDS: Final[dict[str, type[OSError]]] = {
    each.__name__: each
    for each in (OSError, UnansweredError, FileNotFoundError, PermissionError, IsADirectoryError, TimeoutError)
}
"""Errors that keep their class on the way; others become the nearest of these."""
