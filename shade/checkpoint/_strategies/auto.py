"""Delegates each save to the strategy whose saves cost this training least on this machine.

`auto` tries each strategy that fits the open tiers for `TRIALS` saves, then keeps the one whose saves cost least. A
save costs the time that the training waits, and what the saving threads' CPU time takes from the training; all saves
together show how much a second of it takes (`_drag`).

All ranks use the same strategy: rank 0 chooses, and its choice travels with the pace of its saves, so it takes effect
two saves later. Candidates restore bit for bit and wait only for the copy. Decision 0038.
"""

from __future__ import annotations

import itertools
import logging
import statistics
from collections import Counter, deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Final

import torch
import torch.distributed as dist
from typing_extensions import override

from shade.checkpoint._buffer.tensor_copy import Copying
from shade.checkpoint._pacing.schedule import Pace
from shade.checkpoint._strategies.base import STRATEGIES, Strategy, StrategyConfig

AUTO: Final = "auto"
"""This strategy's name; it is no candidate."""
FIRST: Final = "overlap"
"""The strategy of the first saves."""
TRIALS: Final = 3
"""Saves of a candidate before the choice: a single one varies with the machine's other work."""
DEAR: Final = 2.0
"""A candidate whose first measured saves cost more than so many times the best's is not tried further."""
_KEPT: Final = 10
"""Latest measurements of each candidate that count."""

logger = logging.getLogger("shade.checkpoint")


def candidates() -> dict[str, StrategyConfig]:
    """Returns the configs, by name, of the exact strategies that are no ablations; a class with aliases comes once."""
    found: dict[type[object], tuple[str, StrategyConfig]] = {}
    for name in STRATEGIES:
        strategy = STRATEGIES.get(name)
        if name != AUTO and strategy.config.is_exact and not strategy.is_ablation:
            found.setdefault(strategy, (name, strategy.config))
    return dict(found.values())


class StrategySelector:
    """Rank 0's choice among strategies, as arithmetic on measured paces.

    Args:
        candidates: Names of the candidates.
        first: The candidate that takes the first saves.
    """

    def __init__(self, candidates: Collection[str], first: str = FIRST) -> None:
        self.candidates = list(candidates)
        self.chosen = first
        """The strategy of the next save."""
        self._measured: dict[str, deque[Pace]] = {}
        """The latest measurements of each tried candidate."""
        self._num_chosen: Counter[str] = Counter()
        """Saves that each candidate was chosen for."""

    def record(self, strategy: str, pace: Pace) -> None:
        """Adds the measurement of a finished save by this strategy."""
        if pace.step_seconds > 0 and pace.save_seconds > 0:
            self._measured.setdefault(strategy, deque(maxlen=_KEPT)).append(pace)

    def decide(self) -> str:
        """Chooses the strategy of the next save, also as `chosen`; finishes a begun trial first."""
        costs = self._costs()
        if costs:
            best = min(costs, key=costs.__getitem__)
            untried = [
                name
                for name in self.candidates
                if max(len(self._measured.get(name, ())), self._num_chosen[name] - 1) < TRIALS
                and costs.get(name, 0.0) <= DEAR * costs[best]
            ]
            if self.chosen not in untried:
                self.chosen = (untried or [best])[0]
        self._num_chosen[self.chosen] += 1
        return self.chosen

    def cost_seconds(self, strategy: str) -> float | None:
        """Returns the cost of a save by a strategy; None before one was measured."""
        return self._costs().get(strategy)

    def _costs(self) -> dict[str, float]:
        """Returns the cost of a save by each tried candidate."""
        found = {}
        for name, paces in self._measured.items():
            waits, works = _middle(paces)
            if works > 0:
                found[name] = waits + self._drag() * works
            else:  # no thread worked, or the system has no thread clocks
                found[name] = max(waits, statistics.mean(pace.cost_seconds for pace in paces))
        return found

    def _drag(self) -> float:
        """Returns the training's loss for a second of CPU time: least squares over all saves, and over `TRIALS` more
        that lost a second for each."""
        paces = list(itertools.chain.from_iterable(self._measured.values()))
        squares = [pace.worked_seconds**2 for pace in paces]
        prior = TRIALS * statistics.mean(squares)
        lost = sum(pace.worked_seconds * (pace.cost_seconds - pace.blocked_seconds) for pace in paces)
        return max(0.0, (lost + prior) / (sum(squares) + prior))

    def report(self) -> str:
        """Returns the measurements, a line for each tried candidate, the cheapest first."""
        lines = []
        for name, cost in sorted(self._costs().items(), key=lambda each: each[1]):
            paces = self._measured[name]
            waits, works = _middle(paces)
            line = (
                f"{'>' if name == self.chosen else ' '} {name:<14} measured {len(paces)} times: waits {waits:.3f} s, "
            )
            lines.append(line + f"works {works:.3f} s, costs {cost:.3f} s")
        return "\n".join(lines)


