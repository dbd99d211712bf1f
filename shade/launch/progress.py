"""Shows how far a run is: a bar on a terminal, a line an epoch anywhere else.

Rank 0 keeps a small file with its present step (`TrainSession`); this reads it a few times a second. A pipe or a file
gets whole lines and few of them: carriage returns are for eyes.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from shade.config import RunConfig

_POLL_SECONDS = 0.2


def watch(poll: Callable[[], int | None], config: RunConfig) -> int:
    """Shows progress on standard error until the ranks are done.

    Args:
        poll: Their exit status, or None while they run.
        config: The resolved run.

    Returns:
        Their exit status.
    """
    file = Path(config.out) / "progress.json"
    show = _Bar(config) if sys.stderr.isatty() else _Lines(config)
    try:
        while (status := poll()) is None:
            time.sleep(_POLL_SECONDS)
            with contextlib.suppress(OSError, ValueError, KeyError):
                show(json.loads(file.read_text()))
        show.end(status == 0)
    finally:
        show.close()
        file.unlink(missing_ok=True)
    return status


def _sentence(now: dict[str, Any], config: RunConfig) -> str:
    return (
        f"epoch {now['epoch'] + 1}/{config.epochs} · step {now['step']}/{now['num_steps']} · "
        f"{now['samples_per_second']:,.0f} samples/s · hit ratio {now['hit_ratio']:.0%} · "
        f"waiting for data {now['waiting_fraction']:.0%}"
    )


class _Bar:
    """For eyes: one line that is drawn again and again."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        form = "{percentage:3.0f}% |{bar:24}| {desc}"
        self._bar = tqdm(total=config.epochs, file=sys.stderr, bar_format=form, dynamic_ncols=True)
        self._bar.set_description_str("starting the ranks")

    def __call__(self, now: dict[str, Any]) -> None:
        self._bar.set_description_str(_sentence(now, self._config), refresh=False)
        self._bar.update(now["epoch"] + now["step"] / max(1, now["num_steps"]) - self._bar.n)

    def end(self, good: bool) -> None:
        if good:
            self._bar.n = self._bar.total
        self._bar.set_description_str("done" if good else "stopped")

    def close(self) -> None:
        self._bar.close()


class _Lines:
    """For logs: one line when an epoch has begun."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._epoch = -1

    def __call__(self, now: dict[str, Any]) -> None:
        if now["epoch"] != self._epoch:
            self._epoch = now["epoch"]
            sys.stderr.write(_sentence(now, self._config) + "\n")

    def end(self, good: bool) -> None:
        """The report, or the reason, follows anyway."""

    def close(self) -> None:
        sys.stderr.flush()
