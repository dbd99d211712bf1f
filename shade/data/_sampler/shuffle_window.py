"""Brings the order of shards into one in which neighbours come near each other, so that each block is read once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from shade.errors import ConfigError
from shade.rank_group import RankGroup, agreed_name
from shade.sampling.base import Draw, Purpose, generator
from shade.sampling.window import windowed
from shade.types import Indices, Order


class ReadAheadBlocks(Protocol):
    """A data set whose samples lie in blocks, which may be read before they are wanted: `shade.Shards`."""

    first_sample_D: Indices
    """(D,) the first sample of each block, ascending, from 0."""

    def plan_window(self, window: int, owner: str, count: Callable[[int, int], None] | None) -> None:
        """Makes room for an order in which the samples of a block are within ``window`` places. The ranks of a job have
        one ``owner``; ``count`` gets the requests and bytes that are read ahead. Raises ConfigError if there is no
        room."""
        ...

    def begin_pass(self, order_K: Order, start: int) -> None:
        """Takes the order of all ranks, and the place in it where a pass begins."""
        ...

    def reach(self, handed_out: int, used: int) -> None:
        """Says up to which place samples are handed out, and up to which they are used by every rank."""
        ...


_APART_STEPS = 2
"""More steps than ranks of a job are apart."""


class ShuffleWindow:
    """Brings an epoch into an order in which neighbours in a shard come near each other, and has their blocks read
    ahead. Collective.

    Args:
        dataset: A `ShadeDataset` of `Shards`, or `Shards`.
        window: Over how many places the samples of a block are spread.
        seed: The sampler's.
        global_batch: G.
        group: The ranks of this job.
        count: Gets the requests and bytes that are read ahead.

    Raises:
        ConfigError: A window below 1, another data set, or no room for the window.
    """

    def __init__(
        self,
        dataset: Any,
        window: int,
        seed: int,
        global_batch: int,
        *,
        group: RankGroup,
        count: Callable[[int, int], None] | None,
    ) -> None:
        if window < 1:
            raise ConfigError.of("shuffle_window ≥ 1, in samples", window, "10_000 is a usual size")
        source = getattr(dataset, "source", dataset)
        found: ReadAheadBlocks | None = source if hasattr(source, "plan_window") else getattr(source, "shards", None)
        if found is None:
            expected = "Shards with a shuffle_window, because their samples lie in blocks"
            raise ConfigError.of(expected, type(dataset).__name__, "leave shuffle_window out")
        self._blocks, self._window, self._seed, self._global_batch = found, window, seed, global_batch
        self._num_samples = len(dataset)
        found.plan_window(min(window, self._num_samples), agreed_name(group), count)

    def ordered(self, draw: Draw) -> Draw:
        """Returns a draw in an order of its own samples; a window of the whole data set leaves it as it is."""
        if self._window >= self._num_samples:
            return draw
        random = generator(self._seed, draw.epoch, Purpose.WINDOW)
        order_K = windowed(draw.order_K, self._blocks.first_sample_D, self._window, random)
        return Draw(draw.epoch, order_K, draw.weight_N, draw.receipt)

    def begin(self, order_K: Order, step: int) -> None:
        """Begins a pass through an order at a step."""
        self._blocks.begin_pass(order_K, min(step * self._global_batch, len(order_K)))

    def reach(self, step: int, num_got: int) -> None:
        """Says that a step is handed out, and how many steps this rank's loop has got."""
        # The loops of other ranks may be that far behind this one's, and must still find their blocks.
        used = (num_got - _APART_STEPS) * self._global_batch
        self._blocks.reach((step + 1) * self._global_batch, used)
