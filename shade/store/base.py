"""What a store is: bytes by key, in batches. It knows nothing of samples, tensors or policies.

Every method takes a batch and answers in its order, so a batch of samples costs one round trip a node and not one a
sample. A store never retries for long and never hides a failure: it raises within its timeout, and the caller decides
(a cache counts a miss; a checkpoint fails). Values are opaque and never changed.

Clients are lazy and belong to one process: a store pickles as its URL, and connects again in a child after fork, spawn
or forkserver. Invariant: a value that `get_many` returns is byte for byte a value that was written to that key.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from shade.errors import StoreAuthError, StoreClosedError, StoreError, StoreFullError, StoreTimeoutError
from shade.registry import Registry
from shade.types import Bytes

READY_SECONDS: Final = 5.0
"""How long `Store.wait_ready` asks a silent server again."""


@dataclass(frozen=True)
class NodeStats:
    """One server, as it describes itself."""

    address: str
    role: str
    """``primary`` or ``replica``."""
    used_bytes: int
    """Memory of keys and values as the allocator gave it out, without `overhead_bytes`. A server updates its clients'
    buffers once a second, so under load this is off by what is in flight."""
    max_bytes: int
    """Its own limit (``maxmemory``); 0 means none."""
    num_keys: int
    version: str
    overhead_bytes: int = 0
    """Memory beside data: start-up, clients' buffers and the tables of a cluster's slots, whose room is taken before
    every slot has a key. Counts against ``max_bytes`` as data does."""


@dataclass(frozen=True)
class StoreStats:
    """A whole store; sums are over the primaries."""

    nodes: tuple[NodeStats, ...] = field(default_factory=tuple)

    @property
    def used_bytes(self) -> int:
        """Returns the bytes held by data on all primaries."""
        return sum(n.used_bytes for n in self.nodes if n.role == "primary")

    @property
    def max_bytes(self) -> int:
        """Returns the sum of the primaries' own limits."""
        return sum(n.max_bytes for n in self.nodes if n.role == "primary")

    @property
    def free_bytes(self) -> int | None:
        """Returns what the primaries can still take; None if one has no limit of its own."""
        primaries = [n for n in self.nodes if n.role == "primary"]
        if not all(n.max_bytes for n in primaries):
            return None
        return sum(max(0, n.max_bytes - n.used_bytes - n.overhead_bytes) for n in primaries)

    @property
    def num_keys(self) -> int:
        """Returns the number of keys on all primaries."""
        return sum(n.num_keys for n in self.nodes if n.role == "primary")


