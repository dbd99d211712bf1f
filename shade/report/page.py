"""Writes ``report.html``: the run as one page that needs nothing else, no network, no script, no file beside it.

A reader can mail it, archive it and open it years later. It is light or dark as the reader's system is; the charts are
SVG in the page, and the contact sheet of `shade quality`, where there is one, is a picture in it.

This module computes; the templates in ``templates/`` say what the page looks like. jinja2 escapes all that they print
(paths, settings, class names): a page that you receive shows what a run was called, and does not run it. A chart
names classes instead of colours: ``style.css`` has two sets of them. Every mark has a ``<title>``, which browsers show
under the pointer and screen readers read aloud. The price of charts without a script is that nothing can be zoomed; the
numbers stand in the table below the charts and in ``epochs.csv``.
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

from shade.report.quality import CSV_FILE, SHEET_FILE
from shade.report.rows import CAUSES, Run
from shade.report.text import LEGEND, flatten, human_bytes, reads_per_n, totals

if TYPE_CHECKING:
    from jinja2 import Environment

COLOURS = {"origin": "c4", "cache": "c2", "decode": "c5", "transform": "c6", "wait": "c7", "step": "c3"}
WIDTH, HEIGHT = 560, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 10, 8, 26
_MOST_MARKS = 80
"""Points of a line that are marked; with more the marks would touch."""
_MOST_SHEET_BYTES = 8 * 2**20
_NUM_SUSPECTS = 10
_HEADS = (
    "epoch", "loss", "train acc.", "val acc.", "samples", "hit ratio", "origin reads", "reads/N", "samples/s",
    "seconds", "step", *CAUSES,
)  # fmt: skip

Format = Callable[[float], str]


@dataclass(frozen=True)
class Series:
    """One quantity over epochs."""

    name: str
    colour: str
    """A class of the style sheet: ``c1`` … ``c7``."""
    values: Sequence[float | None]
    """A value for each epoch; None leaves a gap."""

    @property
    def is_known(self) -> bool:
        """Returns whether there is anything to draw."""
        return any(value is not None for value in self.values)


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
    return _fill(
        "report.html",
        name=run.directory.resolve().name,
        subtitle=" · ".join([*named, size, str(run.directory)]),
        tiles=_tiles(run),
        figures=_figures(run),
        sentences=[line.strip() for line in totals(run)][1:],
        suspects=_suspects(run.directory),
        sheet=_sheet(run.directory),
        heads=_HEADS,
        rows=_rows(run),
        settings=flatten(run.plan),
        legend=LEGEND,
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


def _tiles(run: Run) -> Iterator[tuple[str, str]]:
    """Yields meaning and value of each known number of the last epoch, and of the run's totals."""
    last = run.epochs[-1]
    accuracy = next((e.val_accuracy for e in reversed(run.epochs) if e.val_accuracy is not None), None)
    stalls, seconds = last.stall_seconds, last.epoch_seconds
    waited = sum(stalls.values()) / seconds if stalls and seconds else None
    known = {
        "hit ratio, last epoch": _percent(last.hit_ratio),
        "origin reads / N, last epoch": _plain(reads_per_n(run, last), ".3f"),
        "samples/s, last epoch": _plain(last.samples_per_second, ",.0f"),
        "of the last epoch spent waiting for data": _percent(waited),
        "validation accuracy": _percent(accuracy),
        "training loss": _plain(last.loss, ".4g"),
        "snapshots": _plain(run.snapshots.get("saves"), ",.0f"),
    }
    sent = sum(e.gradient_bytes or 0.0 for e in run.epochs)
    if sent:
        known["of gradients sent"] = human_bytes(sent)
    return ((meaning, value) for meaning, value in known.items() if value)


