"""A copy that several threads share: each byte once, whoever takes it, and the check when all have come back."""

from __future__ import annotations

import itertools
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from shade.checkpoint.arrivals import Arrivals
from shade.checkpoint.copying import Copying
from shade.checkpoint.layout import TensorSpec, plan

CHUNK = 2**16


def state() -> dict[str, torch.Tensor]:
    """Long, short, empty and not contiguous."""
    generator = torch.Generator().manual_seed(0)
    tensors = {f"{number:02}": torch.randn(number * 4999, generator=generator) for number in range(12)}
    return tensors | {"across": torch.randn(300, 200, generator=generator).t()}


class Counted(Arrivals):
    """Notes what has come."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes, CHUNK)
        self.came: list[tuple[int, int]] = []

    def add(self, start: int, stop: int, event: torch.cuda.Event | None = None) -> None:
        self.came.append((start, stop))
        super().add(start, stop, event)


@pytest.mark.parametrize("seed", range(5))
def test_threads_that_share_a_copy_take_each_byte_once(seed: int) -> None:
    live = state()
    layout = plan({name: TensorSpec.of(tensor) for name, tensor in live.items()}, 0, 1)
    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    arrivals = Counted(layout.num_bytes)
    copying = Copying(live, layout.entries, buffer, frozenset(live), arrivals)
    total = copying.num_bytes_left

    def share(number: int) -> int:
        draw, moved, mine = random.Random(100 * seed + number), 1, 0
        while moved:
            moved = copying.advance(draw.randrange(64, 2 * CHUNK))
            mine += moved
        return mine

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(share, range(4))) == total
    assert copying.names == []
    copying.finish()
    for name, entry in layout.entries.items():
        content = buffer[entry.start : entry.stop].view(torch.float32).view(live[name].shape)
        assert torch.equal(content, live[name]), name
    told = sorted((start, stop) for start, stop in arrivals.came if start < stop)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(told))
    assert sum(stop - start for start, stop in told) == total
