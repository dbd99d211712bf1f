"""Delegates each save to the strategy that costs this training least on this machine, within a budget.

`Auto` passes calls to the chosen strategy, and may choose another between two saves; `StrategySelector` decides. The
interval is the schedule's: ``"2% mtbf 6h"`` means the best interval for a failure every six hours, at 2 % of the time
at most.

The first saves go to `overlap`. Then the machine's rates are measured, and every candidate is predicted. The next saves
go to the candidates with the best predictions, and their measured costs replace the predictions. Untried candidates are
predicted anew, by the factor that the tried ones were off by. After `TRIALS` saves of each candidate near the best, the
choice stands; each later save checks it again, so the choice follows changes of the training and the machine.

A save's cost is measured in two ways. The steps after it are longer: this is the true cost, but steps vary as much
without a save. The training's wait and the threads' CPU time are exact, and a second of CPU time drags alike in all
strategies, so all saves together give the drag. The two are weighted by their variances: first the parts dominate, with
many saves the steps.

All ranks use the same strategy: rank 0 chooses, and its choice travels with the pace of its saves, so it takes effect
two saves later. A requested trial therefore counts before it is measured; else each trial would last as long again as
the answers take. Candidates restore bit for bit, fit the open tiers (codec, slots, buffers, saves in flight) and wait
for no more than the copy, since any further wait costs more. Price: a memory probe with the second save, for which the
training waits a tenth of a second, since beside it memory would seem half as fast; and a few saves by more expensive
strategies, which count against the budget. The log shows predictions and measurements at each change of the choice and
at the end.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import statistics
import time
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Final

import torch
import torch.distributed as dist
from typing_extensions import override

from shade.checkpoint._buffer.tensor_copy import Copying
from shade.checkpoint._pacing.schedule import Pace, budget_of
from shade.checkpoint._strategies.base import STRATEGIES, Strategy, StrategyConfig
from shade.checkpoint._strategies.measure import Costs, MemoryRates, costs_of, memory_rates
from shade.checkpoint._strategies.predict import Choice, Prediction, judge, predict, ranked

AUTO: Final = "auto"
"""This strategy's name; it is no candidate."""
FIRST: Final = "overlap"
"""The strategy of the saves before the first measurement."""
TRIALS: Final = 3
"""Saves of a candidate before its measured cost counts: a single one varies with the machine's other work."""
DRAG: Final = 1.0
"""Prior for the cost of a second of CPU time: a core that saves does nothing else."""
DRAG_ERROR: Final = 0.5
"""Standard deviation of that prior, where cores are idle or wait for each other."""
PARTS_ERROR: Final = 0.1
"""Relative standard deviation of a cost that is put together from its parts."""
NEAR: Final = 1.25
"""Measured candidates that cost up to so many times the best are tried as often: chance could reverse the order."""
UNTRIED: Final = 2.0
"""The same factor for candidates without a measured save, since predictions are off by as much."""
_KEPT: Final = 10
"""Latest measurements of each candidate that count."""
_PASSES: Final = 20
"""Latest passes whose median is the length of a pass."""

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
    """Rank 0's choice among strategies, as arithmetic on predictions and measured paces.

    Args:
        candidates: Configs of the candidates, by name.
        first: The candidate that takes saves before the first prediction.
        budget: Share of the training that saves may add.
        mtbf_seconds: Mean time between failures.
    """

    def __init__(
        self, candidates: Mapping[str, StrategyConfig], first: str, budget: float, mtbf_seconds: float
    ) -> None:
        self._candidates, self._budget, self._mtbf_seconds = dict(candidates), budget, mtbf_seconds
        self.chosen = first
        """The strategy of the next save."""
        self.predicted: dict[str, Prediction] = {}
        """Predictions from rates alone; empty until these are measured."""
        self._measured: dict[str, deque[Pace]] = {}
        """The latest measurements of each tried candidate."""
        self._num_chosen: Counter[str] = Counter()
        """Saves that each candidate was chosen for."""
        self._step_seconds = 0.0

    def learn(self, costs: Costs, without: Collection[str] = ()) -> None:
        """Predicts all candidates, except `without` and those whose codec is not in the costs."""
        known = {"none", *costs.codecs}
        able = {name: each for name, each in self._candidates.items() if each.codec in known and name not in without}
        self.predicted = {name: predict(costs, config) for name, config in able.items()}
        self._step_seconds = self._step_seconds or costs.step_seconds

    def record(self, strategy: str, pace: Pace) -> None:
        """Adds the measurement of a finished save by this strategy."""
        if pace.step_seconds > 0 and pace.save_seconds > 0:
            self._step_seconds = pace.step_seconds
            self._measured.setdefault(strategy, deque(maxlen=_KEPT)).append(pace)

    def mean_pace(self, strategy: str) -> Pace:
        """Returns the mean of a strategy's saves; all 0 before it has `TRIALS` of them."""
        return _mean(self._measured[strategy]) if self._num_measured(strategy) >= TRIALS else Pace()

    def decide(self) -> str:
        """Chooses the strategy of the next save, also as `chosen`; finishes a begun trial first."""
        choices = self.choices()
        if choices:
            best = choices[0]
            least = best.prediction.cost_seconds
            untried = [
                each.strategy
                for each in choices
                if self._num_trials(each.strategy) < TRIALS
                and each.prediction.cost_seconds <= least * (NEAR if self._num_measured(each.strategy) else UNTRIED)
            ]
            if self.chosen not in untried:
                self.chosen = (untried or [best.strategy])[0]
        self._num_chosen[self.chosen] += 1
        return self.chosen

    def choices(self) -> list[Choice]:
        """Returns all candidates as estimated now, the best first; none before the first prediction."""
        if not self.predicted or self._step_seconds <= 0:
            return []
        estimates = {name: self._estimate(name) for name in self.predicted}
        return ranked(estimates, self._step_seconds, budget=self._budget, mtbf_seconds=self._mtbf_seconds)

    def cost_seconds(self, strategy: str) -> float | None:
        """Returns the estimated cost of a save by a strategy; None before the first prediction."""
        return self._estimate(strategy).cost_seconds if strategy in self.predicted else None

    def _num_measured(self, strategy: str) -> int:
        return len(self._measured.get(strategy, ()))

    def _num_trials(self, strategy: str) -> int:
        """Returns the saves measured or still to come; the first of those in a row is not measured."""
        return max(self._num_measured(strategy), self._num_chosen[strategy] - 1)

    def _estimate(self, name: str) -> Prediction:
        """Returns the measurement of a tried candidate, else its corrected prediction."""
        prediction, measured = self.predicted[name], self._measured.get(name)
        if measured is None:
            return self._corrected(prediction)
        mean = _mean(measured)
        stall, safe = mean.blocked_seconds, mean.save_seconds
        found = replace(prediction, stall_seconds=stall, drag_seconds=self._weighted_cost(measured) - stall)
        if prediction.committed_seconds is not None:
            return replace(found, committed_seconds=safe)
        if prediction.durable_seconds is not None:
            return replace(found, durable_seconds=safe)
        return replace(found, kept_seconds=safe)

    def _weighted_cost(self, measured: Collection[Pace]) -> float:
        """Returns the cost of one strategy's save, weighted between its parts and the steps after it."""
        mean = _mean(measured)
        if mean.worked_seconds <= 0:  # no thread worked, or the system has no thread clocks
            return mean.cost_seconds
        parts = mean.blocked_seconds + self._drag() * mean.worked_seconds
        parts_error, steps_error = (PARTS_ERROR * parts) ** 2, self._variance() / len(measured)
        weight = parts_error / (parts_error + steps_error) if steps_error > 0 else 1.0
        return max(mean.blocked_seconds, parts + weight * (mean.cost_seconds - parts))

    def _drag(self) -> float:
        """Returns the training's loss for a second of background CPU time: least squares over all saves, with `DRAG`
        as prior."""
        prior = self._variance() / DRAG_ERROR**2
        lost, worked = prior * DRAG, prior
        for pace in itertools.chain.from_iterable(self._measured.values()):
            lost += pace.worked_seconds * (pace.cost_seconds - pace.blocked_seconds)
            worked += pace.worked_seconds**2
        return max(0.0, lost / worked)

    def _variance(self) -> float:
        """Returns the variance of a single save's measured cost about its strategy's mean; 0 while unknown."""
        several = [[pace.cost_seconds for pace in each] for each in self._measured.values() if len(each) > 1]
        degrees = sum(len(each) - 1 for each in several)
        return sum(statistics.variance(each) * (len(each) - 1) for each in several) / degrees if degrees else 0.0

    def _corrected(self, prediction: Prediction) -> Prediction:
        """Scales a prediction by the median factor that the tried candidates were off by.

        Without such a factor, because all predictions of tried candidates are 0, the cost is at least their median
        measured cost. Else an untried candidate that is predicted to be free would seem free for ever, since no factor
        raises 0.
        """
        costs = {name: self._weighted_cost(each) for name, each in self._measured.items() if name in self.predicted}
        before = {name: self.predicted[name].cost_seconds for name in costs}
        ratios = [cost / before[name] for name, cost in costs.items() if before[name] > 0]
        if ratios and prediction.cost_seconds > 0:
            factor = statistics.median(ratios)
            stall, drag = factor * prediction.stall_seconds, factor * prediction.drag_seconds
            return replace(prediction, stall_seconds=stall, drag_seconds=drag)
        least = statistics.median(costs.values()) if costs else 0.0
        return replace(prediction, drag_seconds=max(prediction.drag_seconds, least - prediction.stall_seconds))

    def report(self) -> str:
        """Returns prediction and measurement, a line for each candidate, the best first."""
        lines = []
        for choice in self.choices():
            name, before = choice.strategy, self.predicted[choice.strategy]
            planned = judge(name, before, choice.every_steps, self._step_seconds, self._mtbf_seconds)
            line = f"{'>' if name == self.chosen else ' '} {name:<14} every {choice.every_steps} steps; predicted: "
            line += f"stall {before.stall_seconds:.3f} s, cost {before.cost_seconds:.3f} s, "
            line += f"safe in {before.safe_seconds:.2f} s, overhead {100 * planned.overhead:.2f} %"
            if self._num_measured(name):
                mean, now = _mean(self._measured[name]), choice.prediction
                line += f"; measured {self._num_measured(name)} times: stall {now.stall_seconds:.3f} s, "
                line += f"cost {mean.cost_seconds:.3f} s, safe in {now.safe_seconds:.2f} s, "
                line += f"work {mean.worked_seconds:.3f} s; held to cost {now.cost_seconds:.3f} s, "
                line += f"overhead {100 * choice.overhead:.2f} %"
            lines.append(line)
        return "\n".join(lines)


