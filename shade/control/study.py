"""Searches for the global batch and the density that train best.

Optuna's Gaussian process chooses each next point. scikit-learn's fits the expected quality of a profile, because
Optuna keeps its own fit private. Both are imported when a search runs. Decision 0019 compares the samplers.

Every evaluation is one line of JSON in a journal, failures too, and the journal is the only state: each next point is a
function of the journal and the seed. A study that is killed at any moment resumes with the points that it would have
tried. `CommandObjective` runs the user's training command once and reads the quality from its output.

References:
    Lim et al., SIGCOMM 2024: Bayesian optimisation of (global batch, compression) with 10 initial evaluations of 31.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from shade.control.profile import Profile
from shade.errors import ConfigError, DataError
from shade.installation import install_hint
from shade.telemetry import JsonlSink, jsonable

NUM_EVALUATIONS, NUM_FIRST = 31, 10
FORMAT: Final = "shade-study-1"
_GRID: Final = (9, 25)
"""Batches and densities of a profile."""
_MOST_DRAWS: Final = 500
"""Random points that are drawn in search of one that was not tried."""
_MOST_LINE_BYTES: Final = 1 << 16
_SHOWN: Final = 200
"""Most characters that a message shows of a command's last line."""
_BAR: Final = re.compile(r"^.*\r[^{\r]*", re.DOTALL)
"""A progress bar, which is drawn again after each carriage return and has no end of line of its own."""
_TIED: Final = """\
import os, signal, sys
from shade.process import die_with_parent
die_with_parent(int(sys.argv[1]), signal.SIGKILL)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"{sys.argv[2]}: {error.strerror}")
"""
"""Program that becomes the command and dies with this process. A `preexec_fn` would be unsafe: the search has
started threads."""


class EvaluationError(Exception):
    """The objective has no quality at this point. The study records the failure and continues."""


class Point(NamedTuple):
    """The batch and density of one evaluation."""

    batch: int
    """Global, in samples."""
    density: float
    """Kept fraction of the gradient."""


