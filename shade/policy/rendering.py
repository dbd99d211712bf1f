"""Miss-ratio curves for people: a text table for the terminal, a plot for the report.

Both show the same two numbers: the hit ratio, which tells how good the policy was, and origin reads per sample and
epoch, which is what the run pays for. Only the second compares different sampling modes.
"""

from __future__ import annotations

from pathlib import Path

from shade.errors import ConfigError
from shade.policy.simulator import MissRatioCurves


def format_table(curves: MissRatioCurves) -> str:
    """One line a policy; for each capacity the hit ratio in percent and origin reads per sample.

    Args:
        curves: From `miss_ratio_curves`.

    Returns:
        Markdown that also reads well as plain text, without a final newline.
    """
    header = ["policy", *(f"f={fraction:g}: hits %, reads/N" for fraction in curves.fractions)]
    rows = [
        [name, *(f"{100 * r.hit_ratio(skip):.1f}, {r.origin_reads_per_sample(skip):.3f}" for r in results)]
        for skip in (curves.skip_epochs,)
        for name, results in curves.results.items()
    ]
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in [header, *rows]
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def plot_curves(curves_by_title: dict[str, MissRatioCurves], path: str | Path) -> None:
    """Draws origin reads per sample over capacity, one panel a trace, one line a policy.

    Args:
        curves_by_title: Panel title → curves.
        path: Where to write; the suffix says the format.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError.of(
            "matplotlib, to draw a plot", None, "pip install shade[report], or use the table"
        ) from None
    figure = Figure(figsize=(4.6 * len(curves_by_title), 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(curves_by_title), squeeze=False, sharey=True)[0]
    for panel, (title, curves) in zip(panels, curves_by_title.items(), strict=True):
        for rank, (name, results) in enumerate(curves.results.items()):
            reads = [result.origin_reads_per_sample(curves.skip_epochs) for result in results]
            width = 1 + 3 * (1 - rank / len(curves.results))  # equal curves stay visible
            panel.plot(
                curves.fractions, reads, marker="osv^D<>P"[rank % 8], markersize=2 + 1.5 * width, lw=width, label=name
            )
        panel.set(title=title, xlabel="capacity / data set")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("origin reads per sample and epoch")
    panels[0].set_ylim(bottom=0)
    panels[-1].legend(fontsize="small")
    figure.savefig(path, dpi=110)
