"""Auto: delegates each save to the strategy that costs this training least, on this machine, within a budget.

It forwards calls to the chosen strategy, and may choose another between two saves. `_strategies.pilot` chooses; how
often to save is the schedule's, where ``"2% mtbf 6h"`` means the best interval for a failure every six hours, with at
most 2 % of the time.

Rank 0 chooses for all: its choice travels with the pace of its saves and takes effect two saves later on every rank.
What cannot change once a run's tiers are open (codec, slots, buffers, saves in flight) is as with `overlap`, and
strategies that need it otherwise are no candidates; nor are those that make the training wait for more than the copy,
which never costs less. Cost: a probe of memory at the second save, for which the training waits a tenth of a second,
because beside the training memory seems half as fast; and a few saves by strategies that turn out dearer. The log
shows predictions and measurements whenever the choice changes, and at the end.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import statistics
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Final

import torch
import torch.distributed as dist
from typing_extensions import override

from shade.checkpoint._buffer.tensor_copy import Copying
from shade.checkpoint._pacing.schedule import Pace, budget_of
from shade.checkpoint._strategies.base import STRATEGIES, Strategy, StrategyConfig
from shade.checkpoint._strategies.measure import MemoryRates, costs_of, memory_rates
from shade.checkpoint._strategies.pilot import Pilot, candidates
from shade.checkpoint._strategies.predict import Choice

FIRST: Final = "overlap"
"""Takes saves until something has been measured."""
_PASSES: Final = 20
"""Of the last, whose median length is that of a pass."""

logger = logging.getLogger("shade.checkpoint")


@STRATEGIES.register("auto")
class Auto(Strategy):
    """Delegates each save to the strategy with the lowest predicted cost."""

    config = StrategyConfig(every="5% mtbf 24h", batches=True)

    def __init__(self) -> None:
        self._flown: dict[str, Strategy] = {}
        """Those that have been attached."""
        self._attached: list[tuple[Sequence[torch.nn.Module], Sequence[torch.optim.Optimizer]]] = []
        self._name = FIRST
        self._copying_by: Strategy | None = None
        """Who copies the save begun last."""
        self._pilot: Pilot | None = None
        self._in_a_row = 0
        """Saves that the same strategy has taken since it was attached."""
        self._num_bytes = 0
        self._passes: deque[float] = deque(maxlen=_PASSES)
        self._pass_begun: float | None = None
        self._hooks: list[Any] = []
        self._rates: MemoryRates | None = None
        self._is_of_devices = False

    @override
    def open(self, config: StrategyConfig) -> None:
        budget, mtbf_seconds = budget_of(config.every)
        able = {name: each for name, each in candidates().items() if _can_fly(name, each, config)}
        # What a codec takes is in what the first save takes to land: the prediction need not know of it.
        self._pilot = Pilot(
            {name: dataclasses.replace(each, codec="none") for name, each in able.items()}, FIRST, budget, mtbf_seconds
        )

    @property
    @override
    def streams(self) -> bool:
        return self._strategy(self._name).streams

    @property
    def report(self) -> str:
        """Predicted against measured, a line a candidate; empty before anything is known."""
        return "" if self._pilot is None else self._pilot.report()

    @property
    def choices(self) -> list[Choice]:
        """All candidates as they are judged now, the best first; empty before anything is known."""
        return [] if self._pilot is None else self._pilot.choices()

    @property
    def chosen(self) -> str:
        """Who takes the next save."""
        return self._name

    @override
    def attach(self, modules: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._attached.append((modules, optimizers))
        for strategy in self._flown.values():
            strategy.attach(modules, optimizers)
        self._strategy(self._name)
        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self._pass_ended()))
            self._hooks.append(optimizer.register_step_post_hook(lambda *_: self._pass_begins()))

    def _strategy(self, name: str) -> Strategy:
        """One of the candidates, attached to what is trained."""
        if name not in self._flown:
            made = self._flown[name] = STRATEGIES.get(name)()
            for modules, optimizers in self._attached:
                made.attach(modules, optimizers)
        return self._flown[name]

    def _pass_begins(self) -> None:
        self._pass_begun = time.perf_counter()

    def _pass_ended(self) -> None:
        if self._pass_begun is not None:
            self._passes.append(time.perf_counter() - self._pass_begun)
            self._pass_begun = None

    # ── the choice ──────────────────────────────────────────────────────────────────────────────────────────────────

    @override
    def steer(self, mine: Pace, agreed: Pace) -> Pace:
        leads = self._pilot if _rank() == 0 else None
        if leads is not None and self._in_a_row >= 2:  # the first has no windows yet, or the probe
            leads.saw(self._name, mine)
            self._learn(leads)
        if agreed.strategy and agreed.strategy != self._name:
            self._name, self._in_a_row = agreed.strategy, 0
        if leads is None:
            return mine
        before = leads.chosen
        wished = leads.decide()
        if wished != before:
            logger.info("autopilot: %s instead of %s\n%s", wished, before, leads.report())
        cost = leads.cost_seconds(wished)
        return dataclasses.replace(mine, strategy=wished, cost_seconds=mine.cost_seconds if cost is None else cost)

    def _learn(self, leads: Pilot) -> None:
        """Predicts, once: from the rates, and from what the first saves have come to."""
        pace = leads.seen(FIRST)
        if leads.predicted or self._rates is None or pace.save_seconds <= 0:
            return
        passing = min(statistics.median(self._passes or [pace.step_seconds]), pace.step_seconds)
        costs = costs_of(self._num_bytes, self._rates, passing, pace)
        leads.learn(costs, without=() if self._is_of_devices else _for_devices())
        logger.info("autopilot: measured costs: %s", json.dumps(dataclasses.asdict(costs)))

    def _land_others(self) -> None:
        """Takes the hooks off those that are not flown any more."""
        for name in [name for name, each in self._flown.items() if each is not self._copying_by]:
            self._flown.pop(name).close()

    # ── passed on ───────────────────────────────────────────────────────────────────────────────────────────────────

    @override
    def begin(self, copying: Copying) -> Future[None]:
        self._num_bytes, self._is_of_devices = copying.num_bytes_left, copying.is_of_devices
        is_first = self._copying_by is None  # behind it the copying is compiled; the second probes
        if self._rates is None and not is_first and _rank() == 0:
            self._rates, self._in_a_row = memory_rates(), 0
        self._in_a_row += 1
        self._copying_by = self._strategy(self._name)
        self._land_others()
        return self._copying_by.begin(copying)

    @override
    def wait(self) -> None:
        if self._copying_by is not None:
            self._copying_by.wait()

    @override
    def before_chunk(self, num_bytes: int) -> None:
        strategy = self._copying_by
        if strategy is not None:
            strategy.before_chunk(num_bytes)

    @override
    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        report, self._pilot = self.report, None
        if report:
            logger.info("autopilot, at the end:\n%s", report)
        for strategy in self._flown.values():
            strategy.close()


def _can_fly(name: str, config: StrategyConfig, opened: StrategyConfig) -> bool:
    """Whether a strategy does something of its own, the open tiers meet its config, and nothing but a copy
    waits."""
    strategy = STRATEGIES.get(name)
    parent = strategy.__mro__[1]
    of_its_own = any(callable(each) for each in vars(strategy).values())
    streams_anew = issubclass(parent, Strategy) and config.streams != parent.config.streams
    is_free = config.save_waits_for in ("begun", "copied") and config.step_waits_for in ("begun", "copied")
    fits = config.in_flight <= opened.in_flight and config.buffers <= opened.buffers and config.slots <= opened.slots
    is_plain = config.codec in ("none", opened.codec) and config.replicas <= opened.replicas
    return (of_its_own or streams_anew) and is_free and fits and is_plain


def _for_devices() -> list[str]:
    return [name for name in STRATEGIES if STRATEGIES.get(name).is_for_devices]


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