def _figures(run: Run) -> Iterator[Figure]:
    """Yields the charts for which the run has numbers."""
    epochs = [e.epoch for e in run.epochs]

    def of(name: str, colour: str, values: Iterable[float | None]) -> Series:
        return Series(name, colour, list(values))

    hits = [of("hit ratio", "c3", (e.hit_ratio for e in run.epochs))]
    yield Figure("Hit ratio", hits, line_chart(epochs, hits, _percent_of, top=1.0))
    reads = [of("origin reads", "c4", (e.counts.get("origin_reads") for e in run.epochs))]
    rule = float(run.num_samples) if run.num_samples else None
    dashed = f"dashed: N = {run.num_samples:,}, what an epoch without a cache reads" if run.num_samples else ""
    yield Figure("Origin reads", reads, bar_chart(epochs, reads, _short, rule=rule), dashed)
    speed = [of("samples/s", "c1", (e.samples_per_second for e in run.epochs))]
    highest = max((v for v in speed[0].values if v is not None), default=0.0)
    yield Figure("Throughput, samples/s", speed, line_chart(epochs, speed, _short, top=highest or 1.0))
    spent = [of(cause, COLOURS[cause], (e.stall_seconds.get(cause) for e in run.epochs)) for cause in CAUSES]
    spent.insert(0, of("step", COLOURS["step"], (e.step_seconds for e in run.epochs)))
    caption = "step: the script had its batch; the others: it waited for one, while loading was busy with …"
    yield Figure("Where the time went, seconds a rank", spent, bar_chart(epochs, spent, _seconds), caption)
    yield from _curves(run, epochs, "Loss", "loss", "val_loss", _short, None)
    yield from _curves(run, epochs, "Accuracy", "train_accuracy", "val_accuracy", _percent_of, 1.0)
    blocked = [of("waited for snapshots", "c2", (e.snapshot_seconds for e in run.epochs))]
    if any(e.snapshot_seconds for e in run.epochs):
        yield Figure("Snapshots: time the training waited", blocked, bar_chart(epochs, blocked, _seconds))
    sent = [of("sent", "c5", (e.gradient_bytes for e in run.epochs))]
    if sent[0].is_known:
        yield Figure("Gradients sent, all ranks", sent, bar_chart(epochs, sent, human_bytes))


def _curves(
    run: Run, epochs: Sequence[int], title: str, training: str, validation: str, form: Format, top: float | None
) -> Iterator[Figure]:
    """Yields the chart of a quantity that training and validation have, if either is known."""
    series = [
        Series("training", "c1", [getattr(e, training) for e in run.epochs]),
        Series("validation", "c2", [getattr(e, validation) for e in run.epochs]),
    ]
    if any(each.is_known for each in series):
        yield Figure(title, series, line_chart(epochs, series, form, top=top))


def _rows(run: Run) -> Iterator[list[str]]:
    """Yields the cells of each epoch, in the order of `_HEADS`; an unknown number is empty."""
    for e in run.epochs:
        yield [
            str(e.epoch), _plain(e.loss, ".4f"), _percent(e.train_accuracy), _percent(e.val_accuracy),
            _plain(e.counts.get("samples"), ","), _percent(e.hit_ratio), _plain(e.counts.get("origin_reads"), ","),
            _plain(reads_per_n(run, e), ".3f"), _plain(e.samples_per_second, ",.0f"), _plain(e.epoch_seconds, ",.2f"),
            _plain(e.step_seconds, ",.2f"), *(_plain(e.stall_seconds.get(cause), ",.2f") for cause in CAUSES),
        ]  # fmt: skip


def _suspects(directory: Path) -> list[list[str]]:
    """Returns the first rows of `shade quality`; empty if it was not run, or wrote something else."""
    try:
        with (directory / CSV_FILE).open(newline="", encoding="utf-8", errors="replace") as file:
            rows = [row for row, _ in zip(csv.DictReader(file), range(_NUM_SUSPECTS), strict=False)]
        return [
            [row["suspicion"], row["confidence"], row["usual_confidence"], row["target"], row["sample"] or row["index"]]
            for row in rows
        ]
    except (OSError, csv.Error, KeyError):
        return []


def _sheet(directory: Path) -> str:
    """Returns the contact sheet of `shade quality` in base64; empty if there is none, or it is too large for a page."""
    try:
        picture = (directory / SHEET_FILE).read_bytes()
    except OSError:
        return ""
    return base64.b64encode(picture).decode() if len(picture) <= _MOST_SHEET_BYTES else ""


