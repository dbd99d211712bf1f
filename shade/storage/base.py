"""What a volume is: named byte strings that survive the machine's end. It knows nothing of checkpoints.

Files are few and large: a name is written once, in long sequential runs, and read in ranges. Names are relative paths
with ``/``. Invariant: once `Volume.write` has returned, the name holds all that it was given. After a crash at any
earlier moment the name holds all of the new content, or all of the old, or, if there was no old one, nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from shade.errors import StorageError
from shade.registry import Registry
from shade.types import Bytes


class Volume(ABC):
    """Durable bytes by name.

    Raises:
        StorageError: By any method: the storage failed, or the name is invalid. What was there is untouched.
        StorageFullError: By `write`: no space left. What was there is untouched; the unfinished file is removed.
    """

    url: str
    """The address with any password replaced by ``***``: safe to log."""

    _closed = False

    @abstractmethod
    def write(self, name: str, parts: Iterable[Bytes]) -> int:
        """Makes ``name`` hold exactly these bytes; durable when it returns, and never visible in part.

        Args:
            name: Relative path; its folders are made.
            parts: The content in order; consumed once, so it may be produced while earlier parts are written. A part's
                memory may be reused when the next one is asked for.

        Returns:
            Bytes written.
        """

    @abstractmethod
    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fills ``buffer`` with the bytes from ``start`` on, or raises StorageError if the name is missing or too
        short."""

    @abstractmethod
    def size_bytes(self, name: str) -> int | None:
        """Returns the length of what the name holds; None if there is none."""

    @abstractmethod
    def list(self, prefix: str = "") -> list[str]:
        """Lists every name that starts with ``prefix``, sorted, without what a crash left unfinished."""

    @abstractmethod
    def delete_many(self, names: Sequence[str]) -> int:
        """Deletes names, in this order, durably, and folders that become empty. Returns how many there were."""

    @abstractmethod
    def leftovers(self, prefix: str = "") -> Sequence[str]:
        """Lists unfinished files, sorted, whose path or folder begins with a prefix: those of writers that died, or
        that are writing now. They cannot be read."""

    @abstractmethod
    def sweep(self, prefix: str = "") -> int:
        """Deletes the `leftovers` of a prefix, and folders that become empty; returns how many. Not while
        others write."""

    @abstractmethod
    def ping(self) -> None:
        """Returns if a small file can be written, read and deleted there, else raises. Called once, at start."""

    def close(self) -> None:
        """Frees its resources. Safe to call twice."""
        self._closed = True

    @abstractmethod
    def read_many(self, names: Sequence[str]) -> Sequence[bytes | None]:
        """Returns the contents of small files, read together, in the order of their names; None for a file that is
        missing or unreadable."""

    def free_bytes(self) -> int | None:
        """Returns the space left; None if it is unknown, as in a bucket."""
        return None

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Returns the bytes ``start`` … ``stop`` of a name, to its end by default, or raises as `read_into` does."""
        end = self.size_bytes(name) if stop is None else stop
        buffer = bytearray(max(0, (end or 0) - start))
        self.read_into(name, start, memoryview(buffer))
        return bytes(buffer)

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError(f"expected an open volume, got {self.url} after close(); open it again")

    def __enter__(self) -> Volume:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


VOLUMES: Registry[Volume] = Registry("storage URL scheme")
"""URL scheme → class, built from the URL alone; ``*`` is whatever fsspec knows. A path without a scheme is ``file``."""


def open_volume(url: str) -> Volume:
    """Opens durable storage; nothing is touched yet.

    Args:
        url: A path, ``file:///path``, or ``scheme://…`` as in fsspec.

    Returns:
        The volume.

    Raises:
        ConfigError: Not an address, or its library is missing; the message says which to install.
    """
    scheme = url.partition("://")[0] if "://" in url else "file"
    return VOLUMES.get(scheme if scheme in VOLUMES else "*")(url)  # type: ignore[call-arg]
