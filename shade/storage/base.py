"""What a volume is: named byte strings that survive the machine's end. It knows nothing of checkpoints.

Few and large: a name is written once, in long sequential runs, and read in ranges. Names are relative paths with ``/``.
Invariant: after a crash at any moment a name holds either all of what a returned `Volume.write` gave it, or all of what
it held before, or, if it never was, nothing; and once `write` has returned, the new.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from shade.registry import Registry
from shade.types import Bytes


class Volume(ABC):
    """Durable bytes by name.

    Raises:
        StorageError: By any method: the storage failed, or the name cannot be. What was there is untouched.
        StorageFullError: By `write`: no space left. What was there is untouched, what was begun is removed.
    """

    url: str
    """The address with any password replaced by ``***``: safe to log."""

    @abstractmethod
    def write(self, name: str, parts: Iterable[Bytes]) -> int:
        """Makes ``name`` hold exactly these bytes; durable when it returns, and never visible in part.

        Args:
            name: Relative path; folders in it are made.
            parts: The content in order; consumed once, so it may be produced while earlier parts are written. The
                memory of a part may be used again when the next one is asked for.

        Returns:
            Bytes written.
        """

    @abstractmethod
    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fills ``buffer`` with the bytes from ``start`` on; a name that is missing or too short is a StorageError."""

    @abstractmethod
    def size_bytes(self, name: str) -> int | None:
        """Length of what the name holds; None where there is none."""

    @abstractmethod
    def list(self, prefix: str = "") -> list[str]:
        """Every name that starts with ``prefix``, sorted; what a crash left unfinished is not among them."""

    @abstractmethod
    def delete_many(self, names: Sequence[str]) -> int:
        """Removes names, in this order, durably; empty folders go with them. How many there were."""

    @abstractmethod
    def leftovers(self, prefix: str = "") -> Sequence[str]:
        """What lies there unfinished, sorted: left by writers that died, or being written now.

        Args:
            prefix: What the path, or the folder, of the unfinished begins with.

        Returns:
            Names; none of them can be read.
        """

    @abstractmethod
    def sweep(self, prefix: str = "") -> int:
        """Removes the `leftovers` of that prefix, and folders they leave empty; how many. Not while others write."""

    @abstractmethod
    def ping(self) -> None:
        """Returns when something can be written, read and removed there; raises otherwise. Called once, at start."""

    @abstractmethod
    def close(self) -> None:
        """Frees what it holds. Safe to call twice."""

    @abstractmethod
    def read_many(self, names: Sequence[str]) -> Sequence[bytes | None]:
        """Whole contents of small files, fetched together; None where there is none, or its medium lost it.

        Args:
            names: As they were written.

        Returns:
            In the same order.
        """

    def free_bytes(self) -> int | None:
        """What can still be written; None where nobody can tell, as in a bucket."""
        return None

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes ``start`` … ``stop`` of a name, to its end by default.

        Args:
            name: As it was written.
            start: First byte.
            stop: One past the last.

        Returns:
            Exactly those bytes.

        Raises:
            StorageError: It is missing, or shorter.
        """
        end = self.size_bytes(name) if stop is None else stop
        buffer = bytearray(max(0, (end or 0) - start))
        self.read_into(name, start, memoryview(buffer))
        return bytes(buffer)

    def __enter__(self) -> Volume:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


VOLUMES: Registry[Volume] = Registry("storage URL scheme")
"""URL scheme → class, built from the URL alone; ``*`` is whatever fsspec knows. A path without a scheme is ``file``."""


def open_volume(url: str) -> Volume:
    """Opens durable storage.

    Args:
        url: A path, ``file:///path``, or ``scheme://…`` as fsspec has it.

    Returns:
        The volume; nothing is touched yet.

    Raises:
        ConfigError: Not an address, or its library is missing; the message says which to install.
    """
    scheme = url.partition("://")[0] if "://" in url else "file"
    return VOLUMES.get(scheme if scheme in VOLUMES else "*")(url)  # type: ignore[call-arg]
