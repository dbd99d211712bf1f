"""Writes ``quality.csv`` and ``quality.png``: a list of samples worth a look, from a run's recorded losses.

`shade.trajectory` has the recorded losses, `shade.report.quality` judges them. This module writes what a person reads:
every sample in a table, the most suspicious first; a contact sheet of those, each over its label and its confidence;
and a page of text about them. Duplicates are files that are equal byte for byte, by a 128-bit hash.
"""

from __future__ import annotations

import csv
import math
import os
import textwrap
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash
from PIL import Image, ImageDraw, ImageFont, ImageOps, UnidentifiedImageError

from shade.report.quality import CSV_FILE, FEWEST_USES, PRECISION, SETTLED_AFTER, SHEET_FILE, Verdicts, judge
from shade.report.style import percent
from shade.trajectory import LOSSES, Samples, Trajectory
from shade.types import Indices

COLUMNS = (
    "index", "sample", "target", "suspicion", "likely_mislabelled", "never_learned", "duplicate_of",
    "duplicate_has_other_target", "uses", "confidence", "usual_confidence", "variability", "best", "forgotten",
    "first_loss", "last_loss", "mean_loss",
)  # fmt: skip
_NUM_LISTED = 10
_PER_ROW, MOST = 8, 48
_TITLE, _TEXT, _LINE = 20, 13, 19
"""Heights of the letters, and of the heading's lines below its title."""
_LONGEST_LINE = 150
_SIDE, _GAP, _CAPTION = 112, 10, 36
_PAPER, _FRAME, _INK, _MUTED = "#ffffff", "#d7dde3", "#22303c", "#6b7a88"
_LONGEST = 18
MOST_READ = 100_000
"""Most files that are opened to find duplicates: at 20 ms a file and 32 at a time, about a minute."""
_THREADS = 32


def write_quality(directory: str | os.PathLike[str]) -> str:
    """Writes the two files from a run's losses and returns a summary; raises `DataError` if the run recorded none."""
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
    epochs = int(verdicts.uses_N.max(initial=0))
    heading = (
        f"Samples worth a look: {directory.resolve().name}",
        *textwrap.wrap(
            f"The most suspicious of {trajectory.num_samples:,} samples. Below each: its label; the model's confidence "
            f"in it, of what is usual in its class (means over up to {epochs} epoch{'s' * (epochs != 1)}).",
            _LONGEST_LINE,
        ),
        *textwrap.wrap(PRECISION, _LONGEST_LINE),
    )
    num_shown = write_sheet(shown, directory / SHEET_FILE, heading)
    return "\n".join(_summary(trajectory, verdicts, duplicates, order, num_shown)) + "\n"


def label_of(samples: Samples, index: int) -> str:
    """Returns the name of a sample's class: the folder in an ImageFolder, else the number."""
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
            f"{percent(verdicts.confidence_N[index])} of {percent(verdicts.usual_N[index])}",
        )
        for index in order
        if verdicts.suspicion_N[index] > 0
    ]


def _summary(
    trajectory: Trajectory, verdicts: Verdicts, duplicates: Duplicates, order: np.ndarray, num_shown: int
) -> Iterator[str]:
    samples, epochs = trajectory.samples, len(trajectory.epochs)
    left_out = ", the first left out of the averages" if epochs >= SETTLED_AFTER else ""
    yield f"{trajectory.num_samples:,} samples, {epochs} epoch{'s' * (epochs > 1)} of losses{left_out}"
    few = int((verdicts.uses_N < FEWEST_USES).sum())
    if few:
        yield f"  {few:,} were used less than {FEWEST_USES} times: nothing is said of them"
    yield f"  {int(verdicts.mislabelled_N.sum()):,} likely mislabelled: at most half the confidence usual in the class"
    yield f"  {int(verdicts.never_learned_N.sum()):,} never learned: at no use did the label get an even chance"
    if samples.names:
        first_of = duplicates.first_of
        other = sum(samples.targets[a] != samples.targets[b] for a, b in first_of.items()) if samples.targets else 0
        yield f"  {len(first_of):,} duplicates of another file, {other:,} of them under another label"
        if duplicates.num_left_out:
            yield f"    ({duplicates.num_left_out:,} less suspicious files of equal length were not opened)"
    yield ""
    yield "the most suspicious: confidence, what is usual in the class, uses, label, sample"
    for index in order[:_NUM_LISTED].tolist():
        name = samples.names[index] if samples.names else f"index {index}"
        yield (
            f"  {percent(verdicts.confidence_N[index]):>6} {percent(verdicts.usual_N[index]):>6} "
            f"{verdicts.uses_N[index]:>4}  {label_of(samples, index):<16} {name}"
        )
    yield ""
    yield textwrap.fill(PRECISION, 80)
    yield ""
    sheet = f", {SHEET_FILE} shows the first {num_shown}" if num_shown else f"; no {SHEET_FILE}: there is no picture"
    yield f"{CSV_FILE} has all of them, in this order{sheet}"


