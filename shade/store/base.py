"""What a store is: bytes by key, in batches. It knows nothing of samples, tensors or policies.

Every method takes a batch and answers in its order, so that a batch of samples costs one round trip a node and not
one a sample. A store never retries for long and never hides a failure: it raises within its timeout and the floor
above decides (the cache: a miss; a checkpoint: an error). Values are opaque and never changed.

Clients are lazy and belong to one process: a store pickles as its URL, and connects again in a child after fork,
spawn or forkserver. Invariant: a value that `get_many` returns is byte for byte a value that was written to that key.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shade.errors import StoreAuthError, StoreClosedError, StoreError, StoreFullError
from shade.registry import Registry
from shade.types import Bytes


@dataclass(frozen=True)
class NodeStats:
    """One server, as it describes itself."""

    address: str
    role: str
    """``primary`` or ``replica``."""
    used_bytes: int
    """Memory held by data: what the allocator gave out for keys and values, clients and start-up left out. A server
    looks after its clients' buffers once a second, so under load this is off by what is in flight."""
    max_bytes: int
    """Its own limit (``maxmemory``); 0 means none."""
    num_keys: int
    version: str
    overhead_bytes: int = 0
    """What it uses beside data: its start-up, its clients' buffers. Counts against ``max_bytes`` as data does."""


@dataclass(frozen=True)
class StoreStats:
    """A whole store; sums are over the primaries."""

    nodes: tuple[NodeStats, ...] = field(default_factory=tuple)

    @property
    def used_bytes(self) -> int:
        """Bytes held by data on all primaries."""
        return sum(n.used_bytes for n in self.nodes if n.role == "primary")

    @property
    def num_keys(self) -> int:
        """Keys on all primaries."""
        return sum(n.num_keys for n in self.nodes if n.role == "primary")


class Store(ABC):
    """Bytes by key.

    Raises:
        StoreUnavailableError: By any method: no answer in time. Reads: nothing known. Writes: each key is either the
            old value, the new one or absent, never a mixture.
        StoreAuthError: By any method: refused.
        StoreClosedError: By any method, after `close`.
    """

    url: str
    """The address with any password replaced by ``***``: safe to log."""

    shared: bool
    """True when other processes that open the same URL see the same bytes."""

    @abstractmethod
    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Values in the order of ``keys``; ``None`` where there is none. What an unreachable node of several holds is
        ``None`` too, unless all are unreachable."""

    @abstractmethod
    def get_many_into(self, items: Mapping[str, memoryview]) -> list[bool]:
        """Reads large values straight into the caller's memory, one after the other. True where the buffer now holds
        the value whole; False where there is none, its node is away, or its length is not the buffer's: then what the
        buffer holds means nothing."""

    @abstractmethod
    def set_many(self, items: Mapping[str, Bytes]) -> list[bool]:
        """Writes, replacing what was there. False where the server refused for want of memory, or is away and others
        are there; `refusals` tells the one from the other."""

    def refusals(self, items: Mapping[str, Bytes]) -> list[StoreError | None]:
        """`set_many`, for who must know why: what kept each value from being written.

        Args:
            items: Values by key.

        Returns:
            In the order of ``items``: None where it was written, `StoreFullError` where its server has no memory left,
            `StoreUnavailableError` where its server is away.
        """
        full = StoreFullError(f"a server of {self.url} has no memory left; raise its maxmemory")
        return [None if written else full for written in self.set_many(items)]

    @abstractmethod
    def add_many(self, items: Mapping[str, Bytes]) -> list[bool]:
        """Writes only keys that are absent. False where it was present or the server refused for want of memory."""

    @abstractmethod
    def delete_many(self, keys: Sequence[str]) -> list[int]:
        """Removes. The length in bytes of each value that this call removed, -1 where there was none."""

    @abstractmethod
    def increment(self, key: str, by: int) -> int:
        """Adds to a shared integer (absent counts as 0) and returns its new value, atomically across clients."""

    def increment_many(self, keys: Sequence[str], by: int) -> list[int | StoreError]:
        """`increment` of several, each by as much, in one round where it can be: what each came to, or why it did not.

        Args:
            keys: Of the integers.
            by: What to add.

        Returns:
            In the order of ``keys``; an error in the place of what could not be done.

        Raises:
            StoreAuthError: Refused.
            StoreClosedError: After `close`.
        """
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
        """Every key that starts with ``prefix``, in no order, each once. For start-up and tools, never in a loop.
        Where one of several servers does not answer, what the others have comes first and `StoreUnavailableError`
        last: it is not the whole."""

    @abstractmethod
    def stored_bytes(self, key_length: int, value_length: int) -> int:
        """Memory the server gives out for one such entry, allocator rounding and bookkeeping included."""

    @abstractmethod
    def placement(self) -> list[str]:
        """One hash tag for each server that holds keys of its own: keys with different tags, as in ``a{tag}b``, lie on
        different servers. In the order of `keys.placement_tags`, of which they are part, and as of now: a cluster can
        be rearranged, so whoever writes keys notes the tags with them."""

    def homes(self, keys: Sequence[str]) -> list[str]:
        """The address of the server that has each key, as of now; all empty where there is just one."""
        return [""] * len(keys)

    @abstractmethod
    def stats(self) -> StoreStats:
        """What the servers say of themselves; of several, those that answer."""

    @abstractmethod
    def ping(self) -> None:
        """Returns when the servers answer and let us in; raises otherwise. Of a cluster some may be away. Called once,
        at start."""

    @abstractmethod
    def close(self) -> None:
        """Frees connections (and a private server). Safe to call twice."""

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


STORES: Registry[Store] = Registry("store URL scheme")
"""URL scheme → class. `shade.store.open_store(url)` is the way in."""
