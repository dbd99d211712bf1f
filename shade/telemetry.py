"""Carries what was counted and timed to where somebody can read it.

`Histogram` keeps a distribution in 48 integers; a sink (`JsonlSink`, `TensorBoardSink`, `prometheus_text`) carries a
snapshot out, and `join_pages` makes one Prometheus page of several. What is counted is declared where it is counted
(`shade.cache.ledger`), each name with the sentence that says how to read it, and that sentence travels to the reader:
it is the ``# HELP`` line in Prometheus.

Why this way: the hot path is one integer addition per batch, nothing is formatted until an epoch ends, and no thread
runs in the background. The price: a histogram knows a value only to within a factor of two, and a row that the disk
refuses is lost (and counted), because a metric must never stop a training.

Invariant: a row is one line, written by one ``os.write`` in append mode, so ranks on one machine may share a file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shade.errors import ConfigError


class Histogram:
    """How a positive quantity is distributed, in buckets that double: 1 µs, 2 µs … 4 years.

    The first bucket also takes what is smaller, the last what is larger.
    Histograms of different ranks add up exactly, which percentiles do not.
    """

    EDGES: npt.NDArray[np.float64] = np.ldexp(1.0, np.arange(-20, 28))
    """Upper edge of each bucket, inclusive."""

    def __init__(self) -> None:
        self.bucket_counts: npt.NDArray[np.int64] = np.zeros(len(self.EDGES), dtype=np.int64)
        """Values per bucket, not cumulated. A second hump far right of the first is a slow path, not noise."""
        self.total = 0.0
        """Sum of all values; ``total / count`` is the exact mean."""
        self.largest = 0.0
        """The worst value ever seen, exact; p99 may be far below it."""

    @property
    def count(self) -> int:
        """How many values came in."""
        return int(self.bucket_counts.sum())

    def observe(self, value: float) -> None:
        """Takes in one value; zero and negative ones land in the first bucket.

        Args:
            value: Finite.

        Raises:
            ValueError: The value is not finite; nothing was changed.
        """
        if not math.isfinite(value):
            raise ValueError(f"expected a finite value, got {value!r}; a clock or a division upstream is broken")
        bucket = min(int(np.searchsorted(self.EDGES, value)), len(self.EDGES) - 1)
        self.bucket_counts[bucket] += 1
        self.total += value
        self.largest = max(self.largest, value)

    def quantile(self, fraction: float) -> float:
        """An upper bound of the quantile, less than twice the true one, never above the largest value; 0 if empty."""
        if not self.count:
            return 0.0
        wanted = max(math.ceil(fraction * self.count), 1)
        bucket = int(np.searchsorted(np.cumsum(self.bucket_counts), wanted))
        last = bucket == len(self.EDGES) - 1
        return self.largest if last else min(float(self.EDGES[bucket]), self.largest)

    @property
    def p50(self) -> float:
        """What a usual one takes."""
        return self.quantile(0.50)

    @property
    def p99(self) -> float:
        """What the slowest in a hundred takes: with a hundred steps an epoch, felt once in each."""
        return self.quantile(0.99)

    def merge(self, other: Histogram) -> None:
        """Adds another's values."""
        self.bucket_counts += other.bucket_counts
        self.total += other.total
        self.largest = max(self.largest, other.largest)


