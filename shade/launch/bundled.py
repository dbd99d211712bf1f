"""Has what the package brings along for a first run: training scripts to copy from, and a data set.

The scripts are those of ``examples/`` in the repository; ``shade/examples`` is a link to it, which a wheel holds as a
folder. So there is one copy of each, in a clone, an editable install and a wheel.

The data set is the 1,797 handwritten digits that scikit-learn carries, written as an image folder: nothing is
downloaded. Each file is written under another name and renamed. The next call completes a half-written folder, and
leaves a complete one alone.
"""

from __future__ import annotations

import ast
import io
import json
import re
from importlib import resources
from pathlib import Path
from typing import Final

from shade.errors import ConfigError
from shade.installation import install_hint
from shade.process import replacing

EXAMPLES: Final = Path(str(resources.files("shade"))) / "examples"
"""The folder of the training scripts."""
DIGITS: Final = Path(".cache") / "digits"
"""Where a run keeps the digits, from its working directory: ``train`` and ``val``, a folder a digit."""
_SIZE: Final = 32
_NUM_TRAIN, _NUM_VALIDATION = 1437, 360


def examples() -> dict[str, str]:
    """Returns the name of each example and the first line of what it says about itself."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(EXAMPLES.glob("*.py"))}
    return {
        name: (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
        for name, text in texts.items()
        if "__main__" in text
    }


def write_example(name: str, folder: Path) -> list[Path]:
    """Writes an example, and the modules of ours that it imports, into a folder; returns the files.

    Raises `ConfigError` if there is no such example, or a file of that name is there already.
    """
    name = name.removesuffix(".py")
    known = examples()
    if name not in known:
        raise ConfigError.of(f"an example among {', '.join(known)}", name, "see shade example for what each shows")
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    among = {path.stem for path in EXAMPLES.glob("*.py")}
    helpers = (each for each in re.findall(r"^import (\w+)", text, re.MULTILINE) if each in among)
    paths = [folder / f"{each}.py" for each in (name, *helpers)]
    there = [str(path) for path in paths if path.exists()]
    if there:
        raise ConfigError.of("a folder without the example", ", ".join(there), "remove it, or go to another folder")
    for path in paths:
        path.write_bytes((EXAMPLES / path.name).read_bytes())
    return paths


def prepare_digits(folder: Path, flip_fraction: float = 0.0, seed: int = 0) -> str:
    """Writes what is missing of the digits (``train`` 1,437 images, ``val`` 360, the same split every time) and
    returns a line that says what was done. The 8 × 8 scans are enlarged to 32 × 32 grey PNGs, so that every network
    of the examples takes them. A share ``flip_fraction`` of the training images, chosen by the seed, lies in another
    digit's folder; ``flipped.txt`` lists them. Raises ConfigError if scikit-learn is not installed, or the folder
    holds another variant or cannot be written."""
    num_flipped = round(flip_fraction * _NUM_TRAIN)
    sizes = f"{_NUM_TRAIN} for training, {_NUM_VALIDATION} for validation, {num_flipped} labels flipped"
    variant = {"size": _SIZE, "flip_labels": flip_fraction, "seed": seed if flip_fraction else 0}
    _check_variant(folder / "digits.json", variant)
    num_there = sum(1 for split in ("train", "val") for _ in (folder / split).glob("*/[0-9]*.png"))
    if num_there == _NUM_TRAIN + _NUM_VALIDATION and (folder / "flipped.txt").exists() == bool(num_flipped):
        return f"digits: {sizes} in {folder} (already complete)"
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError:
        raise ConfigError.of("scikit-learn, which brings the digits", None, install_hint("digits")) from None
    import numpy as np
    from PIL import Image

    digits = load_digits()
    train, val = train_test_split(
        np.arange(len(digits.target)), test_size=_NUM_VALIDATION, random_state=0, stratify=digits.target
    )
    label = digits.target.copy()
    generator = np.random.default_rng(seed)
    flipped = np.sort(generator.choice(train, size=num_flipped, replace=False))
    label[flipped] = (label[flipped] + generator.integers(1, 10, size=len(flipped))) % 10
    num_written = 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _replace(folder / "digits.json", json.dumps(variant).encode())
        for split, members in (("train", train), ("val", val)):
            for digit in range(10):
                (folder / split / str(digit)).mkdir(parents=True, exist_ok=True)
            for index in members.tolist():
                path = folder / split / str(label[index]) / f"{index:04d}.png"
                if not path.exists():
                    grey = np.round(digits.images[index] * (255 / 16)).astype(np.uint8)
                    png = io.BytesIO()
                    Image.fromarray(grey).resize((_SIZE, _SIZE), Image.Resampling.BICUBIC).save(png, "png")
                    _replace(path, png.getvalue())
                    num_written += 1
        if len(flipped):
            lines = [f"train/{label[i]}/{i:04d}.png was {digits.target[i]}\n" for i in flipped.tolist()]
            _replace(folder / "flipped.txt", "".join(lines).encode())
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}; choose another folder") from None
    return f"digits: {sizes} in {folder} ({num_written} images written)"


def _check_variant(marker: Path, variant: dict[str, float]) -> None:
    found = json.loads(marker.read_text()) if marker.is_file() else variant
    if found != variant:
        cure = f"it holds another variant, {found}; name another folder, or remove this one"
        raise ConfigError(f"cannot write to {marker.parent}: {cure}")


def _replace(path: Path, content: bytes) -> None:
    with replacing(path) as beside:
        beside.write_bytes(content)
