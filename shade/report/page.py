"""Writes ``report.html``: the run as one page that needs nothing else, no network, no script, no file beside it.

A reader can mail it, archive it and open it years later. It is light or dark as the reader's system is. The run's
results stand first, its settings last. This module computes; the templates in ``templates/`` say what the page looks
like, and jinja2 escapes all that they print. A chart names meanings instead of colours: `style` has two colours of
each. Every mark has a ``<title>``, which browsers show and screen readers read aloud.
"""

from __future__ import annotations

import base64
import csv
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shade.report.forecast import plain_loading
from shade.report.quality import CSV_FILE, PRECISION, SHEET_FILE
from shade.report.rows import CAUSES, Run
from shade.report.style import PALETTE, human_bytes, percent
from shade.report.text import (
    LEGEND,
    Result,
    details,
    labelled,
    plain_beside,
    plain_note,
    plain_rows,
    plain_title,
    reads_per_n,
    results,
    settings,
)

if TYPE_CHECKING:
    from jinja2 import Environment

WIDTH, HEIGHT = 560, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 10, 26, 26
_MOST_MARKS = 80
"""Points of a line that are marked; with more the marks would touch."""
_MOST_SHEET_BYTES = 8 * 2**20
_NUM_SUSPECTS = 10
_HEADS = (
    "epoch", "loss", "train acc.", "val acc.", "samples", "hit ratio", "origin reads", "reads/N", "samples/s",
    "seconds", "step", *CAUSES, "rest",
)  # fmt: skip

Format = Callable[[float], str]


@dataclass(frozen=True)
class Series:
    """One quantity over epochs."""

    name: str
    meaning: str
    """One of `PALETTE`, which gives it its colour."""
    values: Sequence[float | None]
    """A value for each epoch; None leaves a gap."""

    @property
    def is_known(self) -> bool:
        """Returns whether there is anything to draw."""
        return any(value is not None for value in self.values)


@dataclass(frozen=True)
class Scale:
    """The axis of values of a chart."""

    name: str
    """What it shows, and the unit of its numbers."""
    number: Format
    """Writes a number of the axis, whose unit is in the name."""
    value: Format
    """Writes a value with its unit."""


@dataclass(frozen=True)
class Figure:
    """One chart with its title, legend and caption."""

    title: str
    series: Sequence[Series]
    chart: str
    """An ``<svg>`` element, or a sentence where nothing is known."""
    caption: str = ""

    @property
    def known(self) -> list[Series]:
        """Returns the series of the legend."""
        return [each for each in self.series if each.is_known]


def write_html(run: Run, path: Path) -> None:
    """Writes the page, in place of an old one; raises `OSError` if it cannot."""
    path.write_text(render(run), encoding="utf-8", errors="replace")


def render(run: Run) -> str:
    """Returns the page as text; see `write_html`."""
    named = [str(run.plan[key]) for key in ("network", "sampling", "policy") if isinstance(run.plan.get(key), str)]
    ranks = max(e.ranks for e in run.epochs)
    size = f"{len(run.epochs)} epoch{'s' * (len(run.epochs) > 1)}, {ranks} rank{'s' * (ranks > 1)}"
    tiles = list(results(run))
    comparison = plain_rows(run)
    if comparison and comparison[-1][0] == "samples a second":
        value, _, sense = comparison[-1][3].partition(" × ")
        how = "predicted" if plain_beside(run) is None else "measured"
        tiles.insert(0, Result("speed", f"{value} ×", f"{sense} as plain loading ({how})"))
    return _fill(
        "report.html",
        name=run.directory.resolve().name,
        subtitle=" · ".join([*named, size, str(run.directory)]),
        palette=PALETTE,
        tiles=tiles,
        plain_title=plain_title(run),
        plain_rows=comparison,
        plain_note=plain_note(run),
        figures=_figures(run),
        sentences=details(run),
        suspects=_suspects(run.directory),
        precision=PRECISION,
        sheet=_sheet(run.directory),
        heads=_HEADS,
        rows=_rows(run),
        legend=LEGEND.partition("\n")[2],
        settings=settings(run),
    )


