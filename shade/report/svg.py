"""Small charts as SVG text: lines over epochs, and bars that stack. No library, no script, no file beside the page.

A chart is drawn with classes, not colours: the page's style sheet has two sets of them, for light and for dark. Every
mark carries a ``<title>``, which browsers show under the pointer and readers read aloud. The price of doing without a
library is that there is nothing to zoom; the numbers stand in the table below and in ``epochs.csv``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 10, 8, 26
_MOST_MARKS = 80
"""Points of a line that are marked; more would be a smear."""

Format = Callable[[float], str]


@dataclass(frozen=True)
class Series:
    """One quantity over epochs."""

    name: str
    colour: str
    """A class of the page's style sheet: ``c1`` … ``c6``."""
    values: Sequence[float | None]
    """One an epoch; None leaves a gap."""

    @property
    def is_known(self) -> bool:
        """Whether there is anything to draw."""
        return any(value is not None for value in self.values)


def line_chart(epochs: Sequence[int], series: Sequence[Series], form: Format, *, top: float | None = None) -> str:
    """Lines with a mark at each epoch.

    Args:
        epochs: Numbers, ascending.
        series: Drawn in this order.
        form: How a value is written.
        top: Where the axis ends, and it then begins at 0; None: around the values.

    Returns:
        An ``<svg>`` element, or a sentence where nothing is known.
    """
    known = [value for each in series for value in each.values if value is not None]
    if not known:
        return _EMPTY
    low, high = (0.0, top) if top is not None else (min(known), max(known))
    frame = _Frame(epochs, low, high, form)
    body = [frame.axes()]
    for each in series:
        for run in _runs(epochs, each.values):
            points = " ".join(f"{frame.x(e):.1f},{frame.y(v):.1f}" for e, v in run)
            body.append(f'<polyline class="line {each.colour}" points="{points}"/>')
            if len(epochs) <= _MOST_MARKS:
                body += [
                    f'<circle class="mark {each.colour}" cx="{frame.x(e):.1f}" cy="{frame.y(v):.1f}" r="3">'
                    f"<title>{escape(each.name)}, epoch {e}: {escape(form(v))}</title></circle>"
                    for e, v in run
                ]
    return _svg(body, series)


def bar_chart(epochs: Sequence[int], series: Sequence[Series], form: Format, *, rule: float | None = None) -> str:
    """Bars, one an epoch, the series on top of each other.

    Args:
        epochs: Numbers, ascending.
        series: From the bottom to the top.
        form: How a value is written.
        rule: Where a dashed line is drawn across, if anywhere.

    Returns:
        As `line_chart`.
    """
    heights = [sum(each.values[n] or 0.0 for each in series) for n in range(len(epochs))]
    if not any(each.is_known for each in series):
        return _EMPTY
    frame = _Frame(epochs, 0.0, max([*heights, rule or 0.0]), form)
    body = [frame.axes()]
    for number, epoch in enumerate(epochs):
        floor = 0.0
        for each in series:
            value = each.values[number]
            if not value:
                continue
            y, bottom = frame.y(floor + value), frame.y(floor)
            body.append(
                f'<rect class="bar {each.colour}" x="{frame.x(epoch) - frame.bar / 2:.1f}" y="{y:.1f}" '
                f'width="{frame.bar:.1f}" height="{max(bottom - y, 0.5):.1f}">'
                f"<title>{escape(each.name)}, epoch {epoch}: {escape(form(value))}</title></rect>"
            )
            floor += value
    if rule is not None:
        y = frame.y(rule)
        body.append(f'<line class="rule" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
    return _svg(body, series)


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers that span an axis.

    Args:
        low: Smallest value.
        high: Largest; may be the same.
        most: About how many.

    Returns:
        At least two, ascending, the first ≤ low and the last ≥ high.
    """
    span = (high - low) or abs(high) or 1.0
    magnitude = 10.0 ** math.floor(math.log10(span / most))
    step = next(s * magnitude for s in (1, 2, 2.5, 5, 10, 20) if span / (s * magnitude) <= most)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [n * step for n in range(first, max(last, first + 1) + 1)]


_EMPTY = '<p class="none">nothing of this in the run</p>'


class _Frame:
    """Where a value lies in the picture."""

    def __init__(self, epochs: Sequence[int], low: float, high: float, form: Format) -> None:
        self._ticks, self._form = ticks(low, high), form
        self._low, self._high = self._ticks[0], self._ticks[-1]
        self._epochs = epochs
        self._slot = (WIDTH - _LEFT - _RIGHT) / max(4, epochs[-1] - epochs[0] + 1)
        self.bar = max(1.0, self._slot * (0.66 if len(epochs) <= 60 else 1.0))

    def x(self, epoch: int) -> float:
        """Middle of an epoch."""
        return _LEFT + (epoch - self._epochs[0] + 0.5) * self._slot

    def y(self, value: float) -> float:
        """Height of a value, from the top."""
        share = (min(max(value, self._low), self._high) - self._low) / (self._high - self._low)
        return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)

    def axes(self) -> str:
        """Grid, and numbers at it."""
        lines = []
        for value in self._ticks:
            y = self.y(value)
            lines.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            lines.append(_text(_LEFT - 7, y + 3.5, "end", self._form(value)))
        every = -(-len(self._epochs) // 12)
        lines += [_text(self.x(epoch), HEIGHT - 8, "middle", str(epoch)) for epoch in self._epochs[::every]]
        return "".join(lines)


def _text(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text class="tick" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _runs(epochs: Sequence[int], values: Sequence[float | None]) -> list[list[tuple[int, float]]]:
    """The stretches without a gap."""
    runs: list[list[tuple[int, float]]] = [[]]
    for epoch, value in zip(epochs, values, strict=True):
        if value is not None:
            runs[-1].append((epoch, value))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _svg(body: Sequence[str], series: Sequence[Series]) -> str:
    names = ", ".join(each.name for each in series if each.is_known)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(names)} by epoch">{"".join(body)}</svg>'
