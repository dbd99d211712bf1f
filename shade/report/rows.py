"""Reads ``metrics.jsonl`` and adds its rows up to one summary per epoch.

There is one row per epoch and rank, and more than one where a run was stopped and resumed within an epoch: counters and
seconds add up, of losses and accuracies the last one stands. Over ranks, counters add up; times are those of the
slowest rank (epoch) or the mean rank (stall), because ranks run side by side; loss and training accuracy are weighted
by samples. Nulls and missing fields are skipped, so a row that knows less simply says less.

The price of a file that many append to: a kill can tear its last line. Such lines are skipped and counted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from shade.errors import DataError

CAUSES = ("origin", "cache", "decode", "transform", "wait")
"""Causes of a stall; ``wait`` is the time that the others do not explain."""

COUNTERS = (
    "samples", "hits", "misses", "duplicates", "origin_reads", "origin_bytes", "cache_reads", "cache_bytes",
    "admitted", "admitted_bytes", "declined", "yielded", "corrupt", "store_errors", "bad_samples",
)  # fmt: skip
"""Fields that add up over partial rows and over ranks."""

_LAST = (
    "loss", "train_accuracy", "val_loss", "val_accuracy", "learning_rate", "resident_bytes", "capacity_bytes",
    "num_cpus",
)  # fmt: skip
"""Fields of which the last one stands for the run."""
_LARGEST = 2.0**63
"""Every figure is smaller, so that what is computed from figures is finite."""


@dataclass
class EpochSummary:
    """One epoch over all ranks; None where no row has the number."""

    epoch: int
    ranks: int
    counts: dict[str, int]
    """`COUNTERS` that at least one row held."""
    epoch_seconds: float | None
    """Time of the slowest rank."""
    stall_seconds: dict[str, float]
    """Cause → seconds of the mean rank; together, the time its training waited for data."""
    loss: float | None
    train_accuracy: float | None
    val_loss: float | None
    val_accuracy: float | None
    learning_rate: float | None
    resident_bytes: float | None
    """Held at the end of the epoch; the largest number of any rank, because ranks share one cache."""
    capacity_bytes: float | None
    receipt: dict[str, Any]
    step_seconds: float | None = None
    """The script had a batch in hand: mean rank."""
    busy_seconds: dict[str, float] = field(default_factory=dict)
    """Cause → time spent on it, summed over all workers of all ranks; they run side by side."""
    num_cpus: int | None = None
    """Cores that the ranks of a machine may use."""
    snapshot_seconds: float | None = None
    """The training waited for snapshots: slowest rank."""
    gradient_bytes: float | None = None
    """Sent by all ranks together; None where gradients went whole."""

    @property
    def hit_ratio(self) -> float | None:
        """Returns hits / (hits + misses): the share of samples whose bytes did not come from the origin."""
        hits, misses = self.counts.get("hits"), self.counts.get("misses")
        return None if hits is None or misses is None or hits + misses == 0 else hits / (hits + misses)

    @property
    def samples_per_second(self) -> float | None:
        """Returns samples of all ranks over the epoch's time, which includes the validation if its clock does."""
        samples = self.counts.get("samples")
        return samples / self.epoch_seconds if samples is not None and self.epoch_seconds else None

    @property
    def rest_seconds(self) -> float | None:
        """Returns the time that was neither step nor stall: validation, end of the epoch; None if one is unknown."""
        if self.epoch_seconds is None or self.step_seconds is None:
            return None
        return max(0.0, self.epoch_seconds - self.step_seconds - sum(self.stall_seconds.values()))


