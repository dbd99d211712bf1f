"""Runs what several ranks do together in threads that take turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from shade.rank_group import RankGroup
from tests.simulation.torture.world import World

T = TypeVar("T")


def together(num_ranks: int, act: Callable[[RankGroup], T]) -> list[Any]:
    """What each rank comes to: a result, or the error that it raised."""
    world = World(0)
    found: list[Any] = [None] * num_ranks

    def process(group: RankGroup) -> Callable[[], None]:
        def work() -> None:
            try:
                found[group.rank] = act(group)
            except Exception as error:  # noqa: BLE001 - it is what the test asks for
                found[group.rank] = error

        return work

    world.run({f"rank {group.rank}": process(group) for group in world.groups(num_ranks)})
    return found
