"""Draws a run as one picture of four panels: reads, stalls, loss, accuracy.

Needs matplotlib, imported only when a picture is drawn; without it the report says so. The
figure is built on its own canvas (no pyplot), so no global state, window or display is touched.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shade.installation import install_hint
from shade.report.rows import CAUSES, EpochSummary, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#22303c", "#6b7a88", "#e4e9ee"
PALE, BLUE, ORANGE, GREEN, RED = "#c9d8e8", "#2f6fb0", "#e08a2e", "#3c9a6b", "#c8553d"
STALL_COLOURS = {"origin": RED, "cache": ORANGE, "decode": "#8d6bb1", "transform": "#5aa5c8", "wait": "#9aa7b2"}


def write_png(run: Run, path: Path) -> str:
    """Draws the run; returns a line for the report if nothing could be drawn, else an empty text."""
    figure = _figure(_title(run), 7.6)
    if figure is None:
        return _not_drawn(path)
    (reads, stall), (loss, accuracy) = figure.subplots(2, 2)
    _draw_reads(reads, run)
    _draw_stalls(stall, run)
    _draw_lines(loss, run, "Loss", {"training": ("loss", BLUE), "validation": ("val_loss", ORANGE)})
    _draw_lines(
        accuracy, run, "Accuracy, %",
        {"training": ("train_accuracy", BLUE), "validation": ("val_accuracy", ORANGE)}, scale=100.0,
    )  # fmt: skip
    figure.savefig(path, metadata={"Software": None})
    return ""


def write_comparison(plain: Run, cached: Run, path: Path) -> str:
    """Draws a run without shade and one through it in one picture; returns as `write_png` does."""
    figure = _figure("The same training, with a plain DataLoader and through shade", 4.2)
    if figure is None:
        return _not_drawn(path)
    panels: list[tuple[str, Callable[[EpochSummary], float | None]]] = [
        ("Seconds an epoch", lambda e: e.epoch_seconds),
        ("Read from storage, KiB an epoch", lambda e: e.counts.get("origin_bytes", 0) / 1024),
        ("Validation accuracy, %", lambda e: None if e.val_accuracy is None else 100 * e.val_accuracy),
    ]
    for axes, (title, value_of) in zip(figure.subplots(1, 3), panels, strict=True):
        _style(axes, title, cached)
        for run, colour, label in ((plain, ORANGE, "plain DataLoader"), (cached, BLUE, "shade")):
            x, y = _points(run, [value_of(e) for e in run.epochs])
            _line(axes, x, y, colour, label)
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


def _style(axes: Axes, title: str, run: Run) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=26)
    axes.set_facecolor("white")
    axes.grid(axis="y", color=GRID, linewidth=1)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.tick_params(colors=MUTED, labelsize=9, length=0)
    axes.set_xlabel("epoch", fontsize=9, color=MUTED)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    first, last = run.epochs[0].epoch, run.epochs[-1].epoch
    axes.set_xlim(first - 0.6, max(last, first + 3) + 0.6)


def _legend(axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(
            handles, labels, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=len(labels), frameon=False,
            fontsize=9, labelcolor=MUTED, handlelength=1.1, columnspacing=1.2, borderaxespad=0.3, borderpad=0.1,
        )  # fmt: skip


def _bar_width(run: Run) -> float:
    return 0.62 if len(run.epochs) <= 40 else 1.0


def _empty(axes: Axes, what: str) -> None:
    axes.text(0.5, 0.5, f"no {what} in this run", transform=axes.transAxes, ha="center", color=MUTED, fontsize=10)
    axes.set_yticks([])


def _points(run: Run, values: list[Any]) -> tuple[list[int], list[float]]:
    known = [(e.epoch, v) for e, v in zip(run.epochs, values, strict=True) if v is not None]
    return [x for x, _ in known], [y for _, y in known]


def _line(axes: Axes, x: list[int], y: list[float], colour: str, label: str) -> None:
    marker = "o" if len(x) <= 40 else ""
    axes.plot(x, y, color=colour, linewidth=2, marker=marker, markersize=4.5, markeredgewidth=0, label=label)


def _draw_reads(axes: Axes, run: Run) -> None:
    _style(axes, "Reads", run)
    x, reads = _points(run, [e.counts.get("origin_reads") for e in run.epochs])
    hit_x, hit_ratio = _points(run, [e.hit_ratio for e in run.epochs])
    if not x and not hit_x:
        _empty(axes, "reads")
        return
    _line(axes, hit_x, [100 * v for v in hit_ratio], GREEN, "hit ratio, % (left)")
    axes.set_ylim(0, 104)
    bars = axes.twinx()
    bars.bar(x, reads, width=_bar_width(run), color=PALE)
    axes.bar([run.epochs[0].epoch], [0], color=PALE, label="origin reads (right)")
    bars.set_ylim(0, max([*reads, run.num_samples or 0, 1]) * 1.04)
    bars.spines[["top", "right", "left", "bottom"]].set_visible(False)
    bars.tick_params(colors=MUTED, labelsize=9, length=0)
    bars.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    if run.num_samples:
        bars.axhline(run.num_samples, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        bars.annotate(
            f"N = {run.num_samples:,}", (1, run.num_samples), xycoords=("axes fraction", "data"),
            xytext=(-4, -4), textcoords="offset points", ha="right", va="top", fontsize=8, color=MUTED,
        )  # fmt: skip
    axes.set_zorder(bars.get_zorder() + 1)
    axes.patch.set_visible(False)
    _legend(axes)


def _draw_stalls(axes: Axes, run: Run) -> None:
    _style(axes, "Stall, seconds per rank", run)
    x = [e.epoch for e in run.epochs]
    floor = [0.0] * len(x)
    for cause in CAUSES:
        heights = [e.stall_seconds.get(cause, 0.0) for e in run.epochs]
        if any(heights):
            axes.bar(x, heights, bottom=floor, width=_bar_width(run), color=STALL_COLOURS[cause], label=cause)
            floor = [a + b for a, b in zip(floor, heights, strict=True)]
    if not any(floor):
        _empty(axes, "stall")
    _legend(axes)


def _draw_lines(axes: Axes, run: Run, title: str, curves: dict[str, tuple[str, str]], scale: float = 1.0) -> None:
    _style(axes, title, run)
    for label, (name, colour) in curves.items():
        x, y = _points(run, [getattr(e, name) for e in run.epochs])
        if x:
            _line(axes, x, [scale * v for v in y], colour, f"{label}, last {scale * y[-1]:.3g}")
    if not axes.lines:
        _empty(axes, title.split(",")[0].lower())
    axes.margins(y=0.14)
    _legend(axes)