def jsonable(value: Any) -> Any:
    """Plain JSON: numpy scalars and arrays unwrapped, nan and infinities as None, anything else unknown as text."""
    if isinstance(value, Mapping):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [jsonable(v) for v in value]
    if isinstance(value, (np.generic, np.ndarray)):
        return jsonable(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


class JsonlSink:
    """Appends rows to a JSON-lines file that several ranks, and several runs one after the other, may share.

    Makes the file's folder. A line that a kill has torn is ended when the next sink opens the file: it spoils no other.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.lost_rows = 0
        """Rows that the disk refused. Not 0: the report undercounts."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd: int | None = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size_bytes = os.fstat(self._fd).st_size
        if size_bytes and os.pread(self._fd, 1, size_bytes - 1) != b"\n":
            os.write(self._fd, b"\n")

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends one row; a row that cannot be written whole is counted in `lost_rows` and raises nothing."""
        line = (json.dumps(jsonable(row), separators=(",", ":")) + "\n").encode()
        try:
            if self._fd is None or os.write(self._fd, line) != len(line):
                self.lost_rows += 1
        except OSError:
            self.lost_rows += 1

    def close(self) -> None:
        """Closes the file. Safe to call twice."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class TensorBoardSink:
    """Writes every number of a row as a scalar over epochs, nested ones under ``outer/inner``.

    Args:
        directory: Where TensorBoard will look.

    Raises:
        ConfigError: TensorBoard is not installed.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError("TensorBoard is not installed; pip install 'shade[report]' brings it") from None
        self._writer = SummaryWriter(str(directory))

    def write(self, row: Mapping[str, Any]) -> None:
        """Adds the row's numbers at the step ``row["epoch"]``, under the row's rank."""
        self._add(f"rank{row.get('rank', 0)}", row, int(row.get("epoch", 0)))

    def _add(self, tag: str, row: Mapping[str, Any], step: int) -> None:
        for name, value in jsonable(row).items():
            if isinstance(value, dict):
                self._add(f"{tag}/{name}", value, step)
            elif isinstance(value, (int, float)) and name not in ("epoch", "rank"):
                self._writer.add_scalar(f"{tag}/{name}", value, step)

    def close(self) -> None:
        """Writes out what is buffered and closes."""
        self._writer.close()


def prometheus_text(
    counts: Mapping[str, float],
    meaning: Mapping[str, str],
    histograms: Mapping[str, Histogram] | None = None,
    labels: Mapping[str, object] | None = None,
    gauges: Mapping[str, float] | None = None,
) -> str:
    """Renders a snapshot in the Prometheus text format, every name under ``shade_``.

    Args:
        counts: Totals that only grow; become ``shade_<name>_total``.
        meaning: Name → the sentence that says how to read it: the ``# HELP`` line.
        histograms: Name (unit included) → histogram; empty leading and trailing buckets are left out.
        labels: Put on every line: ``{"rank": 0}``.
        gauges: What is so now and may fall again; become ``shade_<name>``. One that is not finite is left out.

    Returns:
        The page, ending in a newline.
    """
    quoted = [f"{k}={json.dumps(str(v), ensure_ascii=False)}" for k, v in (labels or {}).items()]
    suffix = f"{{{','.join(quoted)}}}" if quoted else ""
    lines: list[str] = []
    totals = [(f"{name}_total", "counter", name, value) for name, value in counts.items()]
    now = [(name, "gauge", name, value) for name, value in (gauges or {}).items() if math.isfinite(value)]
    for shown, kind, name, value in [*totals, *now]:
        text = meaning[name].replace("\\", "\\\\").replace("\n", "\\n")
        lines += [f"# HELP shade_{shown} {text}", f"# TYPE shade_{shown} {kind}"]
        lines.append(f"shade_{shown}{suffix} {value!r}")
    for name, histogram in (histograms or {}).items():
        lines.append(f"# TYPE shade_{name} histogram")
        cumulative = np.cumsum(histogram.bucket_counts)
        for edge, below, here in zip(histogram.EDGES[:-1], cumulative, histogram.bucket_counts, strict=False):
            if here:
                bucket = ",".join([*quoted, f'le="{edge:g}"'])
                lines.append(f"shade_{name}_bucket{{{bucket}}} {below}")
        infinite = ",".join([*quoted, 'le="+Inf"'])
        lines.append(f"shade_{name}_bucket{{{infinite}}} {histogram.count}")
        lines += [f"shade_{name}_sum{suffix} {histogram.total!r}", f"shade_{name}_count{suffix} {histogram.count}"]
    return "\n".join(lines) + "\n"


def join_pages(pages: Iterable[str]) -> str:
    """One page out of several ranks': the lines of a metric together under one header, as the format wants it.

    Args:
        pages: From `prometheus_text`, with labels that tell them apart.

    Returns:
        The page.
    """
    headers: dict[str, dict[str, None]] = {}
    samples: dict[str, list[str]] = {}
    for page in pages:
        family = ""
        for line in page.splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                headers.setdefault(family, {})[line] = None
            else:
                samples.setdefault(family, []).append(line)
    lines = [line for family in headers for line in (*headers[family], *samples.get(family, ()))]
    return "".join(f"{line}\n" for line in lines)
