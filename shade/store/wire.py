"""Writes Redis commands and names its errors: the few lines of RESP2 that a cache of bytes needs.

Why not a client library on the hot path: a batch of 64 values of 100 KB is bounded by memory copies, and each layer
between the socket and the ``bytes`` object handed to the caller adds one. Read straight from the socket, such a batch
costs a fifth less CPU than redis-py's pipeline with hiredis, and every wait is one that we chose (decision 0002).
RESP2 has not changed since Redis 2.0, and every Redis, Valkey and KeyDB speaks it.

Invariant: a value is sent as it is, without a copy, and an error reply is a *value* (`ServerError`), so that a batch is
always read to its end and the connection stays in step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from shade.errors import StoreAuthError, StoreError, StoreUnavailableError
from shade.types import Bytes

_REFUSED: Final = ("WRONGPASS", "NOAUTH", "NOPERM", "DENIED")
_NOT_NOW: Final = (
    "BUSY",
    "CLUSTERDOWN",
    "LOADING",
    "MASTERDOWN",
    "MISCONF",
    "NOREPLICAS",
    "OOM",
    "READONLY",
    "TRYAGAIN",
)


@dataclass(frozen=True)
class ServerError:
    """An error that a server sent in place of an answer."""

    text: str
    """``CODE and words``, such as ``OOM command not allowed when used memory > 'maxmemory'.``"""

    @property
    def code(self) -> str:
        """The first word."""
        return self.text.partition(" ")[0]

    def as_exception(self, address: str) -> StoreError:
        """The exception for a caller who cannot go on without the answer."""
        message = f"expected an answer from {address}, got {self.text!r}"
        if self.code in _REFUSED or "AUTH" in self.text or "invalid password" in self.text:
            return StoreAuthError(f"{message}; correct the user, the password or the server's ACL")
        if self.code in _NOT_NOW or "max number of clients" in self.text:
            return StoreUnavailableError(f"{message}; it may serve later")
        if self.code == "MOVED":
            return StoreError(f"{message}; it is a node of a cluster: write redis+cluster://")
        if "cluster support disabled" in self.text:
            return StoreError(f"{message}; it is a single server: write redis://")
        return StoreError(f"{message}; is another program using these keys?")


Reply: TypeAlias = "bytes | int | list[Reply] | ServerError | None"
"""A status line is ``bytes`` as a value is; a missing value is None."""

Command: TypeAlias = tuple[Bytes, ...]
"""One packed command, in pieces that are sent one after the other; a large value is a piece of its own."""


def pack(*words: str | int | bytes) -> Command:
    """One command of small words.

    Args:
        *words: Verb and arguments.

    Returns:
        A single piece.
    """
    encoded = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return (b"*%d\r\n" % len(encoded) + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in encoded]),)


def pack_keys(verb: bytes, keys: Iterable[str]) -> list[Command]:
    """One ``VERB key`` a key: the hot path, 0.2 µs each."""
    head = b"*2\r\n$%d\r\n%b\r\n" % (len(verb), verb)
    return [(head + b"$%d\r\n%b\r\n" % (len(key), key),) for key in map(str.encode, keys)]


def pack_set(key: str, value: Bytes, *, only_if_absent: bool = False) -> Command:
    """``SET key value [NX]``; the value itself is not copied unless its memory has gaps."""
    if isinstance(value, memoryview):
        value = value.cast("B") if value.c_contiguous and value.nbytes else value.tobytes()
    name = key.encode()
    num_words, tail = (4, b"\r\n$2\r\nNX\r\n") if only_if_absent else (3, b"\r\n")
    head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (num_words, len(name), name, len(value))
    return (head, value, tail)
