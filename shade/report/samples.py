"""``quality.csv`` and ``quality.png``: a run's recorded losses, turned into a list of samples worth a look.

In reading order: `shade.trajectory` (what was recorded), `quality` (what it says), `duplicates`, `sheet`, and here what
a person gets: every sample in a table, the most suspicious first, and a page of text about them.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from shade.report.duplicates import Duplicates, find_duplicates
from shade.report.quality import CSV_FILE, FEWEST_USES, SETTLED_AFTER, SHEET_FILE, Verdicts, judge
from shade.report.sheet import MOST, Exhibit, write_sheet
from shade.trajectory import LOSSES, Samples, Trajectory

COLUMNS = (
    "index", "sample", "target", "suspicion", "likely_mislabelled", "never_learned", "duplicate_of",
    "duplicate_has_other_target", "uses", "confidence", "usual_confidence", "variability", "best", "forgotten",
    "first_loss", "last_loss", "mean_loss",
)  # fmt: skip
_NUM_TOLD = 10


def write_quality(directory: str | os.PathLike[str]) -> str:
    """Reads the losses of a run and writes the two files; running it again replaces them.

    Args:
        directory: A run directory.

    Returns:
        What to tell a person.

    Raises:
        DataError: The run recorded no losses.
    """
    directory = Path(directory)
    trajectory = Trajectory.load(directory / LOSSES)
    samples = trajectory.samples
    verdicts = judge(trajectory.losses(), len(trajectory.epochs), samples.targets or None)
    order = verdicts.by_suspicion
    duplicates = find_duplicates(samples.names, order) if samples.names else Duplicates()
    with (directory / CSV_FILE).open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(_rows(verdicts, samples, duplicates, order.tolist()))
    shown = _exhibits(verdicts, samples, order[:MOST].tolist())
    num_shown = write_sheet(shown, directory / SHEET_FILE)
    return "\n".join(_told(trajectory, verdicts, duplicates, order, num_shown)) + "\n"


def label_of(samples: Samples, index: int) -> str:
    """What a person calls the class: the folder of an ImageFolder, else the number."""
    if samples.names:
        return Path(samples.names[index]).parent.name
    return str(samples.targets[index]) if samples.targets else ""


def _rows(verdicts: Verdicts, samples: Samples, duplicates: Duplicates, order: Sequence[int]) -> Iterator[list[object]]:
    mislabelled, never = verdicts.mislabelled_N, verdicts.never_learned_N
    for index in order:
        first = duplicates.first_of.get(index)
        other = first is not None and bool(samples.targets) and samples.targets[first] != samples.targets[index]
        yield [
            index,
            samples.names[index] if samples.names else "",
            samples.targets[index] if samples.targets else "",
            _short(verdicts.suspicion_N[index]),
            int(mislabelled[index]),
            int(never[index]),
            "" if first is None else first,
            int(other),
            int(verdicts.uses_N[index]),
            *(
                _short(values_N[index])
                for values_N in (verdicts.confidence_N, verdicts.usual_N, verdicts.variability_N, verdicts.best_N)
            ),
            int(verdicts.forgotten_N[index]),
            *(_short(each[index]) for each in (verdicts.first_loss_N, verdicts.last_loss_N, verdicts.mean_loss_N)),
        ]


def _short(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.4g}"


def _exhibits(verdicts: Verdicts, samples: Samples, order: Sequence[int]) -> list[Exhibit]:
    if not samples.names:
        return []
    return [
        Exhibit(
            samples.names[index],
            f"'{label_of(samples, index)}'",
            f"{verdicts.confidence_N[index]:.0%} of {verdicts.usual_N[index]:.0%}",
        )
        for index in order
        if verdicts.suspicion_N[index] > 0
    ]


def _told(
    trajectory: Trajectory, verdicts: Verdicts, duplicates: Duplicates, order: np.ndarray, num_shown: int
) -> Iterator[str]:
    samples, epochs = trajectory.samples, len(trajectory.epochs)
    left_out = ", the first left out of the averages" if epochs >= SETTLED_AFTER else ""
    yield f"{trajectory.num_samples:,} samples, {epochs} epoch{'s' * (epochs > 1)} of losses{left_out}"
    few = int((verdicts.uses_N < FEWEST_USES).sum())
    if few:
        yield f"  {few:,} were used less than {FEWEST_USES} times: nothing is said of them"
    yield (
        f"  {int(verdicts.mislabelled_N.sum()):,} likely mislabelled: the model believed in the label at most half as "
        "much as is usual in its class"
    )
    yield f"  {int(verdicts.never_learned_N.sum()):,} never learned: at no use did the label get an even chance"
    if samples.names:
        first_of = duplicates.first_of
        other = sum(samples.targets[a] != samples.targets[b] for a, b in first_of.items()) if samples.targets else 0
        yield f"  {len(first_of):,} duplicates of another file, {other:,} of them under another label"
        if duplicates.num_left_out:
            yield f"    ({duplicates.num_left_out:,} less suspicious files of equal length were not opened)"
    yield ""
    yield "the most suspicious: confidence, what is usual in the class, uses, label, sample"
    for index in order[:_NUM_TOLD].tolist():
        name = samples.names[index] if samples.names else f"index {index}"
        yield (
            f"  {verdicts.confidence_N[index]:>6.1%} {verdicts.usual_N[index]:>6.1%} {verdicts.uses_N[index]:>4}  "
            f"{label_of(samples, index):<16} {name}"
        )
    yield ""
    sheet = f", {SHEET_FILE} shows the first {num_shown}" if num_shown else f"; no {SHEET_FILE}: there is no picture"
    yield f"{CSV_FILE} has all of them, in this order{sheet}"
