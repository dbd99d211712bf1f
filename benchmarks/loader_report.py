"""Turns the lines of `bench_loaders` into its tables and its picture; nothing here measures anything.

Figures of a method with a share of cache are medians over the second and later epochs of all its rounds. Ratios are to
the fastest setting of torch's DataLoader on the same storage. A loader whose cache has no share to set, or that has no
cache, is measured once for each storage, and its share is None.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from loader_methods import METHODS, SHARES

Rows = list[dict[str, Any]]
Figures = dict[tuple[str, float | None], dict[str, Any]]
TORCH = tuple(name for name in METHODS if name.startswith("torch-"))
OURS = tuple(name for name in METHODS if name.startswith("shade"))
UNLIMITED = ("huggingface",)
"""Loaders that keep everything and cannot be limited: compared where all is cached."""
CLOSE = 0.9
"""A loader with this part of the fastest one's samples/s is not clearly behind it."""
HEAD = "| loader | in cache | samples/s | spread | epochs | ratio | first, s | CPU, ms | opens/N | bytes/all |"


def runs_of(name: str, shares: list[float]) -> list[float | None]:
    """The shares of cache that a method is measured with."""
    own = METHODS[name][1].shares
    return [None] if own is None else [share for share in shares if share in own]


def summary(rows: Rows, storage: str) -> Figures:
    """(method, share) → its figures, or ``{"why": …}`` where there are none."""
    found: Figures = {}
    here = [row for row in rows if row["storage"] == storage]
    for name in METHODS:
        for share in sorted({row["share"] for row in here if row["method"] == name}, key=lambda each: each or 0):
            mine = [row for row in here if (row["method"], row["share"]) == (name, share)]
            later = [row for row in mine if row.get("epoch", -1) >= 1]
            if later:
                found[name, share] = _figures(later, [row for row in mine if row.get("epoch") == 0])
            elif mine and "why" in mine[-1]:
                found[name, share] = {"why": mine[-1]["why"]}
    return found


def _figures(later: Rows, first: Rows) -> dict[str, Any]:
    def median(of: Any, rows: Rows = later) -> float:
        return float(statistics.median(of(row) for row in rows))

    rates = sorted(row["samples"] / row["seconds"] for row in later)
    return {
        "rate": median(lambda row: row["samples"] / row["seconds"]),
        "lowest": rates[0],
        "highest": rates[-1],
        "first_epoch_seconds": median(lambda row: row["seconds"], first),
        "cpu_milliseconds_per_sample": 1000 * median(lambda row: row["cpu_seconds"] / row["samples"]),
        "opens_per_sample": median(lambda row: row["opens"] / row["num_samples"]),
        "bytes_share": median(lambda row: row["bytes"] / row["num_bytes"]),
        "epochs": len(later),
    }


def fastest(figures: Figures, names: tuple[str, ...], shares: tuple[float | None, ...]) -> tuple[str, float] | None:
    """The fastest of some methods at some shares, and its samples/s; None if none of them was measured."""
    rates = {
        name: each["rate"]
        for (name, share), each in figures.items()
        if name in names and share in shares and "why" not in each
    }
    return max(rates.items(), key=lambda each: each[1]) if rates else None


def contenders(figures: Figures) -> set[tuple[str, float | None]]:
    """Returns what the rules compare, and what is not clearly behind it: see `bench_loaders`."""
    groups = [(TORCH, (None,)), *((rivals(share), (None, share)) for share in SHARES)]
    found: set[tuple[str, float | None]] = {("shadeloader-pillow", 0.0), *(("shadeloader", share) for share in SHARES)}
    for names, shares in groups:
        best = fastest(figures, names, shares)
        found |= {
            (name, share)
            for (name, share), each in figures.items()
            if best and name in names and share in shares and each.get("rate", 0.0) >= CLOSE * best[1]
        }
    return found


def rivals(share: float) -> tuple[str, ...]:
    """Returns the loaders of others that are compared at a share."""
    return tuple(name for name in METHODS if name not in OURS and (share == 1 or name not in UNLIMITED))


def label(share: float | None) -> str:
    """A share of cache in words."""
    return {None: "", 0.0: "nothing", 1.0: "all"}.get(share, f"{share or 0:.0%}")


