"""Turns the store's verbs into Redis commands, for one server and for a cluster alike.

A subclass says only where a command goes (`_round`); this module says what is sent and what an answer means. Batches
are cut into rounds so that neither side ever holds an unbounded reply. Invariant: one outcome a command, in order,
whatever happens to its server: a reply, a `ServerError`, or the `StoreUnavailableError` of the node that should have
answered.

`stored_bytes` says what memory a server gives out for an entry, before it is written: over many keys never less than
what the server reports. It is jemalloc's arithmetic of an entry of Redis 7 (jemalloc(3), size classes; sds.h, object.c,
dict.h); with libc a server uses up to 20 % less, which leaves a cache that is not quite full.
What a node of a cluster keeps for each slot that has a key, 2.5 KB in Redis 8.0, `RemoteStore.stats` has as overhead.
"""

from __future__ import annotations

import contextlib
import math
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

from typing_extensions import override

from shade.errors import StoreAuthError, StoreError, StoreFullError, StoreUnavailableError
from shade.store._servers.data_sets import DataSetMarks
from shade.store.base import NodeStats, Store, StoreStats
from shade.store.keys import NUM_BUCKETS
from shade.store.node import Node, exchange
from shade.store.url import StoreURL
from shade.store.wire import Command, GetInto, Reply, ServerError
from shade.types import Bytes

ROUND_BYTES: Final = 16 << 20
"""Bytes that one round may read or write: 64 samples of 100 KB fit in twice, and a stalled reader costs the server no
more than this in output buffers."""
_ROUND_COMMANDS: Final = 1024
_FIRST_GUESS_BYTES: Final = 128 << 10
_SCAN_COUNT: Final = 1000
PROBE_KEY: Final = "shade:probe"
"""Read to see whether a server serves; never written."""
_GLOB: Final = re.compile(r"([\\*?\[\]^])")

_EMBEDDED_MAX_BYTES: Final = 44
_BIG_ARGUMENT_BYTES: Final = 32 << 10
_OBJECT_BYTES: Final = 16
_TABLE_SHARE_BYTES: Final = 24
_ENTRY_BYTES: Final = {False: 32, True: 48}
"""24 and 40, in an allocator whose small classes are 16 bytes apart."""

Outcome: TypeAlias = "Reply | StoreUnavailableError"


