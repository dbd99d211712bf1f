"""The table and plot of `bench_gradient`, from the lines that it wrote: quality, costs, and which way is right where.

Invariant: everything here can be made again from the lines alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from measures import standard_error

Lines = Sequence[dict[str, Any]]


class Row(NamedTuple):
    """A row of the table."""

    label: str
    flags: tuple[str, ...]
    """The flags with which `train_gradient` is started."""
    hidden: float
    """Share of a step's compute beside which the exchange may run: 1 if it is one step late, 2/3, the backward pass, if
    it goes in buckets, 0 if it begins after it."""
    on_processor: bool = False
    """True: its own work needs a processor. False: an accelerator does it, and a step's time leaves it out."""
    is_offered: bool = True
    """False: no library has it, so it only separates two effects, and is never the right choice."""


_SPARSE = ("--method", "engine", "--compressor", "threshold-v", "--correction")
BASE, NONE = "ddp", "none"
ROWS = {
    NONE: Row("no exchange", ("--method", "none"), 0),
    BASE: Row("DDP, float32", ("--method", "ddp"), 2 / 3),
    "ddp-bf16": Row("DDP, bf16 hook", ("--method", "ddp-bf16"), 2 / 3),
    "powersgd": Row("DDP, PowerSGD rank 4", ("--method", "powersgd4"), 0),
    "powersgd late": Row("PowerSGD rank 4, one step late", ("--method", "powersgd4-late"), 1, is_offered=False),
    "diloco 4": Row("DiLoCo, bf16, H = 4", ("--method", "diloco-bf16", "--inner-steps", "4"), 0),
    "diloco 20": Row("DiLoCo, bf16, H = 20", ("--method", "diloco-bf16", "--inner-steps", "20"), 0),
    "engine now": Row("shade, engine, 3 %, not late", (*_SPARSE, "--density", "0.03", "--staleness", "0"), 2 / 3, True),
    "engine now 1 %": Row(
        "shade, engine, 1 %, not late", (*_SPARSE, "--density", "0.01", "--staleness", "0"), 2 / 3, True
    ),
    "engine": Row("shade, engine, 3 %, one step late", (*_SPARSE, "--density", "0.03", "--staleness", "1"), 1, True),
    "engine 1 %": Row(
        "shade, engine, 1 %, one step late", (*_SPARSE, "--density", "0.01", "--staleness", "1"), 1, True
    ),
}
"""In the order in which one of several that are about as fast is the right choice: the plainest first."""
LEAST_POINTS = 1.0
"""What no exchange must lose for a quality to say something, and the most that a right choice may lose."""
ABOUT_AS_FAST = 1.05
SLOWEST, FASTEST, FINENESS = 1e6, 1e11, 1.01
"""Bandwidths that are looked at, in bits per second."""


class Cost(NamedTuple):
    """The costs of a way on every rank, in the mean of its steps."""

    hidden: float
    """As in `Row`."""
    own_seconds: float
    """CPU time beside that of a step without exchange."""
    num_bytes: float
    """Sent or received, whichever is more."""

    def step_seconds(self, compute: float, bandwidth: float) -> float:
        """Computes how long a step takes.

        Args:
            compute: Seconds of forward and backward.
            bandwidth: Bits per second that a rank can send, and receive, at once.
        """
        exchange = self.own_seconds + 8 * self.num_bytes / bandwidth
        return (1 - self.hidden) * compute + max(self.hidden * compute, exchange)


def tried(lines: Lines, task: str, row: str) -> dict[tuple[float, float], float]:
    """Returns the quality by rates, inner and outer, of a row's tuning; 0 where the training diverged."""
    some = (line for line in lines if (line["stage"], line["task"], line["row"]) == ("tuning", task, row))
    return {(line["lr"], line["outer_lr"]): 0.0 if math.isnan(line["loss"]) else line["accuracy"] for line in some}


def best(lines: Lines, task: str, row: str) -> tuple[float, float]:
    """Returns the rates, inner and outer, with which a row was best in its tuning; the bf16 hook takes DDP's."""
    found = tried(lines, task, BASE if row == "ddp-bf16" else row)
    if not found:
        raise SystemExit(f"bench_gradient: expected rates of {row} on {task}, found none; run the stage tuning first")
    return max(found, key=found.__getitem__)


