"""Holds one connection to one Redis server: sends a batch, reads its replies.

redis-py makes the connection: socket, TLS, login; hiredis packs and parses the batch. The socket's timeout is a
*progress* timeout: it bounds each wait for the next bytes and not a whole transfer. There are no retries: a connection
that broke is closed, and the next batch opens another. The system resolves names, with its own timeout.

Invariant: an open link has no reply outstanding between two batches. Decisions 0002, 0025 and 0052 have the price of
the libraries, of the timeout and of sendfile(2).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import os
import select
import socket
import ssl
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import hiredis
from redis.backoff import NoBackoff
from redis.connection import Connection, DefaultParser, PythonRespSerializer, SSLConnection, UnixDomainSocketConnection
from redis.credentials import CredentialProvider
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from shade.errors import ConfigError, StoreAuthError, StoreTimeoutError, StoreUnavailableError
from shade.process import position_in_file
from shade.store.url import StoreURL, format_address
from shade.store.wire import Command, GetInto, Reply, ServerError
from shade.types import Bytes

_READ_BYTES: Final = 1 << 18
"""Measured on 64 × 100 KB: redis-py's 64 KiB costs 3 % more time than 256 KiB, larger gains nothing."""
_SEND_ALONE_BYTES: Final = 6000
"""Pieces below this are joined before they are sent; above, they are sent as they are. redis-py's own figure."""
_SEND_SLICE_BYTES: Final = 1 << 18
"""With TLS. `socket.sendall` applies its timeout to the whole buffer; slices make it a progress timeout again."""
_UNIX_SEND_BYTES: Final = 1 << 20
"""Send buffer of a unix socket. The default is a fifth of it, and whenever it is full the sender waits and threads
are switched. The system may allow less; TCP chooses by itself."""
_WITHOUT_SENDFILE: Final = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_MOST_SHORT_WORDS: Final = 2
"""Words of the commands that hiredis packs: a verb and a key. It takes a quarter of redis-py's time for these, but
would copy a large value."""

_SHORTEST_LINE_BYTES: Final = 4
"""Length of the shortest header of a value, ``$5`` and the line end: this much can be read before the length is
known."""
_LOGIN_BYTES: Final = 4096
"""Bytes that redis-py reads at once: a few replies at login, and none after it."""
_UNFINISHED: Final = object()
_hiredis: Any = hiredis
"""hiredis without its stubs, which know fewer kinds of bytes, and of errors, than it accepts."""


class _RawErrorParser(DefaultParser):  # type: ignore[misc]
    """Leaves an error reply as the server wrote it: redis-py would remove the code, and take LOADING or a refused login
    for a broken connection."""

    EXCEPTION_CLASSES: ClassVar[dict[str, Any]] = {}


def _encode(word: str | int | Bytes) -> bytes | memoryview:
    """Encodes a word without a copy, unless it is small or its memory has gaps."""
    if isinstance(word, bytes):
        return word
    if isinstance(word, str | int):
        return str(word).encode()
    view = memoryview(word)
    return view.cast("B") if view.c_contiguous and view.nbytes > _SEND_ALONE_BYTES else view.tobytes()


def _slices(pieces: Sequence[Bytes]) -> Iterator[Bytes]:
    for piece in pieces:
        if len(piece) <= _SEND_SLICE_BYTES:
            yield piece
        else:
            view = memoryview(piece)
            for start in range(0, len(view), _SEND_SLICE_BYTES):
                yield view[start : start + _SEND_SLICE_BYTES]


