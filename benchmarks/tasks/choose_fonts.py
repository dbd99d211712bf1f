"""Makes glyphs.json: which fonts of Debian's font packages are in the glyphs task, and in which part.

Needs the index of Debian 12 and fontTools; run once, the list is committed. The rules:

* Every package whose name begins with fonts-, ttf- or otf-, between 15 kB and 4 MB, but for collections of symbols.
* A font must have all 52 letters, none of them blank. Its letters must correlate with the mean letters (≥ 0.3: segment
  displays and dingbats do not); fonts with another script in place of the letters are named. Its small letters must
  differ from its capitals (correlation of the letters that differ in print < 0.8).
* Families with a pair of fonts that correlate above 0.97 are one group. Of two fonts of one group that correlate above
  0.98 the second is left out, and a family gives two fonts at most.
* Groups are dealt by the hash of their first family's name: about a fifth to validation.

    python benchmarks/tasks/choose_fonts.py FOLDER     (FOLDER keeps the packages; about 200 MB)
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import PIL
from fontTools.ttLib import TTFont, TTLibError
from PIL import features

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tasks.glyphs import LETTERS, LIST, Pixels, distort, render
from tasks.packages import Package, fetch, share_of, unpack

_SYMBOLS = re.compile(r"icon|symbol|math|denemo|awesome|-web$|-doc$|manchu|circos")
_OTHER_SCRIPTS = re.compile(r"Futhark|TAMu_|alfa-beta|Dutsa2")
_SIZES = range(15_000, 4_000_000)
_DIFFER_IN_PRINT = "abdefghijlmnqrty"
_LIKE_A_LETTER, _CASES_ALIKE, _ONE_GROUP, _COPY = 0.3, 0.8, 0.97, 0.98
_FONTS_A_FAMILY = 2
_VALIDATION = 0.2

Floats = npt.NDArray[np.float32]


class Font(NamedTuple):
    """A font that could be drawn."""

    package: Package
    path: str
    family: str
    pixels: Pixels


def listed_packages() -> list[Package]:
    """Returns the font packages of the index, newest version, in order of name."""
    words = ["apt-cache", "search", "--names-only", "^(fonts|ttf|otf)-"]
    found = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split("\n")
    names = sorted(line.split()[0] for line in found if line and not _SYMBOLS.search(line.split()[0]))
    words = ["apt-cache", "show", "--no-all-versions", *names]
    shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    packages = []
    for text in shown.strip().split("\n\n"):
        field = dict(re.findall(r"^(\w+): (.*)$", text, re.MULTILINE))
        if int(field["Size"]) in _SIZES:
            packages.append(Package(field["Package"], field["Version"], field["SHA256"]))
    return sorted(set(packages))


def fonts_of(package: Package, unpacked: Path) -> list[Font]:
    """Returns those of its fonts that have all letters."""
    fonts = []
    for path in sorted(unpacked.rglob("*")):
        if path.suffix.lower() not in (".ttf", ".otf") or path.is_symlink() or _OTHER_SCRIPTS.search(path.name):
            continue
        try:
            with TTFont(path, lazy=True) as font:
                has = font.getBestCmap() or {}
                family = font["name"].getDebugName(16) or font["name"].getDebugName(1) or path.stem
            if all(ord(letter) in has for letter in LETTERS):
                fonts.append(Font(package, str(path.relative_to(unpacked)), family, render(path)))
        except (OSError, ValueError, AssertionError, KeyError, TTLibError) as error:
            print(f"{package.name}: {path.name}: {error}")
    return fonts


def unit(rows: Floats) -> Floats:
    """Takes the mean from the last dimension and scales it to length 1: products are correlations."""
    rows = rows - rows.mean(-1, keepdims=True)
    return rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-6)


def usable(fonts: list[Font]) -> list[Font]:
    """Leaves out fonts with a blank letter, without letters' shapes, or with one case."""
    fonts = [font for font in fonts if font.pixels.reshape(len(LETTERS), -1).max(1).min() >= 64]
    pixels = np.stack([font.pixels for font in fonts]).reshape(len(fonts), len(LETTERS), -1).astype(np.float32)
    letters, mean = unit(pixels), unit(pixels.mean(0))
    like = np.einsum("nld,ld->nl", letters, mean).mean(1)
    small = [LETTERS.index(letter) for letter in _DIFFER_IN_PRINT]
    capital = [LETTERS.index(letter.upper()) for letter in _DIFFER_IN_PRINT]
    alike = np.einsum("nld,nld->nl", letters[:, small], letters[:, capital]).mean(1)
    return [font for font, a, b in zip(fonts, like, alike, strict=True) if a >= _LIKE_A_LETTER and b < _CASES_ALIKE]


def chosen(fonts: list[Font]) -> dict[tuple[Package, str], str]:
    """Returns the part, train or val, of each font taken."""
    vectors = unit(np.stack([font.pixels for font in fonts]).reshape(len(fonts), -1).astype(np.float32))
    alike = vectors @ vectors.T
    group = {font.family: font.family for font in fonts}

    def first(family: str) -> str:
        while group[family] != family:
            family = group[family]
        return family

    for i, j in zip(*np.nonzero(np.triu(alike > _ONE_GROUP, 1)), strict=True):
        a, b = sorted((first(fonts[i].family), first(fonts[j].family)))
        group[b] = a
    taken: dict[str, list[int]] = defaultdict(list)
    families: Counter[str] = Counter()
    for i, font in enumerate(fonts):
        members = taken[first(font.family)]
        if families[font.family] < _FONTS_A_FAMILY and (not members or alike[i, members].max() <= _COPY):
            members.append(i)
            families[font.family] += 1
    parts = {}
    for name, members in taken.items():
        for i in members:
            parts[fonts[i].package, fonts[i].path] = "val" if share_of(name) < _VALIDATION else "train"
    return parts


def main(folder: Path) -> None:
    """Writes glyphs.json."""
    packages = listed_packages()
    fetch(packages, folder / "packages")
    fonts: list[Font] = []
    for package in packages:
        unpacked = folder / "unpacked" / package.name
        if not unpacked.exists():
            unpack(package, folder / "packages", unpacked)
        fonts += fonts_of(package, unpacked)
    parts = chosen(usable(fonts))
    listed: list[dict[str, Any]] = []
    drawn: dict[str, list[bytes]] = {"train": [], "val": []}
    pixels = {(font.package, font.path): font.pixels for font in fonts}
    for package in packages:
        mine = {path: part for (owner, path), part in parts.items() if owner == package}
        if mine:
            listed.append(package._asdict() | {"fonts": mine})
            for path, part in mine.items():
                drawn[part].append(distort(pixels[package, path], path).tobytes())
    checksum = hashlib.sha256(b"".join(drawn["train"] + drawn["val"])).hexdigest()
    with_what = f"Pillow {PIL.__version__} with FreeType {features.version('freetype2')}"
    LIST.write_text(
        json.dumps({"drawn_with": with_what, "pixels_sha256": checksum, "packages": listed}, indent=1) + "\n"
    )
    count = Counter(parts.values())
    print(
        f"{len(listed)} packages; fonts: {dict(count)}; pictures: { {k: v * len(LETTERS) for k, v in count.items()} }"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
