"""Shows how far a run is, on a terminal; a pipe or a file gets nothing but the report and the errors.

Rank 0 keeps a small file with its present step (`TrainSession`); this reads it a few times a second. Whoever redirects
the output and still wants to know looks at the epochs in ``train.log``.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path

from shade.config import RunConfig
from shade.terminal import progress_bar

_POLL_SECONDS = 0.2


def watch(poll: Callable[[], int | None], config: RunConfig) -> int:
    """Shows a bar on standard error until the ranks are done.

    Args:
        poll: Their exit status, or None while they run.
        config: The resolved run.

    Returns:
        Their exit status.
    """
    file = Path(config.out) / "progress.json"
    form = "{percentage:3.0f}% |{bar:12}| {desc}"
    with progress_bar(config.epochs, bar_format=form) as bar:
        bar.set_description_str("starting the ranks")
        while (status := poll()) is None:
            time.sleep(_POLL_SECONDS)
            with contextlib.suppress(OSError, ValueError, KeyError):
                now = json.loads(file.read_text())
                bar.set_description_str(
                    f"epoch {now['epoch'] + 1}/{config.epochs} step {now['step']}/{now['num_steps']} · "
                    f"{now['samples_per_second']:,.0f} samples/s · hits {now['hit_ratio']:.0%} · "
                    f"waiting {now['waiting_fraction']:.0%}",
                    refresh=False,
                )
                bar.update(now["epoch"] + now["step"] / max(1, now["num_steps"]) - bar.n)
        bar.n = config.epochs if status == 0 else bar.n
        bar.set_description_str("done" if status == 0 else "stopped")
    file.unlink(missing_ok=True)
    return status
