"""Holds one connection to one Redis server: connects, logs in, sends a batch, reads its replies.

The socket's timeout is a *progress* timeout: it bounds each wait for the next bytes and not a whole transfer, so that
a large batch over a slow network is no failure while a stalled server is found out after ``timeout_seconds``. There
are no retries here: a connection that broke once is closed, and the next batch opens another.

What goes wrong inside is an exception with the address in it, and the connection is closed first: half a reply left
in it would answer somebody else's question. Invariant: an open link has no reply outstanding between two batches.

Name look-ups are the system's and have its timeout; name servers by address where that matters.
"""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from shade.errors import ConfigError, StoreAuthError, StoreError, StoreUnavailableError
from shade.store.url import StoreURL, format_address
from shade.store.wire import Command, Reply, ServerError, pack
from shade.types import Bytes

_READ_BUFFER_BYTES: Final = 1 << 18
"""Measured on 64 × 100 KB: 8 KiB costs 9 % more time than 256 KiB, larger gains nothing."""
_SEND_ALONE_BYTES: Final = 1 << 14
"""Pieces below this are joined before they are sent; above, the copy would cost more than the call."""
_SEND_SLICE_BYTES: Final = 1 << 18
"""`socket.sendall` counts its timeout over the whole buffer; slices make it a progress timeout again."""
_MAX_LINE_BYTES: Final = 1 << 16
_MAX_VALUE_BYTES: Final = 1 << 30
"""A length beyond this is a server that speaks something else; believing it would exhaust our memory."""