def qualities(lines: Lines) -> dict[tuple[str, int, str], dict[int, dict[str, Any]]]:
    """Returns the lines of the trainings by task, ranks and row, and in them by seed."""
    found: dict[tuple[str, int, str], dict[int, dict[str, Any]]] = {}
    for line in lines:
        if line["stage"] == "quality":
            found.setdefault((line["task"], line["ranks"], line["row"]), {})[line["number"]] = line
    return found


def points(lines: Lines, task: str, ranks: int, row: str) -> list[float]:
    """Returns how many points a row's quality is above DDP's, one for each seed that both have."""
    found = qualities(lines)
    mine, base = found.get((task, ranks, row), {}), found.get((task, ranks, BASE), {})
    return [100 * (mine[seed]["accuracy"] - base[seed]["accuracy"]) for seed in sorted(mine.keys() & base.keys())]


def costs(lines: Lines, task: str, ranks: int, on_accelerator: bool = True) -> dict[str, Cost]:
    """Returns the cost of each row that was measured; an accelerator takes over own work that needs no processor."""
    measured = {
        line["row"]: line for line in lines if (line["stage"], line["task"], line["ranks"]) == ("bytes", task, ranks)
    }
    if NONE not in measured:
        return {}
    floor = measured[NONE]["step_cpu_seconds"]
    return {
        row: Cost(
            ROWS[row].hidden,
            max(0.0, line["step_cpu_seconds"] - floor) if ROWS[row].on_processor or not on_accelerator else 0.0,
            max(line["step_bytes_sent"], line["step_bytes_received"]),
        )
        for row, line in measured.items()
    }


def candidates(lines: Lines, task: str, ranks: int) -> dict[str, Cost]:
    """Returns the cost of each row that may be the right choice: it is offered, and loses at most a point."""
    found = {}
    for row, cost in costs(lines, task, ranks).items():
        lost = points(lines, task, ranks, row)
        if row != NONE and ROWS[row].is_offered and lost and statistics.fmean(lost) >= -LEAST_POINTS:
            found[row] = cost
    return found


def right_choice(of: dict[str, Cost], compute: float, bandwidth: float) -> str:
    """Returns the plainest row that is about as fast as the fastest."""
    seconds = {row: cost.step_seconds(compute, bandwidth) for row, cost in of.items()}
    return next(row for row in ROWS if row in seconds and seconds[row] <= ABOUT_AS_FAST * min(seconds.values()))


def ranges(of: dict[str, Cost], compute: float) -> list[tuple[float, float, str]]:
    """Returns the right choice by bandwidth: from, to (bits per second), row; the ends of one are crossing points."""
    count = math.ceil(math.log(FASTEST / SLOWEST) / math.log(FINENESS))
    found: list[tuple[float, float, str]] = []
    for number in range(count):
        low, high = (SLOWEST * FINENESS**place for place in (number, number + 1))
        row = right_choice(of, compute, math.sqrt(low * high))
        if found and found[-1][2] == row:
            low = found.pop()[0]
        found.append((low, high, row))
    return found


def spell(bandwidth: float) -> str:
    """Writes bits per second with two digits."""
    unit, name = next((unit, name) for unit, name in ((1e9, "Gbit/s"), (1e6, "Mbit/s")) if bandwidth >= 0.995 * unit)
    value = float(f"{bandwidth / unit:.2g}")
    return f"{value:.{1 if value < 10 else 0}f} {name}"


def table(lines: Lines, compute: float) -> str:
    """Returns the Markdown of all that there is."""
    found: list[str] = []
    ranks = sorted({line["ranks"] for line in lines if line["stage"] != "tuning"})
    for task in dict.fromkeys(line["task"] for line in lines):
        found += [f"## {task}", "", *_networks(lines, task), *_tuning(lines, task)]
        found += [*_quality(lines, task, ranks), *_costs(lines, task, ranks), *_choices(lines, task, ranks, compute)]
        found += _time(lines, task, ranks, compute)
    return "\n".join(found)


