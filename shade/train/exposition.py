"""The Prometheus page of each rank, and of its machine.

Every rank rewrites ``rank<r>.prom`` in the run directory every two seconds between two steps (about 1 ms of the
training thread), for a node exporter's textfile collector. With ``--metrics-port`` the first rank of each machine also
serves the pages of all ranks of the machine as one page, at ``http://127.0.0.1:PORT/metrics``. It reads their files: no
port a rank, no connection between ranks.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from shade.cache.ledger import CAUSES, FIELDS
from shade.config import RunConfig
from shade.control.server import TelemetryServer
from shade.gradient._engine.meter import COUNTS
from shade.process import replacing
from shade.telemetry import Histogram, join_pages, prometheus_text

logger = logging.getLogger("shade.train")


MEANING: Final[dict[str, str]] = {
    **{name: meaning for name, meaning in FIELDS.items() if not name.endswith("_nanoseconds")},
    **{
        f"stall_{cause}_seconds": f"time the training waited for data while the loading was busy with: {cause}"
        for cause in CAUSES
    },
    "wait_seconds": "time the training waited for each batch",
    "stall_wait_seconds": "time the training waited for data that no counted work explains: workers start, hand over",
    "step_seconds": "time the script had a batch in hand: transfer, forward, backward, optimizer",
    "snapshots": "snapshots that reached a place or failed",
    "snapshots_failed": "of them, those that reached no place; the log says why",
    "snapshot_blocked_seconds": "time the training waited for snapshots",
    **COUNTS,
    "epoch": "the present epoch, from 0",
    "step": "steps of it whose losses were reported",
    "epoch_samples_per_second": "samples of this rank in the present epoch, over its time so far",
    "epoch_hit_ratio": "hits over samples in the present epoch",
    "capacity_bytes": "what the cache's entries may occupy in the store",
    "resident_bytes": "what the policy holds resident",
    "hit_ratio": "hits over samples in the last whole epoch",
    "origin_reads_per_sample": "origin reads of this rank in the last whole epoch over the size of the data set",
    "samples_per_second": "samples of this rank in the last whole epoch over its time",
    "loss": "mean of this rank over the last whole epoch",
    "val_accuracy": "after the last whole epoch, 0 to 1",
    "val_loss": "after the last whole epoch",
    "learning_rate": "of the last whole epoch",
}
"""Every number on the page, and a sentence that says how to read it."""
EVERY_SECONDS: Final = 2.0
_SNAPSHOT_TOTALS: Final = {
    "saves": "snapshots", "failed": "snapshots_failed", "blocked_seconds": "snapshot_blocked_seconds"
}  # fmt: skip
_LAST_EPOCH: Final = (
    "hit_ratio", "origin_reads_per_sample", "samples_per_second", "loss", "val_accuracy", "val_loss", "learning_rate"
)  # fmt: skip
GAUGES: Final = frozenset(
    {"epoch", "step", "epoch_samples_per_second", "epoch_hit_ratio", "capacity_bytes", "resident_bytes", *_LAST_EPOCH}
)
"""Names of present values, which may fall again; ``wait_seconds`` is a histogram, and all others are counters."""


def page_name(rank: int) -> str:
    """Returns the name of a rank's page in the run directory."""
    return f"rank{rank}.prom"


class Exposition:
    """Writes one rank's page, and serves the pages of its machine where asked to.

    Args:
        config: The resolved run.
        rank: Number of this rank.
        local_rank: Number of this rank on its machine.

    Raises:
        ConfigError: Another program listens on the port.
    """

    def __init__(self, config: RunConfig, rank: int, local_rank: int) -> None:
        self._out, self._rank = Path(config.out), rank
        first = config.node_rank * config.processes
        self._here = range(first, first + config.processes)
        self._written_at = -EVERY_SECONDS
        self._totals: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._server: TelemetryServer | None = None
        if config.metrics_port is not None and local_rank == 0:
            # It does not listen to other machines: they ask through the machine's own Prometheus, or a tunnel.
            self._server = TelemetryServer(port=config.metrics_port, page=self.joined)
            logger.info("Prometheus may scrape %s/metrics", self._server.url)

    @property
    def url(self) -> str | None:
        """Returns the URL of the page; None if this rank does not serve it."""
        return None if self._server is None else f"{self._server.url}/metrics"

    def joined(self) -> str:
        """Returns the pages of this machine's ranks as one page; a rank that has not written one yet is missing."""
        pages = []
        for rank in self._here:
            with contextlib.suppress(OSError):
                pages.append((self._out / page_name(rank)).read_text(encoding="utf-8"))
        return join_pages(pages)

    def end_epoch(self, row: Mapping[str, Any]) -> None:
        """Adds this rank's epoch row, as in ``metrics.jsonl`` with `RunRecord`'s quotients, to the totals."""
        for name, value in row["gradient"].items():
            if name in COUNTS:
                self._totals[name] = self._totals.get(name, 0) + value
        for key, name in _SNAPSHOT_TOTALS.items():
            self._totals[name] = self._totals.get(name, 0) + row["checkpoint"].get(key, 0)
        self._last = {name: float(row[name]) for name in _LAST_EPOCH if row.get(name) is not None}

    @property
    def is_due(self) -> bool:
        """Returns whether the page is older than `EVERY_SECONDS`."""
        return time.monotonic() - self._written_at >= EVERY_SECONDS

    def write(self, totals: Mapping[str, float], now: Mapping[str, float], waits: Histogram) -> None:
        """Writes the page: totals since the run began that `MEANING` knows, present values, and waits for batches."""
        self._written_at = time.monotonic()
        counts = {name: value for name, value in {**totals, **self._totals}.items() if name in MEANING}
        gauges = {**now, **self._last}
        # Not prometheus_client's multiprocess mode: that adds up the counters of all processes, and these pages show
        # each rank (decision 0035).
        page = prometheus_text(counts, MEANING, {"wait_seconds": waits}, {"rank": self._rank}, gauges)
        with replacing(self._out / page_name(self._rank)) as beside:
            beside.write_text(page, encoding="utf-8")

    def close(self) -> None:
        """Stops the server; the file stays. Safe to call twice."""
        if self._server is not None:
            self._server.close()
        self._server = None
