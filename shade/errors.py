"""Defines every exception that `shade` raises on purpose, as one tree.

::

    ShadeError
    ├── ConfigError (ValueError): what was asked for cannot be       UnknownNameError
    ├── DataError: the data set is not what it should be             BadSampleError
    ├── StoreError: the store of bytes; a cache has a miss           StoreUnavailableError, StoreAuthError,
    │   │                                                            StoreClosedError, CorruptEntryError
    │   └── StoreUnavailableError                                    StoreTimeoutError, StoreFullError
    ├── StorageError: durable storage; what was there still is       StorageFullError
    ├── CheckpointError: a snapshot cannot be had or trusted         TornSnapshotError, CorruptCheckpointError,
    │                                                                NewerSnapshotError, StateMismatchError,
    │                                                                RunInUseError
    └── GradientError: on all ranks or on none                       PayloadError, NonFiniteGradientError, PeerLostError

Each message says what was expected, what came, and the cure. Every class takes one string, so it survives the trip from
a worker process to the training loop unchanged. `shown_url` says what a message may show of a URL.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from urllib.parse import unquote

from typing_extensions import Self

__all__ = [
    "BadSampleError", "CheckpointError", "ConfigError", "CorruptCheckpointError", "CorruptEntryError",
    "DataError", "GradientError", "NewerSnapshotError", "NonFiniteGradientError", "PayloadError",
    "PeerLostError", "RunInUseError", "ShadeError", "StateMismatchError", "StorageError", "StorageFullError",
    "StoreAuthError", "StoreClosedError", "StoreError", "StoreFullError", "StoreTimeoutError",
    "StoreUnavailableError", "TornSnapshotError", "UnknownNameError",
]  # fmt: skip

SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+]{0,15}")
"""Matches the scheme of a URL, which stands before ``://``."""
_HOST: Final = r"(?:\[[\da-fA-F:.]*\]|[\w.\-]*)(?::\d+)?"
_PLACE: Final = re.compile(rf"/[^@?]*|{_HOST}(?:,{_HOST})*(?:/[^@?]*)?")

_HUB: Final = re.compile(r"hf://[\w.\-]+/[^?]")
"""Matches a URL of Hugging Face's Hub, where a revision and no login stands beside an "@"."""


def shown_url(text: str) -> str:
    """Returns what a message may show of a text that should be a URL, whatever it is: scheme, hosts and path, but no
    login and no value of an option."""
    scheme, separator, rest = text.partition("://")
    head = f"{scheme}://" if separator and SCHEME.fullmatch(scheme) else ""
    place, question, query = (rest if head else text).partition("?")
    if _HUB.match(text):
        return f"{head}{place}{'?***' if question else ''}"
    login, _, place = place.rpartition("@")
    # A "@" behind the "?": the password may hold either, so where it ends is not known.
    is_safe = "@" not in query and _PLACE.fullmatch(place) is not None
    return f"{head}{'***@' if login and is_safe else ''}{place if is_safe else '***'}{'?***' if question else ''}"


def shown_place(text: str) -> str:
    """Returns what a message may show of a path or a URL: a path whole, a URL as `shown_url` does."""
    return shown_url(text) if "://" in text else text


def without_login(words: str, url: str) -> str:
    """Returns another library's words about a URL without what `shown_url` hides of it."""
    rest = url.partition("://")[2]
    login, query = "" if _HUB.match(url) else rest.rpartition("@")[0], rest.partition("?")[2]
    hidden = {login, query, *re.split(r"[:/?@&=]", f"{login}:{query}")}
    hidden |= {unquote(word) for word in hidden}
    for word in sorted(hidden, key=len, reverse=True):
        if len(word) > 2 or word == login.partition(":")[2] != "":
            words = words.replace(word, "***")
    return words


class ShadeError(Exception):
    """Base of every deliberate error."""

    @classmethod
    def of(cls, expected: str, got: object, cure: str) -> Self:
        """Builds the error with its one-line message.

        Args:
            expected: What is accepted, with its unit or range.
            got: What came; shown with ``repr``.
            cure: What to type or do instead.

        Returns:
            The exception, ready to raise.
        """
        return cls(f"expected {expected}, got {got!r}; {cure}")


@contextmanager
def refused_as(kind: type[ShadeError], expected: str, cure: str) -> Iterator[None]:
    """Raises an error of ``kind`` in place of what reading other values than the written ones raises."""
    try:
        yield
    except ShadeError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise kind.of(expected, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}", cure) from error


class ConfigError(ShadeError, ValueError):
    """An argument, flag or combination of them that cannot be honoured."""


class UnknownNameError(ConfigError):
    """A name that no registry knows."""


class DataError(ShadeError):
    """The data set on disk is missing, empty or malformed."""


class BadSampleError(DataError):
    """A sample that cannot be read or decoded; the message names its path or index."""


class StoreError(ShadeError):
    """Base of everything a store can raise; a cache degrades each of these to a miss."""


class StoreUnavailableError(StoreError):
    """The server did not answer, or not in time. Nothing was changed by us; safe to treat as a miss."""


class StoreTimeoutError(StoreUnavailableError):
    """The server accepted the connection, or may have, and was silent for too long."""


class StoreFullError(StoreUnavailableError):
    """The server refused a write for want of memory. Reads and removals still work."""


class StoreAuthError(StoreError):
    """The server answered and refused us: wrong password, user, ACL or certificate."""


class StoreClosedError(StoreError):
    """The store was used after `close()`."""


class CorruptEntryError(StoreError):
    """An entry whose length or checksum does not match its header; drop it and read the origin again."""


class StorageError(ShadeError):
    """Durable storage failed. What was committed there before is untouched."""


class StorageFullError(StorageError):
    """No space, or no quota, left in durable storage. Reading still works."""


class CheckpointError(ShadeError):
    """Base of what goes wrong with a snapshot; a checkpoint never degrades in silence."""


class TornSnapshotError(CheckpointError):
    """A tensor was changed while it was being copied. Nothing was committed; the message names the tensor."""


class CorruptCheckpointError(CheckpointError):
    """Bytes of a snapshot do not match their checksum in any copy within reach."""


class NewerSnapshotError(CheckpointError):
    """A snapshot is sound, and of a format that only a later version of this package reads."""


class StateMismatchError(CheckpointError):
    """A snapshot does not fit the attached objects. Nothing was loaded; the message names what differs."""


class RunInUseError(CheckpointError):
    """Another live process saves under the same run id."""


class GradientError(ShadeError):
    """Base of what goes wrong between a gradient and the weights; raised on all ranks or on none."""


class PayloadError(GradientError):
    """Bytes of another rank are not what it packed, or not packed for us. Nothing of them was used."""


class NonFiniteGradientError(GradientError):
    """A gradient holds NaN or infinity. Weights, optimizer state and residuals are what they were before the step."""


class PeerLostError(GradientError):
    """Another rank is gone, or did not answer in time. What was to be sent to it is still in the residual."""