def _networks(lines: Lines, task: str) -> list[str]:
    found = []
    for stages, name in ((("tuning", "quality"), "Quality"), (("bytes", "time"), "Costs and time")):
        some = [line for line in lines if line["task"] == task and line["stage"] in stages]
        if some:
            dead = max(line["without_gradient"] for line in some)
            size = f"{some[0]['parameters'] / 1e6:.2f} M parameters"
            found.append(f"{name}: {size}, of which {100 * dead:.2f} % at most had no gradient in three steps.")
    return [*found, ""]


def _tuning(lines: Lines, task: str) -> list[str]:
    told = []
    for row in ROWS:
        if found := tried(lines, task, row):
            inner, outer = best(lines, task, row)
            of = sorted(each[1] if outer else each[0] for each in found)
            told.append(f"{ROWS[row].label} {'outer ' if outer else ''}{outer or inner:g} (of {of[0]:g} to {of[-1]:g})")
    return ["Rates, chosen on another seed: " + "; ".join(told) + ".", ""] if told else []


def _head(first: str, ranks: Iterable[int], *names: str) -> list[str]:
    cells = [f"{name}W = {number}" for name in names or ("",) for number in ranks]
    return [f"| {first} | " + " | ".join(cells) + " |", "|---" * (1 + len(cells)) + "|"]


def _quality(lines: Lines, task: str, ranks: list[int]) -> list[str]:
    found, rows = qualities(lines), []
    for row in ROWS:
        cells = [
            _quality_cell(found.get((task, number, row), {}), points(lines, task, number, row)) for number in ranks
        ]
        if any(cells):
            rows.append(f"| {ROWS[row].label} | " + " | ".join(cell or "–" for cell in cells) + " |")
    if not rows:
        return []
    seeds = [len(by_seed) for (name, _, _), by_seed in found.items() if name == task]
    unit = "share that is right, and bits per byte" if task == "text" else "share that is right"
    note = [f"Held out, {unit}; in brackets the points above DDP with the same seed, ± their standard error."]
    note += [f"{min(seeds)} to {max(seeds)} seeds a cell. Bold: more than a point below DDP."]
    for number in ranks:
        lost = points(lines, task, number, NONE)
        if lost and -statistics.fmean(lost) < LEAST_POINTS:
            note.append(f"**With {number} ranks no exchange loses less than a point: the column says nothing.**")
    return ["### Quality", "", *_head("method", ranks), *rows, "", " ".join(note), ""]


def _quality_cell(by_seed: dict[int, dict[str, Any]], above: list[float]) -> str:
    if not by_seed:
        return ""
    text = f"{100 * statistics.fmean(line['accuracy'] for line in by_seed.values()):.2f} %"
    first = next(iter(by_seed.values()))
    if first["task"] == "text":
        text += f", {statistics.fmean(line['loss'] for line in by_seed.values()) / math.log(2):.3f} bits"
    if first["row"] == BASE or not above:
        return text
    spread = f" ± {standard_error(above):.2f}" if len(above) > 1 else ""
    text += f" ({statistics.fmean(above):+.2f}{spread})"
    return f"**{text}**" if statistics.fmean(above) < -LEAST_POINTS and first["row"] != NONE else text


def _costs(lines: Lines, task: str, ranks: list[int]) -> list[str]:
    by_ranks = {number: costs(lines, task, number, on_accelerator=False) for number in ranks}
    rows = []
    for row in ROWS:
        mine = [by_ranks[number].get(row) for number in ranks]
        if any(mine):
            cells = [f"{cost.num_bytes / 1e6:.2f}" if cost else "–" for cost in mine]
            cells += [f"{1000 * cost.own_seconds:.0f}" if cost else "–" for cost in mine]
            rows.append(f"| {ROWS[row].label} | " + " | ".join(cells) + " |")
    head = _head("method", ranks, "MB a step, ", "CPU ms a step, ")
    return ["### Costs of a rank", "", *head, *rows, ""] if rows else []


