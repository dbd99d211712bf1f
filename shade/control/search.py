"""Says which batch and density to try next, and what quality to expect everywhere: a Gaussian process.

scikit-learn's regressor (Matérn 5/2 over the logarithms of both, with noise) is fitted to what was measured; tried next
is where it expects most improvement over its own best mean, among many random places and some around the best. What
failed counts, for the next choice, as the worst that was seen, so that the search leaves such places alone.

The next point is a function of the evaluations so far and the seed, nothing else: no state to save, so a search that
was killed goes on with the points that it would have tried. The price is a fit from scratch each time, 0.1 s for 30
evaluations, next to evaluations of minutes.

References:
    Jones, Schonlau, Welch, "Efficient Global Optimization of Expensive Black-Box Functions", J. Global Optim. 1998, §4.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shade.control.space import Point, Space
from shade.errors import ConfigError

_NUM_CANDIDATES: Final = 2000
_NUM_NEAR: Final = 500
_NEAR_SPREAD: Final = 0.05
_MARGIN: Final = 0.01
"""Of the spread of qualities, that an improvement has to be at least: else it hones the best for ever."""
_GRID: Final = (9, 25)
"""Batches and densities of a profile."""


def suggest(space: Space, tried: Sequence[tuple[Point, float | None]], *, seed: int, num_first: int) -> Point:
    """The point to try next.

    Args:
        space: Where to look.
        tried: What was, in order, with its gain (the greater the better), None where it failed.
        seed: Of everything that is drawn.
        num_first: Evaluations that only look around.

    Returns:
        A point that was not tried yet, unless all that were looked at were.
    """
    gains = [gain for _, gain in tried if gain is not None]
    known = {point for point, _ in tried}
    draw = np.random.default_rng([seed, 1, len(tried)])
    if len(tried) < num_first:
        return space.first(num_first, seed)[len(tried)]
    if len(gains) < 2:
        candidates = [space.point(*place) for place in draw.random((_NUM_NEAR, 2))]
        return next((each for each in candidates if each not in known), candidates[0])
    worst = min(gains)
    model = _fitted(space, [(point, worst if gain is None else gain) for point, gain in tried], seed)
    best = max((gain, space.unit(point)) for point, gain in tried if gain is not None)[1]
    near = np.clip(np.array(best) + _NEAR_SPREAD * draw.standard_normal((_NUM_NEAR, 2)), 0, 1)
    places = np.concatenate([draw.random((_NUM_CANDIDATES, 2)), near])
    points = [space.point(*place) for place in places]
    fresh = [point for point in dict.fromkeys(points) if point not in known] or points[:1]
    means, deviations = model.predict(_units(space, fresh), return_std=True)
    top = float(np.max(model.predict(_units(space, [point for point, _ in tried]))))
    return fresh[int(np.argmax(_expected_improvement(means, deviations, top + _MARGIN * float(np.std(gains)))))]


def surface(
    space: Space, measured: Sequence[tuple[Point, float]], *, seed: int
) -> tuple[tuple[int, ...], tuple[float, ...], tuple[tuple[float, ...], ...]]:
    """Expected gain over a grid.

    Args:
        space: Its extent.
        measured: Points and what they gained; at least one.
        seed: Of the fit.

    Returns:
        Batches, densities, and a row for each batch.
    """
    model = _fitted(space, measured, seed)
    num_batches, num_densities = _GRID
    batches = sorted({space.point(place, 0.0).batch for place in np.linspace(0, 1, num_batches)})
    densities = sorted({space.point(0.0, place).density for place in np.linspace(0, 1, num_densities)})
    points = [Point(batch, density) for batch in batches for density in densities]
    rows = model.predict(_units(space, points)).reshape(len(batches), len(densities))
    return tuple(batches), tuple(densities), tuple(tuple(map(float, row)) for row in rows)


def _units(space: Space, points: Sequence[Point]) -> npt.NDArray[np.float64]:
    return np.array([space.unit(point) for point in points])


def _fitted(space: Space, measured: Sequence[tuple[Point, float]], seed: int) -> Any:
    try:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel
        from threadpoolctl import threadpool_limits
    except ImportError:
        raise ConfigError("scikit-learn is not installed; pip install 'shade[tune]' brings it") from None
    kernel = ConstantKernel(1.0, (1e-2, 1e2)) * Matern([0.5, 0.5], (0.05, 10.0), nu=2.5) + WhiteKernel(
        1e-3, (1e-6, 0.3)
    )
    model = GaussianProcessRegressor(kernel, normalize_y=True, n_restarts_optimizer=1, random_state=seed)
    with warnings.catch_warnings(), threadpool_limits(1):  # matrices of 30 × 30: more threads only wait for each other
        warnings.simplefilter("ignore", ConvergenceWarning)  # a length at its bound: a side that does not matter
        model.fit(_units(space, [point for point, _ in measured]), np.array([gain for _, gain in measured]))
    return model


def _expected_improvement(
    means: npt.NDArray[np.float64], deviations: npt.NDArray[np.float64], top: float
) -> npt.NDArray[np.float64]:
    """Of each candidate over the top: E max(0, N(mean, deviation) - top)."""
    spread = np.maximum(deviations, 1e-12)
    z = (means - top) / spread
    below = 0.5 * (1 + np.array([math.erf(each / math.sqrt(2)) for each in z]))
    return np.asarray((means - top) * below + spread * np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi))
