"""Servers of a cluster in memory, each with its own part of the keys, and each able to go away or come back empty.

They behave as `shade.store.cluster` does: a server that is away costs the reader a miss, a writer a refusal, and only
when all are away an error. A process has its own view of them, as it has its own connections.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from typing_extensions import override

from shade.errors import StoreError, StoreUnavailableError
from shade.store.base import NodeStats, Store, StoreStats
from shade.store.keys import placement_tags
from shade.types import Bytes
from tests.simulation.torture.disk import flipped
from tests.simulation.torture.world import Act, World

T = TypeVar("T")
_PLACES: Final = {tag: place for place, tag in enumerate(placement_tags())}


class Servers:
    """What they hold.

    Args:
        num_servers: How many.
    """

    def __init__(self, num_servers: int) -> None:
        self.contents: list[dict[str, bytes]] = [{} for _ in range(num_servers)]
        self.away: set[int] = set()
        """Silent for everybody; they keep what they have."""

    def copy(self) -> Servers:
        """The same, apart."""
        made = Servers(len(self.contents))
        made.contents, made.away = [dict(each) for each in self.contents], set(self.away)
        return made

    def owner(self, key: str) -> int:
        """Which server has a key."""
        place = _PLACES.get(key[key.find("{") + 1 : key.find("}")])
        if place is None:
            raise StoreError(f"expected a key with a placement tag, got {key!r}; use spread_keys")
        return place * len(self.contents) // len(_PLACES)


class ServersView(Store):
    """The servers as one process reaches them.

    Args:
        world: Counts what is done, and makes it fail.
        servers: What it is done to.
        actor: The process.
    """

    shared = True
    url = "virtual://"

    def __init__(self, world: World, servers: Servers, actor: str) -> None:
        self.world, self.servers, self.actor = world, servers, actor
        self.cut_off: set[int] = set()
        """Servers that this process alone cannot reach."""

    @property
    def _away(self) -> set[int]:
        return self.servers.away | self.cut_off

    def _do(self, name: str, keys: Sequence[str], whole: Callable[[], T], **more: Any) -> T:
        def unavailable() -> T:
            raise StoreUnavailableError(f"expected an answer from {self.url}, got a time-out; is it up?")

        shown = f"{len(keys)} × {keys[0]}" if keys else ""
        act = Act("store", name, shown, whole, **more)
        act.errors = {"time-out": unavailable, **act.errors}
        found: T = self.world.perform(self.actor, act)
        return found

    def _each(self, keys: Sequence[str], away: T, ask: Callable[[dict[str, bytes], str], T]) -> list[T]:
        servers, silent = self.servers, self._away
        if len(silent) == len(servers.contents):
            raise StoreUnavailableError(f"expected an answer from {self.url}, got none; is it up?")
        found = []
        for key in keys:
            owner = servers.owner(key)
            found.append(away if owner in silent else ask(servers.contents[owner], key))
        return found

    @override
    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:

        def whole() -> list[bytes | None]:
            return self._each(keys, None, lambda content, key: content.get(key))

        def spoilt(dice: random.Random) -> list[bytes | None]:
            found = whole()
            there = [place for place, content in enumerate(found) if content]
            for place in dice.sample(there, min(1, len(there))):
                found[place] = bytes(flipped(found[place] or b"", dice))
            return found

        return self._do("get_many", keys, whole, writes=False, spoilt=spoilt)

    @override
    def get_many_into(self, items: Mapping[str, memoryview]) -> list[bool]:

        def give(content: dict[str, bytes], key: str) -> bool:
            found = content.get(key)
            if found is None or len(found) != len(items[key]):
                return False
            items[key][:] = found
            return True

        def spoilt(dice: random.Random) -> list[bool]:
            found = self._each(list(items), False, give)
            buffer = items[dice.choice(list(items))]
            buffer[:] = flipped(buffer, dice)
            return found

        keys = list(items)
        return self._do("get_many_into", keys, lambda: self._each(keys, False, give), writes=False, spoilt=spoilt)

    def _write(self, name: str, items: Mapping[str, Bytes], put: Callable[[dict[str, bytes], str], bool]) -> list[bool]:
        keys = list(items)

        def whole() -> list[bool]:
            return self._each(keys, False, put)

        def part(dice: random.Random) -> None:
            self._each([key for key in keys if dice.random() < 0.5], False, put)

        def spoilt(dice: random.Random) -> list[bool]:
            done = whole()
            key = dice.choice(keys)
            content = self.servers.contents[self.servers.owner(key)]
            if key in content:
                content[key] = bytes(flipped(content[key], dice))
            return done

        full = {"full": lambda: [False] * len(keys)}
        return self._do(name, keys, whole, part=part, spoilt=spoilt, errors=full)

    @override
    def set_many(self, items: Mapping[str, Bytes]) -> list[bool]:

        def put(content: dict[str, bytes], key: str) -> bool:
            content[key] = bytes(items[key])
            return True

        return self._write("set_many", items, put)

    @override
    def refusals(self, items: Mapping[str, Bytes]) -> list[StoreError | None]:
        silent = StoreUnavailableError(f"expected every server of {self.url}, got one that is silent; start it")
        return [
            silent if refusal and self.servers.owner(key) in self._away else refusal
            for key, refusal in zip(items, super().refusals(items), strict=True)
        ]

    @override
    def add_many(self, items: Mapping[str, Bytes]) -> list[bool]:

        def put(content: dict[str, bytes], key: str) -> bool:
            added = key not in content
            content.setdefault(key, bytes(items[key]))
            return added

        return self._write("add_many", items, put)

    @override
    def delete_many(self, keys: Sequence[str]) -> list[int]:

        def drop(content: dict[str, bytes], key: str) -> int:
            found = content.pop(key, None)
            return -1 if found is None else len(found)

        def part(dice: random.Random) -> None:
            self._each([key for key in keys if dice.random() < 0.5], -1, drop)

        return self._do("delete_many", keys, lambda: self._each(keys, -1, drop), part=part)

    @override
    def increment(self, key: str, by: int) -> int:

        def add(content: dict[str, bytes], key: str) -> int:
            content[key] = b"%d" % (int(content.get(key, b"0")) + by)
            return int(content[key])

        return self._do("increment", [key], lambda: self._each([key], 0, add)[0])

    @override
    def scan(self, prefix: str) -> Iterator[str]:
        for content in self.servers.contents:
            yield from [key for key in content if key.startswith(prefix)]

    @override
    def stored_bytes(self, key_length: int, value_length: int) -> int:
        return key_length + value_length

    @override
    def placement(self) -> list[str]:
        return list(placement_tags()[:: -(-len(placement_tags()) // len(self.servers.contents))])

    @override
    def stats(self) -> StoreStats:

        def whole() -> StoreStats:
            up = [number for number in range(len(self.servers.contents)) if number not in self._away]
            return StoreStats(tuple(NodeStats(str(number), "primary", 0, 0, 0, "") for number in up))

        return self._do("stats", [], whole, writes=False)

    @override
    def ping(self) -> None:

        def whole() -> None:
            if self._away:
                raise StoreUnavailableError(f"expected every server of {self.url}, got one that is silent; start it")

        self._do("ping", [], whole, writes=False)

    @override
    def close(self) -> None:
        pass