@dataclass(frozen=True)
class Space:
    """The points that a study may try, on a logarithmic scale in both dimensions.

    Args:
        batches: Least and greatest global batch, in samples.
        densities: Least and greatest density.
        batch_multiple: Every batch is a multiple of it, for example of the number of ranks.

    Raises:
        ConfigError: The space is empty.
    """

    batches: tuple[int, int]
    densities: tuple[float, float]
    batch_multiple: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.densities[0] <= self.densities[1] <= 1:
            raise ConfigError.of("0 < least density ≤ greatest ≤ 1", self.densities, "write 0.0005:0.1")
        if self.batch_multiple < 1 or not 0 < self._multiples[0] <= self._multiples[1]:
            got = (self.batches, self.batch_multiple)
            raise ConfigError.of("multiples between the least batch and the greatest", got, "widen --batch")

    @property
    def _multiples(self) -> tuple[int, int]:
        return -(-self.batches[0] // self.batch_multiple), self.batches[1] // self.batch_multiple

    def distributions(self) -> dict[str, Any]:
        """Returns the space as Optuna's distributions of `Point`'s fields; the batch is counted in multiples."""
        from optuna.distributions import FloatDistribution, IntDistribution

        return {"batch": IntDistribution(*self._multiples, log=True),
                "density": FloatDistribution(*self.densities, log=True)}  # fmt: skip

    def rounded(self, num_multiples: float, density: float) -> Point:
        """Returns the nearest possible point; three digits of density identify it in a line of a log."""
        (low, high), (least, most) = self._multiples, self.densities
        batch = min(max(round(num_multiples), low), high) * self.batch_multiple
        return Point(batch, min(max(float(f"{density:.3g}"), least), most))

    def point(self, across: float, up: float) -> Point:
        """Returns the point at a position in the unit square; 0 is the least batch or density, 1 the greatest."""
        (low, high), (least, most) = self._multiples, self.densities
        return self.rounded(low * (high / low) ** across, least * (most / least) ** up)

    def unit(self, point: Point) -> tuple[float, float]:
        """Returns the position of a point in the unit square."""
        low, high = (each * self.batch_multiple for each in self._multiples)
        return _fraction(point.batch, low, high), _fraction(point.density, *self.densities)

    def first(self, num: int, seed: int) -> list[Point]:
        """Returns a Latin hypercube: each row and each column of a num × num grid holds one point."""
        draw = np.random.default_rng([seed, 0])
        across, up = ((draw.permutation(num) + draw.random(num)) / num for _ in range(2))
        return [self.point(float(x), float(y)) for x, y in zip(across, up, strict=True)]


@dataclass(frozen=True)
class Evaluation:
    """One evaluation and its result."""

    number: int
    batch: int
    density: float
    quality: float | None
    failure: str | None
    """Why there is no quality."""
    seconds: float

    @property
    def point(self) -> Point:
        """The batch and density that were tried."""
        return Point(self.batch, self.density)


@dataclass(frozen=True)
class Study:
    """The search and its settings.

    Args:
        space: The points that may be tried.
        is_loss: Whether a smaller quality is better.
        seed: Seed of all random draws.
        num_evaluations: Number of evaluations, with failures.
        num_first: Number of evenly spread evaluations, before the search uses results.
        about: Further identity of this study, such as the command; plain JSON.

    Raises:
        ConfigError: There is less than one evaluation, or the seed is negative.
    """

    space: Space
    is_loss: bool = False
    seed: int = 0
    num_evaluations: int = NUM_EVALUATIONS
    num_first: int = NUM_FIRST
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_evaluations < 1 or self.num_first < 1 or self.seed < 0:
            got = (self.num_evaluations, self.num_first, self.seed)
            raise ConfigError.of("at least one evaluation, and a seed of 0 or more", got, "write --evaluations 31")

    def identity(self) -> dict[str, Any]:
        """Returns what two runs of one study have in common: everything but the number of evaluations."""
        identity: dict[str, Any] = jsonable({**asdict(self), "format": FORMAT})
        del identity["num_evaluations"]
        return identity

    @property
    def _sign(self) -> float:
        return -1.0 if self.is_loss else 1.0

    def next_point(self, evaluations: list[Evaluation]) -> Point:
        """Returns the point to try after these evaluations."""
        tried = [(each.point, None if each.quality is None else self._sign * each.quality) for each in evaluations]
        return suggest(self.space, tried, seed=self.seed, num_first=self.num_first)

    def profile(self, evaluations: list[Evaluation]) -> Profile:
        """Fits the expected quality over a grid; raises `DataError` if no evaluation succeeded."""
        measured = [(each.point, self._sign * each.quality) for each in evaluations if each.quality is not None]
        if not measured:
            why = evaluations[-1].failure if evaluations else "none was made"
            raise DataError.of("at least one evaluation that succeeded", why, "run the command by hand")
        batches, densities, gains = _surface(self.space, measured, self.seed)
        quality = tuple(tuple(self._sign * float(gain) for gain in row) for row in gains)
        records = tuple(asdict(each) for each in evaluations)
        return Profile(tuple(batches), tuple(densities), quality, self.is_loss, records, self.identity())

    def best(self, evaluations: list[Evaluation]) -> Evaluation | None:
        """Returns the evaluation with the best quality, the first of equals, or None if none succeeded."""
        return max(
            (each for each in evaluations if each.quality is not None),
            key=lambda each: (self._sign * (each.quality or 0.0), -each.number),
            default=None,
        )


def suggest(space: Space, tried: Sequence[tuple[Point, float | None]], *, seed: int, num_first: int) -> Point:
    """Chooses the point to try next: one that was not tried, unless none can be found. ``tried`` has every point so
    far, in order, with its gain (greater is better), or None where it failed; the first ``num_first`` are a Latin
    hypercube. Raises `ConfigError` if Optuna or scipy is not installed."""
    if len(tried) < num_first:
        return space.first(num_first, seed)[len(tried)]
    gains = [gain for _, gain in tried if gain is not None]
    known = {point for point, _ in tried}
    if len(gains) >= 2:
        point = _sampled(space, [(point, min(gains) if gain is None else gain) for point, gain in tried], seed)
        if point not in known:
            return point
    # Measuring a point twice teaches less than a random new one, and both would write to the same log.
    draw = np.random.default_rng([seed, 1, len(tried)])
    positions = draw.random((_MOST_DRAWS, 2))
    points = [space.point(float(across), float(up)) for across, up in positions]
    return next((point for point in points if point not in known), points[0])


def _sampled(space: Space, tried: Sequence[tuple[Point, float]], seed: int) -> Point:
    """Returns what Optuna's Gaussian process suggests; a new sampler each time, because an old one carries state."""
    try:
        import optuna
        import scipy  # type: ignore[import-untyped]  # noqa: F401  # GPSampler needs it, and would say so much later
    except ImportError as error:
        raise ConfigError(f"{error.name} is not installed; {install_hint('tune')} brings it") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    draw = int(np.random.SeedSequence([seed, len(tried)]).generate_state(1)[0])
    sampler = optuna.samplers.GPSampler(seed=draw, n_startup_trials=1)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    names = space.distributions()
    for point, gain in tried:
        params = {"batch": point.batch // space.batch_multiple, "density": point.density}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=names, value=gain))
    found = study.ask(names).params
    return space.rounded(found["batch"], found["density"])


def _surface(
    space: Space, measured: Sequence[tuple[Point, float]], seed: int
) -> tuple[list[int], list[float], npt.NDArray[np.float64]]:
    """Returns the batches and the densities of a grid, and the expected gain there, a row for each batch."""
    try:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel
        from threadpoolctl import threadpool_limits
    except ImportError:
        raise ConfigError(f"scikit-learn is not installed; {install_hint('tune')} brings it") from None
    noise = WhiteKernel(1e-3, (1e-6, 0.3))
    kernel = ConstantKernel(1.0, (1e-2, 1e2)) * Matern([0.5, 0.5], (0.05, 10.0), nu=2.5) + noise
    model = GaussianProcessRegressor(kernel, normalize_y=True, n_restarts_optimizer=1, random_state=seed)
    with warnings.catch_warnings(), threadpool_limits(1):  # matrices of 30 × 30: more threads only wait for each other
        warnings.simplefilter("ignore", ConvergenceWarning)  # a length scale at its bound: that side does not matter
        model.fit([space.unit(point) for point, _ in measured], [gain for _, gain in measured])
    num_batches, num_densities = _GRID
    batches = sorted({space.point(float(position), 0.0).batch for position in np.linspace(0, 1, num_batches)})
    densities = sorted({space.point(0.0, float(position)).density for position in np.linspace(0, 1, num_densities)})
    gains = model.predict([space.unit(Point(batch, density)) for batch in batches for density in densities])
    return batches, densities, np.reshape(gains, (len(batches), len(densities)))


def _fraction(value: float, low: float, high: float) -> float:
    return 0.5 if low == high else math.log(value / low) / math.log(high / low)


# ── running a study, and its journal ────────────────────────────────────────────────────────────────────────────────


def run(study: Study, objective: Callable[[Point], float], journal: str | os.PathLike[str]) -> Iterator[Evaluation]:
    """Runs a study from its beginning, or resumes it, and yields each evaluation, old ones first.

    Args:
        study: What is searched for.
        objective: Returns the quality of a point. `EvaluationError`, or a quality that is not finite, is a failure;
            any other exception ends the run, and the study can be resumed.
        journal: File to which evaluations are written; made if it is absent.

    Yields:
        Evaluations, in order, each when it is done.

    Raises:
        ConfigError: The journal belongs to another study, or cannot be written.
    """
    done = read_journal(journal, study)[: study.num_evaluations]
    yield from done
    try:
        sink = JsonlSink(journal)
    except OSError as error:
        raise ConfigError.of("a journal that can be written", f"{journal}: {error.strerror}", "name another") from None
    try:
        if not done and not _lines(journal):
            _write(sink, {"study": study.identity()})
        while len(done) < study.num_evaluations:
            evaluation = _evaluate(len(done), study.next_point(done), objective)
            _write(sink, {"evaluation": asdict(evaluation)})
            done.append(evaluation)
            yield evaluation
    finally:
        sink.close()


def read_journal(journal: str | os.PathLike[str], study: Study) -> list[Evaluation]:
    """Returns the journal's evaluations in order, without a line that a kill cut short; none if there is no file.

    Raises `ConfigError` if the journal belongs to another study, or is no journal.
    """
    rows = _lines(journal)
    if not rows:
        return []
    if rows[0].get("study") != study.identity():
        raise ConfigError.of(
            "the journal of this very study",
            f"{os.fspath(journal)} of another one",
            "name another folder, or remove it",
        )
    done: list[Evaluation] = []
    try:
        for row in rows[1:]:
            evaluation = msgspec.convert(row["evaluation"], Evaluation)
            if evaluation.number == len(done):
                done.append(evaluation)
    except (KeyError, ValueError) as error:
        raise ConfigError.of("a journal of evaluations", f"{os.fspath(journal)}: {error}", "remove it") from None
    return done


def _lines(journal: str | os.PathLike[str]) -> list[dict[str, Any]]:
    rows = []
    try:
        for line in Path(journal).read_bytes().splitlines():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                rows.append(row)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError.of("a journal", f"{os.fspath(journal)}: {error.strerror}", "name another") from None
    return rows


def _write(sink: JsonlSink, row: dict[str, Any]) -> None:
    sink.write(row)
    if sink.lost_rows:
        raise ConfigError.of("space for a line of the journal", f"{sink.path} is full", "free some and run it again")


def _evaluate(number: int, point: Point, objective: Callable[[Point], float]) -> Evaluation:
    begun = time.monotonic()
    quality: float | None = None
    failure: str | None = None
    try:
        quality = float(objective(point))
        if not math.isfinite(quality):
            quality, failure = None, f"the quality is {quality}"
    except EvaluationError as error:
        failure = str(error)
    return Evaluation(number, point.batch, point.density, quality, failure, time.monotonic() - begun)


class CommandObjective:
    """The quality of a point as a command prints it.

    Args:
        command: Words as for a shell, but run without one; ``{batch}`` and ``{density}`` are replaced.
        folder: Holds the output of each evaluation, ``batch-64-density-0.01.log``; made if it is absent.
        metric: Name of a number in a line of JSON that is printed, behind a progress bar too; the last one counts.
        pattern: Instead: a regular expression with one group, which is the number.
        timeout_seconds: After which a command is killed; None for never.

    Raises:
        ConfigError: An argument cannot be used.
    """

    def __init__(
        self,
        command: str,
        folder: str | os.PathLike[str],
        *,
        metric: str | None = None,
        pattern: str | None = None,
        timeout_seconds: float | None = None,
    ) -> None:
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise ConfigError.of("a command", command, f"{error}") from None
        if not self._words or not all(name in command for name in ("{batch}", "{density}")):
            raise ConfigError.of(
                "a command with {batch} and {density}", command, "as 'python train.py -b {batch} -d {density}'"
            )
        if (metric is None) == (pattern is None):
            raise ConfigError.of("a metric or a regular expression", (metric, pattern), "give one of the two")
        if timeout_seconds is not None and not timeout_seconds > 0:
            raise ConfigError.of("a timeout above 0 seconds", timeout_seconds, "leave it out for none")
        try:
            self._pattern = None if pattern is None else re.compile(pattern)
        except re.error as error:
            raise ConfigError.of("a regular expression", pattern, f"{error}") from None
        if self._pattern is not None and self._pattern.groups != 1:
            raise ConfigError.of("one group in the regular expression", pattern, "as 'accuracy ([0-9.]+)'")
        self._metric = metric
        self._timeout_seconds = timeout_seconds
        self._folder = Path(folder)

    def __call__(self, point: Point) -> float:
        """Runs the command with the point's values and returns the quality.

        Raises `EvaluationError`, with the command's last line, if it failed, took too long or printed no number.
        """
        values = {"{batch}": str(point.batch), "{density}": f"{point.density:g}"}
        words = [functools.reduce(lambda word, name: word.replace(name, values[name]), values, w) for w in self._words]
        log = self._folder / f"batch-{point.batch}-density-{point.density:g}.log"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with log.open("wb") as output:
                code = self._run(words, output.fileno())
        except OSError as error:
            raise EvaluationError(f"it cannot be started: {error}") from None
        if code is None:
            raise EvaluationError(f"it took more than {self._timeout_seconds:g} s{_last_words(log)}")
        if code != 0:
            ending = f"exit code {code}" if code > 0 else f"killed by signal {-code}"
            raise EvaluationError(f"{ending}{_last_words(log)}")
        found = None
        for line in _printed(log):
            number = self._number(line)
            found = found if number is None else number
        if found is None:
            wanted = repr(self._metric or (self._pattern and self._pattern.pattern))
            raise EvaluationError(f"it printed no {wanted}{_last_words(log)}")
        return found

    def _run(self, words: list[str], output: int) -> int | None:
        """Returns the exit code, or None after a timeout."""
        process = subprocess.Popen(
            [sys.executable, "-c", _TIED, str(os.getpid()), *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(self._timeout_seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also the children that it left behind
            process.wait()

    def _number(self, line: str) -> float | None:
        try:
            if self._pattern is not None:
                found = self._pattern.search(line.strip())
                return float(found[1]) if found else None
            row = json.loads(_BAR.sub("", line.rstrip()))
            return float(row[self._metric]) if isinstance(row, dict) and self._metric in row else None
        except (ValueError, TypeError, RecursionError):
            return None


def _printed(log: Path) -> Iterator[str]:
    with log.open("rb") as output:
        while line := output.readline(_MOST_LINE_BYTES):
            yield line.decode(errors="replace")


def _last_words(log: Path) -> str:
    last = ""
    for line in _printed(log):
        last = line.strip() or last
    return f"; its last line: {last[:_SHOWN]}" if last else "; it printed nothing"