@cache
def _templates() -> Environment:
    """Returns the templates of this package; what they print is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # imported here: most commands write no page

    return Environment(
        loader=PackageLoader("shade.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )


def _fill(template: str, **values: Any) -> str:
    """Returns a template filled in, marked as markup, so that a template that prints it does not escape it again."""
    from markupsafe import Markup

    return Markup(_templates().get_template(template).render(values))


def _figures(run: Run) -> Iterator[Figure]:
    """Yields the charts for which the run has numbers."""
    epochs = [e.epoch for e in run.epochs]
    beside, predicted = plain_beside(run), plain_loading(run)
    how, plain_speed, plain_seconds = "predicted", None, None
    if beside is not None:
        how, plain_speed = "measured", beside.whole.samples_per_second
        plain_seconds = (beside.whole.epoch_seconds or 0.0) / len(beside.epochs)
    elif predicted is not None and predicted[1] is not None:
        plain_speed, plain_seconds = predicted[1].samples_per_second, predicted[1].seconds

    def of(name: str, meaning: str, values: Iterable[float | None]) -> Series:
        return Series(name, meaning, list(values))

    hits = [of("hit ratio", "cache", (e.hit_ratio for e in run.epochs))]
    yield Figure("Hit ratio", hits, line_chart(epochs, hits, _shares("hit ratio"), top=1.0))
    reads = [of("origin reads", "origin", (e.counts.get("origin_reads") for e in run.epochs))]
    rule = float(run.num_samples) if run.num_samples else None
    dashed = f"dashed: plain loading reads all N = {run.num_samples:,} samples" if run.num_samples else ""
    yield Figure("Origin reads", reads, bar_chart(epochs, reads, _numbers("reads an epoch"), rule=rule), dashed)
    speed = [of("samples/s", "run", (e.samples_per_second for e in run.epochs))]
    known = [v for v in speed[0].values if v is not None]
    rule = plain_speed
    dashed = "" if rule is None else f"dashed: plain loading, {rule:,.0f} samples/s ({how})"
    chart = line_chart(
        epochs, speed, _numbers("samples/s, all ranks"), top=max([*known, rule or 0.0]) or 1.0, rule=rule
    )
    yield Figure("Throughput", speed, chart, dashed)
    spent = [of("step", "step", (e.step_seconds for e in run.epochs))]
    spent += [of(cause, cause, (e.stall_seconds.get(cause) for e in run.epochs)) for cause in CAUSES]
    spent.append(of("rest", "rest", (e.rest_seconds for e in run.epochs)))
    rule = plain_seconds
    dashed = "" if rule is None else f"dashed: plain loading, {_seconds(rule)} ({how}); "
    caption = "step: the script had its batch; origin … wait: it waited for one, while loading was busy with …"
    chart = bar_chart(epochs, spent, _SECONDS, rule=rule)
    yield Figure("Where the time went", spent, chart, dashed + caption)
    yield from _curves(run, epochs, "Loss", "loss", "val_loss", _numbers("loss, mean of a sample"), None)
    yield from _curves(run, epochs, "Accuracy", "train_accuracy", "val_accuracy", _shares("accuracy"), 1.0)
    blocked = [of("waited for snapshots", "snapshots", (e.snapshot_seconds for e in run.epochs))]
    if any(e.snapshot_seconds for e in run.epochs):
        yield Figure("Snapshots: time the training waited", blocked, bar_chart(epochs, blocked, _SECONDS))
    sent = [of("sent", "gradient", (e.gradient_bytes for e in run.epochs))]
    if sent[0].is_known:
        scale = Scale("bytes an epoch, all ranks", human_bytes, human_bytes)
        yield Figure("Gradients sent", sent, bar_chart(epochs, sent, scale))


def _curves(
    run: Run, epochs: Sequence[int], title: str, training: str, validation: str, scale: Scale, top: float | None
) -> Iterator[Figure]:
    """Yields the chart of a quantity that training and validation have, if either is known."""
    series = [
        Series("training", "training", [getattr(e, training) for e in run.epochs]),
        Series("validation", "validation", [getattr(e, validation) for e in run.epochs]),
    ]
    if any(each.is_known for each in series):
        yield Figure(title, series, line_chart(epochs, series, scale, top=top))


def _rows(run: Run) -> Iterator[list[str]]:
    """Yields the cells of each epoch and of the whole run, in the order of `_HEADS`; an unknown number is empty."""
    for label, e in labelled(run):
        yield [
            label, _plain(e.loss, ".4f"), _percent(e.train_accuracy), _percent(e.val_accuracy),
            _plain(e.counts.get("samples"), ","), _percent(e.hit_ratio), _plain(e.counts.get("origin_reads"), ","),
            _plain(reads_per_n(run, e), ".3f"), _plain(e.samples_per_second, ",.0f"), _plain(e.epoch_seconds, ",.2f"),
            _plain(e.step_seconds, ",.2f"), *(_plain(e.stall_seconds.get(cause), ",.2f") for cause in CAUSES),
            _plain(e.rest_seconds, ",.2f"),
        ]  # fmt: skip


def _suspects(directory: Path) -> list[list[str]]:
    """Returns the first rows of `shade quality`; empty if it was not run, or wrote something else."""
    try:
        with (directory / CSV_FILE).open(newline="", encoding="utf-8", errors="replace") as file:
            rows = [row for row, _ in zip(csv.DictReader(file), range(_NUM_SUSPECTS), strict=False)]
        return [
            [
                row["suspicion"],
                *(percent(float(row[name])) if row[name] else "" for name in ("confidence", "usual_confidence")),
                row["target"],
                row["sample"] or row["index"],
            ]
            for row in rows
        ]
    except (OSError, csv.Error, KeyError, ValueError):
        return []


def _sheet(directory: Path) -> str:
    """Returns the contact sheet of `shade quality` in base64; empty if there is none, or it is too large for a page."""
    try:
        picture = (directory / SHEET_FILE).read_bytes()
    except OSError:
        return ""
    return base64.b64encode(picture).decode() if len(picture) <= _MOST_SHEET_BYTES else ""


# ── charts ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def line_chart(
    epochs: Sequence[int],
    series: Sequence[Series],
    scale: Scale,
    *,
    top: float | None = None,
    rule: float | None = None,
) -> str:
    """Returns lines with a mark at each epoch as an ``<svg>`` element, or a sentence where nothing is known.

    The axis runs from 0 to `top`, or without `top` over the values. A dashed line stands at `rule`, if given.
    """
    known = [value for each in series for value in each.values if value is not None]
    if not known:
        return _chart(None, series)
    low, high = (0.0, top) if top is not None else (min(known), max(known))
    frame = _Frame(epochs, low, high, scale)
    lines, dots = [], []
    for each in series:
        for run in _runs(epochs, each.values):
            lines.append((each.meaning, [(frame.x(epoch), frame.y(value)) for epoch, value in run]))
            dots += [
                (each.meaning, frame.x(epoch), frame.y(value), f"{each.name}, epoch {epoch}: {scale.value(value)}")
                for epoch, value in run
            ]
    return _chart(frame, series, rule, lines=lines, dots=dots if len(epochs) <= _MOST_MARKS else ())


def bar_chart(epochs: Sequence[int], series: Sequence[Series], scale: Scale, *, rule: float | None = None) -> str:
    """Returns bars, one an epoch, with the series on top of each other, as `line_chart` does."""
    heights = [sum(each.values[n] or 0.0 for each in series) for n in range(len(epochs))]
    if not any(each.is_known for each in series):
        return _chart(None, series)
    frame = _Frame(epochs, 0.0, max([*heights, rule or 0.0]), scale)
    bars = []
    for number, epoch in enumerate(epochs):
        floor = 0.0
        for each in series:
            value = each.values[number]
            if not value:
                continue
            y, bottom = frame.y(floor + value), frame.y(floor)
            left, height = round(frame.x(epoch) - frame.bar / 2, 1), round(max(bottom - y, 0.5), 1)
            bars.append((each.meaning, left, y, height, f"{each.name}, epoch {epoch}: {scale.value(value)}"))
            floor += value
    return _chart(frame, series, rule, bars=bars)


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Returns about `most` round numbers, at least two, ascending, that span an axis from `low` to `high`."""
    span = (high - low) or abs(high) or 1.0
    magnitude = 10.0 ** math.floor(math.log10(span / most))
    step = next(s * magnitude for s in (1, 2, 2.5, 5, 10, 20) if span / (s * magnitude) <= most)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [n * step for n in range(first, max(last, first + 1) + 1)]