def _middle(paces: Collection[Pace]) -> tuple[float, float]:
    """Returns the medians of the training's wait and of the saving threads' CPU time."""
    waits, works = zip(*((pace.blocked_seconds, pace.worked_seconds) for pace in paces), strict=True)
    return statistics.median(waits), statistics.median(works)


@STRATEGIES.register(AUTO)
class Auto(Strategy):
    """Delegates each save to the strategy whose saves cost least."""

    config = StrategyConfig(every="5% mtbf 24h", batches=True)

    def __init__(self) -> None:
        self._active: dict[str, Strategy] = {}
        """Strategies with hooks."""
        self._attached: list[tuple[Sequence[torch.nn.Module], Sequence[torch.optim.Optimizer]]] = []
        self._name = FIRST
        self._copying_by: Strategy | None = None
        """The strategy that copies the save begun last."""
        self._selector: StrategySelector | None = None
        self._in_a_row = 0
        """Saves that the current strategy has taken since it was attached."""

    @override
    def open(self, config: StrategyConfig) -> None:
        self._selector = StrategySelector([name for name, each in candidates().items() if _fits(name, each, config)])

    @property
    @override
    def streams(self) -> bool:
        return self._strategy(self._name).streams

    @property
    def report(self) -> str:
        """Measurements, a line for each tried candidate."""
        return "" if self._selector is None else self._selector.report()

    @property
    def chosen(self) -> str:
        """The strategy of the next save."""
        return self._name

    @override
    def attach(self, modules: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._attached.append((modules, optimizers))
        for strategy in self._active.values():
            strategy.attach(modules, optimizers)
        self._strategy(self._name)

    def _strategy(self, name: str) -> Strategy:
        """Returns a candidate that is attached to the modules and optimizers."""
        if name not in self._active:
            made = self._active[name] = STRATEGIES.get(name)()
            for modules, optimizers in self._attached:
                made.attach(modules, optimizers)
        return self._active[name]

    @override
    def steer(self, mine: Pace, agreed: Pace) -> Pace:
        selector = self._selector if _rank() == 0 else None
        if selector is not None and self._in_a_row >= 2:  # behind the first save it compiles, or has no windows yet
            selector.record(self._name, mine)
        if agreed.strategy and agreed.strategy != self._name:
            self._name, self._in_a_row = agreed.strategy, 0
        if selector is None:
            return mine
        before, chosen = selector.chosen, selector.decide()
        if chosen != before:
            logger.info("autopilot: %s instead of %s\n%s", chosen, before, selector.report())
        cost = selector.cost_seconds(chosen)
        return replace(mine, strategy=chosen, cost_seconds=mine.cost_seconds if cost is None else cost)

    @override
    def begin(self, copying: Copying) -> Future[None]:
        if self._copying_by is None and self._selector is not None and not copying.is_of_devices:
            able = [name for name in self._selector.candidates if not STRATEGIES.get(name).is_for_devices]
            self._selector.candidates = able
        self._in_a_row += 1
        self._copying_by = self._strategy(self._name)
        for name in [name for name, each in self._active.items() if each is not self._copying_by]:
            self._active.pop(name).close()
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
        report, self._selector = self.report, None
        if report:
            logger.info("autopilot, at the end:\n%s", report)
        for strategy in self._active.values():
            strategy.close()


def _fits(name: str, config: StrategyConfig, opened: StrategyConfig) -> bool:
    """Whether a strategy has code or streaming of its own, fits the open tiers, and waits for a copy only."""
    strategy = STRATEGIES.get(name)
    parent = strategy.__mro__[1]
    has_code = any(callable(each) for each in vars(strategy).values())
    changes_streaming = issubclass(parent, Strategy) and config.streams != parent.config.streams
    is_free = config.save_waits_for in ("begun", "copied") and config.step_waits_for in ("begun", "copied")
    fits = config.in_flight <= opened.in_flight and config.buffers <= opened.buffers and config.slots <= opened.slots
    is_plain = config.codec in ("none", opened.codec) and config.replicas <= opened.replicas
    return (has_code or changes_streaming) and is_free and fits and is_plain


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
