"""Draws a run as one picture of four panels over one axis of epochs: reads, time, loss, accuracy.

Needs matplotlib, imported only when a picture is drawn; without it the report says so. The
figure is built on its own canvas (no pyplot), so no global state, window or display is touched.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shade.installation import install_hint
from shade.report.rows import CAUSES, EpochSummary, Run
from shade.report.style import PALETTE, percent
from shade.report.text import reads_per_n

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#22303c", "#6b7a88", "#e4e9ee"


def write_png(run: Run, path: Path) -> str:
    """Draws the run; returns a line for the report if nothing could be drawn, else an empty text."""
    figure = _figure(_title(run), 7.6)
    if figure is None:
        return _not_drawn(path)
    (reads, spent), (loss, accuracy) = figure.subplots(2, 2, sharex=True)
    _draw_reads(reads, run)
    _draw_spent(spent, run)
    _draw_lines(loss, run, "Loss", "loss, mean of a sample", {"training": "loss", "validation": "val_loss"})
    curves = {"training": "train_accuracy", "validation": "val_accuracy"}
    _draw_lines(accuracy, run, "Accuracy", "accuracy, %", curves, percent)
    figure.savefig(path, metadata={"Software": None})
    return ""


def write_comparison(plain: Run, cached: Run, path: Path) -> str:
    """Draws a run without shade and one through it in one picture; returns as `write_png` does."""
    figure = _figure("The same training, with a plain DataLoader and through shade", 4.2)
    if figure is None:
        return _not_drawn(path)
    panels: list[tuple[str, str, Callable[[EpochSummary], float | None]]] = [
        ("Time", "seconds an epoch", lambda e: e.epoch_seconds),
        ("Read from storage", "KiB an epoch", lambda e: e.counts.get("origin_bytes", 0) / 1024),
        ("Validation accuracy", "accuracy, %", lambda e: None if e.val_accuracy is None else 100 * e.val_accuracy),
    ]
    for axes, (title, unit, value_of) in zip(figure.subplots(1, 3, sharex=True), panels, strict=True):
        _style(axes, title, unit, cached)
        for run, label in ((plain, "plain DataLoader"), (cached, "shade")):
            x, y = _points(run, [value_of(e) for e in run.epochs])
            _line(axes, x, y, "run", label, dashed=run is plain)
        if axes is not figure.axes[-1]:
            axes.set_ylim(bottom=0)
        _legend(axes)
    figure.savefig(path, metadata={"Software": None})
    return ""


def _not_drawn(path: Path) -> str:
    return f"No {path.name}: matplotlib is not installed; {install_hint('report')} brings it."


def _figure(title: str, height: float) -> Figure | None:
    """Returns an empty figure, 12 inches wide, or None without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError:
        return None
    layout = ConstrainedLayoutEngine(w_pad=0.16, h_pad=0.14, wspace=0.03, hspace=0.05)
    figure = Figure(figsize=(12, height), dpi=110, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.013, ha="left", fontsize=14, fontweight="bold", color=INK)
    return figure


def _title(run: Run) -> str:
    named = [str(run.plan[key]) for key in ("network", "sampling", "policy") if isinstance(run.plan.get(key), str)]
    epochs, ranks = len(run.epochs), max(e.ranks for e in run.epochs)
    size = f"{epochs} epoch{'s' * (epochs > 1)}, {ranks} rank{'s' * (ranks > 1)}"
    return "  ·  ".join(["shade", *(named or [run.directory.resolve().name]), size])


def _style(axes: Axes, title: str, unit: str, run: Run) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=26)
    axes.set_facecolor("white")
    axes.grid(axis="y", color=GRID, linewidth=1)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.tick_params(colors=MUTED, labelsize=9, length=0, labelbottom=True)
    axes.set_xlabel("epoch", fontsize=9, color=MUTED)
    axes.set_ylabel(unit, fontsize=9, color=MUTED)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    first, last = run.epochs[0].epoch, run.epochs[-1].epoch
    axes.set_xlim(first - 0.6, max(last, first + 3) + 0.6)


def _legend(axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(
            handles, labels, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=len(labels), frameon=False,
            fontsize=9, labelcolor=MUTED, handlelength=0.9, columnspacing=0.8, handletextpad=0.5, borderaxespad=0.3,
            borderpad=0.1,
        )  # fmt: skip


def _bar_width(run: Run) -> float:
    return 0.62 if len(run.epochs) <= 40 else 1.0


def _empty(axes: Axes, what: str) -> None:
    axes.text(0.5, 0.5, f"no {what} in this run", transform=axes.transAxes, ha="center", color=MUTED, fontsize=10)
    axes.set_yticks([])


def _points(run: Run, values: list[Any]) -> tuple[list[int], list[float]]:
    known = [(e.epoch, v) for e, v in zip(run.epochs, values, strict=True) if v is not None]
    return [x for x, _ in known], [y for _, y in known]


def _line(axes: Axes, x: list[int], y: list[float], meaning: str, label: str, *, dashed: bool = False) -> None:
    from matplotlib.patheffects import Normal, Stroke

    marker = "o" if len(x) <= 40 else ""
    halo = [Stroke(linewidth=4, foreground="white"), Normal()]
    colour, style = (MUTED, (0, (4, 3))) if dashed else (PALETTE[meaning][0], "-")
    axes.plot(
        x, y, color=colour, linestyle=style, linewidth=2, marker=marker, markersize=4.5, markeredgewidth=0,
        label=label, path_effects=halo,
    )  # fmt: skip


def _draw_reads(axes: Axes, run: Run) -> None:
    _style(axes, "Reads", "%", run)
    x, reads = _points(run, [reads_per_n(run, e) for e in run.epochs])
    hit_x, hit_ratio = _points(run, [e.hit_ratio for e in run.epochs])
    if not x and not hit_x:
        _empty(axes, "reads")
        return
    if x:
        label, width = f"origin reads, % of N = {run.num_samples:,}", _bar_width(run)
        axes.bar(x, [100 * v for v in reads], width=width, color=PALETTE["origin"][0], label=label)
    _line(axes, hit_x, [100 * v for v in hit_ratio], "cache", "hit ratio, % of samples")
    axes.set_ylim(0, max([104.0, *(104 * v for v in reads)]))
    _legend(axes)


def _draw_spent(axes: Axes, run: Run) -> None:
    _style(axes, "Where the time went", "seconds of a rank", run)
    x = [e.epoch for e in run.epochs]
    parts = {
        "step": [e.step_seconds for e in run.epochs],
        **{cause: [e.stall_seconds.get(cause) for e in run.epochs] for cause in CAUSES},
        "rest": [e.rest_seconds for e in run.epochs],
    }
    floor = [0.0] * len(x)
    for name, heights in parts.items():
        known = [height or 0.0 for height in heights]
        if any(known):
            axes.bar(x, known, bottom=floor, width=_bar_width(run), color=PALETTE[name][0], label=name)
            floor = [a + b for a, b in zip(floor, known, strict=True)]
    if not any(floor):
        _empty(axes, "times")
    _legend(axes)


def _draw_lines(
    axes: Axes, run: Run, title: str, unit: str, curves: dict[str, str], form: Callable[[float], str] = "{:.3g}".format
) -> None:
    _style(axes, title, unit, run)
    scale = 100 if form is percent else 1
    for meaning, name in curves.items():
        x, y = _points(run, [getattr(e, name) for e in run.epochs])
        if x:
            _line(axes, x, [scale * v for v in y], meaning, f"{meaning}, last {form(y[-1])}")
    if not axes.lines:
        _empty(axes, title.lower())
    axes.margins(y=0.14)
    _legend(axes)