def _mean(paces: Collection[Pace]) -> Pace:
    """Returns the means of one strategy's saves, but the medians of wait and work; the cost is at least the wait."""
    blocked = statistics.median(pace.blocked_seconds for pace in paces)
    return Pace(
        step_seconds=statistics.mean(pace.step_seconds for pace in paces),
        cost_seconds=max(blocked, statistics.mean(pace.cost_seconds for pace in paces)),
        save_seconds=statistics.mean(pace.save_seconds for pace in paces),
        blocked_seconds=blocked,
        worked_seconds=statistics.median(pace.worked_seconds for pace in paces),
    )


@STRATEGIES.register(AUTO)
class Auto(Strategy):
    """Delegates each save to the strategy with the lowest predicted cost."""

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
        self._num_bytes = 0
        self._passes: deque[float] = deque(maxlen=_PASSES)
        self._pass_begun: float | None = None
        self._hooks: list[Any] = []
        self._rates: MemoryRates | None = None
        self._is_of_devices = False

    @override
    def open(self, config: StrategyConfig) -> None:
        budget, mtbf_seconds = budget_of(config.every)
        able = {name: each for name, each in candidates().items() if _is_candidate(name, each, config)}
        # The first saves' duration contains the codec's, so the predictions leave the codec out.
        able = {name: replace(each, codec="none") for name, each in able.items()}
        self._selector = StrategySelector(able, FIRST, budget, mtbf_seconds)

    @property
    @override
    def streams(self) -> bool:
        return self._strategy(self._name).streams

    @property
    def report(self) -> str:
        """Predictions and measurements, a line a candidate; empty before the first prediction."""
        return "" if self._selector is None else self._selector.report()

    @property
    def choices(self) -> list[Choice]:
        """All candidates as estimated now, the best first; none before the first prediction."""
        return [] if self._selector is None else self._selector.choices()

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
        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self._end_pass()))
            self._hooks.append(optimizer.register_step_post_hook(lambda *_: self._begin_pass()))

    def _strategy(self, name: str) -> Strategy:
        """Returns a candidate that is attached to the modules and optimizers."""
        if name not in self._active:
            made = self._active[name] = STRATEGIES.get(name)()
            for modules, optimizers in self._attached:
                made.attach(modules, optimizers)
        return self._active[name]

    def _begin_pass(self) -> None:
        self._pass_begun = time.perf_counter()

    def _end_pass(self) -> None:
        if self._pass_begun is not None:
            self._passes.append(time.perf_counter() - self._pass_begun)
            self._pass_begun = None

    @override
    def steer(self, mine: Pace, agreed: Pace) -> Pace:
        selector = self._selector if _rank() == 0 else None
        if selector is not None and self._in_a_row >= 2:  # the first save has no windows yet, or the probe
            selector.record(self._name, mine)
            self._learn(selector)
        if agreed.strategy and agreed.strategy != self._name:
            self._name, self._in_a_row = agreed.strategy, 0
        if selector is None:
            return mine
        before = selector.chosen
        chosen = selector.decide()
        if chosen != before:
            logger.info("autopilot: %s instead of %s\n%s", chosen, before, selector.report())
        cost = selector.cost_seconds(chosen)
        return replace(mine, strategy=chosen, cost_seconds=mine.cost_seconds if cost is None else cost)

    def _learn(self, selector: StrategySelector) -> None:
        """Predicts once, from the memory's rates and the first saves."""
        pace = selector.mean_pace(FIRST)
        if selector.predicted or self._rates is None or pace.save_seconds <= 0:
            return
        passing = min(statistics.median(self._passes or [pace.step_seconds]), pace.step_seconds)
        costs = costs_of(self._num_bytes, self._rates, passing, pace)
        for_devices = [name for name in STRATEGIES if STRATEGIES.get(name).is_for_devices]
        selector.learn(costs, without=() if self._is_of_devices else for_devices)
        logger.info("autopilot: measured costs: %s", json.dumps(dataclasses.asdict(costs)))

    @override
    def begin(self, copying: Copying) -> Future[None]:
        self._num_bytes, self._is_of_devices = copying.num_bytes_left, copying.is_of_devices
        is_first = self._copying_by is None  # the copy is compiled behind the first save; the second probes
        if self._rates is None and not is_first and _rank() == 0:
            self._rates, self._in_a_row = memory_rates(), 0
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
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        report, self._selector = self.report, None
        if report:
            logger.info("autopilot, at the end:\n%s", report)
        for strategy in self._active.values():
            strategy.close()


def _is_candidate(name: str, config: StrategyConfig, opened: StrategyConfig) -> bool:
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