# ── duplicates ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Duplicates:
    """Equal files of a data set."""

    first_of: dict[int, int] = field(default_factory=dict)
    """Sample → the first sample that is the same file."""
    num_read: int = 0
    num_left_out: int = 0
    """Files of equal length that were not opened."""


def find_duplicates(names: Sequence[str], by_suspicion: Indices) -> Duplicates:
    """Finds equal files among paths by sample index, the most suspicious first; skips files that cannot be read."""
    with ThreadPoolExecutor(_THREADS) as pool:
        length_N = np.fromiter(pool.map(_length, names, chunksize=256), dtype=np.int64, count=len(names))
        _, inverse_N, counts = np.unique(length_N, return_inverse=True, return_counts=True)
        alike = by_suspicion[(counts[inverse_N[by_suspicion]] > 1) & (length_N[by_suspicion] > 0)]
        chosen = np.sort(alike[:MOST_READ]).tolist()
        digests = list(pool.map(_digest, [names[index] for index in chosen], chunksize=16))
    seen: dict[bytes, int] = {}
    first_of: dict[int, int] = {}
    for index, digest in zip(chosen, digests, strict=True):
        if digest and seen.setdefault(digest, index) != index:
            first_of[index] = seen[digest]
    return Duplicates(first_of, len(chosen), len(alike) - len(chosen))


def _length(name: str) -> int:
    try:
        return os.stat(name).st_size
    except OSError:
        return 0


def _digest(name: str) -> bytes:
    try:
        with open(name, "rb") as file:
            return xxhash.xxh3_128_digest(file.read())
    except OSError:
        return b""


# ── the contact sheet ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Exhibit:
    """One sample on the sheet."""

    path: str
    label: str
    remark: str


def write_sheet(exhibits: Sequence[Exhibit], path: Path, heading: Sequence[str] = ("",)) -> int:
    """Draws the contact sheet of at most `MOST` exhibits below a title and lines; returns how many could be shown.

    Leaves out a file that is gone or is no picture. Without anything to show, removes an old sheet.
    """
    shown = [(each, picture) for each in exhibits[:MOST] if (picture := _thumbnail(each.path)) is not None]
    path.unlink(missing_ok=True)
    if not shown:
        return 0
    rows = -(-len(shown) // _PER_ROW)
    head = 4 * _GAP + _TITLE + _LINE * (len(heading) - 1)
    width, height = _GAP + _PER_ROW * (_SIDE + _GAP), head + rows * (_SIDE + _CAPTION + _GAP)
    sheet = Image.new("RGB", (width, height), _PAPER)
    draw = ImageDraw.Draw(sheet)
    title, text = ImageFont.load_default(_TITLE), ImageFont.load_default(_TEXT)
    for number, line in enumerate(heading):
        top = _GAP + (number and _TITLE + _GAP + _LINE * (number - 1))
        draw.text((_GAP, top), _ascii(line), fill=_MUTED if number else _INK, font=text if number else title)
    for number, (exhibit, picture) in enumerate(shown):
        left = _GAP + number % _PER_ROW * (_SIDE + _GAP)
        top = head + number // _PER_ROW * (_SIDE + _CAPTION + _GAP)
        draw.rectangle((left - 1, top - 1, left + _SIDE, top + _SIDE), outline=_FRAME)
        sheet.paste(picture, (left + (_SIDE - picture.width) // 2, top + (_SIDE - picture.height) // 2))
        draw.text((left, top + _SIDE + 3), _drawable(exhibit.label), fill=_INK, font=text)
        draw.text((left, top + _SIDE + 18), _drawable(exhibit.remark), fill=_MUTED, font=text)
    sheet.save(path)
    return len(shown)


def _thumbnail(path: str) -> Image.Image | None:
    """Returns a small copy of a picture, or None if the file is not one; enlarges tiny pictures pixel by pixel."""
    try:
        with Image.open(path) as image:
            image.draft("RGB", (2 * _SIDE, 2 * _SIDE))
            picture = image.convert("RGB")
    except (OSError, ValueError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError):
        return None
    method = Image.Resampling.NEAREST if max(picture.size) <= _SIDE // 2 else Image.Resampling.LANCZOS
    return ImageOps.contain(picture, (_SIDE, _SIDE), method)


def _drawable(text: str) -> str:
    """Returns text as Pillow's own font draws it, cut to the width of a picture."""
    plain = _ascii(text)
    return plain if len(plain) <= _LONGEST else plain[: _LONGEST - 2] + ".."


def _ascii(text: str) -> str:
    return text.encode("ascii", "replace").decode()
