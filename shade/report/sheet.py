"""The contact sheet: the most suspicious samples as one picture, each over its label and its confidence.

A person sees in a second what no statistic can tell: a wrong label, a broken scan, or a picture that is just hard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageOps, UnidentifiedImageError

COLUMNS, MOST = 8, 48
_SIDE, _GAP, _CAPTION = 112, 10, 30
_PAPER, _FRAME, _INK, _MUTED = "#ffffff", "#d7dde3", "#22303c", "#6b7a88"
_LONGEST = 18


@dataclass(frozen=True)
class Exhibit:
    """One sample on the sheet."""

    path: str
    label: str
    remark: str


def write_sheet(exhibits: Sequence[Exhibit], path: Path) -> int:
    """Draws the sheet.

    Args:
        exhibits: In the order in which they are shown; those beyond `MOST` are not.
        path: Of the PNG; replaced if there, and removed if there is nothing to show.

    Returns:
        How many are on it; a file that is gone or no picture is left out.
    """
    shown = [(each, picture) for each in exhibits[:MOST] if (picture := _thumbnail(each.path)) is not None]
    path.unlink(missing_ok=True)
    if not shown:
        return 0
    rows = -(-len(shown) // COLUMNS)
    columns = min(COLUMNS, len(shown))
    sheet = Image.new(
        "RGB", (_GAP + columns * (_SIDE + _GAP), _GAP + rows * (_SIDE + _CAPTION + _GAP)), _PAPER
    )  # fmt: skip
    draw = ImageDraw.Draw(sheet)
    for number, (exhibit, picture) in enumerate(shown):
        left = _GAP + number % COLUMNS * (_SIDE + _GAP)
        top = _GAP + number // COLUMNS * (_SIDE + _CAPTION + _GAP)
        draw.rectangle((left - 1, top - 1, left + _SIDE, top + _SIDE), outline=_FRAME)
        sheet.paste(picture, (left + (_SIDE - picture.width) // 2, top + (_SIDE - picture.height) // 2))
        draw.text((left, top + _SIDE + 3), _plain(exhibit.label), fill=_INK)
        draw.text((left, top + _SIDE + 15), _plain(exhibit.remark), fill=_MUTED)
    sheet.save(path)
    return len(shown)


def _thumbnail(path: str) -> Image.Image | None:
    """A small copy; small pictures are enlarged pixel by pixel, so that they can be seen."""
    try:
        with Image.open(path) as image:
            image.draft("RGB", (2 * _SIDE, 2 * _SIDE))
            picture = image.convert("RGB")
    except (OSError, ValueError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError):
        return None
    method = Image.Resampling.NEAREST if max(picture.size) <= _SIDE // 2 else Image.Resampling.LANCZOS
    return ImageOps.contain(picture, (_SIDE, _SIDE), method)


def _plain(text: str) -> str:
    """What Pillow's own font can draw, and no longer than a picture is wide."""
    plain = text.encode("ascii", "replace").decode()
    return plain if len(plain) <= _LONGEST else plain[: _LONGEST - 2] + ".."
