"""Makes the pictures of the report, ``shade top``, the quality sheet and the dashboard; ``scripts/docs screenshots``.

It trains once on digits of which a tenth has a wrong label, and takes the pictures from that run: the page in a
headless Chromium, the terminal view through rich, the sheet as it is. Look at each before you commit it.
"""

from __future__ import annotations

import io
import json
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
DASHBOARD: Final = ROOT / "deploy" / "grafana" / "shade.json"
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
    """Trains, and writes the pictures."""
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
        show_dashboard(here)
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


def show_dashboard(here: Path) -> None:
    """Draws deploy/grafana/shade.json's panels from a run's rows, over epochs: a stand-in where no Grafana runs."""
    from matplotlib.figure import Figure

    rows = [json.loads(line) for line in (here / RUN / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["kind"] == "epoch" and row.get("epoch_seconds")]

    def shares(cause: str) -> list[float]:
        return [(row["stall_seconds"] | row).get(cause, 0.0) / row["epoch_seconds"] for row in rows]

    curves = {
        "Samples a second": {"all ranks": [row["samples"] / row["epoch_seconds"] for row in rows]},
        "Hit ratio of the epoch": {"hits": [row["hits"] / max(1, row["hits"] + row["misses"]) for row in rows]},
        "What the training waits for": {
            name: shares(name) for name in ("origin", "cache", "decode", "transform", "wait", "step_seconds")
        },
        "Read from the origin": {
            name: [row[f"{name}_bytes"] / row["epoch_seconds"] for row in rows] for name in ("origin", "cache")
        },
        "Cache": {name: [row[f"{name}_bytes"] for row in rows] for name in ("resident", "capacity")},
        "Loss": {name: [row[name] for row in rows] for name in ("loss", "val_loss")},
    }
    titles = [panel["title"] for panel in json.loads(DASHBOARD.read_text())["panels"]]
    figure = Figure(figsize=(11, 8), dpi=80, facecolor="#181b1f", layout="constrained")
    figure.suptitle("Stand-in, drawn from metrics.jsonl over epochs; not a picture of Grafana", color="#ccccdc")
    for axes, title in zip(figure.subplots(3, 2).flat, (each for each in titles if each in curves), strict=True):
        axes.set_title(title, loc="left", color="#ccccdc", fontsize=10)
        axes.set_facecolor("#181b1f")
        axes.tick_params(colors="#8e8e9a", labelsize=8)
        axes.grid(color="#2c2f36")
        for name, values in curves[title].items():
            axes.plot([row["epoch"] for row in rows], values, label=name.removesuffix("_seconds"))
        axes.legend(fontsize=7, facecolor="#22252b", labelcolor="#ccccdc", edgecolor="#2c2f36")
    figure.savefig(here / "dashboard.png")
    keep(here / "dashboard.png", "dashboard.png")


def keep(picture: Path, name: str) -> None:
    """Writes a picture with 256 colours, rare ones among them, into the documentation's images."""
    with Image.open(picture) as image:
        image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE).save(IMAGES / name, optimize=True)
    if (size := (IMAGES / name).stat().st_size) > MOST_BYTES:
        sys.exit(f"screenshots: {name} has {size:,} bytes, more than {MOST_BYTES:,}; show less of it")


if __name__ == "__main__":
    main()
