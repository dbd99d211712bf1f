"""The ways to choose an epoch's samples that `bench_importance` compares. Each gives an order and weights for an epoch,
and takes every batch's losses.

All of them use the product's own modes (`shade.sampling`) and score table
(`shade.importance`); only InfoBatch is written here, as published. An epoch is drawn one epoch ahead, from the scores
of that moment, as the product draws it.

References:
    Qin et al., "InfoBatch", ICLR 2024. Schaul et al., "Prioritized Experience Replay", ICLR 2016 (weights to a power
    that is annealed to 1). Katharopoulos & Fleuret, ICML 2018 (gradient norm). Khan et al., "SHADE", FAST 2023 (pads).

Legend: N samples · K drawn in one epoch · B batch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from typing_extensions import override

from shade.importance import ImportanceTable
from shade.sampling import MODES
from shade.sampling.base import Draw, SamplingMode, Scores, Validation, generator
from shade.types import Bools, Floats, Indices

RESIDENT = 0.2
"""Share of the samples that the cache of `pads` holds: those with the highest scores."""
_FULL_TAIL, _PRUNED = 0.875, 0.5
"""InfoBatch's figures: the share of the run that is pruned, and the share of the samples below the mean that is."""


class Setting(NamedTuple):
    """The run that a way chooses for."""

    num_samples: int
    batch: int
    seed: int
    epochs: int
    keep: float


class Way(ABC):
    """One way to choose."""

    @abstractmethod
    def epoch(self, epoch: int) -> tuple[Indices, Floats | None]:
        """Returns the order of an epoch, (K,), and the weight of each sample, (N,), or None for 1."""

    @abstractmethod
    def report(self, rows_B: Indices, loss_B: Floats, norm_B: Floats) -> None:
        """Takes the losses of one batch, and the bounds of their gradients' norms."""


class Full(Way):
    """Every sample in every epoch."""

    def __init__(self, at: Setting) -> None:
        self._mode = MODES.get("uniform")(at.num_samples, at.batch, at.seed)

    @override
    def epoch(self, epoch: int) -> tuple[Indices, Floats | None]:
        return self._mode.draw(epoch, None).order_K.astype(np.int64), None

    @override
    def report(self, rows_B: Indices, loss_B: Floats, norm_B: Floats) -> None:
        """Needs none."""


class Sampled(Way):
    """A sampling mode of the product, over scores of one kind.

    Args:
        at: The run.
        value: What is reported of each sample, from its loss, the norm, and the loss before; the table averages it.
        weight_power: The weights are raised to this power, rising to 1 at the end of the run if ``annealed``.
        annealed: See there.
    """

    score = "loss"
    """How the product's table combines the reported values."""

    def __init__(
        self,
        at: Setting,
        value: Callable[[Floats, Floats, Floats], Floats],
        weight_power: float = 1,
        annealed: bool = False,
    ) -> None:
        self._at = at
        self._value = value
        self._power, self._annealed = weight_power, annealed
        self._table = ImportanceTable(at.num_samples, self.score)
        self._last_N = np.full(at.num_samples, np.nan, np.float32)
        self._mode: SamplingMode = self._make_mode()
        self._next: Draw | None = None

    def _make_mode(self) -> SamplingMode:
        at = self._at
        floor = min(0.3, at.keep)
        return MODES.get("unbiased")(
            at.num_samples,
            at.batch,
            at.seed,
            keep=at.keep,
            epochs=at.epochs,
            pi_min=floor,  # type: ignore[call-arg]
        )

    @override
    def epoch(self, epoch: int) -> tuple[Indices, Floats | None]:
        draw = self._next or self._draw(epoch)
        self._next = self._draw(epoch + 1) if self._mode.draws_ahead else None
        return draw.order_K.astype(np.int64), self._weights(draw)

    def _draw(self, epoch: int) -> Draw:
        score_N, seen_N = self._table.score_N.copy(), self._table.seen_N.copy()
        scores = Scores(score_N, seen_N) if seen_N.any() else None
        return self._mode.draw(epoch, scores, resident_N=self._resident(score_N), validation=Validation())

    def _resident(self, score_N: Floats) -> Bools:
        held_N = np.zeros(len(score_N), bool)
        held_N[np.argsort(-score_N, kind="stable")[: round(RESIDENT * len(score_N))]] = True
        return held_N

    def _weights(self, draw: Draw) -> Floats | None:
        if draw.weight_N is None or self._power == 1:
            return draw.weight_N
        rise = draw.epoch / max(1, self._at.epochs - 1) if self._annealed else 0.0
        power_N = draw.weight_N ** np.float32(self._power + rise * (1 - self._power))
        whole: float = draw.weight_N[draw.order_K].sum() / power_N[draw.order_K].sum()
        return power_N * np.float32(whole)

    @override
    def report(self, rows_B: Indices, loss_B: Floats, norm_B: Floats) -> None:
        self._table.update(rows_B, self._value(loss_B, norm_B, self._last_N[rows_B]))
        self._last_N[rows_B] = loss_B


