"""What came of `bench_strategies`, as a table a model, as JSON, and as a picture."""

from __future__ import annotations

import json
import math
import platform
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measures import percentile
from planning.goodput import goodput
from strategy_methods import CANDIDATES, leaves_modules_alone, process_of

from shade.checkpoint._pacing.schedule import best_cycle

OURS = "asymmetric"
"""The strategy that is asked about."""
AROUND = 7
"""Turns whose steps without saves a turn is compared with: its own, and those just before and after it."""
SHOWN = 3.0
"""Times the middle cost, and no more, is what a panel of the picture shows."""
SURE = 2.0
"""Standard errors of a difference, beyond which it is none of chance."""
MTBF_SECONDS = 3600.0
"""Mean time between failures, for the interval that is best and the run time that comes of it (decision 0048)."""
_MEDIAN_ERROR = 1.2533 / 1.349
"""Of a median, by the quartiles' distance and the root of the number: as for normal errors."""


@dataclass(frozen=True)
class Line:
    """One method on one model, all rounds together."""

    method: str
    num_runs: int
    stall_p50: float
    stall_p99: float
    slow_down: float
    """Median over saves of the steps' length behind it over that without one, less 1."""
    cost: float
    """Seconds a snapshot: median over saves."""
    spread: float
    """Standard error of `cost`, from what the middle half of the saves spans."""
    memory: float | None
    durable: float | None
    written: float
    """Of the state's size."""
    recovery: float | None
    read: float | None
    """Bytes read for that, of the state's size."""
    is_equal: bool
    error: float
    failed: str = ""

    def run_time(self, cost: float | None = None) -> float:
        """Returns a run's time at the best interval, over that of a run without saves and failures.

        Args:
            cost: Seconds a snapshot, > 0; None: those measured.
        """
        seconds = max(self.cost if cost is None else cost, LEAST_SECONDS)
        work = best_cycle(seconds, MTBF_SECONDS) - seconds
        return 1 / goodput(work, seconds, MTBF_SECONDS, lag_seconds=(self.durable or 0.0) - seconds)

    @property
    def run_time_error(self) -> float:
        """Standard error of `run_time`."""
        return abs(self.run_time(self.cost + self.spread) - self.run_time(self.cost - self.spread)) / 2


LEAST_SECONDS = 1e-3
"""A cost below it is noise."""
TITLE = (
    "# Our implementations of published checkpoint strategies, on our own buffer and format\n\n"
    "`excp`, `gemini`, `pccheck` and the other strategies are not their authors' code; "
    "`torchsnapshot-package`, `dcp-async` and `torch.save` are."
)
"""Says whose code is measured."""


