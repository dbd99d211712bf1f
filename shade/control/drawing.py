"""Draws a profile: expected quality over batch and density, what was measured, and the cut at the best batch.

Needs matplotlib, imported when a picture is drawn. The figure is built on its own canvas, so no display is touched.
"""

from __future__ import annotations

import os
from typing import Any, Final

from shade.control.profile import ALLOWED_SHORTFALL_FRACTION, Profile
from shade.errors import ConfigError

_INK: Final = "#22303c"


def draw(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Writes the picture.

    Args:
        profile: With its evaluations.
        path: Where to; the suffix says the format.

    Raises:
        ConfigError: matplotlib is not installed, or it cannot be written there.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("matplotlib is not installed; pip install 'shade[tune]' brings it") from None
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    both, cut = figure.subplots(1, 2)
    _draw_surface(figure, both, profile)
    _draw_cut(cut, profile)
    try:
        figure.savefig(path, dpi=110, metadata={"Software": None})
    except (OSError, ValueError) as error:
        raise ConfigError.of("a picture that can be written", f"{os.fspath(path)}: {error}", "name a .png") from None


def best_batch(profile: Profile) -> int:
    """The batch of the grid with the best expected quality at any density."""
    return min(profile.batches, key=lambda batch: min(profile.shortfall(batch, each) for each in profile.densities))


def _draw_surface(figure: Any, axes: Any, profile: Profile) -> None:
    good = [each for each in profile.evaluations if each.get("quality") is not None]
    failed = [each for each in profile.evaluations if each.get("quality") is None]
    if len(profile.batches) > 1 and len(profile.densities) > 1:
        columns = list(zip(*profile.quality, strict=True))
        colours = "viridis_r" if profile.is_loss else "viridis"
        filled = axes.contourf(profile.batches, profile.densities, columns, levels=20, cmap=colours)
        figure.colorbar(filled, ax=axes, label="expected loss" if profile.is_loss else "expected quality")
    for those, marker, label in ((good, "o", "measured"), (failed, "x", "failed")):
        if those:
            x, y = [each["batch"] for each in those], [each["density"] for each in those]
            axes.scatter(x, y, marker=marker, s=22, color="white" if marker == "o" else "#c8553d",
                         edgecolors=_INK if marker == "o" else None, label=label)  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="global batch", ylabel="density", title="Quality")
    if profile.evaluations:
        axes.legend(fontsize="small", loc="lower right")


def _draw_cut(axes: Any, profile: Profile) -> None:
    batch = best_batch(profile)
    expected = [profile.expected(batch, density) for density in profile.densities]
    axes.plot(profile.densities, expected, color="#2f6fb0", label=f"expected at batch {batch}")
    floor = profile.floor(batch)
    axes.axvline(floor, color="#e08a2e", ls="--", label=f"{ALLOWED_SHORTFALL_FRACTION:.0%} worse below {floor:.3g}")
    axes.set(xscale="log", xlabel="density", title="What density costs")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
