"""The part of a bucket that each rank of a node is responsible for. Several ranks are in tests/integration."""

from __future__ import annotations

import pytest

from shade.gradient._comm.topology import FlatTopology, NodeTopology
from shade.gradient._comm.transport import Transport


class Place(Transport):
    """A rank of a world that is not there."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.rank, self.world_size, self.ranks = rank, world_size, tuple(range(world_size))


@pytest.mark.parametrize("size", [0, 1, 16, 17, 31, 33, 1000, 4096])
@pytest.mark.parametrize("local_size", [1, 2, 3, 4])
def test_parts_cover_a_bucket_once_in_whole_lines(size: int, local_size: int) -> None:
    covered: list[int] = []
    for rank in range(local_size):
        part = NodeTopology(Place(rank, 2 * local_size), local_size).part(size)
        covered += range(size)[part]
        assert part.start % 16 == 0 or part.start == size
    assert covered == list(range(size))


def test_peers_are_nodes() -> None:
    topology = NodeTopology(Place(5, 6), 2)
    assert topology.peers == ((0, 1), (2, 3), (4, 5))
    assert topology.place == 2
    straight = FlatTopology(Place(1, 3))
    assert (straight.peers, straight.place) == (((0,), (1,), (2,)), 1)
    assert straight.part(10) == slice(0, 10)