class _Frame:
    """Maps epochs and values to positions in the picture, rounded to a tenth of a pixel."""

    left, right, top, bottom, width, height = _LEFT, WIDTH - _RIGHT, _TOP, HEIGHT - _BOTTOM, WIDTH, HEIGHT

    def __init__(self, epochs: Sequence[int], low: float, high: float, scale: Scale) -> None:
        self.name = scale.name
        values = ticks(low, high)
        self._low, self._high, self._first = values[0], values[-1], epochs[0]
        self._slot = (self.right - self.left) / max(4, epochs[-1] - epochs[0] + 1)
        self.bar = round(max(1.0, self._slot * (0.66 if len(epochs) <= 60 else 1.0)), 1)
        self.grid = [(self.y(value), scale.number(value)) for value in values]
        self.columns = [(self.x(epoch), epoch) for epoch in epochs[:: -(-len(epochs) // 12)]]

    def x(self, epoch: int) -> float:
        """Returns the middle of an epoch."""
        return round(self.left + (epoch - self._first + 0.5) * self._slot, 1)

    def y(self, value: float) -> float:
        """Returns the position of a value, from the top."""
        share = (min(max(value, self._low), self._high) - self._low) / (self._high - self._low)
        return round(self.bottom - share * (self.bottom - self.top), 1)


def _chart(frame: _Frame | None, series: Sequence[Series], rule: float | None = None, **marks: Sequence[Any]) -> str:
    """Returns a chart as markup; without a frame, the sentence that there is nothing to draw."""
    names = ", ".join(each.name for each in series if each.is_known)
    height = None if rule is None or frame is None else frame.y(rule)
    return _fill("chart.svg", frame=frame, names=names, rule=height, **{"lines": (), "dots": (), "bars": (), **marks})


def _runs(epochs: Sequence[int], values: Sequence[float | None]) -> list[list[tuple[int, float]]]:
    """Returns the stretches without a gap."""
    runs: list[list[tuple[int, float]]] = [[]]
    for epoch, value in zip(epochs, values, strict=True):
        if value is not None:
            runs[-1].append((epoch, value))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


# ── numbers as text ─────────────────────────────────────────────────────────────────────────────────────────────────


def _plain(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _percent(value: float | None) -> str:
    return "" if value is None else percent(value)


def _short(value: float) -> str:
    for factor, unit in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if abs(value) >= factor:
            scale = 1e3 if unit == " k" else factor
            return f"{value / scale:,.4g}{unit}"
    return f"{value:,.4g}"


def _seconds(value: float) -> str:
    return f"{value:,.3g} s"


def _numbers(name: str) -> Scale:
    return Scale(name, _short, _short)


def _shares(name: str) -> Scale:
    return Scale(f"{name}, %", lambda share: f"{100 * share:g}", percent)


_SECONDS = Scale("seconds of a rank", _short, _seconds)
