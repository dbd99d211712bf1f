"""Turns the lines of `bench_loaders` into its table and its picture; nothing here measures anything.

A case is one data set behind one storage with one share of cache. Figures of a method are medians over the second and
later epochs of all its rounds, ratios are to torch's DataLoader with two workers in the same case. Who cannot be told
a share is measured with one of them, and stands in all tables.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from loader_methods import METHODS

Rows = list[dict[str, Any]]
BASE = next(iter(METHODS))
OURS = tuple(name for name in METHODS if name.startswith("shade"))
BARS = {"local disk": 2.5, "2 ms, 100 MB/s": 4.0, "20 ms, 25 MB/s": 6.0}
"""Samples/s over the base that ShadeLoader is to reach on the large images with a fifth in cache."""


def case_of(row: dict[str, Any]) -> tuple[str, str, float]:
    """What a line belongs to."""
    return row["data"], row["storage"], row["share"]


def is_told_share(name: str) -> bool:
    """Whether a method is measured with every share of cache: who can be told it, and the base."""
    return name == BASE or METHODS[name][1].has_share


def summary(rows: Rows) -> dict[tuple[str, str, float], dict[str, dict[str, Any]]]:
    """Case → method → its figures, or ``{"why": …}`` where there are none."""
    found: dict[tuple[str, str, float], dict[str, dict[str, Any]]] = {}
    for case in dict.fromkeys(map(case_of, rows)):
        here = [
            row
            for row in rows
            if case_of(row)[:2] == case[:2] and (row["share"] == case[2] or not is_told_share(row["method"]))
        ]
        methods = found.setdefault(case, {})
        for name in METHODS:
            mine = [row for row in here if row["method"] == name]
            later = [row for row in mine if row.get("epoch", -1) >= 1]
            if later:
                methods[name] = _figures(later, [row for row in mine if row.get("epoch") == 0])
            elif mine and "why" in mine[-1]:
                methods[name] = {"why": mine[-1]["why"]}
    return found


def _figures(later: Rows, first: Rows) -> dict[str, Any]:
    def median(of: Any, rows: Rows = later) -> float:
        return float(statistics.median(of(row) for row in rows))

    rates = sorted(row["samples"] / row["seconds"] for row in later)
    return {
        "samples_per_second": median(lambda row: row["samples"] / row["seconds"]),
        "lowest": rates[0],
        "highest": rates[-1],
        "epoch_seconds": median(lambda row: row["seconds"]),
        "first_epoch_seconds": median(lambda row: row["seconds"], first),
        "cpu_milliseconds_per_sample": 1000 * median(lambda row: row["cpu_seconds"] / row["samples"]),
        "opens_per_sample": median(lambda row: row["opens"] / row["num_samples"]),
        "bytes_share": median(lambda row: row["bytes"] / row["num_bytes"]),
        "epochs": len(later),
    }


def table(rows: Rows) -> str:
    """Markdown: a part for each case."""
    lines: list[str] = []
    for (data, storage, share), methods in summary(rows).items():
        cached = "all of it in cache" if share == 1 else f"{share:.0%} in cache"
        lines += [
            "",
            f"## {data}, {storage}, {cached}",
            "",
            "| loader | samples/s | spread | epochs | ratio | epoch, s | first, s | CPU, ms | opens/N | bytes/all |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        base = methods.get(BASE, {}).get("samples_per_second")
        for name, each in methods.items():
            if "why" in each:
                lines.append(f"| {METHODS[name][0]} | {each['why']} | | | | | | | | |")
                continue
            rate = each["samples_per_second"]
            ratio = f"{rate / base:.2f}×" if base else ""
            lines.append(
                f"| {METHODS[name][0]} | {rate:.0f} | {each['lowest']:.0f}–{each['highest']:.0f} | "
                f"{each['epochs']} | {ratio} | {each['epoch_seconds']:.1f} | {each['first_epoch_seconds']:.1f} | "
                f"{each['cpu_milliseconds_per_sample']:.2f} | {each['opens_per_sample']:.2f} | "
                f"{each['bytes_share']:.2f} |"
            )
        lines += ["", verdict(data, storage, share, methods)]
    return "\n".join(lines[1:])


def verdict(data: str, storage: str, share: float, methods: dict[str, dict[str, Any]]) -> str:
    """One sentence: how far ahead ours is, whether that meets the bar, and who is ahead of it."""
    rates = {name: each["samples_per_second"] for name, each in methods.items() if "why" not in each}
    ours = {name: rate for name, rate in rates.items() if name in OURS}
    if not ours or BASE not in rates:
        return "Not measured yet."
    best = max(ours, key=lambda name: ours[name])
    ahead = [METHODS[name][0] for name, rate in rates.items() if name not in OURS and rate > ours[best]]
    ratio = ours[best] / rates[BASE]
    bar = BARS.get(storage) if share < 1 and "400" in data else None
    met = "" if bar is None else f" (bar: {bar}×, {'met' if ratio >= bar else '**missed**'})"
    who = f"Ahead of it: {', '.join(ahead)}." if ahead else "No peer is ahead of it."
    return f"Best of ours: {METHODS[best][0]}, {ratio:.2f}×{met}. {who}"


def plot(rows: Rows, path: Path) -> None:
    """Samples/s of every method, a panel for each case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = summary(rows)
    columns = min(3, len(cases))
    height = -(-len(cases) // columns)
    figure, axes = pyplot.subplots(
        height, columns, figsize=(6 * columns, 4.5 * height), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(cases) :]:
        axis.remove()
    for axis, ((data, storage, share), methods) in zip(axes.flat, cases.items(), strict=False):
        measured = {name: each for name, each in methods.items() if "why" not in each}
        names = [METHODS[name][0].replace("*", "") for name in measured]
        rates = [each["samples_per_second"] for each in measured.values()]
        errors = [
            [rate - each["lowest"] for rate, each in zip(rates, measured.values(), strict=True)],
            [each["highest"] - rate for rate, each in zip(rates, measured.values(), strict=True)],
        ]
        colours = ["tab:orange" if name in OURS else "tab:blue" for name in measured]
        axis.barh(names, rates, xerr=errors, color=colours)
        axis.invert_yaxis()
        axis.set(title=f"{data}\n{storage}, cache {share:.0%}", xlabel="samples/s, second and later epochs")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