@dataclass
class Run:
    """A run directory, read."""

    directory: Path
    plan: dict[str, Any]
    """``run.json``, free form; empty when there is none."""
    epochs: list[EpochSummary] = field(default_factory=list)
    num_torn: int = 0
    """Lines that were not JSON: torn by a kill, and left out."""
    snapshots: dict[str, float] = field(default_factory=dict)
    """``saves``, ``failed``, ``blocked_seconds`` of the slowest rank, ``committed_step``, ``durable_step``, as far as
    rows have them."""
    num_samples: int | None = None
    """N, the size of the data set, from the last row with ``num_samples``, else from the plan."""
    gradient: dict[str, float] = field(default_factory=dict)
    """Some of the gradient engine's counts, each of the rank that has most; empty where gradients went whole."""
    cached_format: dict[str, Any] = field(default_factory=dict)
    """``form``, and the predicted and measured seconds and hit ratio of a sample, the median of the measured ones;
    empty where no prediction was made."""

    def total(self, name: str) -> int | None:
        """Returns a counter over all epochs; None if no epoch has it."""
        return self.whole.counts.get(name)

    @cached_property
    def whole(self) -> EpochSummary:
        """Returns the run as one row: counts and seconds are sums; losses, accuracies and the cache are the last
        known."""
        last: dict[str, Any] = {}
        for name in _LAST:
            last[name] = next((v for e in reversed(self.epochs) if (v := getattr(e, name)) is not None), None)
        return EpochSummary(
            epoch=self.epochs[-1].epoch,
            ranks=max(e.ranks for e in self.epochs),
            counts=_totals(e.counts for e in self.epochs),
            epoch_seconds=_total(e.epoch_seconds for e in self.epochs),
            stall_seconds=_totals(e.stall_seconds for e in self.epochs),
            receipt=self.epochs[-1].receipt,
            step_seconds=_total(e.step_seconds for e in self.epochs),
            busy_seconds=_totals(e.busy_seconds for e in self.epochs),
            snapshot_seconds=_total(e.snapshot_seconds for e in self.epochs),
            gradient_bytes=_total(e.gradient_bytes for e in self.epochs),
            **last,
        )