# ── charts ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def line_chart(epochs: Sequence[int], series: Sequence[Series], form: Format, *, top: float | None = None) -> str:
    """Returns lines with a mark at each epoch as an ``<svg>`` element, or a sentence where nothing is known.

    The axis runs from 0 to `top`, or without `top` over the values. `form` writes a value as text.
    """
    known = [value for each in series for value in each.values if value is not None]
    if not known:
        return _chart(None, series)
    low, high = (0.0, top) if top is not None else (min(known), max(known))
    frame = _Frame(epochs, low, high, form)
    lines, dots = [], []
    for each in series:
        for run in _runs(epochs, each.values):
            lines.append((each.colour, [(frame.x(epoch), frame.y(value)) for epoch, value in run]))
            dots += [
                (each.colour, frame.x(epoch), frame.y(value), f"{each.name}, epoch {epoch}: {form(value)}")
                for epoch, value in run
            ]
    return _chart(frame, series, lines=lines, dots=dots if len(epochs) <= _MOST_MARKS else ())


def bar_chart(epochs: Sequence[int], series: Sequence[Series], form: Format, *, rule: float | None = None) -> str:
    """Returns bars, one an epoch, with the series on top of each other, as `line_chart` does.

    A dashed line stands at `rule`, if given.
    """
    heights = [sum(each.values[n] or 0.0 for each in series) for n in range(len(epochs))]
    if not any(each.is_known for each in series):
        return _chart(None, series)
    frame = _Frame(epochs, 0.0, max([*heights, rule or 0.0]), form)
    bars = []
    for number, epoch in enumerate(epochs):
        floor = 0.0
        for each in series:
            value = each.values[number]
            if not value:
                continue
            y, bottom = frame.y(floor + value), frame.y(floor)
            left, height = round(frame.x(epoch) - frame.bar / 2, 1), round(max(bottom - y, 0.5), 1)
            bars.append((each.colour, left, y, height, f"{each.name}, epoch {epoch}: {form(value)}"))
            floor += value
    return _chart(frame, series, bars=bars, rule=None if rule is None else frame.y(rule))


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Returns about `most` round numbers, at least two, ascending, that span an axis from `low` to `high`."""
    span = (high - low) or abs(high) or 1.0
    magnitude = 10.0 ** math.floor(math.log10(span / most))
    step = next(s * magnitude for s in (1, 2, 2.5, 5, 10, 20) if span / (s * magnitude) <= most)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [n * step for n in range(first, max(last, first + 1) + 1)]


class _Frame:
    """Maps epochs and values to places in the picture, rounded to a tenth of a pixel."""

    left, right, width, height = _LEFT, WIDTH - _RIGHT, WIDTH, HEIGHT

    def __init__(self, epochs: Sequence[int], low: float, high: float, form: Format) -> None:
        values = ticks(low, high)
        self._low, self._high, self._first = values[0], values[-1], epochs[0]
        self._slot = (self.right - self.left) / max(4, epochs[-1] - epochs[0] + 1)
        self.bar = round(max(1.0, self._slot * (0.66 if len(epochs) <= 60 else 1.0)), 1)
        self.grid = [(self.y(value), form(value)) for value in values]
        self.columns = [(self.x(epoch), epoch) for epoch in epochs[:: -(-len(epochs) // 12)]]

    def x(self, epoch: int) -> float:
        """Returns the middle of an epoch."""
        return round(self.left + (epoch - self._first + 0.5) * self._slot, 1)

    def y(self, value: float) -> float:
        """Returns the place of a value, from the top."""
        share = (min(max(value, self._low), self._high) - self._low) / (self._high - self._low)
        return round(self.height - _BOTTOM - share * (self.height - _TOP - _BOTTOM), 1)


def _chart(frame: _Frame | None, series: Sequence[Series], rule: float | None = None, **marks: Sequence[Any]) -> str:
    """Returns a chart as markup; without a frame, the sentence that there is nothing to draw."""
    names = ", ".join(each.name for each in series if each.is_known)
    return _fill("chart.svg", frame=frame, names=names, rule=rule, **{"lines": (), "dots": (), "bars": (), **marks})


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
    return "" if value is None else f"{value:.1%}"


def _percent_of(value: float) -> str:
    return f"{value:.3g}" if value == 0 else f"{100 * value:.3g} %"


def _short(value: float) -> str:
    for factor, unit in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if abs(value) >= factor:
            scale = 1e3 if unit == " k" else factor
            return f"{value / scale:,.4g}{unit}"
    return f"{value:,.4g}"


def _seconds(value: float) -> str:
    return f"{value:,.3g} s"
