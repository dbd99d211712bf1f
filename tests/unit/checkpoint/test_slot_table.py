"""Where copies of chunks lie: in groups, as Gemini places them; every server with the same load."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from shade.checkpoint._format.digest import digest_of
from shade.checkpoint._tiers.slot_table import SlotLayout, SlotTable

TAGS = tuple("abcdefghijkl")


def holders(layout: SlotLayout, num_chunks: int = 240) -> list[frozenset[str]]:
    """The servers that each chunk of rank 0 lies on."""
    return [frozenset(layout.copy_tags(0, number)) for number in range(num_chunks)]


@pytest.mark.parametrize("num_servers", range(1, 13))
@pytest.mark.parametrize("replicas", range(4))
def test_each_copy_lies_on_another_server_and_all_servers_have_as_much(num_servers: int, replicas: int) -> None:
    if replicas >= num_servers:
        pytest.skip("refused before")
    layout = SlotLayout(TAGS[:num_servers], replicas, grouped=True)
    num_chunks = 2 * num_servers
    copies = [tag for number in range(num_chunks) for tag in layout.copy_tags(3, number)]
    assert all(len(each) == 1 + replicas for each in holders(layout, num_chunks))
    assert set(Counter(copies).values()) == {2 * (1 + replicas)}
    homes = Counter(layout.copy_tags(3, number)[0] for number in range(num_chunks))
    assert set(homes.values()) == {2}


def fatal(layout: SlotLayout, num_lost: int) -> int:
    """How many choices of servers to lose lose a chunk."""
    held = set(holders(layout))
    return sum(any(each <= set(lost) for each in held) for lost in itertools.combinations(layout.tags, num_lost))


@pytest.mark.parametrize(
    ("num_servers", "replicas", "expected"),
    [
        (4, 1, 2),  # of 6 pairs the 2 groups
        (6, 1, 3),
        (12, 1, 6),
        (6, 2, 2),  # of 20 triples the 2 groups
        (12, 3, 3),
        (5, 1, 4),  # a group of two, and three that share: 1 + 3
        (7, 2, 5),  # a group of three, and four of which any three neighbours are a copy set: 1 + 4
    ],
)
def test_of_all_losses_of_as_many_servers_as_copies_only_whole_groups_are_fatal(
    num_servers: int, replicas: int, expected: int
) -> None:
    grouped = SlotLayout(TAGS[:num_servers], replicas, grouped=True)
    assert fatal(grouped, replicas) == 0
    assert fatal(grouped, replicas + 1) == expected
    assert fatal(SlotLayout(TAGS[:num_servers], replicas), replicas + 1) == num_servers, "what it was before"


def test_a_table_from_before_there_were_groups_is_read_as_it_was_written() -> None:
    before = SlotLayout(("a", "b", "c"), 1)
    content = SlotTable().with_slot(0, 5, before, (10,)).to_bytes()
    old = content[32:].replace(b',"grouped":false', b"")
    assert old != content[32:]
    found = SlotTable.parse(digest_of(old).encode() + old)
    assert found is not None
    assert found.slots[0].layout == before
