"""Compares the search of `shade tune` with Optuna's other samplers, on response surfaces whose optimum is known.

    python benchmarks/bench_tune.py --method shade --seeds 20

prints one row for each surface: the shortfall of the best point against the optimum (without the noise) after 20 and
31 evaluations, the number of seeds within a twentieth of it (the bar of tests/integration/test_study.py), the mean
error of the profile in percent of the surface's range, and processor seconds for a search. `shade` is the search of the
imported `shade.control.study`: with PYTHONPATH set to a checkout of 853ef6a, the former Gaussian process.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shade.control.study import Evaluation, EvaluationError, Point, Space, Study, run

SPACE = Space((32, 1024), (0.0005, 0.1), batch_multiple=8)
NUM_EVALUATIONS = 31


def hill(point: Point) -> float:
    """Accuracy with its top, 0.9, at batch 200 and density 0.02."""
    across = math.log(point.batch / 200) / math.log(32)
    up = math.log(point.density / 0.02) / math.log(200)
    return 0.9 * math.exp(-4 * across**2 - 6 * up**2)


def sharp(point: Point) -> float:
    """The same, with a narrow top."""
    return hill(point) ** 8


def saturating(point: Point) -> float:
    """Accuracy as it usually is: a greater density is never worse, a greater batch is."""
    return 0.95 - 0.2 * (point.density / 0.0005) ** -0.5 - 0.05 * math.log(point.batch / 32) / math.log(32)


def valley(point: Point) -> float:
    """A loss with a bent valley."""
    across = math.log(point.batch / 100) / math.log(32)
    up = math.log(point.density / 0.005) / math.log(200)
    return 2.0 + 3 * (up - across**2) ** 2 + 0.5 * across**2


@dataclass(frozen=True)
class Surface:
    """One objective."""

    truth: Callable[[Point], float]
    best: float
    is_loss: bool = False
    noise: float = 0.0
    """Standard deviation of what is measured."""
    fails: Callable[[Point], bool] = lambda point: False


SURFACES = {
    "hill": Surface(hill, 0.9),
    "sharp": Surface(sharp, 0.9**8),
    "saturating": Surface(saturating, saturating(Point(32, 0.1))),
    "valley": Surface(valley, 2.0, is_loss=True),
    "hill, fails": Surface(hill, 0.9, fails=lambda point: point.batch > 400 or point.density < 0.001),
    "hill, noise 0.01": Surface(hill, 0.9, noise=0.01),
    "saturating, noise 0.01": Surface(saturating, saturating(Point(32, 0.1)), noise=0.01),
}


def searched(surface: Surface, seed: int) -> list[Evaluation]:
    """Evaluations of `shade tune`."""
    draw = np.random.default_rng([seed, 7])

    def objective(point: Point) -> float:
        if surface.fails(point):
            raise EvaluationError("out of memory")
        return surface.truth(point) + surface.noise * float(draw.standard_normal())

    with tempfile.TemporaryDirectory() as folder:
        study = Study(SPACE, surface.is_loss, seed, NUM_EVALUATIONS)
        return list(run(study, objective, Path(folder) / "journal"))


def sampled(sampler: str, surface: Surface, seed: int) -> list[Evaluation]:
    """Evaluations of one of Optuna's samplers as it comes, with failed trials."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    draw = np.random.default_rng([seed, 7])
    study = optuna.create_study(
        direction="minimize" if surface.is_loss else "maximize", sampler=getattr(optuna.samplers, sampler)(seed=seed)
    )
    done = []
    for number in range(NUM_EVALUATIONS):
        trial = study.ask()
        point = Point(8 * trial.suggest_int("batch", 4, 128, log=True), trial.suggest_float("d", 5e-4, 0.1, log=True))
        if surface.fails(point):
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            done.append(Evaluation(number, *point, None, "out of memory", 0.0))
        else:
            quality = surface.truth(point) + surface.noise * float(draw.standard_normal())
            study.tell(trial, quality)
            done.append(Evaluation(number, *point, quality, None, 0.0))
    return done


def shortfall_percent(surface: Surface, done: list[Evaluation]) -> float:
    """How far the truth at the best measured point lies from the optimum."""
    best = Study(SPACE, surface.is_loss).best(done)
    return math.inf if best is None else 100 * abs(surface.truth(best.point) - surface.best) / surface.best


def profile_error_percent(surface: Surface, seed: int, done: list[Evaluation]) -> float:
    """Mean error of the profile over its grid, failing places left out."""
    profile = Study(SPACE, surface.is_loss, seed).profile(done)
    points = [Point(batch, density) for batch in profile.batches for density in profile.densities]
    points = [point for point in points if not surface.fails(point)]
    truth = [surface.truth(point) for point in points]
    errors = [abs(profile.expected(*point) - true) for point, true in zip(points, truth, strict=True)]
    return 100 * statistics.fmean(errors) / (max(truth) - min(truth))


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=["shade", "GPSampler", "TPESampler", "RandomSampler"], default="shade")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--surface", choices=SURFACES, nargs="*", default=list(SURFACES))
    given = parser.parse_args()
    print("| method | surface | 20: median, worst | 31: median, worst | within 5 % | profile error | cpu s |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for name in given.surface:
        surface, rows = SURFACES[name], []
        for seed in range(given.seeds):
            begun = time.process_time()
            done = searched(surface, seed) if given.method == "shade" else sampled(given.method, surface, seed)
            seconds = time.process_time() - begun
            early, late = (shortfall_percent(surface, done[:num]) for num in (20, NUM_EVALUATIONS))
            rows.append((early, late, profile_error_percent(surface, seed, done), seconds))
        early_S, late_S, error_S, seconds_S = zip(*rows, strict=True)
        print(
            f"| {given.method} | {name} | {statistics.median(early_S):.2f}, {max(early_S):.2f} % "
            f"| {statistics.median(late_S):.2f}, {max(late_S):.2f} % "
            f"| {sum(each <= 5 for each in late_S)}/{given.seeds} | {statistics.fmean(error_S):.1f} % "
            f"| {statistics.fmean(seconds_S):.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