def _choices(lines: Lines, task: str, ranks: list[int], compute: float) -> list[str]:
    rows = []
    for number in ranks:
        offered = {
            row: cost for row, cost in costs(lines, task, number).items() if row != NONE and ROWS[row].is_offered
        }
        if offered:
            told = [_ranges_cell(of, compute) for of in (offered, candidates(lines, task, number))]
            rows.append(f"| {number} | {told[0]} | {told[1]} |")
    if not rows:
        return []
    head = ["| W | shortest time, whatever the quality | right choice |", "|---|---|---|"]
    note = "By bandwidth of each rank. –: no row's quality is measured."
    return [f"### Right choice, computed, for {compute:g} s of compute a step", "", *head, *rows, "", note, ""]


def _ranges_cell(of: dict[str, Cost], compute: float) -> str:
    told = []
    for low, high, row in ranges(of, compute) if of else ():
        place = f"{spell(low)} to {spell(high)}" if low > SLOWEST else f"up to {spell(high)}"
        told.append(f"{place if high < FASTEST else f'from {spell(low)}'}: {ROWS[row].label}")
    return "; ".join(told) or "–"


def _time(lines: Lines, task: str, ranks: list[int], compute: float) -> list[str]:
    some = [line for line in lines if (line["stage"], line["task"]) == ("time", task)]
    if not some:
        return ["### Time on the testbed", "", "Not measured yet: it needs a quiet machine.", ""]
    found = ["### Time on the testbed", ""]
    for rate in dict.fromkeys(line["rate"] for line in some):
        rows = []
        for row in ROWS:
            mine = {number: [line["step_seconds"] for line in some if _is(line, rate, number, row)] for number in ranks}
            if any(mine.values()):
                cells = [
                    _time_cell(seconds, costs(lines, task, number, on_accelerator=False).get(row), compute, rate)
                    for number, seconds in mine.items()
                ]
                rows.append(f"| {ROWS[row].label} | " + " | ".join(cells) + " |")
        found += [*_head(f"{rate}: s a step, spread, measured / computed", ranks), *rows, ""]
    return found


def _is(line: dict[str, Any], rate: str, ranks: int, row: str) -> bool:
    return (line["rate"], line["ranks"], line["row"]) == (rate, ranks, row)


def _time_cell(seconds: list[float], cost: Cost | None, compute: float, rate: str) -> str:
    if not seconds:
        return "–"
    median = statistics.median(seconds)
    text = f"{median:.3f} ({min(seconds):.3f} to {max(seconds):.3f})"
    return text if cost is None else f"{text}, {median / cost.step_seconds(compute, bits(rate)):.2f}"


def bits(rate: str) -> float:
    """Returns the bits per second of a rate such as 100mbit."""
    return float(rate[:-4]) * {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}[rate[-4:]]


def plot(lines: Lines, compute: float, path: Path) -> None:
    """Draws the computed time of a step by bandwidth: a row of panels a task, a panel for each number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    some = [line for line in lines if line["stage"] == "bytes"]
    tasks, ranks = list(dict.fromkeys(line["task"] for line in some)), sorted({line["ranks"] for line in some})
    size = (5 * len(ranks), 4 * len(tasks))
    figure, axes = pyplot.subplots(
        len(tasks), len(ranks), figsize=size, squeeze=False, layout="constrained", sharey=True
    )
    bandwidths = [SLOWEST * 10 ** (place / 20) for place in range(81)]
    for (y, task), (x, number) in product(enumerate(tasks), enumerate(ranks)):
        axis, may = axes[y][x], candidates(lines, task, number)
        for place, (row, cost) in enumerate(costs(lines, task, number).items()):
            if row != NONE:
                seconds = [cost.step_seconds(compute, bandwidth) for bandwidth in bandwidths]
                style = {"color": f"C{place}", "linestyle": "-" if row in may else ":"}
                axis.plot([each / 1e6 for each in bandwidths], seconds, label=ROWS[row].label, **style)
        axis.set(title=f"{task}, W = {number}", xscale="log", yscale="log", xlabel="Mbit/s")
    axes[0][0].set_ylabel("s a step (dotted: no choice)")
    axes[0][-1].legend(fontsize="small")
    figure.savefig(path, dpi=80)
    pyplot.close(figure)