def report(rows: Rows) -> str:
    """Markdown: what each part brings, who is ahead, and a table for each storage."""
    storages = list(dict.fromkeys(row["storage"] for row in rows))
    figures = {storage: summary(rows, storage) for storage in storages}
    lines = ["## What each part brings", "", *parts(figures), "", "## Who is ahead at equal cache", "", *ahead(figures)]
    for storage in storages:
        base = fastest(figures[storage], TORCH, (None,))
        lines += ["", f"## {storage}", "", HEAD, "|---|" + "---|" * 9]
        for (name, share), each in figures[storage].items():
            start = f"| {METHODS[name][0]} | {label(share)} |"
            if "why" in each:
                lines.append(f"{start} {each['why']} | | | | | | | |")
                continue
            ratio = f"{each['rate'] / base[1]:.2f}×" if base else ""
            lines.append(
                f"{start} {each['rate']:.0f} | {each['lowest']:.0f}–{each['highest']:.0f} | {each['epochs']} | "
                f"{ratio} | {each['first_epoch_seconds']:.1f} | {each['cpu_milliseconds_per_sample']:.2f} | "
                f"{each['opens_per_sample']:.2f} | {each['bytes_share']:.2f} |"
            )
    return "\n".join(lines)


def parts(figures: dict[str, Figures]) -> list[str]:
    """A row for each storage: ShadeLoader over torch at its best, and the factors that this is made of."""
    lines = [
        "| storage | fastest torch | ShadeLoader, 20 % over it | pipeline, Pillow | decoder | cache of 20 % | of all |",
        "|---|---|---|---|---|---|---|",
    ]
    for storage, each in figures.items():
        base = fastest(each, TORCH, (None,))
        rates = [
            fastest(each, (name,), (share,))
            for name, share in (
                ("shadeloader-pillow", 0.0), ("shadeloader", 0.0), ("shadeloader", 0.2), ("shadeloader", 1.0)
            )
        ]  # fmt: skip
        if base is None or None in rates:
            continue
        pillow, none, fifth, whole = (found[1] for found in rates if found)
        lines.append(
            f"| {storage} | {METHODS[base[0]][0]}: {base[1]:.0f} | {fifth / base[1]:.2f}× | {pillow / base[1]:.2f}× | "
            f"{none / pillow:.2f}× | {fifth / none:.2f}× | {whole / none:.2f}× |"
        )
    return lines


def ahead(figures: dict[str, Figures]) -> list[str]:
    """A row for each storage and share: ShadeLoader and the fastest of all others."""
    lines = ["| storage | in cache | ShadeLoader | fastest other | ratio |", "|---|---|---|---|---|"]
    for storage, each in figures.items():
        for share in sorted({share for _, share in each if share is not None}):
            ours, other = fastest(each, ("shadeloader",), (share,)), fastest(each, rivals(share), (None, share))
            if ours and other:
                lines.append(
                    f"| {storage} | {label(share)} | {ours[1]:.0f} | {METHODS[other[0]][0]}: {other[1]:.0f} | "
                    f"{ours[1] / other[1]:.2f}× |"
                )
    return lines


def plot(rows: Rows, path: Path) -> None:
    """Samples/s of every method with a fifth in cache or without a share, a panel for each storage."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    storages = list(dict.fromkeys(row["storage"] for row in rows))
    figure, axes = pyplot.subplots(
        1, len(storages), figsize=(6 * len(storages), 8), squeeze=False, layout="constrained", sharey=True
    )
    for axis, storage in zip(axes.flat, storages, strict=True):
        measured = {
            name: each
            for (name, share), each in summary(rows, storage).items()
            if share in (None, 0.2) and "why" not in each
        }
        for name, each in measured.items():
            rate = each["rate"]
            axis.barh(
                METHODS[name][0].replace("*", "").replace("`", ""),
                rate,
                xerr=[[rate - each["lowest"]], [each["highest"] - rate]],
                color="tab:orange" if name in OURS else "tab:green" if name in TORCH else "tab:blue",
            )
        axis.set(title=storage, xlabel="samples/s, second and later epochs")
    axes.flat[0].invert_yaxis()
    figure.suptitle("a fifth of the data set in cache, where a loader has one")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
