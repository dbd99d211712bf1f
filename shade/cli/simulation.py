"""``shade simulate``: miss-ratio curves of a recorded run, as a table and as a picture."""

from __future__ import annotations

import sys
from pathlib import Path

from shade.errors import ConfigError
from shade.policy.rendering import format_table, plot_curves
from shade.policy.simulator import miss_ratio_curves
from shade.policy.trace import Trace
from shade.store.url import parse_bytes
from shade.train import TRACE_FILE


def answer(where: Path, capacities: str, policies: str, skip_epochs: int, plot: Path | None) -> int:
    """Simulates and prints.

    Args:
        where: A run directory, or a trace file.
        capacities: Separated by commas, each a percentage of the data set or bytes.
        policies: Names, separated by commas.
        skip_epochs: Warm-up left out of the figures.
        plot: Where to draw the curves, or None.

    Returns:
        The exit code.
    """
    trace = Trace.load(where / TRACE_FILE if where.is_dir() else where)
    if trace.num_epochs == 0:
        raise ConfigError.of("a trace with an epoch in it", str(where), "let the run begin an epoch")
    fractions = sorted({_fraction(text.strip(), trace.data_set_bytes) for text in capacities.split(",")})
    names = [name.strip() for name in policies.split(",")]
    skip_epochs = min(skip_epochs, trace.num_epochs - 1) if skip_epochs == 1 else skip_epochs
    curves = miss_ratio_curves(trace, names, fractions, skip_epochs=skip_epochs)
    if plot is not None:
        try:
            plot_curves({where.name: curves}, plot)
        except (OSError, ValueError) as error:
            raise ConfigError.of("a --plot that can be written", f"{plot}: {error}", "name a .png") from None
    skipped = f", the first {skip_epochs} left out" if skip_epochs else ""
    sys.stdout.write(
        f"{trace.num_epochs} epochs{skipped}; {trace.num_samples:,} samples of {trace.data_set_bytes:,} bytes in all; "
        f"{trace.global_batch} a step; f = capacity / data set\n\n{format_table(curves)}\n"
    )
    return 0


def _fraction(text: str, data_set_bytes: int) -> float:
    if not text.endswith("%"):
        return parse_bytes(text) / data_set_bytes
    try:
        percentage = float(text[:-1])
    except ValueError:
        percentage = -1.0
    if not 0 <= percentage < float("inf"):
        raise ConfigError.of("capacities such as 20% or 8GiB, separated by commas", text, "write --capacity 10%,8GiB")
    return percentage / 100
