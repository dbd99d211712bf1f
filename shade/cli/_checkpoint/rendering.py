"""Renders replays: a table for the terminal, and a plot of the goodput over the interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from shade.checkpoint._pacing.schedule import goodput
from shade.cli._checkpoint.replay import Habit, Outcome
from shade.errors import ConfigError

HEADER = (
    "strategy", "every", "stall", "cost", "safe", "kept", "lost", "saving", "recovering", "down", "lost/failure",
    "expected",
)  # fmt: skip
"""``cost`` is stall and drag; ``expected`` is the closed form for failures at random times."""


def expected(habit: Habit, mtbf_seconds: float) -> float:
    """Returns the expected goodput for failures at random times without down time."""
    prediction, cost = habit.prediction, habit.cost_seconds
    return goodput(
        habit.work_seconds,
        cost,
        mtbf_seconds,
        lag_seconds=prediction.landed_seconds - cost,
        recover_seconds=prediction.recover_seconds,
    )


def rows(outcomes: Sequence[Outcome], mtbf_seconds: float) -> list[list[str]]:
    """Returns the cells of a table, heading first.

    Args:
        outcomes: In the order of the table.
        mtbf_seconds: Of the trace.

    Returns:
        As many lines as outcomes, and one.
    """
    found = [list(HEADER)]
    for outcome in outcomes:
        prediction, total = outcome.habit.prediction, outcome.total_seconds
        shares = (outcome.lost_seconds, outcome.saving_seconds, outcome.recovering_seconds, outcome.down_seconds)
        lost = f"{outcome.lost_seconds / outcome.num_failures:.1f} s" if outcome.num_failures else "-"
        found.append(
            [
                outcome.habit.name,
                str(outcome.habit.every_steps),
                f"{prediction.stall_seconds:.3f} s",
                f"{outcome.habit.cost_seconds:.3f} s",
                f"{prediction.landed_seconds:.2f} s",
                f"{100 * outcome.goodput:.3f} %",
                *(f"{100 * share / total:.3f} %" for share in shares),
                lost,
                f"{100 * expected(outcome.habit, mtbf_seconds):.3f} %",
            ]
        )
    return found


def plot(curves: Mapping[str, Sequence[Outcome]], path: Path) -> None:
    """Plots the goodput over the seconds between two saves, one line per strategy.

    Raises ConfigError if matplotlib is not installed, or the path cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError.of(
            "matplotlib, to draw a plot", None, "pip install shade[report], or use the table"
        ) from None
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    for name, outcomes in curves.items():
        seconds = [outcome.habit.work_seconds for outcome in outcomes]
        panel.plot(seconds, [100 * outcome.goodput for outcome in outcomes], marker=".", label=name)
    panel.set(xscale="log", xlabel="training between two saves, s", ylabel="time that ends up as training, %")
    panel.grid(alpha=0.3)
    panel.legend(fontsize="small")
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigError.of("a --plot that can be written", f"{path}: {error}", "name a .png") from None