class Replayed(Sampled):
    """SHADE's own sampling: with repeats, biased towards high scores and cached samples."""

    score = "rank"

    @override
    def _make_mode(self) -> SamplingMode:
        at = self._at
        return MODES.get("pads")(at.num_samples, at.batch, at.seed, replication_factor=3.0)  # type: ignore[call-arg]


class InfoBatch(Way):
    """Leaves out half of the samples whose last loss is below the mean, weighs the other half twice."""

    def __init__(self, at: Setting) -> None:
        self._at = at
        self._loss_N = np.full(at.num_samples, np.nan, np.float32)

    @override
    def epoch(self, epoch: int) -> tuple[Indices, Floats | None]:
        draw = generator(self._at.seed, epoch, 0)
        order = draw.permutation(self._at.num_samples)
        if np.isnan(self._loss_N).any() or epoch >= math.floor(_FULL_TAIL * self._at.epochs):
            return order, None
        well_N = self._loss_N < self._loss_N.mean()
        left_out_N = well_N & (draw.random(self._at.num_samples) < _PRUNED)
        weight_N = np.where(well_N, 1 / (1 - _PRUNED), 1).astype(np.float32)
        return order[~left_out_N[order]], weight_N

    @override
    def report(self, rows_B: Indices, loss_B: Floats, norm_B: Floats) -> None:
        self._loss_N[rows_B] = loss_B


def _loss(loss_B: Floats, norm_B: Floats, last_B: Floats) -> Floats:
    return loss_B


def _norm(loss_B: Floats, norm_B: Floats, last_B: Floats) -> Floats:
    return norm_B


def _norm_of_loss(loss_B: Floats, norm_B: Floats, last_B: Floats) -> Floats:
    """One minus the probability of the target, for cross-entropy: the norm's part that the loss alone gives."""
    return -np.expm1(-loss_B)


def _one(loss_B: Floats, norm_B: Floats, last_B: Floats) -> Floats:
    return np.ones_like(loss_B)


def _change(loss_B: Floats, norm_B: Floats, last_B: Floats) -> Floats:
    """How far the loss moved since the sample was last seen."""
    return np.where(np.isnan(last_B), loss_B, np.abs(loss_B - last_B)).astype(np.float32)


def _squared(value: Callable[[Floats, Floats, Floats], Floats]) -> Callable[[Floats, Floats, Floats], Floats]:
    """The mode draws in proportion to the root of the score, so a square makes it proportional."""
    return lambda *of: value(*of) ** 2


WHOLE_RUN: dict[str, Callable[[Setting], Way]] = {
    "uniform": Full,
    "InfoBatch": InfoBatch,
    "pads -rep 3": lambda at: Replayed(at, _loss),
}
"""Ways that know no ``keep``."""

KEPT: dict[str, Callable[[Setting], Way]] = {
    "uniform, as many steps": Full,
    "random": lambda at: Sampled(at, _one),
    "loss": lambda at: Sampled(at, _loss),
    "gradient norm": lambda at: Sampled(at, _norm),
    "gradient norm, from the loss": lambda at: Sampled(at, _norm_of_loss),
    "loss, proportional": lambda at: Sampled(at, _squared(_loss)),
    "gradient norm, proportional": lambda at: Sampled(at, _squared(_norm)),
    "loss, weights annealed": lambda at: Sampled(at, _loss, 0.5, True),
    "gradient norm proportional, weights annealed": lambda at: Sampled(at, _squared(_norm), 0.5, True),
    "loss, no weights": lambda at: Sampled(at, _loss, 0),
    "change of loss": lambda at: Sampled(at, _change),
}
"""Ways to use a share of the samples."""