@dataclass(frozen=True)
class Endpoint:
    """One server, and the way in."""

    path: str = ""
    host: str = ""
    port: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    database: int = 0
    encrypted: bool = False
    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    @classmethod
    def of(cls, url: StoreURL, host: str = "", port: int = 0) -> Endpoint:
        """The server at that address, entered as the URL says."""
        return cls(
            url.path,
            host,
            port,
            url.username,
            url.password,
            url.database,
            url.scheme == "rediss",
            url.option("ca"),
            url.option("cert"),
            url.option("key"),
        )

    def __str__(self) -> str:
        return self.path or format_address(self.host, self.port)

    def connect(self, timeout_seconds: float) -> socket.socket:
        """A connected (and encrypted) socket, nothing said yet.

        Args:
            timeout_seconds: Bound of each wait, then and later.

        Returns:
            The socket, the caller's to close.

        Raises:
            OSError: Unreachable, or no agreement on TLS.
            ConfigError: A certificate file that cannot be read.
        """
        if self.path:
            plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                plain.settimeout(timeout_seconds)
                plain.connect(self.path)
            except BaseException:
                plain.close()
                raise
            return plain
        plain = socket.create_connection((self.host, self.port), timeout_seconds)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            return self._tls().wrap_socket(plain, server_hostname=self.host) if self.encrypted else plain
        except BaseException:
            plain.close()
            raise

    def _tls(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.cert:
                context.load_cert_chain(self.cert, self.key)
        except (OSError, ssl.SSLError) as error:
            files = ", ".join(filter(None, (self.ca, self.cert, self.key)))
            cure = f"check ?ca= &cert= &key= of the URL ({error})"
            raise ConfigError.of("readable PEM certificates and their key", files, cure) from error
        return context


class Link:
    """An open connection, logged in.

    Args:
        endpoint: Where and as whom.
        timeout_seconds: Bound of each wait: to connect, to be let in, for the next bytes.

    Raises:
        StoreUnavailableError: Nobody there, or silent.
        StoreAuthError: There, and refused us.
    """

    def __init__(self, endpoint: Endpoint, timeout_seconds: float) -> None:
        self._endpoint = endpoint
        self._timeout_seconds = timeout_seconds
        try:
            self._socket = endpoint.connect(timeout_seconds)
        except OSError as error:
            raise self._failure(error, "connect") from error
        self._file = self._socket.makefile("rb", buffering=_READ_BUFFER_BYTES)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        greeting: list[Command] = []
        if endpoint.password is not None:
            words = ("AUTH", endpoint.username, endpoint.password) if endpoint.username else ("AUTH", endpoint.password)
            greeting.append(pack(*words))
        if endpoint.database:
            greeting.append(pack("SELECT", endpoint.database))
        # The name is for whoever reads CLIENT LIST; an ACL may forbid it. Asking something also makes sure that a TLS
        # server's session tickets are read now and do not look like unasked-for bytes in `is_stale`.
        greeting.append(pack("CLIENT", "SETNAME", "shade"))
        self.send(greeting)
        *answers, named = self.receive(len(greeting))
        if isinstance(named, ServerError) and named.code != "NOPERM":
            answers.append(named)
        for answer in answers:
            if isinstance(answer, ServerError):
                self.close()
                raise answer.as_exception(str(endpoint))

    def fileno(self) -> int:
        """For `select.poll`."""
        return self._socket.fileno()

    def is_stale(self) -> bool:
        """True when an idle link is readable: the server hung up, or sent what nobody asked for. Costs a system call
        and saves the retry that a dead idle connection would otherwise need."""
        return bool(self._poll.poll(0))

    def send(self, commands: Sequence[Command]) -> None:
        """Writes a batch of commands; their replies must then be received.

        Args:
            commands: Packed, each in pieces.

        Raises:
            StoreUnavailableError: Not written; the link is closed.
        """
        small: list[Bytes] = []
        sendall = self._socket.sendall
        try:
            for command in commands:
                for piece in command:
                    if len(piece) < _SEND_ALONE_BYTES:
                        small.append(piece)
                        continue
                    sendall(b"".join(small))
                    small.clear()
                    view = memoryview(piece)
                    for start in range(0, len(view), _SEND_SLICE_BYTES):
                        sendall(view[start : start + _SEND_SLICE_BYTES])
            if small:
                sendall(b"".join(small))
        except OSError as error:
            self.close()
            raise self._failure(error, "send to") from error
        except BaseException:
            self.close()
            raise

    def receive(self, count: int) -> list[Reply]:
        """Reads the replies to the commands sent.

        Args:
            count: How many.

        Returns:
            The replies in the order of the commands; an error reply is a `ServerError` in its place.

        Raises:
            StoreUnavailableError: Hung up, silent for too long, or not speaking Redis; the link is closed.
        """
        readline, read = self._file.readline, self._file.read
        replies: list[Reply] = []
        try:
            for _ in range(count):
                line = readline(_MAX_LINE_BYTES)
                if line[:1] == b"$" and line[1:2] != b"-":
                    length = int(line[1:])
                    if length > _MAX_VALUE_BYTES:
                        raise ValueError(f"a value of {length} bytes")
                    value = read(length)
                    if read(2) != b"\r\n":
                        raise ConnectionResetError("hung up in the middle of a value")
                    replies.append(value)
                else:
                    replies.append(self._read(line))
        except (OSError, ValueError) as error:
            self.close()
            raise self._failure(error, "read from") from error
        except BaseException:
            self.close()
            raise
        return replies

    def _read(self, line: bytes) -> Reply:
        """Everything that is not a value: once a batch, not once a key."""
        if not line.endswith(b"\r\n"):
            raise ConnectionResetError("hung up")
        kind, rest = line[:1], line[1:-2]
        if kind == b"+":
            return rest
        if kind == b"-":
            return ServerError(rest.decode(errors="replace"))
        if kind == b":":
            return int(rest)
        if kind in (b"$", b"*") and rest == b"-1":
            return None
        if kind == b"*":
            return self.receive(int(rest))
        raise ValueError(f"{line[:40]!r}, which is no reply")

    def close(self) -> None:
        """Closes the socket, and no more than that: after a fork it is the parent's conversation. Safe to repeat."""
        self._file.close()
        self._socket.close()

    def _failure(self, error: Exception, verb: str) -> StoreError:
        if isinstance(error, ssl.SSLCertVerificationError) or "ALERT" in (getattr(error, "reason", None) or ""):
            return StoreAuthError(f"could not agree on TLS with {self._endpoint}: {error}; check ?ca= &cert= &key=")
        if isinstance(error, TimeoutError):
            cause = f"no progress within {self._timeout_seconds} s"
        else:
            cause = str(error) or type(error).__name__
        return StoreUnavailableError(f"could not {verb} {self._endpoint}: {cause}")
