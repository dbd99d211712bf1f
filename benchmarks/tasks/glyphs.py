"""Glyphs: the 52 Latin letters of several hundred free typefaces, 32 × 32 pixels, grey; which letter is it?

A task that is not at its ceiling, made on any machine from Debian's font packages. Typefaces are split between
training and validation by *group*, families whose letters look alike being one group, so a model is judged on shapes it
has never seen. glyphs.json names every package, font file and its part, and the SHA-256 of what is written;
`choose_fonts.py` made it.

Every font is drawn at the size at which its highest and lowest letters fill 24 pixels and its widest at most 26, on one
baseline, so small c and capital C differ. Each picture is then turned (± 15°), sheared (± 0.2) and shifted (± 2 pixels)
by numbers drawn from its font's path: without that, most typefaces hold no error and a few strange ones hold them all.

Written to the folder:
    glyphs.npz   train_x uint8 (N, 32, 32), train_y int64 (N,), val_x, val_y; 0 … 25 are a … z, 26 … 51 are A … Z
    licences/    the copyright file of each package; all are free software by Debian's guidelines
"""

from __future__ import annotations

import hashlib
import json
import math
import string
from pathlib import Path

import numpy as np
import numpy.typing as npt
import PIL
from PIL import Image, ImageDraw, ImageFont, features

from shade.process import replacing
from tasks.packages import Package, PackageError, fetch, unpacked

LETTERS = string.ascii_lowercase + string.ascii_uppercase
SIDE = 32
LIST = Path(__file__).with_name("glyphs.json")

_HEIGHT, _WIDTH = 24, 26
_TRIAL_SIZE = 200
_TURN, _SHEAR, _SHIFT = math.radians(15), 0.2, 2.0

Pixels = npt.NDArray[np.uint8]


def render(font: Path) -> Pixels:
    """Draws the letters of a font: uint8 (52, 32, 32). Raises OSError or ValueError for a font that cannot be drawn."""
    trial = ImageFont.truetype(str(font), _TRIAL_SIZE, layout_engine=ImageFont.Layout.BASIC)
    boxes = [trial.getbbox(letter, anchor="ls") for letter in LETTERS]
    top, bottom = min(box[1] for box in boxes), max(box[3] for box in boxes)
    widest = max(box[2] - box[0] for box in boxes)
    if bottom <= top or widest <= 0:
        raise ValueError(f"{font}: no letter has ink")
    scale = min(_HEIGHT / (bottom - top), _WIDTH / widest)
    baseline = round(SIDE / 2 - scale * (top + bottom) / 2)
    drawn = ImageFont.truetype(str(font), _TRIAL_SIZE * scale, layout_engine=ImageFont.Layout.BASIC)
    pixels = np.zeros((len(LETTERS), SIDE, SIDE), np.uint8)
    for row, letter in enumerate(LETTERS):
        image = Image.new("L", (SIDE, SIDE))
        left, _, right, _ = drawn.getbbox(letter, anchor="ls")
        place = (SIDE / 2 - (left + right) / 2, baseline)
        ImageDraw.Draw(image).text(place, letter, fill=255, font=drawn, anchor="ls")
        pixels[row] = np.asarray(image)
    return pixels


def distort(pixels: Pixels, seed: str) -> Pixels:
    """Turns, shears and shifts each picture of a font by its own numbers, the same for the same seed."""
    key = np.frombuffer(hashlib.sha256(seed.encode()).digest()[:16], np.uint64)
    draw_L4 = np.random.Generator(np.random.Philox(key=key)).uniform(-1, 1, (len(pixels), 4))
    out = np.empty_like(pixels)
    for row, (turn, shear, x, y) in enumerate(draw_L4):
        cosine, sine = math.cos(_TURN * turn), math.sin(_TURN * turn)
        a, b, d, e = cosine, -sine + _SHEAR * shear, sine, cosine
        centre = SIDE / 2
        c, f = centre - a * centre - b * centre + _SHIFT * x, centre - d * centre - e * centre + _SHIFT * y
        image = Image.fromarray(pixels[row])
        out[row] = np.asarray(
            image.transform((SIDE, SIDE), Image.Transform.AFFINE, (a, b, c, d, e, f), Image.Resampling.BICUBIC)
        )
    return out


def prepare(folder: Path) -> Path:
    """Writes the task into a folder, unless it is there, and returns the path of glyphs.npz.

    Raises:
        PackageError: A package could not be had, or the pixels differ from those of the list: another FreeType.
    """
    target = folder / "glyphs.npz"
    if target.exists():
        return target
    listed = json.loads(LIST.read_text())
    packages = {Package(each["name"], each["version"], each["sha256"]): each["fonts"] for each in listed["packages"]}
    fetch(list(packages), folder / "packages")
    parts: dict[str, list[Pixels]] = {"train": [], "val": []}
    for package, fonts in packages.items():
        with unpacked(package, folder) as files:
            for path, part in fonts.items():
                parts[part].append(distort(render(files / path), path))
    train, val = np.concatenate(parts["train"]), np.concatenate(parts["val"])
    got = hashlib.sha256(train.tobytes() + val.tobytes()).hexdigest()
    if got != listed["pixels_sha256"]:
        here = f"Pillow {PIL.__version__} with FreeType {features.version('freetype2')}"
        wanted = f"the pixels of {listed['drawn_with']}"
        raise PackageError(f"expected {wanted}, got others from {here}; install that Pillow")
    y = np.arange(len(LETTERS))
    train_y, val_y = (np.tile(y, len(parts[part])) for part in ("train", "val"))
    with replacing(target) as beside, beside.open("wb") as file:
        np.savez(file, train_x=train, train_y=train_y, val_x=val, val_y=val_y)
    return target
