"""Writes counters and times where people and tools can read them.

`Histogram` keeps a distribution in 48 integers, to within a factor of two. `JsonlSink`, `TensorBoardSink` and
`prometheus_text` write a snapshot of the counters; `join_pages` makes one Prometheus page of several. A counter is
declared where it is counted (`shade.cache.ledger`), with a sentence that becomes the ``# HELP`` line. A row that the
disk refuses is lost and counted. Invariant: a row is one line, written by one ``os.write`` in append mode, so ranks on
one machine may share a file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shade.errors import ConfigError
from shade.installation import install_hint

if TYPE_CHECKING:
    from prometheus_client import Metric


class Histogram:
    """Counts the values of a positive quantity in buckets that double: 1 µs, 2 µs … 4 years.

    The first bucket also takes smaller values, the last one larger values.
    Histograms of different ranks add up exactly; percentiles do not.
    """

    EDGES: npt.NDArray[np.float64] = np.ldexp(1.0, np.arange(-20, 28))
    """Upper edge of each bucket, inclusive."""

    def __init__(self) -> None:
        self.bucket_counts: npt.NDArray[np.int64] = np.zeros(len(self.EDGES), dtype=np.int64)
        """Values per bucket, not cumulated. A second hump far right of the first is a slow path, not noise."""
        self.total = 0.0
        """Sum of all values; ``total / count`` is the exact mean."""
        self.largest = 0.0
        """The largest value, exact; p99 may be far below it."""

    @property
    def count(self) -> int:
        """Returns the number of values."""
        return int(self.bucket_counts.sum())

    def observe(self, value: float) -> None:
        """Adds one value; values up to 0 go into the first bucket. Raises `ValueError`, unchanged, if it is not
        finite."""
        if not math.isfinite(value):
            raise ValueError(f"expected a finite value, got {value!r}; a clock or a division upstream is broken")
        bucket = min(int(np.searchsorted(self.EDGES, value)), len(self.EDGES) - 1)
        self.bucket_counts[bucket] += 1
        self.total += value
        self.largest = max(self.largest, value)

    def quantile(self, fraction: float) -> float:
        """Returns an upper bound of the quantile: below twice the true one, at most the largest value; 0 if empty."""
        if not self.count:
            return 0.0
        wanted = max(math.ceil(fraction * self.count), 1)
        bucket = int(np.searchsorted(np.cumsum(self.bucket_counts), wanted))
        last = bucket == len(self.EDGES) - 1
        return self.largest if last else min(float(self.EDGES[bucket]), self.largest)

    @property
    def p50(self) -> float:
        """Returns the median."""
        return self.quantile(0.50)

    @property
    def p99(self) -> float:
        """Returns the 99th percentile: an epoch of a hundred steps meets such a value once."""
        return self.quantile(0.99)

    def buckets(self) -> Iterator[tuple[str, int]]:
        """Yields the upper edge of each bucket that holds values, and the number of values up to that edge."""
        below = np.cumsum(self.bucket_counts)
        for edge, total, here in zip(self.EDGES[:-1], below, self.bucket_counts, strict=False):
            if here:
                yield f"{edge:g}", int(total)
        yield "+Inf", self.count

    def merge(self, other: Histogram) -> None:
        """Adds the values of another histogram to this one."""
        self.bucket_counts += other.bucket_counts
        self.total += other.total
        self.largest = max(self.largest, other.largest)


def jsonable(value: Any) -> Any:
    """Returns plain JSON: unwraps numpy scalars and arrays, turns nan and infinities into None, others into text."""
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

    Makes the file's folder. Ends a line that a kill has torn when it opens the file, so that the next row stays whole.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.lost_rows = 0
        """Rows that the disk refused. If it is not 0, the report undercounts."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd: int | None = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size_bytes = os.fstat(self._fd).st_size
        if size_bytes and os.pread(self._fd, 1, size_bytes - 1) != b"\n":
            os.write(self._fd, b"\n")

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends one row. Counts a row that cannot be written whole in `lost_rows`, and raises nothing."""
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

    Raises `ConfigError` if TensorBoard is not installed.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(f"TensorBoard is not installed; {install_hint('report')} brings it") from None
        self._writer = SummaryWriter(str(directory))

    def write(self, row: Mapping[str, Any]) -> None:
        """Adds the row's numbers at the step ``row["epoch"]``, under the row's rank."""
        # An epoch's row has no folder of its own.
        kind = row.get("kind", "epoch")
        tag = f"rank{row.get('rank', 0)}" + ("" if kind in ("epoch", "load") else f"/{kind}")
        self._add(tag, row, int(row.get("epoch", row.get("step", 0))))

    def _add(self, tag: str, row: Mapping[str, Any], step: int) -> None:
        for name, value in jsonable(row).items():
            if isinstance(value, dict):
                self._add(f"{tag}/{name}", value, step)
            elif isinstance(value, (int, float)) and name not in ("epoch", "rank"):
                self._writer.add_scalar(f"{tag}/{name}", value, step)

    def close(self) -> None:
        """Writes the buffered scalars and closes the file."""
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
        histograms: Name (unit included) → histogram; buckets that hold no value are left out.
        labels: Put on every line: ``{"rank": 0}``.
        gauges: Present values, which may fall again; become ``shade_<name>``. One that is not finite is left out.

    Returns:
        The page, ending in a newline.
    """
    from prometheus_client import generate_latest
    from prometheus_client import metrics_core as core  # imported here: no other user of this module needs it

    names, values = list(labels or {}), [str(value) for value in (labels or {}).values()]
    families = _Families()
    for name, value in counts.items():
        counter = core.CounterMetricFamily(f"shade_{name}", meaning[name], labels=names)
        counter.add_metric(values, value)
        families.append(counter)
    for name, value in (gauges or {}).items():
        if math.isfinite(value):
            gauge = core.GaugeMetricFamily(f"shade_{name}", meaning[name], labels=names)
            gauge.add_metric(values, value)
            families.append(gauge)
    for name, histogram in (histograms or {}).items():
        shown = core.HistogramMetricFamily(f"shade_{name}", meaning.get(name, ""), labels=names)
        shown.add_metric(values, list(histogram.buckets()), histogram.total)
        families.append(shown)
    return generate_latest(families).decode()


class _Families(list["Metric"]):
    """A collector of finished families: what `generate_latest` renders."""

    def collect(self) -> list[Metric]:
        """Returns the families."""
        return self


def join_pages(pages: Iterable[str]) -> str:
    """Joins the `prometheus_text` pages of several ranks: the format wants all lines of a metric under one header.

    Joins text. Reading the pages with the library's parser takes 25 times as long (decision 0035), in the process of a
    rank that trains. Labels identify the ranks.
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