def load_run(directory: str | os.PathLike[str]) -> Run:
    """Reads a run directory, epochs ascending; raises `DataError` without ``metrics.jsonl`` or an epoch row in it."""
    directory = Path(directory)
    path = directory / "metrics.jsonl"
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError.of(
            "metrics.jsonl in a run directory", str(directory), f"{error.strerror}: name a run"
        ) from None
    rows, saves, num_torn = [], [], 0
    for line in lines:
        row = _parse(line)
        saves += [row] if row is not None and isinstance(row.get("checkpoint"), dict) else []
        if row is not None and row.get("kind", "epoch") == "epoch" and isinstance(_number(row.get("epoch")), int):
            rows.append(row)
        elif row is None and line.strip():
            num_torn += 1
    if not rows:
        raise DataError.of("at least one finished epoch", f"{path.name} with none", "let the run finish an epoch")
    try:
        plan = json.loads((directory / "run.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        plan = {}
    plan = plan if isinstance(plan, dict) else {}
    by_epoch: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        by_epoch.setdefault(row["epoch"], []).append(row)
    summaries = [_summarize(epoch, by_epoch[epoch]) for epoch in sorted(by_epoch)]
    num_samples = _last([plan, *rows], "num_samples")
    samples = int(num_samples) if num_samples else None
    return Run(directory, plan, summaries, num_torn, _snapshots(saves), samples, _gradient(rows), _cached_format(rows))


def _cached_format(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the form that was used, what was predicted of it, and the median of what was measured."""
    known = [row for row in rows if isinstance(row.get("form"), str)]
    found: dict[str, Any] = {"form": known[-1]["form"]} if known else {}
    for name in ("seconds_per_sample", "hit_ratio"):
        found[f"predicted_{name}"] = _last(known, f"predicted_{name}")
        measured = [value for row in known if (value := _number(row.get(f"measured_{name}"))) is not None]
        found[f"measured_{name}"] = median(measured) if measured else None
    return found if all(value is not None for value in found.values()) else {}


def _snapshots(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the counts of rank 0, the wait of the slowest rank, the newest steps."""
    by_rank: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        by_rank.setdefault(_rank(row), []).append(row["checkpoint"])
    first = by_rank.get(0, [])
    known = {
        "saves": _sum(first, "saves"),
        "failed": _sum(first, "failed"),
        "blocked_seconds": _largest(_sum(each, "blocked_seconds") for each in by_rank.values()),
        "committed_step": _last(first, "committed_step"),
        "durable_step": _last(first, "durable_step"),
    }
    return {name: value for name, value in known.items() if value is not None}


def _gradient(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Returns sums over the run, each of the rank that has most of it."""
    by_rank: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        sums = row.get("gradient")
        if isinstance(sums, dict) and sums.get("gradient_steps"):
            by_rank.setdefault(_rank(row), []).append(sums)
    names = ("gradient_steps", "gradient_chosen", "gradient_elements", "gradient_bytes_sent", "gradient_wait_seconds")
    known = {name: _largest(_sum(each, name) for each in by_rank.values()) for name in names}
    return {name: value for name, value in known.items() if value is not None}


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _summarize(epoch: int, rows: list[dict[str, Any]]) -> EpochSummary:
    by_rank: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        by_rank.setdefault(_rank(row), []).append(row)
    parts = list(by_rank.values())
    counts = {name: int(total) for name in COUNTERS if (total := _sum(rows, name)) is not None}
    stalls = _inner(rows, "stall_seconds")
    stall_seconds = {c: total / len(parts) for c in CAUSES if (total := _sum(stalls, c)) is not None}
    return EpochSummary(
        epoch=epoch,
        ranks=len(parts),
        counts=counts,
        epoch_seconds=_largest(_sum(part, "epoch_seconds") for part in parts),
        stall_seconds=stall_seconds,
        loss=_weighted(parts, "loss"),
        train_accuracy=_weighted(parts, "train_accuracy"),
        val_loss=_mean(_last(part, "val_loss") for part in parts),
        val_accuracy=_mean(_last(part, "val_accuracy") for part in parts),
        learning_rate=_last(rows, "learning_rate"),
        resident_bytes=_largest(_last(part, "resident_bytes") for part in parts),
        capacity_bytes=_largest(_last(part, "capacity_bytes") for part in parts),
        receipt=next((row["receipt"] for row in reversed(rows) if isinstance(row.get("receipt"), dict)), {}),
        step_seconds=_mean(_sum(part, "step_seconds") for part in parts),
        busy_seconds={c: total for c in CAUSES if (total := _sum(_inner(rows, "busy_seconds"), c)) is not None},
        num_cpus=None if (cpus := _last(rows, "cpus")) is None else int(cpus),
        snapshot_seconds=_largest(_sum(_inner(part, "checkpoint"), "blocked_seconds") for part in parts),
        gradient_bytes=_sum(_inner(rows, "gradient"), "gradient_bytes_sent"),
    )


def _inner(rows: Iterable[Mapping[str, Any]], name: str) -> list[dict[str, Any]]:
    """Returns the objects that rows hold under a name."""
    return [row[name] for row in rows if isinstance(row.get(name), dict)]


def _number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and abs(value) < _LARGEST else None


def _rank(row: Mapping[str, Any]) -> int:
    return int(_number(row.get("rank")) or 0)


def _sum(rows: Iterable[Mapping[str, Any]], name: str) -> float | None:
    known = [value for row in rows if (value := _number(row.get(name))) is not None]
    return sum(known) if known else None


def _last(rows: list[dict[str, Any]], name: str) -> float | None:
    return next((value for row in reversed(rows) if (value := _number(row.get(name))) is not None), None)


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _total(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _totals(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the sum of each name that at least one part has."""
    sums: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            sums[name] = sums.get(name, 0) + value
    return sums


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _weighted(parts: list[list[dict[str, Any]]], name: str) -> float | None:
    """Returns the mean over ranks of each rank's last value, weighted by the samples that rank trained on."""
    pairs = [(value, _sum(part, "samples") or 0) for part in parts if (value := _last(part, name)) is not None]
    weight = sum(samples for _, samples in pairs)
    return sum(v * samples for v, samples in pairs) / weight if weight else _mean(v for v, _ in pairs)