class Store(ABC):
    """Bytes by key.

    Raises:
        StoreUnavailableError: By any method: no answer in time. After a failed write each key holds the old value, the
            new one or none, never a mixture.
        StoreAuthError: By any method: the server refused the credentials.
        StoreClosedError: By any method, after `close`.
    """

    url: str
    """The address with any password replaced by ``***``: safe to log."""

    shared: bool
    """True when other processes that open the same URL see the same bytes."""

    is_private = False
    """True when it began, and ends, with the process that opened it."""

    medium: str = "memory"
    """``disk`` for a folder of this machine's disk, which other machines do not reach."""

    checks_values = False
    """True when it compares each value that it returns with a checksum of value and key."""

    _closed = False

    @abstractmethod
    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Returns the values in the order of ``keys``, None for a missing key or an unreachable node. Raises only if
        all nodes are unreachable."""

    def get_many_into(self, items: Mapping[str, memoryview]) -> list[bool]:
        """Reads large values straight into the caller's memory, one after the other; waits for a slow server.

        Returns True where the buffer now holds the whole value; False where there is none, its node is unreachable, or
        its length is not the buffer's. Then the buffer's content is undefined.
        """
        found = []
        for key, buffer in items.items():
            (value,) = self.get_many([key])
            found.append(value is not None and len(value) == buffer.nbytes)
            if value is not None and found[-1]:
                buffer.cast("B")[:] = value
        return found

    @abstractmethod
    def set_many(self, items: Mapping[str, Bytes]) -> list[bool]:
        """Writes values, replacing old ones. False where the server has no memory left, or is unreachable while others
        answer; `refusals` distinguishes the two."""

    def refusals(self, items: Mapping[str, Bytes]) -> list[StoreError | None]:
        """Writes as `set_many` does, and returns in the order of ``items`` None where it was written, `StoreFullError`
        where the server has no memory left, `StoreUnavailableError` where it is unreachable. Waits for a slow one."""
        full = StoreFullError(f"a server of {self.url} has no memory left; raise its maxmemory")
        return [None if written else full for written in self.set_many(items)]

    @abstractmethod
    def add_many(self, items: Mapping[str, Bytes]) -> list[bool]:
        """Writes only absent keys. False where the key was present or the server has no memory left."""

    @abstractmethod
    def delete_many(self, keys: Sequence[str]) -> list[int]:
        """Deletes keys. Returns the length in bytes of each value that this call deleted, -1 where there was none."""

    @abstractmethod
    def increment(self, key: str, by: int) -> int:
        """Adds to a shared integer (absent counts as 0), atomically across clients, and returns its new value."""

    def increment_many(self, keys: Sequence[str], by: int) -> list[int | StoreError]:
        """Increments several integers, in one round trip if possible; returns in the order of ``keys`` the new value,
        or the error of that key. Raises StoreAuthError and StoreClosedError."""
        outcomes: list[int | StoreError] = []
        for key in keys:
            try:
                outcomes.append(self.increment(key, by))
            except (StoreAuthError, StoreClosedError):
                raise
            except StoreError as error:
                outcomes.append(error)
        return outcomes

    @abstractmethod
    def scan(self, prefix: str) -> Iterator[str]:
        """Yields every key that starts with ``prefix``, in no order, each once. For start-up and tools, never in a
        loop.

        If one of several servers does not answer, the keys of the others come first and `StoreUnavailableError` last.
        """

    @abstractmethod
    def stored_bytes(self, key_length: int, value_length: int) -> int:
        """Returns the memory that the server gives out for one such entry, rounding and bookkeeping included."""

    @abstractmethod
    def placement(self) -> list[str]:
        """Returns one hash tag for each server that holds keys: keys with different tags, as in ``a{tag}b``, lie on
        different servers. The order is that of `keys.placement_tags`. A cluster can be resharded, so a caller that
        writes keys must note the tags with them."""

    def homes(self, keys: Sequence[str]) -> list[str]:
        """Returns the address of the server that holds each key now; all empty where there is just one."""
        return [""] * len(keys)

    def enter(self, namespace: str, wanted_bytes: int, held_bytes: int = 0) -> None:
        """Announces that this process uses a data set's entries, which want so many bytes and have some of them by
        their counter. A store that outlives its jobs removes entries of data sets that no process uses, if they take
        that room."""
        del namespace, wanted_bytes, held_bytes

    def use_server_of(self, url: str) -> None:
        """Ends the private server, and uses that of another process of this machine from now on, at the address that
        its store has. Raises StoreError, and changes nothing, if that server does not answer."""
        raise StoreError(f"expected a private server to leave for {url}, got {self.url}; open local://")

    def identity(self) -> str:
        """Returns a text that is equal for two stores only if they hold the same bytes, on whatever machines."""
        return self.url

    @abstractmethod
    def stats(self) -> StoreStats:
        """Returns the statistics of the servers that answer."""

    @abstractmethod
    def ping(self) -> None:
        """Returns if the servers answer and accept the credentials, else raises. Of a cluster some may be down."""

    def wait_ready(self) -> None:
        """Returns as soon as the servers answer, else raises as `ping` does. The machine of a job that starts is busy:
        a server that is silent is asked again for `READY_SECONDS`. One that is absent refuses the connection at once.
        """
        until = time.monotonic() + READY_SECONDS
        while True:
            try:
                return self.ping()
            except StoreTimeoutError:
                if time.monotonic() > until:
                    raise

    @abstractmethod
    def close(self) -> None:
        """Frees connections (and a private server). Safe to call twice."""

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"expected an open store, got {self.url} after close(); open it again")

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


STORES: Registry[Store] = Registry("store URL scheme")
"""URL scheme → class. `shade.store.open_store(url)` is the way in."""
