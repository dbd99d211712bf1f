"""Decides for each save which strategy performs it: predicts all, tries the promising ones, keeps the best.

Course of a run. The first save is an ordinary one; behind it the machine's rates are measured, and every candidate is
predicted. The next saves go to the candidate that promises to keep most of the training time, and their cost is
measured in the training. A measurement replaces the prediction; a candidate without one is predicted anew, corrected
by the factor by which the tried ones were off. So the first saves expose a candidate that only looked good, every
candidate that could still be the best gets a turn, and after `TRIALS` saves of each candidate near the best the choice
stands. Every later save reviews it, so it follows a training or a machine that changes.

A save's cost is measured in two ways. The steps behind it are longer: that is the true cost, but steps vary by as much
without a save. And its wait and its threads' processor time are known exactly; what a second of their work costs the
training is the same for all strategies, so all saves together determine it. The two are weighted by their errors: at
first the parts decide, in the long run the steps.

A choice takes effect two saves later. So a requested candidate counts as tried before it is measured; otherwise each
trial would last twice as long.

Candidates are the registered strategies that restore bit for bit; a lossy one must be requested by name. Arithmetic
only; rank 0's choice reaches the other ranks with the pace of its saves. Cost: a few saves by strategies that turn out
dearer; they count against the budget, because the interval follows from the cost of the last save.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Final

from shade.checkpoint._pacing.schedule import Pace
from shade.checkpoint._strategies.base import STRATEGIES, StrategyConfig
from shade.checkpoint._strategies.measure import Costs
from shade.checkpoint._strategies.predict import Choice, Prediction, judge, predict, ranked

AUTO: Final = "auto"
"""The strategy that asks; no candidate of its own."""
TRIALS: Final = 3
"""Saves of a candidate before its cost is believed: a single one is off by whatever else the machine did."""
DRAG: Final = 1.0
"""What a second of work costs before anything is known: a core that computes does nothing else meanwhile."""
DRAG_ERROR: Final = 0.5
"""What that may be off by, where cores are left over or wait for each other: one standard deviation."""
PARTS_ERROR: Final = 0.1
"""What a cost that is put together from its parts may be off by, as a share of it: one standard deviation."""
NEAR: Final = 1.25
"""Candidates that cost up to so many times the best are tried as often as it: their order could be chance."""
UNTRIED: Final = 2.0
"""The same of candidates that no save has been measured of: predictions are off by so much."""
_KEPT: Final = 10
"""Measurements of each that count: the last."""


class Pilot:
    """Chooses among strategies.

    Args:
        candidates: Configs of the candidates, by name.
        first: Of them, the one that takes saves until something is known.
        budget: Share of the training that saving may add.
        mtbf_seconds: Mean time between failures.
    """

    def __init__(
        self, candidates: Mapping[str, StrategyConfig], first: str, budget: float, mtbf_seconds: float
    ) -> None:
        self._candidates, self._budget, self._mtbf_seconds = dict(candidates), budget, mtbf_seconds
        self.chosen = first
        """Of the next save."""
        self.predicted: dict[str, Prediction] = {}
        """From rates alone; empty until they are measured."""
        self._measured: dict[str, deque[Pace]] = {}
        """What the last saves of each that was tried have come to."""
        self._wishes: Counter[str] = Counter()
        """Saves that each was chosen for."""
        self._step_seconds = 0.0

    def learn(self, costs: Costs, without: Collection[str] = ()) -> None:
        """Takes what was measured of the machine.

        Args:
            costs: Candidates whose codec is not in it are dropped.
            without: Candidates that are dropped, too.
        """
        known = {"none", *costs.codecs}
        able = {name: each for name, each in self._candidates.items() if each.codec in known and name not in without}
        self.predicted = {name: predict(costs, config) for name, config in able.items()}
        self._step_seconds = self._step_seconds or costs.step_seconds

    def saw(self, strategy: str, pace: Pace) -> None:
        """A save has landed.

        Args:
            strategy: That copied it.
            pace: As measured since it began.
        """
        if pace.step_seconds > 0 and pace.save_seconds > 0:
            self._step_seconds = pace.step_seconds
            self._measured.setdefault(strategy, deque(maxlen=_KEPT)).append(pace)

    def seen(self, strategy: str) -> Pace:
        """What the saves of a strategy have come to, several together; all 0 before there were `TRIALS` of them."""
        return _mean(self._measured[strategy]) if self._num_measured(strategy) >= TRIALS else Pace()

    def decide(self) -> str:
        """Which strategy the next save is left to; remembered as `chosen`. Who is being tried is tried to the end."""
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
        self._wishes[self.chosen] += 1
        return self.chosen

    def choices(self) -> list[Choice]:
        """All candidates as they are judged now, the best first; empty before anything was predicted."""
        if not self.predicted or self._step_seconds <= 0:
            return []
        estimates = {name: self._estimate(name) for name in self.predicted}
        return ranked(estimates, self._step_seconds, budget=self._budget, mtbf_seconds=self._mtbf_seconds)

    def cost_seconds(self, strategy: str) -> float | None:
        """What a save by a strategy is expected to cost, several measured together; None before anything is known."""
        return self._estimate(strategy).cost_seconds if strategy in self.predicted else None

    def _num_measured(self, strategy: str) -> int:
        return len(self._measured.get(strategy, ()))

    def _num_trials(self, strategy: str) -> int:
        """Measured, or still to come; the first of those in a row is not measured."""
        return max(self._num_measured(strategy), self._wishes[strategy] - 1)

    def _estimate(self, name: str) -> Prediction:
        """Measured, where it was tried; else predicted, by as much as others were off."""
        prediction, measured = self.predicted[name], self._measured.get(name)
        if measured is None:
            return self._corrected(prediction)
        mean = _mean(measured)
        stall, landing = mean.blocked_seconds, mean.save_seconds
        found = replace(prediction, stall_seconds=stall, drag_seconds=self._weighed(measured) - stall)
        if prediction.committed_seconds is not None:
            return replace(found, committed_seconds=landing)
        if prediction.durable_seconds is not None:
            return replace(found, durable_seconds=landing)
        return replace(found, kept_seconds=landing)

    def _weighed(self, measured: Collection[Pace]) -> float:
        """Returns the cost of one strategy's save, weighted from its measured parts and the steps behind them."""
        mean = _mean(measured)
        if mean.worked_seconds <= 0:  # no thread worked, or the system has no such clock
            return mean.cost_seconds
        parts = mean.blocked_seconds + self._drag() * mean.worked_seconds
        parts_error, steps_error = (PARTS_ERROR * parts) ** 2, self._noise() / len(measured)
        weight = parts_error / (parts_error + steps_error) if steps_error > 0 else 1.0
        return max(mean.blocked_seconds, parts + weight * (mean.cost_seconds - parts))

    def _drag(self) -> float:
        """Returns the seconds that training loses per second of work behind it (least squares, with a prior)."""
        noise = self._noise()
        prior = noise / DRAG_ERROR**2
        lost, worked = prior * DRAG, prior
        for pace in itertools.chain.from_iterable(self._measured.values()):
            lost += pace.worked_seconds * (pace.cost_seconds - pace.blocked_seconds)
            worked += pace.worked_seconds**2
        return max(0.0, lost / worked)

    def _noise(self) -> float:
        """Returns the variance of a single save's measured cost about its strategy's mean; 0 while unknown."""
        several = [[pace.cost_seconds for pace in each] for each in self._measured.values() if len(each) > 1]
        degrees = sum(len(each) - 1 for each in several)
        return sum(statistics.variance(each) * (len(each) - 1) for each in several) / degrees if degrees else 0.0

    def _corrected(self, prediction: Prediction) -> Prediction:
        """Returns a prediction, corrected by the median factor by which the tried candidates were off.

        If all candidates are predicted to be free, there is no factor; then the median measured cost is its minimum.
        (This happens when the save from which rates are learned cost nothing: an untried candidate would seem free for
        ever.)
        """
        costs = {name: self._weighed(measured) for name, measured in self._measured.items() if name in self.predicted}
        before = {name: self.predicted[name].cost_seconds for name in costs}
        ratios = [cost / before[name] for name, cost in costs.items() if before[name] > 0]
        if ratios and prediction.cost_seconds > 0:
            factor = statistics.median(ratios)
            stall, drag = factor * prediction.stall_seconds, factor * prediction.drag_seconds
            return replace(prediction, stall_seconds=stall, drag_seconds=drag)
        least = statistics.median(costs.values()) if costs else 0.0
        return replace(prediction, drag_seconds=max(prediction.drag_seconds, least - prediction.stall_seconds))

    def report(self) -> str:
        """Returns predicted and measured costs, one line per candidate, the best first."""
        lines = []
        for choice in self.choices():
            name, before = choice.strategy, self.predicted[choice.strategy]
            planned = judge(name, before, choice.every_steps, self._step_seconds, self._mtbf_seconds)
            line = f"{'>' if name == self.chosen else ' '} {name:<14} every {choice.every_steps} steps; predicted: "
            line += f"stall {before.stall_seconds:.3f} s, cost {before.cost_seconds:.3f} s, "
            line += f"safe in {before.landed_seconds:.2f} s, overhead {100 * planned.overhead:.2f} %"
            if self._num_measured(name):
                mean, now = _mean(self._measured[name]), choice.prediction
                line += f"; measured {self._num_measured(name)} times: stall {now.stall_seconds:.3f} s, "
                line += f"cost {mean.cost_seconds:.3f} s, safe in {now.landed_seconds:.2f} s, "
                line += f"work {mean.worked_seconds:.3f} s; held to cost {now.cost_seconds:.3f} s, "
                line += f"overhead {100 * choice.overhead:.2f} %"
            lines.append(line)
        return "\n".join(lines)


def _mean(paces: Collection[Pace]) -> Pace:
    """Of some saves of one strategy, of its parts the middle one; none costs less than what was waited for."""
    blocked = statistics.median(pace.blocked_seconds for pace in paces)
    return Pace(
        step_seconds=statistics.mean(pace.step_seconds for pace in paces),
        cost_seconds=max(blocked, statistics.mean(pace.cost_seconds for pace in paces)),
        save_seconds=statistics.mean(pace.save_seconds for pace in paces),
        blocked_seconds=blocked,
        worked_seconds=statistics.median(pace.worked_seconds for pace in paces),
    )


def candidates() -> dict[str, StrategyConfig]:
    """The registered strategies that restore bit for bit, no ablations, by name; where two name a class the first."""
    found: dict[type[object], tuple[str, StrategyConfig]] = {}
    for name in STRATEGIES:
        strategy = STRATEGIES.get(name)
        if name != AUTO and strategy.config.is_exact and not strategy.is_ablation:
            found.setdefault(strategy, (name, strategy.config))
    return dict(found.values())
