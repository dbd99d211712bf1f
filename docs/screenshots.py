"""Makes the pictures of the report, of ``shade top`` and of the quality sheet. ``scripts/docs screenshots`` runs it.

It trains once on digits of which a tenth has a wrong label, and takes the pictures from that run: the page in a
headless Chromium, the terminal view through rich, the sheet as it is. Look at each before you commit it.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from PIL import Image
from rich.console import Console

from shade.cli.top import screenful

ROOT: Final = Path(__file__).resolve().parent.parent
IMAGES: Final = ROOT / "docs" / "images"
RUN: Final = "runs/digits"
MOST_BYTES: Final = 150_000
PAGE_SIZE: Final = (1180, 1345)
"""Pixels of the page that are shown: the cards, the comparison, four charts."""
SVG: Final = """\
<svg viewBox="0 0 {terminal_width} {terminal_height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; white-space: pre; }}
{styles}
</style>
<defs>{lines}</defs>
<rect width="{terminal_width}" height="{terminal_height}" rx="8" fill="#12181e"/>
<g class="{unique_id}-matrix" transform="translate(9, 9)">
{backgrounds}
{matrix}
</g>
</svg>
"""


def main() -> None:
    """Trains, and writes the three pictures."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        sys.exit("screenshots: expected a Chromium on PATH, got none; apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        digits = (ROOT / "scripts" / "prepare_digits", "digits", "--flip-labels", "0.1")
        subprocess.run([sys.executable, *digits], cwd=here, check=True)
        words = ("run", "bench_cifar10.py", "digits/train", "--val_paths", "digits/val", "--network", "cnn")
        more = ("--epochs", "6", "--batch_size", "32", "-wss", "0.4", "--out", RUN)
        training = [sys.executable, "-m", "shade", *words, *more]
        with subprocess.Popen(training, cwd=here, stdout=subprocess.DEVNULL) as run:
            await_epoch(here / RUN / "metrics.jsonl", run)
            show_top(here)
        if run.returncode:
            sys.exit(f"screenshots: the training failed; see {here}")
        for verb in ("quality", "report"):
            subprocess.run([sys.executable, "-m", "shade", verb, RUN], cwd=here, check=True, stdout=subprocess.DEVNULL)
        show_page(browser, here)
        keep(here / RUN / "quality.png", "quality.png")


def await_epoch(rows: Path, run: subprocess.Popen[bytes]) -> None:
    """Returns in the third epoch, or when the training ends."""
    while not (rows.exists() and rows.read_text().count("\n") >= 2) and run.poll() is None:
        time.sleep(0.2)
    time.sleep(2.0)


def show_page(browser: str, here: Path) -> None:
    """Writes how a browser shows the upper part of the report."""
    shot = here / "report.png"
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--screenshot={shot}")
    size = "--window-size={},{}".format(*PAGE_SIZE)
    page = (here / RUN / "report.html").as_uri()
    subprocess.run([browser, *flags, size, page], check=True, stderr=subprocess.DEVNULL)
    keep(shot, "report.png")


def show_top(here: Path) -> None:
    """Writes what ``shade top`` shows in the middle of the run."""
    lines = screenful([str(here / RUN)]).plain.replace(f"{here}/", "").splitlines()
    console = Console(width=80, record=True, file=io.StringIO())
    console.print("\n".join(["[bold]$ shade top runs/digits[/bold]", *lines[1:]]).rstrip() + "\n", highlight=False)
    (IMAGES / "top.svg").write_text(console.export_svg(title="", code_format=SVG), encoding="utf-8")


def keep(picture: Path, name: str) -> None:
    """Writes a picture with 256 colours, rare ones among them, into the documentation's images."""
    with Image.open(picture) as image:
        image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE).save(IMAGES / name, optimize=True)
    if (size := (IMAGES / name).stat().st_size) > MOST_BYTES:
        sys.exit(f"screenshots: {name} has {size:,} bytes, more than {MOST_BYTES:,}; show less of it")


if __name__ == "__main__":
    main()
