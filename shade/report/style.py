"""Has one colour for each meaning and one form for each kind of number, for all texts, pages and pictures of a run.

A chart names a meaning and never a colour. Plain loading, which was not measured, is a dashed line in every figure.
"""

from __future__ import annotations

from typing import Final

PALETTE: Final[dict[str, tuple[str, str]]] = {
    "run": ("#22303c", "#e6ecf1"),
    "training": ("#2f6fb0", "#6aa9e6"),
    "validation": ("#d97f1f", "#f0a54f"),
    "step": ("#c4a02c", "#e3c766"),
    "origin": ("#c24a33", "#ea7b64"),
    "cache": ("#2f8a5d", "#5fc394"),
    "decode": ("#7d5aa6", "#b393dd"),
    "transform": ("#3f93b5", "#74c1df"),
    "wait": ("#94a1ad", "#7d8a96"),
    "rest": ("#ccd5dd", "#46525d"),
    "snapshots": ("#c2528b", "#e58ab6"),
    "gradient": ("#7a5233", "#c49a78"),
}
"""Meaning → its colour on light and on dark paper."""


def percent(share: float) -> str:
    """Returns a share as a percentage with one decimal; one that would round to zero is not called zero."""
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}"


def human_bytes(value: float) -> str:
    """Returns bytes with a unit of powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"