@dataclass(frozen=True)
class Endpoint:
    """One server: its address and credentials."""

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
    credentials: str | None = None
    """``module:name`` of a credential provider, which takes the place of user and password."""

    @classmethod
    def of(cls, url: StoreURL, host: str = "", port: int = 0) -> Endpoint:
        """Returns the server at an address, with the credentials of the URL."""
        return cls(
            url.path,
            host,
            port,
            url.username,
            url.password,
            url.database,
            url.scheme.startswith("rediss"),
            url.option("ca"),
            url.option("cert"),
            url.option("key"),
            url.option("credentials"),
        )

    def __str__(self) -> str:
        return self.path or format_address(self.host, self.port)

    def connection(self, timeout_seconds: float) -> Any:
        """Makes redis-py's connection, not yet connected, with a bound of each wait; the caller disconnects it."""
        kind: Callable[..., Any] = Connection
        options: dict[str, Any] = {"host": self.host, "port": self.port, "socket_keepalive": True}
        if self.path:
            kind, options = UnixDomainSocketConnection, {"path": self.path}
        elif self.encrypted:
            kind = SSLConnection
            options |= {"ssl_ca_certs": self.ca, "ssl_certfile": self.cert, "ssl_keyfile": self.key}
            options["ssl_check_hostname"] = True
        if self.credentials is not None:
            options["credential_provider"] = credential_provider(self.credentials)
        return kind(
            **options,
            db=self.database,
            username=self.username,
            password=self.password,
            socket_timeout=timeout_seconds,
            socket_connect_timeout=timeout_seconds,
            socket_read_size=_LOGIN_BYTES,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            parser_class=_RawErrorParser,
            command_packer=PythonRespSerializer(_SEND_ALONE_BYTES, _encode),
        )

    def check_scheme(self, timeout_seconds: float) -> None:
        """Finds out whether the URL's scheme is why a server gave no answer; call it once, at start.

        Args:
            timeout_seconds: Bound of each wait.

        Raises:
            ConfigError: TLS was spoken to a plain port, or the other way round.
        """
        wrong, right = ("rediss", "redis") if self.encrypted else ("redis", "rediss")
        speaks_other = self._speaks_plainly if self.encrypted else self._speaks_tls
        if not self.path and speaks_other(timeout_seconds):
            how = "with TLS" if self.encrypted else "without TLS"
            cure = f"write {right}:// ({right}+cluster:// for a cluster) instead of {wrong}"
            raise ConfigError.of(f"a server that answers {how} at {self}", "the opposite", cure)

    def _speaks_plainly(self, timeout_seconds: float) -> bool:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((self.host, self.port), timeout_seconds) as plain,
        ):
            plain.sendall(b"PING\r\n")
            return plain.recv(1) in (b"+", b"-")
        return False

    def _speaks_tls(self, timeout_seconds: float) -> bool:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        try:
            with (
                socket.create_connection((self.host, self.port), timeout_seconds) as plain,
                context.wrap_socket(plain),
            ):
                return True
        except ssl.SSLError as error:
            return "ALERT" in (error.reason or "")
        except OSError:
            return False

    def check_tls(self, timeout_seconds: float) -> None:
        """Finds out whether TLS is why a connection failed: shakes hands again, and listens.

        Args:
            timeout_seconds: Bound of each wait.

        Raises:
            ConfigError: A certificate file that cannot be read.
            StoreAuthError: One side does not trust the other.
        """
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.cert:
                context.load_cert_chain(self.cert, self.key)
        except OSError as error:
            files = ", ".join(filter(None, (self.ca, self.cert, self.key)))
            cure = f"check ?ca= &cert= &key= of the URL ({error})"
            raise ConfigError.of("readable PEM certificates and their key", files, cure) from error
        try:
            with (
                socket.create_connection((self.host, self.port), timeout_seconds) as plain,
                context.wrap_socket(plain, server_hostname=self.host) as encrypted,
            ):
                # In TLS 1.3 the server judges our certificate after our side of the handshake is done. redis-py writes
                # its login at that moment, and then sees a broken pipe as often as the verdict.
                encrypted.recv(1)
        except ssl.SSLError as error:
            if isinstance(error, ssl.SSLCertVerificationError) or "ALERT" in (error.reason or ""):
                message = f"could not agree on TLS with {self}: {error}; check ?ca= &cert= &key="
                raise StoreAuthError(message) from error
        except OSError:  # no word against us
            return


@functools.cache
def credential_provider(name: str) -> Any:
    """Returns the credential provider that a URL names, made once in each process; every new connection asks it.

    Args:
        name: ``module:name`` of a redis-py ``CredentialProvider``, or of a class or function that makes one.

    Returns:
        The provider. Where it raises, so does its caller's connection, as one that cannot be made.

    Raises:
        ConfigError: There is no such name, or it is no provider.
    """
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
        provider = found if hasattr(found, "get_credentials") and not isinstance(found, type) else found()
        provider.get_credentials  # noqa: B018
    except Exception as error:
        cure = f"write credentials=module:name, importable on every rank ({type(error).__name__}: {error})"
        raise ConfigError.of("a redis.CredentialProvider", name, cure) from error
    return _NamedProvider(provider, name)


