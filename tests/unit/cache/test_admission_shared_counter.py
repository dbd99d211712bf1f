"""A number on several nodes: what it is while some of them are away, and that it is right again afterwards."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shade.cache.admission import SharedCounter
from shade.errors import StoreAuthError, StoreError, StoreUnavailableError
from shade.store import MemoryStore, SampleKeys, StoreURL
from shade.store.keys import placement_tags

KEYS = SampleKeys("tally")


class Nodes(MemoryStore):
    """Three nodes in one memory: a key with a hash tag is on the node of its third of the tags."""

    def __init__(self) -> None:
        super().__init__(StoreURL.parse("memory://"), 1.0)
        self.away: set[int] = set()

    def _node(self, key: str) -> int:
        return 3 * placement_tags().index(key.partition("{")[2].partition("}")[0]) // len(placement_tags())

    def placement(self) -> list[str]:
        return list(placement_tags()[:3])

    def increment(self, key: str, by: int) -> int:
        if self._node(key) in self.away:
            raise StoreUnavailableError(f"node {self._node(key)} is away")
        return super().increment(key, by)

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        found = super().get_many(keys)
        return [None if self._node(key) in self.away else value for key, value in zip(keys, found, strict=True)]


def test_on_one_server_there_is_one_copy_under_the_name_of_old() -> None:
    with MemoryStore(StoreURL.parse("memory://"), 1.0) as store:
        tally = SharedCounter(store, KEYS, "used-bytes")
        assert tally.add(5) == 5
        assert store.get_many([KEYS.counter_key("used-bytes")]) == [b"5"]
        assert list(store.scan(KEYS.prefix)) == [KEYS.counter_key("used-bytes")]


@pytest.mark.parametrize("lost", [{0}, {1}, {2}, {0, 1}, {1, 2}])
def test_it_outlives_the_loss_of_nodes(lost: set[int]) -> None:
    with Nodes() as store:
        tally = SharedCounter(store, KEYS, "used-bytes")
        assert tally.value() == 0
        assert [tally.add(10), tally.add(-3)] == [10, 7]
        store.away = lost
        assert tally.add(1) == 8
        assert tally.value() == 8


def test_what_comes_back_late_is_put_right() -> None:
    with Nodes() as store:
        tally = SharedCounter(store, KEYS, "used-bytes")
        tally.add(10)
        store.away = {0}
        tally.add(5)
        store.away = set()
        tally.put(15)
        for gone in range(3):
            store.away = {gone}
            assert tally.value() == 15


def test_without_any_copy_the_reason_is_raised() -> None:
    with Nodes() as store:
        store.away = {0, 1, 2}
        with pytest.raises(StoreUnavailableError, match="node 0 is away"):
            SharedCounter(store, KEYS, "used-bytes").add(1)


def test_a_copy_that_somebody_has_overwritten_is_passed_over() -> None:
    with Nodes() as store:
        tally = SharedCounter(store, KEYS, "used-bytes")
        tally.add(10)
        first = next(key for key in sorted(store.scan(KEYS.prefix)) if store._node(key) == 0)
        store.set_many({first: b"not a number"})
        assert tally.add(1) == 11
        with pytest.raises(ValueError, match="not a number"):
            tally.value()
        tally.put(11)
        assert tally.value() == 11


def test_a_refusal_is_no_absence() -> None:
    class Refusing(Nodes):
        def increment(self, key: str, by: int) -> int:
            raise StoreAuthError("refused")

    with Refusing() as store, pytest.raises(StoreError, match="refused"):
        SharedCounter(store, KEYS, "used-bytes").add(1)


def test_its_keys_are_those_of_no_sample() -> None:
    with Nodes() as store:
        SharedCounter(store, KEYS, "used-bytes").add(1)
        assert [KEYS.index_of(key) for key in store.scan(KEYS.prefix)] == [None] * 3
