"""Cluster memory: slots in turn, dirty bits, copies and parity; every crash leaves what was committed before."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest

from shade.checkpoint._format.manifest import CHUNK_BYTES
from shade.checkpoint._tiers.memory import MemoryTier
from shade.checkpoint._tiers.slot_table import Slot, SlotLayout, SlotTable
from shade.errors import ConfigError, StoreError, StoreFullError, StoreUnavailableError
from shade.store import MemoryStore, Store, StoreStats, StoreURL, open_store
from shade.store.keys import placement_tags
from shade.store.redis_commands import allocated_bytes, stored_bytes
from shade.testing import FaultyStore
from shade.types import Bytes
from tests.support.snapshots import damages, make, readable, save


class Servers(Store):
    """A cluster of memory stores; those that are down hold on to what they have and answer nothing."""

    shared = True
    url = "servers://"

    def __init__(self, num_servers: int) -> None:
        self.down: set[int] = set()
        self._tags = list(placement_tags()[:: -(-256 // num_servers)])
        self.nodes = [MemoryStore(StoreURL.parse("memory://"), 1.0) for _ in self._tags]

    def _owner(self, key: str) -> int:
        tag = key.partition("{")[2].partition("}")[0]
        return placement_tags().index(tag) * len(self.nodes) // 256

    def _each(self, key: str, ask: Callable[[Store], object], away: object) -> object:
        if len(self.down) == len(self.nodes):
            raise StoreUnavailableError("nobody there")
        owner = self._owner(key)
        return away if owner in self.down else ask(self.nodes[owner])

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self._each(key, lambda node, key=key: node.get_many([key])[0], None) for key in keys]  # type: ignore[misc]

    def get_many_into(self, items: Mapping[str, memoryview]) -> list[bool]:
        return [
            bool(self._each(key, lambda node, one={key: buffer}: node.get_many_into(one)[0], False))  # type: ignore[misc]
            for key, buffer in items.items()
        ]

    def set_many(self, items: Mapping[str, Bytes]) -> list[bool]:
        return [
            bool(self._each(key, lambda node, one={key: value}: node.set_many(one)[0], False))  # type: ignore[misc]
            for key, value in items.items()
        ]

    def refusals(self, items: Mapping[str, Bytes]) -> list[StoreError | None]:
        away = StoreUnavailableError(f"servers {self.down} are away")
        return [
            away if refusal and self._owner(key) in self.down else refusal
            for key, refusal in zip(items, super().refusals(items), strict=True)
        ]

    def add_many(self, items: Mapping[str, Bytes]) -> list[bool]:
        return [
            bool(self._each(key, lambda node, one={key: value}: node.add_many(one)[0], False))  # type: ignore[misc]
            for key, value in items.items()
        ]

    def delete_many(self, keys: Sequence[str]) -> list[int]:
        return [self._each(key, lambda node, key=key: node.delete_many([key])[0], -1) for key in keys]  # type: ignore[misc]

    def increment(self, key: str, by: int) -> int:
        return self.nodes[self._owner(key)].increment(key, by)

    def scan(self, prefix: str) -> Iterator[str]:
        return itertools.chain.from_iterable(node.scan(prefix) for node in self.nodes)

    def stored_bytes(self, key_length: int, value_length: int) -> int:
        return self.nodes[0].stored_bytes(key_length, value_length)

    def placement(self) -> list[str]:
        return self._tags

    def stats(self) -> StoreStats:
        up = [node for number, node in enumerate(self.nodes) if number not in self.down]
        return StoreStats(tuple(node.stats().nodes[0] for node in up))

    def ping(self) -> None:
        if self.down:
            raise StoreUnavailableError(f"servers {self.down} are away")

    def close(self) -> None:
        for node in self.nodes:
            node.close()


@pytest.fixture
def store() -> Iterator[Store]:
    with open_store("memory://") as opened:
        yield opened


@pytest.fixture
def tier(store: Store) -> Iterator[MemoryTier]:
    opened = MemoryTier(store, "run")
    yield opened
    opened.close()


def reopened(tier: MemoryTier, **options: object) -> MemoryTier:
    """What a process that starts later sees."""
    tier.close()
    return MemoryTier(tier.store, tier.run, **options)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ slots


def test_a_snapshot_is_held_after_its_commit_and_not_before(tier: MemoryTier) -> None:
    snapshot = make("run", 7)
    place = tier.prepare(7, [m.stored_bytes for m in snapshot.manifests])
    assert tier.held() == {}
    for rank in range(2):
        tier.put(place, snapshot.shard(rank))
        assert tier.held() == {}
    tier.commit(place, snapshot.record)
    assert tier.held() == {place: snapshot.record}
    assert list(damages(tier, place, snapshot)) == []


def test_slots_are_used_in_turn_and_the_newest_is_never_taken(tier: MemoryTier) -> None:
    snapshots = [make("run", step) for step in range(1, 6)]
    places = [save(tier, snapshot) for snapshot in snapshots]
    assert len({place.partition(".")[0] for place in places}) == 2
    assert tier.held() == {places[-2]: snapshots[-2].record, places[-1]: snapshots[-1].record}
    assert list(damages(tier, places[-1], snapshots[-1])) == []
    place = tier.prepare(6, [100])
    assert tier.held() == {places[-1]: snapshots[-1].record}
    assert place.startswith(places[-2].partition(".")[0])


def test_an_unfinished_slot_is_taken_again_before_a_whole_one(tier: MemoryTier) -> None:
    first = save(tier, make("run", 1))
    unfinished = tier.prepare(2, [200_000])
    tier.put(unfinished, make("run", 2, shard_bytes=[200_000]).shard(0))
    tier = reopened(tier)
    second = save(tier, make("run", 2))
    assert set(tier.held()) == {first, second}
    assert second.partition(".")[0] == unfinished.partition(".")[0]


def test_a_smaller_snapshot_leaves_nothing_of_a_larger_one_behind(tier: MemoryTier, store: Store) -> None:
    def num_chunks() -> int:
        return sum(":chunk:" in key or "}chunk:" in key for key in store.scan("shade:checkpoint:"))

    for step in (1, 2):
        save(tier, make("run", step, shard_bytes=[300_000, 300_000, 300_000]))
    assert num_chunks() == 2 * 3 * 10
    small = [make("run", step, shard_bytes=[60_000]) for step in (3, 4)]
    places = [save(tier, snapshot) for snapshot in small]
    assert num_chunks() == 2 * 2
    assert list(damages(tier, places[1], small[1])) == []


def test_slots_that_a_later_run_does_not_want_are_freed(store: Store) -> None:
    wide = MemoryTier(store, "run", num_slots=4)
    for step in (1, 2, 3, 4):
        save(wide, make("run", step))
    narrow = reopened(wide)
    places = [save(narrow, make("run", step)) for step in (5, 6)]
    assert set(narrow.held()) == set(places)
    narrow.close()


def test_a_discarded_place_is_empty(tier: MemoryTier, store: Store) -> None:
    place = save(tier, make("run", 1))
    tier.discard(place)
    assert tier.held() == {}
    assert [key for key in store.scan("shade:") if "}table" not in key] == []
    tier.discard(place)
    tier.discard("slot-9.9")


def test_runs_do_not_see_each_other(store: Store) -> None:
    runs = ["a", "a:b", "a{b}", "a*", "ä ö"]
    tiers = [MemoryTier(store, run) for run in runs]
    snapshots = [make(run, 3) for run in runs]
    places = [save(tier, snapshot) for tier, snapshot in zip(tiers, snapshots, strict=True)]
    for tier, place, snapshot in zip(tiers, places, snapshots, strict=True):
        assert tier.held() == {place: snapshot.record}
        assert list(damages(tier, place, snapshot)) == []
    tiers[0].discard(places[0])
    assert all(tier.held() for tier in tiers[1:])
    for tier in tiers:
        tier.close()


def test_a_slot_that_was_taken_again_is_not_ours_any_more(tier: MemoryTier) -> None:
    snapshot = make("run", 1)
    place = tier.prepare(1, [m.stored_bytes for m in snapshot.manifests])
    other = MemoryTier(tier.store, "run")
    assert save(other, make("run", 2, shard_bytes=[10])) != place
    with pytest.raises(StoreError, match="does another process save"):
        tier.put(place, snapshot.shard(0))
    with pytest.raises(StoreError, match="does another process save"):
        tier.commit(place, snapshot.record)
    other.close()


def test_an_emptied_store_is_an_error_now_and_none_later(tier: MemoryTier) -> None:
    place = tier.prepare(1, [200_000])
    tier.store.delete_many(list(tier.store.scan("shade:")))
    with pytest.raises(StoreError, match="emptied"):
        tier.put(place, make("run", 1, shard_bytes=[200_000]).shard(0))
    assert tier.held() == {}
    place = save(tier, make("run", 2))
    assert set(tier.held()) == {place}


def test_a_table_with_a_flipped_bit_is_none() -> None:
    table = (
        SlotTable()
        .with_slot(0, 5, SlotLayout(("a", "b"), 1), (10, 20))
        .with_slot(1, 6, SlotLayout(("a",), 0, 4, 2), ())
    )
    content = table.to_bytes()
    assert SlotTable.parse(content) == table
    for position in range(len(content)):
        flipped = bytearray(content)
        flipped[position] ^= 1
        assert SlotTable.parse(bytes(flipped)) is None
    assert SlotTable.parse(b"") is None


# ------------------------------------------------------------------------------------------------ dirty bits


def test_what_a_flusher_holds_is_not_overwritten_before_it_is_in_storage(store: Store) -> None:
    tier = MemoryTier(store, "run", flushed=True)
    flusher = MemoryTier(store, "run")
    snapshots = [make("run", step) for step in (1, 2, 3)]
    places = [save(tier, snapshot) for snapshot in snapshots[:2]]
    assert flusher.dirty() == [(places[0], snapshots[0].record), (places[1], snapshots[1].record)]
    flusher.hold(places[0])
    with pytest.raises(StoreFullError, match=r"steps 1, 2\): the flusher is behind"):
        tier.prepare(3, [10])
    assert list(damages(tier, places[0], snapshots[0])) == []
    flusher.mark_clean(places[0], 1)
    assert not tier.is_dirty(places[0])
    assert tier.is_dirty(places[1])
    places.append(save(tier, snapshots[2]))
    assert [place for place, _ in flusher.dirty()] == places[1:]
    tier.close()
    flusher.close()


def test_where_storage_is_slow_the_oldest_that_nobody_holds_is_overtaken(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    tier = MemoryTier(store, "run", num_slots=3, flushed=True)
    flusher = MemoryTier(store, "run")
    snapshots = [make("run", step) for step in range(1, 7)]
    first = save(tier, snapshots[0])
    flusher.hold(first)
    for step, snapshot in enumerate(snapshots[1:], 2):
        newest = save(tier, snapshot)
        assert list(damages(tier, newest, snapshot)) == []
        assert list(damages(tier, first, snapshots[0])) == [], "it is on its way to storage"
        assert [record.step for _, record in flusher.dirty()] == sorted({1, max(2, step - 1), step})
    assert caplog.text.count("storage is slower than the saves") == 1
    flusher.release_hold(first)
    save(tier, make("run", 7))
    assert [record.step for _, record in flusher.dirty()] == [5, 6, 7]
    tier.close()
    flusher.close()


def test_a_clean_newest_snapshot_is_not_overwritten_either(store: Store) -> None:
    tier = MemoryTier(store, "run", flushed=True)
    places = [save(tier, make("run", step)) for step in (1, 2)]
    tier.mark_clean(places[1], 2)
    tier.hold(places[0])
    with pytest.raises(StoreFullError):
        tier.prepare(3, [10])
    tier.close()


def test_a_late_flusher_does_not_clean_what_came_after(store: Store) -> None:
    tier = MemoryTier(store, "run", flushed=True)
    first, second = (save(tier, make("run", step)) for step in (1, 2))
    tier.mark_clean(first, 1)
    third = save(tier, make("run", 3))
    assert third.partition(".")[0] == first.partition(".")[0]
    tier.mark_clean(first, 1)
    tier.mark_clean(third, 1)
    tier.mark_clean("slot-9.9", 3)
    assert [place for place, _ in tier.dirty()] == [second, third]
    tier.close()


def test_without_a_flusher_nothing_is_dirty(tier: MemoryTier) -> None:
    place = save(tier, make("run", 1))
    assert tier.dirty() == []
    assert not tier.is_dirty(place)


# ------------------------------------------------------------------------------------------------ room


def test_no_room_is_said_before_anything_is_changed(tier: MemoryTier) -> None:
    del tier
    with open_store("memory://?capacity=30MiB") as store:
        tier = MemoryTier(store, "run")
        snapshots = [make("run", step, shard_bytes=[4_000_000], chunk=1_000_000) for step in (1, 2)]
        places = [save(tier, snapshot) for snapshot in snapshots]
        with pytest.raises(StoreFullError, match=r"expected room for 6\d MiB .* got 2\d MiB"):
            tier.prepare(3, [30 << 20])
        assert tier.held() == {p: s.record for p, s in zip(places, snapshots, strict=True)}
        assert list(damages(tier, places[0], snapshots[0])) == []
        tier.close()


def test_what_a_slot_holds_counts_as_free() -> None:
    with open_store("memory://?capacity=27MiB") as store:
        tier = MemoryTier(store, "run", num_threads=1)
        for step in (1, 2, 3, 4):
            save(tier, make("run", step, shard_bytes=[9 << 20], chunk=CHUNK_BYTES))
        assert sorted(record.step for record in tier.held().values()) == [3, 4]
        tier.close()


def test_full_in_the_middle_is_an_error_and_the_one_before_stays() -> None:
    with open_store("memory://?capacity=24MiB") as store:
        tier = MemoryTier(store, "run")
        before = make("run", 1, shard_bytes=[5_000_000])
        place = save(tier, before)
        late = make("run", 2, shard_bytes=[30_000_000])
        second = tier.prepare(2, [1000])
        with pytest.raises(StoreFullError, match="no memory left"):
            tier.put(second, late.shard(0))
        tier.discard(second)
        assert tier.held() == {place: before.record}
        assert list(damages(tier, place, before)) == []
        assert set(tier.held()) | {save(tier, make("run", 3, shard_bytes=[5_000_000]))} == set(tier.held())
        tier.close()


def test_a_chunk_wastes_no_memory_of_a_server() -> None:
    for clustered in (False, True):
        assert stored_bytes(80, CHUNK_BYTES, clustered=clustered) < 1.002 * CHUNK_BYTES
    assert allocated_bytes(4 * 2**20 + 12) == 5 * 2**20


# ------------------------------------------------------------------------------------------------ copies and parity

LAYOUTS = [(3, {"replicas": 1}, 1), (4, {"replicas": 2}, 2), (3, {"parity": (2, 1)}, 1), (6, {"parity": (4, 2)}, 2)]
LAYOUTS += [(3, {"parity": (4, 2)}, 1), (4, {"parity": (2, 2)}, 2), (8, {"parity": (5, 3)}, 3)]


@pytest.mark.parametrize(("num_servers", "options", "survives"), LAYOUTS)
def test_any_servers_may_be_lost(num_servers: int, options: Mapping[str, object], survives: int) -> None:
    store = Servers(num_servers)
    tier = MemoryTier(store, "run", **options)  # type: ignore[arg-type]
    assert tier.survives == survives
    snapshots = [make("run", step) for step in (1, 2)]
    places = [save(tier, snapshot) for snapshot in snapshots]
    assert list(damages(tier, places[0], snapshots[0])) == []
    for lost in itertools.combinations(range(num_servers), survives):
        store.down = set(lost)
        reader = MemoryTier(store, "run")
        assert reader.held() == dict(zip(places, (s.record for s in snapshots), strict=True))
        assert all(readable(reader, place, snapshot) for place, snapshot in zip(places, snapshots, strict=True))
        reader.close()
    store.down = set(range(survives + 1))
    assert not readable(tier, places[0], snapshots[0])
    tier.close()


@pytest.mark.parametrize(("num_servers", "options", "survives"), LAYOUTS)
def test_repair_gives_an_empty_server_its_share(num_servers: int, options: Mapping[str, object], survives: int) -> None:
    del survives
    store = Servers(num_servers)
    tier = MemoryTier(store, "run", flushed=True, **options)  # type: ignore[arg-type]
    snapshot = make("run", 1)
    place = save(tier, snapshot)
    for emptied in range(num_servers):
        before = sorted(store.scan("shade:"))
        node = store.nodes[emptied]
        assert sum(node.delete_many(list(node.scan("shade:")))) > 0
        lost = list(damages(tier, place, snapshot))
        assert lost
        for rank, chunks in enumerate(snapshot.data):
            numbers = {number for _, at, number in lost if at == rank and number >= 0}
            tier.repair(place, snapshot.manifests[rank], {number: chunks[number] for number in numbers})
        assert list(damages(tier, place, snapshot)) == []
        assert sorted(store.scan("shade:")) == before
    tier.close()


@pytest.mark.parametrize("options", [{"replicas": 1}, {"parity": (2, 1)}, {"parity": (2, 2)}])
def test_rotten_bytes_never_pass_and_are_mended(options: Mapping[str, object]) -> None:
    """Each chunk and each piece of parity in turn, with one bit flipped."""
    store = Servers(4)
    tier = MemoryTier(store, "run", **options)  # type: ignore[arg-type]
    snapshot = make("run", 1, shard_bytes=[100_000])
    place = save(tier, snapshot)
    for key in [key for key in store.scan("shade:") if "}chunk" in key or "}parity" in key]:
        (content,) = store.get_many([key])
        assert content is not None
        store.set_many({key: content[:-1] + bytes([content[-1] ^ 16])})
        lost = {number for _, _, number in damages(tier, place, snapshot)}
        assert lost, key
        assert readable(tier, place, snapshot)
        tier.repair(place, snapshot.manifests[0], {number: snapshot.data[0][number] for number in lost})
        assert list(damages(tier, place, snapshot)) == []
        assert store.get_many([key]) == [content]
    tier.close()


def test_a_reader_needs_no_arguments_and_another_layout_follows() -> None:
    store = Servers(4)
    writer = MemoryTier(store, "run", parity=(2, 2))
    first = make("run", 1)
    place = save(writer, first)
    writer.close()
    second_writer = MemoryTier(store, "run", replicas=1)
    second, third = make("run", 2), make("run", 3)
    places = [save(second_writer, snapshot) for snapshot in (second, third)]
    assert not [key for key in store.scan("shade:") if "}parity" in key]
    store.down = {3}
    reader = MemoryTier(store, "run")
    assert set(reader.held()) == set(places)
    assert place not in places
    assert readable(reader, places[0], second)
    assert readable(reader, places[1], third)
    with pytest.raises(StoreUnavailableError, match=r"3 of 4 servers|does not answer|away"):
        reader.prepare(4, [10])
    reader.close()
    second_writer.close()


def test_what_a_server_that_was_away_brings_back_does_not_count() -> None:
    store = Servers(3)
    tier = MemoryTier(store, "run", replicas=1)
    old = make("run", 1)
    place = save(tier, old)
    kept = {key: store.nodes[0].get_many([key])[0] for key in store.nodes[0].scan("shade:")}
    places = [save(tier, make("run", step)) for step in (2, 3, 4)]
    node = store.nodes[0]
    node.delete_many(list(node.scan("shade:")))
    node.set_many({key: value for key, value in kept.items() if value is not None})
    tier = reopened(tier)
    assert set(tier.held()) == set(places[-2:])
    assert place not in tier.held()
    tier.close()


@pytest.mark.parametrize(
    ("num_servers", "options", "message"),
    [
        (1, {"replicas": 1}, r"fewer replicas than the store has servers \(1\)"),
        (3, {"replicas": 3}, r"fewer replicas"),
        (1, {"parity": (2, 1)}, "survives the loss of a server"),
        (2, {"parity": (2, 1)}, "survives the loss of a server"),
        (3, {"replicas": 1, "parity": (2, 1)}, "not both"),
        (3, {"replicas": -1}, "replicas ≥ 0"),
        (3, {"parity": (0, 1)}, "k ≥ 1"),
        (3, {"num_slots": 1}, "2 slots or more"),
    ],
)
def test_arguments_that_cannot_be(num_servers: int, options: Mapping[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MemoryTier(Servers(num_servers), "run", **options)  # type: ignore[arg-type]


def test_survival_is_that_of_the_worst_choice_of_servers() -> None:
    for num_servers, k, r in itertools.product(range(1, 8), range(1, 6), range(1, 5)):
        layout = SlotLayout(placement_tags()[:num_servers], 0, k, r)
        slot = Slot(0, 1, 1, layout, (1,))
        homes = [slot.layout.copy_tags(0, member)[0] for member in range(k)]
        homes += [layout.parity_tag(0, 0, row) for row in range(r)]
        worst = next(
            (
                lost - 1
                for lost in range(1, num_servers + 1)
                if max(sum(map(homes.count, gone)) for gone in itertools.combinations(layout.tags, lost)) > r
            ),
            num_servers,
        )
        assert layout.survives == worst, (num_servers, k, r)


# ------------------------------------------------------------------------------------------------ crashes


@pytest.mark.parametrize("options", [{}, {"flushed": True}])
def test_a_crash_at_any_operation_leaves_the_snapshot_before(options: Mapping[str, object]) -> None:
    """The store is there until its n-th call, for every n that a save needs: then the process is as good as dead."""
    for last_call in itertools.count():
        with open_store("memory://") as store:
            tier = MemoryTier(store, "run", num_slots=3, **options)  # type: ignore[arg-type]
            before = make("run", 1, shard_bytes=[90_000])
            place = save(tier, before)
            save(tier, make("run", 2, shard_bytes=[120_000]))
            tier.mark_clean(place, 1)
            faulty = FaultyStore(store)
            dying = MemoryTier(faulty, "run", **options)  # type: ignore[arg-type]
            calls = itertools.count()
            faulty._call = _until(last_call, calls)  # type: ignore[method-assign]
            after = make("run", 3, shard_bytes=[60_000, 70_000])
            try:
                save(dying, after)
                died = False
            except StoreUnavailableError:
                died = True
            dying.close()
            tier = reopened(tier, num_slots=3)
            held = {record.step: place for place, record in tier.held().items()}
            assert 2 in held
            assert readable(tier, held[2], make("run", 2, shard_bytes=[120_000]))
            if 3 in held:
                assert readable(tier, held[3], after)
            assert died or 3 in held
            final = make("run", 4, shard_bytes=[50_000])
            assert readable(tier, save(tier, final), final)
            tier.close()
            if not died:
                return


def _until(last_call: int, calls: Iterator[int]) -> Callable[[str, Callable[[], object]], object]:
    def call(method: str, action: Callable[[], object]) -> object:
        if next(calls) >= last_call:
            raise StoreUnavailableError(f"gone at {method}")
        return action()

    return call


class Garbling(MemoryStore):
    """Damages the replies to reads of a record, as often as ``left`` says."""

    left = 0
    key = ""

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        found = super().get_many(keys)
        if self.left and self.key in keys:
            self.left -= 1
            found[list(keys).index(self.key)] = b"rotten"
        return found


@pytest.mark.parametrize(("num_slots", "garbled", "times", "left"), [(2, 2, 1, [2, 3]), (3, 1, 100, [1, 3, 4])])
def test_a_record_that_arrives_damaged_gives_no_slot_back(
    num_slots: int, garbled: int, times: int, left: list[int]
) -> None:
    store = Garbling(StoreURL.parse("memory://"), 1.0)
    tier = MemoryTier(store, "run", num_slots=num_slots)
    places = {step: save(tier, make("run", step)) for step in range(1, num_slots + 1)}
    store.key = next(key for key in store.scan("") if key.endswith(f"commit:{places[garbled].removeprefix('slot-')}"))
    store.left = times
    save(tier, make("run", num_slots + 1))
    store.left = 0
    assert sorted(record.step for record in tier.held().values()) == left


def test_a_dirty_bit_that_no_server_shows_is_not_believed_to_be_gone() -> None:
    store = Servers(2)
    tier = MemoryTier(store, "run", flushed=True)
    place = save(tier, make("run", 1))
    assert tier.is_dirty(place)
    store.nodes[0].delete_many(list(store.nodes[0].scan("")))
    store.down = {1}
    assert not tier.is_complete()
    with pytest.raises(StoreUnavailableError, match="1 of 2 servers"):
        tier.is_dirty(place)
    store.down = set()
    assert tier.is_dirty(place)
