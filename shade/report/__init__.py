"""Turns a run directory into something to read: ``epochs.csv``, ``report.txt``, ``report.png`` and ``report.html``.

In reading order: `rows` (reads the file and adds it up), `forecast` (predicts other epochs, plain loading among them),
`style` (colours, forms of numbers), `text` (the tables and what they mean), `plot` (the picture), `page` (the page,
over ``templates/``). `quality` judges the samples of a run by their recorded losses, and `samples` writes the answer to
`shade quality`.
"""

from __future__ import annotations

import os
from pathlib import Path

from shade.report.rows import EpochSummary, Run, load_run

__all__ = ["EpochSummary", "Run", "load_run", "write_comparison", "write_report"]


def write_report(directory: str | os.PathLike[str]) -> str:
    """Writes the four files beside a run's ``metrics.jsonl``, in place of old ones; returns the text of ``report.txt``.

    Raises `DataError` if there is no ``metrics.jsonl``, or no epoch in it.
    """
    from shade.report import page, plot, text  # with numpy, which the command's help does without

    run = load_run(directory)
    (run.directory / "epochs.csv").write_text(text.render_csv(run), encoding="utf-8")
    page.write_html(run, run.directory / "report.html")
    note = plot.write_png(run, run.directory / "report.png")
    report = text.render(run, note)
    Path(run.directory / "report.txt").write_text(report, encoding="utf-8")
    return report


def write_comparison(plain: str | os.PathLike[str], cached: str | os.PathLike[str]) -> str:
    """Compares a run without shade with one through it: writes ``comparison.png`` beside the second one's report, and
    returns a few lines."""
    from shade.report import plot, text

    runs = load_run(plain), load_run(cached)
    picture = runs[1].directory / "comparison.png"
    note = plot.write_comparison(*runs, picture)
    return text.render_comparison(*runs) + f"\n{note or picture}\n"