class _NamedProvider(CredentialProvider):  # type: ignore[misc]
    """Turns what a provider raises into a connection that cannot be made: the cache misses, and training continues."""

    def __init__(self, provider: Any, name: str) -> None:
        self._provider, self._name = provider, name

    def get_credentials(self) -> Any:
        try:
            return self._provider.get_credentials()
        except Exception as error:
            raise ConnectionError(f"no credentials from {self._name}: {error}") from error


def socket_path(folder: str, host: str, port: int) -> str:
    """Returns where a server that listens at a port also has its unix socket; clients on its machine find it by
    address."""
    return f"{folder}/{format_address(host, port)}.sock"


def _bound_waits(plain: socket.socket, timeout_seconds: float) -> None:
    """Has the kernel bound each wait of a socket, so that a call returns when all its bytes are sent."""
    seconds, microseconds = divmod(max(1, round(timeout_seconds * 1e6)), 1_000_000)
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        plain.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, microseconds))
    plain.settimeout(None)


class Link:
    """An open connection, logged in.

    Args:
        endpoint: Address and credentials.
        timeout_seconds: Bound of each wait: to connect, to log in, for the next bytes.

    Raises:
        StoreUnavailableError: The server is unreachable or silent.
        StoreAuthError: The server refused the credentials.
        ConfigError: A certificate file that cannot be read.
    """

    def __init__(self, endpoint: Endpoint, timeout_seconds: float) -> None:
        self._endpoint = endpoint
        self._timeout_seconds = timeout_seconds
        self._connection = endpoint.connection(timeout_seconds)
        try:
            self._connection.connect()
        except ResponseError as error:
            raise ServerError(str(error)).as_exception(str(endpoint)) from error
        except (RedisError, OSError, ValueError) as error:
            if endpoint.encrypted and not isinstance(error, RedisTimeoutError):
                endpoint.check_tls(timeout_seconds)
            raise self._failure(error, "connect") from error
        self._socket: socket.socket = self._connection._sock
        self._is_plain = not isinstance(self._socket, ssl.SSLSocket)
        if self._is_plain:
            _bound_waits(self._socket, timeout_seconds)
        if endpoint.path:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_SEND_BYTES)
        self._sends_files = bool(endpoint.path) and hasattr(os, "sendfile")
        self._reader = _hiredis.Reader(protocolError=ValueError, replyError=ServerError, notEnoughData=_UNFINISHED)
        self._buffer = bytearray(_READ_BYTES)
        self._poller = select.poll()
        self._poller.register(self._socket, select.POLLIN)
        self._commands: Sequence[Command] = ()
        self.replies: list[Reply] = []
        """Replies so far to the commands sent last; an error reply is a `ServerError` in its place."""
        # The name appears in CLIENT LIST; an ACL may forbid it.
        self.send([("CLIENT", "SETNAME", "shade")])
        (named,) = self.receive()
        if isinstance(named, ServerError) and named.code != "NOPERM":
            self.close()
            raise named.as_exception(str(endpoint))

    def fileno(self) -> int:
        """Returns the socket's descriptor, for polling several links."""
        return self._socket.fileno()

    def is_readable(self) -> bool:
        """Returns whether bytes, or the news that the server hung up, are waiting."""
        # An idle link should not be readable. Asking costs a system call, and saves the retry that a dead idle
        # connection would otherwise need.
        return self._reader.has_data() or bool(self._poller.poll(0))

    def send(self, commands: Sequence[Command]) -> None:
        """Writes a batch of commands, whose replies must then be received; raises StoreUnavailableError, and closes the
        link, if it cannot."""
        self._commands, self.replies = commands, []
        if all(len(command) <= _MOST_SHORT_WORDS for command in commands):
            pieces: Any = (b"".join(map(_hiredis.pack_command, commands)),)
        else:
            packed = self._connection.pack_commands(commands)
            pieces = packed if self._is_plain else _slices(packed)
        try:
            for piece in pieces:
                sent = self._send_from_file(piece) if self._sends_files else 0
                if sent < len(piece):
                    self._socket.sendall(piece[sent:] if sent else piece)
        except OSError as error:
            self.close()
            raise self._failure(error, "send to") from error
        # Half a command would answer for the next one.
        except BaseException:
            self.close()
            raise

    def _send_from_file(self, piece: Bytes) -> int:
        """Sends a piece that lies in a file, without a copy; returns how many bytes, 0 for any other piece."""
        region, sent = position_in_file(piece), 0
        if region is None:
            return 0
        descriptor, start = region
        while sent < len(piece):
            try:
                count = os.sendfile(self._socket.fileno(), descriptor, start + sent, len(piece) - sent)
            except OSError as error:
                if error.errno not in _WITHOUT_SENDFILE:
                    raise
                count = 0
            # Not this file or not this system: what is left is copied.
            if not count:
                break
            sent += count
        return sent

    def receive(self) -> list[Reply]:
        """Reads all replies to the commands sent, or raises as `advance` does."""
        while not self.advance():
            pass
        return self.replies

    def advance(self) -> bool:
        """Waits for bytes, and takes the replies that are complete.

        Returns:
            Whether all replies have arrived.

        Raises:
            StoreUnavailableError: The server hung up, was silent, or does not speak Redis; the link is closed.
        """
        commands, replies = self._commands, self.replies
        if not commands:
            return True
        try:
            # Such a batch bypasses the parser; only an ASKING may precede the read.
            if isinstance(commands[-1], GetInto):
                self.replies = [self._reply_into(command) for command in commands]
                return True
            received = self._socket.recv_into(self._buffer)
            if not received:
                raise ConnectionError("the server hung up")
            self._reader.feed(self._buffer, 0, received)
            next_reply = self._reader.gets
            while len(replies) < len(commands):
                reply = next_reply()
                if reply is _UNFINISHED:
                    return False
                replies.append(reply)
        except (OSError, ValueError) as error:
            self.close()
            raise self._failure(error, "read from") from error
        return True

    def _reply_into(self, command: Command) -> Reply:
        """Reads one reply past the parser, from the socket into the caller's buffer."""
        # The length is unknown until the line ends, and a byte read beyond it would be lost to the buffer.
        line = self._read(_SHORTEST_LINE_BYTES)
        while not line.endswith(b"\r\n"):  # to its end and not a byte beyond
            line += self._read(1)
        kind, text = line[:1], line[1:-2]
        if kind == b"-":
            return ServerError(text.decode(errors="replace"))
        if kind == b"+":
            return text
        if kind != b"$":
            raise ValueError(f"expected a value, got {line!r}")
        num_bytes = int(text)
        if num_bytes < 0:
            return None
        if isinstance(command, GetInto) and len(command.buffer) == num_bytes:
            self._fill(command.buffer)
        else:
            self._pass_over(num_bytes)
        if self._read(2) != b"\r\n":
            raise ValueError("expected the end of a value, got more of it")
        return num_bytes

    def _read(self, num_bytes: int) -> bytes:
        part = bytearray(num_bytes)
        self._fill(memoryview(part))
        return bytes(part)

    def _pass_over(self, num_bytes: int) -> None:
        """Reads and drops what has no buffer, without allocating its length."""
        # A wrong or hostile length must not allocate memory.
        scratch = memoryview(self._buffer)
        while num_bytes:
            part = scratch[:num_bytes]
            self._fill(part)
            num_bytes -= len(part)

    def _fill(self, buffer: memoryview) -> None:
        filled = 0
        while filled < len(buffer):
            received = self._socket.recv_into(buffer[filled:])
            if not received:
                raise ConnectionError("the server hung up")
            filled += received

    def close(self) -> None:
        """Closes the socket; after a fork only this process's copy of it. Safe to call twice."""
        self._connection.disconnect()

    def _failure(self, error: Exception, verb: str) -> StoreUnavailableError:
        failed = f"could not {verb} {self._endpoint}"
        if isinstance(error, (RedisTimeoutError, TimeoutError, BlockingIOError)):  # the last is the kernel's
            return StoreTimeoutError(f"{failed}: no progress within {self._timeout_seconds} s")
        return StoreUnavailableError(f"{failed}: {error}")