class Report:
    """Rows of many runs.

    Args:
        rows: Of one setting.
        setting: What they have in common.
    """

    def __init__(self, rows: list[dict[str, Any]], setting: dict[str, Any]) -> None:
        rows = _with_quiet(rows)
        self.setting = setting
        self.models = list(dict.fromkeys(row["model"] for row in rows))
        self.commits = sorted({row["commit"] for row in rows})
        self.processors = sorted({row["processors"] for row in rows})
        self.saves = Counter[tuple[str, str]]()
        """Saves measured, by model and method."""
        for row in rows:
            self.saves[row["model"], row["method"]] += len(row.get("stalls", ()))
        self.lines = {model: _lines([row for row in rows if row["model"] == model]) for model in self.models}
        """By model, the least cost first; what failed last."""
        self.controls = {
            model: _line("none", [row for row in rows if row["model"] == model and row["method"] == "none"])
            for model in self.models
        }
        """Trainings that save nothing: what their pairs differ by is noise."""
        self.state_bytes = {row["model"]: row["state_bytes"] for row in rows if "state_bytes" in row}
        self.has_failed = any("failed" in row for row in rows)
        """True if a turn brought nothing."""

    def exact(self, model: str) -> list[Line]:
        """The methods that restored bit for bit, the least cost first."""
        return [line for line in self.lines[model] if not line.failed and line.is_equal]

    def best(self, model: str) -> Line | None:
        """The method of least cost among those that restored bit for bit."""
        return next(iter(self.exact(model)), None)

    def wins(self) -> list[str]:
        """Models on which ours costs least."""
        best = {model: self.best(model) for model in self.models}
        return [model for model, line in best.items() if line is not None and line.method == OURS]

    def text(self) -> str:
        """Markdown."""
        parts = [TITLE, self.about()]
        for model in self.models:
            control = self.controls[model]
            parts.append(f"## {self._heading(model)}\n\n{self._table(model)}")
            if not control.failed:
                noise = f"{1000 * control.cost:.0f} ± {1000 * control.spread:.0f} ms"
                parts.append(
                    f"Where nothing is saved, steps differ from those around by {noise} ({control.num_runs} runs)."
                )
        if len(self.models) > 1:
            parts.append(f"## All models: a snapshot of each, added up\n\n{self._overall()}")
            parts.append(f"## What the default is chosen among\n\n{self.ranking()}")
        if OURS in {line.method for lines in self.lines.values() for line in lines}:
            wins = self.wins()
            told = ", ".join(wins) or "none"
            parts.append(
                f"`{OURS}` costs least of all that restored bit for bit on {len(wins)} of {len(self.models)}: {told}. "
                f"{self._certain()}"
            )
        return "\n\n".join(parts) + "\n"

    def of_ranks(self) -> str:
        """Markdown: the tables of a model that was sharded over several ranks."""
        num_ranks = self.setting["ranks"]
        tables = [f"## {num_ranks} ranks, {self._heading(model)}\n\n{self._table(model)}" for model in self.models]
        return "\n\n".join([*tables, self.about()])

    def _heading(self, model: str) -> str:
        return f"{model}, {self.setting['size']}: {self.state_bytes.get(model, 0) / 1e6:,.1f} MB of state"

    def _certain(self) -> str:
        """What of the order of the rivals and ours is no chance."""
        cheaper, dearer, num_pairs = [], 0, 0
        for model in self.models:
            exact = self.exact(model)
            pairs = [(ours, rival) for ours in exact for rival in exact if ours.method == OURS != rival.method]
            for ours, rival in pairs:
                difference, doubt = rival.cost - ours.cost, SURE * math.hypot(rival.spread, ours.spread)
                dearer += difference > doubt
                if difference < -doubt:
                    cheaper.append(f"{rival.method} on {model}")
            num_pairs += len(pairs)
        told = ", ".join(cheaper) or "none"
        return (
            f"Of {num_pairs} comparisons with a rival on a model, {len(cheaper)} find the rival cheaper by more than "
            f"twice the difference's standard error ({told}), and {dearer} find it dearer by as much."
        )

    def _overall(self) -> str:
        """A row a method that restored bit for bit on all models."""
        found = []
        for method in dict.fromkeys(line.method for model in self.models for line in self.lines[model]):
            lines = [line for model in self.models for line in self.lines[model] if line.method == method]
            if len(lines) == len(self.models) and all(line.is_equal and not line.failed for line in lines):
                error = sum(line.spread**2 for line in lines) ** 0.5
                first = [model for model in self.models if (best := self.best(model)) and best.method == method]
                found.append((sum(line.cost for line in lines), error, method, ", ".join(first)))
        rows = [f"| {method} | {cost:.2f} ± {error:.2f} s | {first} |" for cost, error, method, first in sorted(found)]
        return "\n".join(["| method | cost | first on |", "|---|---|---|", *rows])

    def ranking(self) -> str:
        """Markdown: what the default is chosen among, the shortest run time first (decision 0048)."""
        found = []
        for method in CANDIDATES:
            lines = {m: line for m, each in self.lines.items() for line in each if line.method == method}
            if len(lines) == len(self.models) and not any(line.failed for line in lines.values()):
                figure = statistics.geometric_mean(line.run_time() for line in lines.values())
                error = math.hypot(*(line.run_time_error for line in lines.values())) / len(lines)
                found.append((figure, error, method, lines))
        found.sort(key=lambda each: each[0])
        eligible = [method for _, _, method, _ in found if leaves_modules_alone(method)]
        rows = [
            "| strategy | run time | saves | a snapshot of each | stall | may be default |",
            "|---|---|---|---|---|---|",
        ]
        for figure, error, method, lines in found:
            name = f"**{method}**" if method in eligible[:1] else method
            total, doubt = sum(each.cost for each in lines.values()), math.hypot(*(e.spread for e in lines.values()))
            stall = statistics.geometric_mean(each.stall_p50 for each in lines.values())
            rows.append(
                f"| {name} | {figure:.4f} ± {error:.4f} | {sum(self.saves[model, method] for model in self.models)} | "
                f"{total:.2f} ± {doubt:.2f} s | {1000 * stall:.0f} ms | "
                f"{'yes' if method in eligible else 'no: hooks modules'} |"
            )
        told = (
            "Run time: with a failure an hour and a save at the best interval, over a run without saves and failures. "
            "Run time and stall are geometric means over the models."
        )
        return "\n\n".join([told, "\n".join(rows)])

    def about(self) -> str:
        """Where the figures are from."""
        import torch

        setting = ", ".join(f"{name} {value}" for name, value in self.setting.items() if value)
        return (
            f"commit {', '.join(self.commits)}; {setting}; torch {torch.__version__}, Python "
            f"{platform.python_version()}, {', '.join(self.processors)}"
        )

    def _table(self, model: str) -> str:
        best = self.best(model)
        rows = [
            "| method | runs | stall p50 | p99 | slow-down | cost a snapshot | memory | durable | written | recovery "
            "| read | equal |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        for line in self.lines[model]:
            if line.failed:
                reason = line.failed.splitlines()[-1].replace("|", "/")[:120]
                rows.append(f"| {line.method} | 0 | failed: {reason} | | | | | | | | | |")
                continue
            name = f"**{line.method}**" if line is best else line.method
            rows.append(
                f"| {name} | {line.num_runs} | {1000 * line.stall_p50:.1f} ms | {1000 * line.stall_p99:.1f} ms | "
                f"{100 * line.slow_down:+.1f} % | {1000 * line.cost:.0f} ± {1000 * line.spread:.0f} ms | "
                f"{seconds(line.memory)} | {seconds(line.durable)} | {line.written:.2f} × | {seconds(line.recovery)} | "
                f"{'' if line.read is None else f'{line.read:.2f} ×'} | "
                f"{'' if line.recovery is None else sameness(line.is_equal, line.error)} |"
            )
        return "\n".join(rows)

    def write(self, out: Path) -> None:
        """Writes strategies.md, strategies.json and strategies.png."""
        out.mkdir(parents=True, exist_ok=True)
        (out / "strategies.md").write_text(self.text())
        found = {model: [vars(line) for line in lines] for model, lines in self.lines.items()}
        whole = {"about": self.about(), "setting": self.setting, "state_bytes": self.state_bytes, "models": found}
        (out / "strategies.json").write_text(json.dumps(whole, indent=1) + "\n")
        self.plot(out / "strategies.png")

    def plot(self, path: Path) -> None:
        """A panel a model: what a snapshot costs, stalls and slow-down, by method. What is far dearer than the middle
        is cut off, with its figure beside it."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(13, 3.6 * ((len(self.models) + 2) // 3)), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots((len(self.models) + 2) // 3, 3, squeeze=False).flatten()
        for panel in panels[len(self.models) :]:
            panel.set_axis_off()
        for panel, model in zip(panels, self.models, strict=False):
            lines = [line for line in self.lines[model] if not line.failed][::-1]
            names = [line.method if line.is_equal else f"{line.method} (lossy)" for line in lines]
            stalls = [1000 * line.stall_p50 for line in lines]
            rest = [max(0.0, 1000 * (line.cost - line.stall_p50)) for line in lines]
            panel.barh(names, stalls, color="#c44", label="stall")
            panel.barh(names, rest, left=stalls, color="#48a", label="slower steps")
            costs = [1000 * line.cost for line in lines]
            panel.errorbar(costs, names, xerr=[1000 * line.spread for line in lines], fmt="none", color="#222", lw=0.8)
            limit = SHOWN * statistics.median(costs)
            for name, cost in zip(names, costs, strict=True):
                if cost > limit:
                    panel.text(limit, name, f"{cost / 1000:.1f} s → ", ha="right", va="center", color="w", size=7)
            panel.set(title=model, xlabel="cost a snapshot, ms", xlim=(0, limit))
            panel.tick_params(labelsize=7)
            panel.grid(axis="x", alpha=0.3)
        panels[0].legend(fontsize="small")
        figure.savefig(path, dpi=110)


def _lines(rows: list[dict[str, Any]]) -> list[Line]:
    """Of one model, every method that saves."""
    methods = sorted({row["method"] for row in rows if row["method"] != "none"})
    lines = [_line(method, [row for row in rows if row["method"] == method]) for method in methods]
    return sorted(lines, key=lambda line: (bool(line.failed), line.cost))


def _line(method: str, rows: list[dict[str, Any]]) -> Line:
    sound = [row for row in rows if "failed" not in row]
    if not sound:
        reason = next((row["failed"] for row in rows), "not run")
        return Line(method, 0, 0.0, 0.0, 0.0, 0.0, 0.0, None, None, 0.0, None, None, False, 0.0, reason)
    restored = [row for row in sound if "equal" in row]
    saves = [(behind, row["quiet"]) for row in sound for behind, _ in row["pairs"]]
    costs = [behind - quiet for behind, quiet in saves]
    stalls = [stall for row in sound for stall in row["stalls"]] or [0.0]
    return Line(
        method,
        len(sound),
        statistics.median(stalls),
        percentile(stalls, 0.99),
        statistics.median(behind / quiet - 1 for behind, quiet in saves),
        statistics.median(costs),
        spread(costs),
        middle(each for row in sound for each in row["committed"]),
        middle(each for row in sound for each in row["durable"]),
        statistics.median(row["written_bytes"] / row["state_bytes"] for row in sound),
        middle(row["recovery"] for row in restored),
        middle(row["read_bytes"] / row["state_bytes"] for row in restored if "read_bytes" in row),
        bool(restored) and all(row["equal"] for row in restored),
        max((row.get("error", 0.0) for row in restored), default=0.0),
    )


def _with_quiet(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with ``quiet``: how long as many steps without saves took in the turns around, the median.

    One such half of a pair is a draw of its own, and as far off as what is asked: seven are less so, and seven turns
    take a minute, in which a machine stays as it is.
    """
    found = []
    for row in rows:
        if "failed" not in row:
            beside = [each for each in rows if "failed" not in each and process_of(each) == process_of(row)]
            around = sorted(beside, key=lambda each: abs(each.get("at", 0.0) - row.get("at", 0.0)))[:AROUND]
            row = row | {"quiet": statistics.median(half for each in around for _, half in each["pairs"])}
        found.append(row)
    return found


def spread(values: list[float]) -> float:
    """Standard error of a median, from what the middle half of the values spans."""
    return _MEDIAN_ERROR * (percentile(values, 0.75) - percentile(values, 0.25)) / len(values) ** 0.5


def sameness(is_equal: bool, error: float) -> str:
    """For a cell: of what came back."""
    return "bit" if is_equal else f"{error:.1e}" if error else "no"


def middle(values: Any) -> float | None:
    """The median; None of nothing."""
    found = list(values)
    return statistics.median(found) if found else None


def seconds(value: float | None) -> str:
    """For a cell."""
    form: Callable[[float], str] = lambda each: f"{each:.3f} s" if each < 1 else f"{each:.2f} s"  # noqa: E731
    return "" if value is None else form(value)
