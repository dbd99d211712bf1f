"""The passes over a sampler's epochs: each plans the cache, and deals this rank's batches one by one.

Legend: N data set · K drawn in an epoch · B batch of one rank · G global batch.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shade.data._sampler.cache_planner import ENDING_BATCHES, CachePlanner
from shade.data._sampler.dealt_batches import DealtBatches
from shade.data._sampler.epoch_draws import EpochDraws
from shade.data._sampler.place import Pass, Place
from shade.data._sampler.rank_shard import RankShard
from shade.data._sampler.shuffle_window import ShuffleWindow
from shade.data._sampler.usage import UsageWarnings
from shade.data._source.host_copy import host_copy
from shade.data._transforms.randomness import BatchGenerators
from shade.errors import ConfigError
from shade.policy.base import EpochPlan
from shade.types import Floats, Order


class EpochPasses:
    """Begins the passes of one sampler.

    Args:
        place: Where training is.
        draws: Of the sampler's epochs.
        shard: This rank's part of every global batch.
        usage: The calls that the loop makes.
        planner: Of the cache, if there is one.
        window: Reads blocks of shards ahead, if there is one.
        generators: Of the data set's random transforms, which follow the epoch, if there are any.
        seed: The same on every rank.
    """

    def __init__(
        self,
        place: Place,
        draws: EpochDraws,
        shard: RankShard,
        usage: UsageWarnings,
        *,
        planner: CachePlanner | None,
        window: ShuffleWindow | None,
        generators: BatchGenerators | None,
        seed: int,
    ) -> None:
        self._place, self._draws, self.shard, self._usage = place, draws, shard, usage
        self._planner, self._window, self._generators, self._seed = planner, window, generators, seed
        # A training loop may set the epoch of the random transforms itself.
        self._follows = False
        self._num_samples = draws.table.num_samples
        self._weight_N: Floats | None = None

    @property
    def num_steps(self) -> int:
        """Returns the steps of the present epoch."""
        return self.shard.num_steps(len(self._draws.of(self._place.epoch).order_K))

    def num_mine(self, first_step: int) -> int:
        """Returns how many samples this rank takes in the present epoch from a step on."""
        return self.shard.num_mine(len(self._draws.of(self._place.epoch).order_K), first_step)

    def weights(self, indices: torch.Tensor) -> torch.Tensor:
        """Returns gradient weights of samples of the pass that began last, as `ShadeSampler.weights`."""
        if self._weight_N is None and not indices.is_cpu:
            return torch.ones(len(indices), dtype=torch.float32, device=indices.device)
        index_B = host_copy(indices).cpu().numpy()
        if len(index_B) and not 0 <= index_B.min() <= index_B.max() < self._num_samples:
            raise ConfigError.of(
                f"indices of the data set's {self._num_samples} samples",
                f"{index_B.min()} … {index_B.max()}",
                "pass the indices that came with the batch",
            )
        if self._weight_N is None:
            return torch.ones(len(index_B), dtype=torch.float32)
        weight_B = torch.from_numpy(self._weight_N[index_B])
        return (weight_B.pin_memory() if indices.is_cuda else weight_B).to(indices.device, non_blocking=True)

    def resume(self) -> None:
        """Takes up a place that was loaded."""
        draw = self._draws.made(self._place.epoch)
        self._weight_N = None if draw is None else self.shard.weights(draw, self._num_samples)
        if self._planner is not None:
            self._planner.doubt()

    def begin(self, is_placed: bool) -> tuple[int, Iterator[int]]:
        """Begins a pass, when its first index is asked for."""
        place = self._place
        if place.first_step and place.is_over(self.num_steps, is_placed=is_placed):
            place.turn_to(place.epoch + 1)
        is_first = not place.has_begun
        if place.has_trained:
            self._end_epoch()
        place.rewind()
        if self._generators is not None and (self._follows or not self._generators.following):
            self._follows = True
            self._generators.follow(self._seed, place.epoch)
        if self._planner is not None:
            self._planner.settle()
        draw = self._draws.of(place.epoch)
        self._weight_N = self.shard.weights(draw, self._num_samples)
        # With both orders known, the residency plan is exact, and every rank computes the same one.
        coming = self._draws.ahead_of(place.epoch)
        self._draws.forget_before(place.epoch)
        order_K = self.shard.epoch_order(draw.order_K)
        if self._planner is not None:
            scores = self._draws.scores()
            self._planner.begin_epoch(
                EpochPlan(
                    place.epoch,
                    order_K,
                    None if coming is None else self.shard.epoch_order(coming.order_K),
                    None if scores is None else scores.score_N,
                    start=min(place.first_step * self.shard.global_batch, len(order_K)),
                )
            )
        if self._window is not None:
            self._window.begin(order_K, place.first_step)
        self._usage.warn_of_length(place.epoch, self.num_steps, self.shard.num_steps(self._num_samples))
        dealt = DealtBatches(self.shard, order_K, len(draw.order_K))
        mine = place.begin(self.num_steps, dealt, is_first=is_first)
        return self.num_mine(0) - self.num_mine(place.first_step), self._pass(mine, order_K, len(draw.order_K))

    def _end_epoch(self) -> None:
        """Warns of calls that the loop has not made in the epochs so far."""
        mode, usage = self._draws.mode, self._usage
        # A loop that never sets an epoch has them counted; a place that was loaded since is where the next pass begins.
        if "set_epoch" not in usage.made and self._place.has_begun:
            self._place.turn_to(self._place.epoch + 1)
        usage.require("set_epoch")
        if mode.uses_scores:
            usage.require("report")
        if self._weight_N is not None and mode.uses_weights and "report" in usage.made:
            usage.require("weights")

    def _pass(self, mine: Pass, order_K: Order, num_drawn: int) -> Iterator[int]:
        """Yields the rest of the epoch, and dispatches each batch just before it is handed out."""
        for step in self._place.steps(mine):
            index_G, part = self.shard.of(order_K, num_drawn, step)
            index_B = index_G[part]
            # The cache is planned for the pass that began last. One that began before and is still used gets the same
            # samples without a plan: by position, through whatever the cache holds.
            if mine is self._place.newest:
                if self._planner is not None:
                    index_B = self._planner.dispatch(index_G, part, num_left=mine.num_steps - 1 - step)
                assert mine.dealt is not None
                mine.dealt.remember(step, index_B)
                if self._window is not None:
                    num_got = mine.num_dealt - ENDING_BATCHES if mine.num_got is None else mine.num_got
                    self._window.reach(step, mine.first_step + num_got)
            yield from index_B.tolist()
        if self._planner is not None and mine is self._place.newest:
            self._planner.end_epoch()