class RemoteStore(Store):
    """Base of the stores that live in servers.

    Args:
        url: Their address.
        timeout_seconds: Bound of each wait for a server.
    """

    shared = True
    clustered: bool

    def __init__(self, url: StoreURL, timeout_seconds: float) -> None:
        self.url = str(url)
        self._url = url
        self._timeout_seconds = timeout_seconds
        self._value_bytes = _FIRST_GUESS_BYTES
        self._marks = DataSetMarks(self)

    def __reduce__(self) -> tuple[type[RemoteStore], tuple[StoreURL, float]]:
        return type(self), (self._url, self._timeout_seconds)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @abstractmethod
    def _round(self, keys: Sequence[str], commands: Sequence[Command], patient: bool = False) -> Sequence[Outcome]:
        """Sends each command to the server that has its key (``keys`` has one each), in one round trip a server.
        Returns one outcome a command; `StoreUnavailableError` for one of several servers that is unreachable. Raises it
        if no server is reachable. Patient: a server that is only slow is asked too."""

    def _can_be_asked_for(self, key: str, holder: Node) -> bool:
        """Returns whether a read of a key that a server lists would go to that server."""
        del key, holder
        return True

    @abstractmethod
    def _primaries(self) -> Sequence[Node]:
        """Returns all servers that hold keys of their own."""

    @abstractmethod
    def _all_nodes(self) -> Sequence[Node]:
        """Returns primaries and replicas."""

    @override
    def enter(self, namespace: str, wanted_bytes: int, held_bytes: int = 0) -> None:
        if not self.is_private:
            self._marks.enter(namespace, wanted_bytes, held_bytes)

    @override
    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        self._check_open()
        self._marks.renew()
        values: list[bytes | None] = []
        while len(values) < len(keys):
            # The values of the last round predict how many keys fill one.
            wanted = max(1, min(_ROUND_COMMANDS, ROUND_BYTES // self._value_bytes))
            part = keys[len(values) : len(values) + wanted]
            found = self._round(part, [(b"GET", key) for key in part])
            part_bytes = num_found = 0
            for value in found:
                # `type(…) is` and not isinstance: this runs once a sample, and bytes have no subclass here.
                if type(value) is bytes:
                    part_bytes += len(value)
                    num_found += 1
                    values.append(value)
                else:
                    self._check_missed(value)
                    values.append(None)
            if num_found:
                self._value_bytes = max(1, part_bytes // num_found)
        return values

    @override
    def get_many_into(self, items: Mapping[str, memoryview]) -> list[bool]:
        self._check_open()
        found = []
        # One value a round trip: a server that prepares several large replies at once pushes them out of its core's
        # cache. Threads that each ask for their own keep servers and network busy.
        for key, buffer in items.items():
            (outcome,) = self._round([key], [GetInto(key, buffer)], patient=True)
            found.append(self._answer(outcome) == len(buffer))
        return found

    @override
    def set_many(self, items: Mapping[str, Bytes]) -> list[bool]:
        return self._taken(self._write(items, ()))

    @override
    def refusals(self, items: Mapping[str, Bytes]) -> list[StoreError | None]:
        away = StoreUnavailableError(f"a server of {self.url} does not answer or does not serve this slot")
        full = StoreFullError(f"a server of {self.url} has no memory left; raise its maxmemory")

        def refusal(outcome: Outcome) -> StoreError | None:
            if _is_full(outcome):
                return full
            if isinstance(outcome, StoreUnavailableError):
                return outcome
            return away if self._answer(outcome) is None else None

        return [refusal(outcome) for outcome in self._write(items, (), patient=True)]

    @override
    def add_many(self, items: Mapping[str, Bytes]) -> list[bool]:
        return self._taken(self._write(items, (b"NX",)))

    def _taken(self, outcomes: Sequence[Outcome]) -> list[bool]:
        return [not _is_full(outcome) and self._answer(outcome) is not None for outcome in outcomes]

    def _write(self, items: Mapping[str, Bytes], condition: Command, patient: bool = False) -> list[Outcome]:
        """Sends one SET an item, in rounds of bounded size; ``condition`` ends each command."""
        self._check_open()
        outcomes: list[Outcome] = []
        keys: list[str] = []
        commands: list[Command] = []
        round_bytes = 0
        for number, (key, value) in enumerate(items.items(), 1):
            keys.append(key)
            commands.append((b"SET", key, value, *condition))
            round_bytes += memoryview(value).nbytes
            if round_bytes >= ROUND_BYTES or len(keys) >= _ROUND_COMMANDS or number == len(items):
                outcomes.extend(self._round(keys, commands, patient))
                keys, commands, round_bytes = [], [], 0
        return outcomes

    @override
    def delete_many(self, keys: Sequence[str]) -> list[int]:
        self._check_open()
        removed: list[int] = []
        for start in range(0, len(keys), _ROUND_COMMANDS):
            part = keys[start : start + _ROUND_COMMANDS]
            # STRLEN and UNLINK of a key share its slot, so both go to the same server, in this order. If another client
            # changes the length in between, the old one is returned.
            twice = [key for key in part for _ in range(2)]
            outcomes = iter(self._round(twice, [(verb, key) for key in part for verb in (b"STRLEN", b"UNLINK")]))
            for length, count in zip(outcomes, outcomes, strict=True):
                length, count = self._answer(length), self._answer(count)
                removed.append(length if isinstance(length, int) and count == 1 else -1)
        return removed

    @override
    def increment(self, key: str, by: int) -> int:
        (outcome,) = self.increment_many([key], by)
        if isinstance(outcome, StoreError):
            raise outcome
        return outcome

    @override
    def increment_many(self, keys: Sequence[str], by: int) -> list[int | StoreError]:
        self._check_open()
        outcomes: list[int | StoreError] = []
        for outcome in self._round(keys, [("INCRBY", key, by) for key in keys]):
            if isinstance(outcome, int | StoreUnavailableError):
                outcomes.append(outcome)
                continue
            error = self._error(outcome)
            if isinstance(error, StoreAuthError):
                raise error
            outcomes.append(error)
        return outcomes

    @override
    def scan(self, prefix: str) -> Iterator[str]:
        self._check_open()
        pattern = _GLOB.sub(r"\\\1", prefix) + "*"
        seen: set[bytes] = set()
        failure: StoreError | None = None
        for node in self._primaries():
            cursor: Reply = b"0"
            while True:
                assert isinstance(cursor, bytes)
                try:
                    (reply,) = node.ask(("SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_COUNT))
                    if not isinstance(reply, list):
                        raise self._error(reply)
                except StoreUnavailableError as error:
                    failure = error
                    break
                cursor, keys = reply
                assert isinstance(keys, list)
                for key in keys:
                    if isinstance(key, bytes) and key not in seen:
                        seen.add(key)
                        # What is no text is no key that anyone could ask for.
                        with contextlib.suppress(UnicodeDecodeError):
                            name = key.decode()
                            if self._can_be_asked_for(name, node):
                                yield name
                if cursor == b"0":
                    break
        if failure is not None:
            raise failure

    @override
    def stored_bytes(self, key_length: int, value_length: int) -> int:
        return stored_bytes(key_length, value_length, clustered=self.clustered)

    @override
    def stats(self) -> StoreStats:
        self._check_open()
        nodes = self._all_nodes()
        questions: list[Command] = [("INFO",), ("DBSIZE",), *([("MEMORY", "STATS")] if self.clustered else ())]
        answers = exchange([(node, questions) for node in nodes])
        answered = [(node, answer) for node, answer in zip(nodes, answers, strict=True) if isinstance(answer, list)]
        if not answered:
            raise StoreUnavailableError(f"no server of {self.url} answers: {answers[0]}")
        stats = [_node_stats(node, answer[:2]) for node, answer in answered]
        if self.clustered:
            tables = [_table_bytes(answer[2]) for _, answer in answered]
            stats = _without_tables(stats, tables, NUM_BUCKETS / len(self._primaries()))
        return StoreStats(tuple(stats))

    @override
    def close(self) -> None:
        if not self._closed:
            self._marks.leave()
        self._closed = True

    def _check_missed(self, outcome: Outcome) -> None:
        """Raises unless an outcome without a value is a miss."""
        if self._answer(outcome) is not None:
            raise self._error(outcome)

    def _answer(self, outcome: Outcome) -> Reply:
        """Returns the reply, or None if its node is unreachable or does not serve that slot; raises any other error."""
        if isinstance(outcome, StoreUnavailableError):
            return None
        if isinstance(outcome, ServerError):
            error = self._error(outcome)
            if not (self.clustered and isinstance(error, StoreUnavailableError)):
                raise error
            return None
        return outcome

    def _error(self, outcome: Any) -> StoreError:
        if isinstance(outcome, ServerError):
            return outcome.as_exception(self.url)
        return StoreError(f"expected a Redis server at {self.url}, got the reply {outcome!r}; check the address")


def _is_full(outcome: Outcome) -> bool:
    return isinstance(outcome, ServerError) and outcome.code == "OOM"


def _node_stats(node: Node, replies: Sequence[Reply]) -> NodeStats:
    for reply in replies:
        if isinstance(reply, ServerError):
            raise reply.as_exception(str(node))
    info, size = replies
    assert isinstance(info, bytes)
    assert isinstance(size, int)
    lines = (line.partition(":") for line in info.decode().splitlines() if ":" in line)
    facts = {name: text for name, _, text in lines}

    def number(name: str) -> int:
        return int(facts.get(name, 0))

    # Names differ between versions; a missing one counts as 0.
    not_data = ("used_memory_startup", "mem_clients_normal", "mem_clients_slaves", "mem_replication_backlog")
    overhead_bytes = sum(map(number, (*not_data, "mem_aof_buffer", "mem_cluster_links")))
    used_bytes = number("used_memory") - overhead_bytes
    return NodeStats(
        address=str(node),
        role="replica" if facts.get("role") == "slave" else "primary",
        used_bytes=max(0, used_bytes),
        max_bytes=number("maxmemory"),
        num_keys=size,
        version=facts.get("redis_version", ""),
        overhead_bytes=overhead_bytes,
    )


def _table_bytes(reply: Reply) -> int:
    """Returns the size of the tables of keys by the reply to MEMORY STATS; 0 if the server does not say."""
    tables = _pairs(_pairs(reply).get(b"db.0"))
    main, empty = (tables.get(b"overhead.hashtable." + name) for name in (b"main", b"expires"))
    # Both have the same fixed part, 128 KB in Redis 8.0, which start-up has already; no key of ours expires.
    return max(0, main - empty) if isinstance(main, int) and isinstance(empty, int) else 0


def _pairs(reply: Reply) -> dict[Any, Reply]:
    return dict(zip(reply[::2], reply[1::2], strict=False)) if isinstance(reply, list) else {}


def _without_tables(nodes: Sequence[NodeStats], table_bytes: Sequence[int], slots_each: float) -> list[NodeStats]:
    """Counts the tables of a cluster's slots as overhead, from the start as large as they are once every slot has a
    key. A server does not say how many slots have one: of ``slots_each`` slots a primary, keys that are spread at
    random leave a part exp(-keys / slots) empty."""
    primaries = [position for position, node in enumerate(nodes) if node.role == "primary"]
    num_keys = sum(nodes[position].num_keys for position in primaries)
    if not num_keys:
        return list(nodes)
    part = -math.expm1(-num_keys / (slots_each * len(primaries)))
    whole = int(sum(table_bytes[position] for position in primaries) / len(primaries) / part)
    return [
        replace(node, used_bytes=max(0, node.used_bytes - held), overhead_bytes=node.overhead_bytes + max(held, whole))
        for node, held in zip(nodes, table_bytes, strict=True)
    ]


def allocated_bytes(size_bytes: int) -> int:
    """Returns the jemalloc size class of a request: multiples of 16 up to 128, then four classes to each doubling."""
    if size_bytes <= 128:
        return max(16, -(-size_bytes // 16) * 16)
    step = 1 << ((size_bytes - 1).bit_length() - 3)
    return -(-size_bytes // step) * step


def stored_bytes(key_length: int, value_length: int, *, clustered: bool) -> int:
    """Returns the memory for one entry of a Redis server, allocator rounding and bookkeeping included."""
    if value_length <= _EMBEDDED_MAX_BYTES:
        value_bytes = allocated_bytes(_OBJECT_BYTES + 3 + value_length + 1)
    else:
        line_end = 2 if value_length >= _BIG_ARGUMENT_BYTES else 0
        value_bytes = _OBJECT_BYTES + allocated_bytes(_header_bytes(value_length) + value_length + 1 + line_end)
    key_bytes = allocated_bytes(_header_bytes(key_length) + key_length + 1)
    return value_bytes + key_bytes + _ENTRY_BYTES[clustered] + _TABLE_SHARE_BYTES


def _header_bytes(length: int) -> int:
    if length < 1 << 8:
        return 3
    return 5 if length < 1 << 16 else 9
