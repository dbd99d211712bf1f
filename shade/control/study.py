"""Looks for the global batch and the density that train best: tries, writes down, decides what to try next.

Every evaluation is a line of JSON in a journal, written when it ends; failures and timeouts too, so that a point that
crashes is not tried for ever. The journal's first line says what is looked for. Running the same study again reads the
journal and goes on behind its last whole line: killed at any moment, it comes to the same points as if it had not been,
and an evaluation that was under way is done again. Another study does not go on with this one's journal.

References:
    Lim et al., SIGCOMM 2024: Bayesian optimisation of (global batch, compression) over a fraction of the training, 10
    evaluations to look around and 31 in all, as here.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from shade.control.profile import Profile
from shade.control.search import suggest, surface
from shade.control.space import Point, Space
from shade.errors import ConfigError, DataError
from shade.telemetry import JsonlSink, jsonable

NUM_EVALUATIONS, NUM_FIRST = 31, 10
FORMAT: Final = "shade-study-1"


class EvaluationError(Exception):
    """An objective could not be evaluated at this point: it is written down, and the study goes on."""


@dataclass(frozen=True)
class Evaluation:
    """One try."""

    number: int
    batch: int
    density: float
    quality: float | None
    failure: str | None
    """Why there is no quality."""
    seconds: float

    @property
    def point(self) -> Point:
        """What was tried."""
        return Point(self.batch, self.density)


@dataclass(frozen=True)
class Study:
    """What is looked for.

    Args:
        space: Where.
        is_loss: Whether a smaller quality is better.
        seed: Of everything that is drawn.
        num_evaluations: In all, failures included.
        num_first: Of those, how many only look around.
        about: Whatever else makes this study this one, as the command; JSON-plain.

    Raises:
        ConfigError: Less than one evaluation.
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
        """What two studies must have in common to be one; how long it goes on is not part of it."""
        told: dict[str, Any] = jsonable({**asdict(self), "format": FORMAT})
        del told["num_evaluations"]
        return told

    def next_point(self, evaluations: list[Evaluation]) -> Point:
        """What to try after these."""
        sign = -1.0 if self.is_loss else 1.0
        tried = [(each.point, None if each.quality is None else sign * each.quality) for each in evaluations]
        return suggest(self.space, tried, seed=self.seed, num_first=self.num_first)

    def profile(self, evaluations: list[Evaluation]) -> Profile:
        """What was learnt.

        Args:
            evaluations: All.

        Returns:
            Expected quality over a grid, and what it was made from.

        Raises:
            DataError: None of them succeeded.
        """
        sign = -1.0 if self.is_loss else 1.0
        measured = [(each.point, sign * each.quality) for each in evaluations if each.quality is not None]
        if not measured:
            why = evaluations[-1].failure if evaluations else "none was made"
            raise DataError.of("at least one evaluation that succeeded", why, "run the command by hand")
        batches, densities, gains = surface(self.space, measured, seed=self.seed)
        quality = tuple(tuple(sign * gain for gain in row) for row in gains)
        told = tuple(asdict(each) for each in evaluations)
        return Profile(batches, densities, quality, self.is_loss, told, self.identity())

    def best(self, evaluations: list[Evaluation]) -> Evaluation | None:
        """The best that was measured; the first of equals; None if nothing was."""
        sign = -1.0 if self.is_loss else 1.0
        return max(
            (each for each in evaluations if each.quality is not None),
            key=lambda each: (sign * (each.quality or 0.0), -each.number),
            default=None,
        )


def run(study: Study, objective: Callable[[Point], float], journal: str | os.PathLike[str]) -> Iterator[Evaluation]:
    """Goes through a study, from the beginning or from where it was left; gives each evaluation, old ones first.

    Args:
        study: What is looked for.
        objective: Takes a point, gives its quality. `EvaluationError`, or a quality that is no number, is a failure;
            whatever else it raises ends the study, which can be gone on with.
        journal: Where evaluations are written; made if it is not there.

    Yields:
        Evaluations, in order, each when it is done.

    Raises:
        ConfigError: The journal is another study's, or cannot be written.
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
    """What was done so far.

    Args:
        journal: As `run` wrote it; may be absent.
        study: Whose it must be.

    Returns:
        Evaluations, in order; a line that a kill has torn is none.

    Raises:
        ConfigError: It is another study's, or no journal.
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
            evaluation = Evaluation(**row["evaluation"])
            if evaluation.number == len(done):
                done.append(evaluation)
    except (KeyError, TypeError) as error:
        raise ConfigError.of("a journal of evaluations", f"{os.fspath(journal)}: {error}", "remove it") from None
    return done


def _lines(journal: str | os.PathLike[str]) -> list[dict[str, Any]]:
    rows = []
    try:
        for line in Path(journal).read_bytes().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
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
        raise ConfigError.of("room for a line of the journal", f"{sink.path} is full", "make room and go on with it")


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
