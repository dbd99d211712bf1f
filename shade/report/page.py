"""``report.html``: the run as one page that needs nothing else: no network, no script, no file beside it.

It can be mailed, archived and opened years later. Light or dark as the reader's system is; the charts are SVG in the
page (`shade.report.svg`), the contact sheet of `shade quality`, where there is one, is a picture in it.

All text that comes out of the run (paths, settings, class names) is escaped: a page somebody sends you shows, and does
not run, what a run was called.
"""

from __future__ import annotations

import base64
import csv
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from shade.report.quality import CSV_FILE, SHEET_FILE
from shade.report.rows import CAUSES, Run
from shade.report.style import STYLE
from shade.report.svg import Format, Series, bar_chart, line_chart
from shade.report.text import LEGEND, flatten, human_bytes, reads_per_n, totals

COLOURS = {"origin": "c4", "cache": "c2", "decode": "c5", "transform": "c6", "wait": "c7", "step": "c3"}
_MOST_SHEET_BYTES = 8 * 2**20
_NUM_SUSPECTS = 10


def write_html(run: Run, path: Path) -> None:
    """Writes the page.

    Args:
        run: What was read.
        path: Where it goes; replaced if there.

    Raises:
        OSError: It cannot be written.
    """
    path.write_text(render(run), encoding="utf-8", errors="replace")


def render(run: Run) -> str:
    """The page as text; see `write_html`."""
    name = run.directory.resolve().name
    named = [str(run.plan[key]) for key in ("network", "sampling", "policy") if isinstance(run.plan.get(key), str)]
    ranks = max(e.ranks for e in run.epochs)
    size = f"{len(run.epochs)} epoch{'s' * (len(run.epochs) > 1)}, {ranks} rank{'s' * (ranks > 1)}"
    sentences = [line.strip() for line in totals(run)][1:]
    parts = [
        f"<h1>shade · {escape(name)}</h1>",
        f'<p class="sub">{escape(" · ".join([*named, size, str(run.directory)]))}</p>',
        f'<div class="tiles">{"".join(_tiles(run))}</div>',
        f'<h2>Epoch by epoch</h2><div class="charts">{"".join(_charts(run))}</div>',
        "<h2>Altogether</h2><ul>" + "".join(f"<li>{escape(line)}</li>" for line in sentences) + "</ul>",
        *_quality(run.directory),
        f'<h2>Every epoch</h2><div class="wide">{_table(run)}</div>',
        "<h2>Settings</h2><dl>"
        + "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in flatten(run.plan))
        + "</dl>",
        f"<pre>{escape(LEGEND)}</pre>",
    ]
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>shade · {escape(name)}</title><style>{STYLE}</style></head><body>"
    )
    return head + "\n".join(parts) + "</body></html>\n"


def _tiles(run: Run) -> Iterator[str]:
    """The last epoch at a glance, and the run's totals."""
    last = run.epochs[-1]
    accuracy = next((e.val_accuracy for e in reversed(run.epochs) if e.val_accuracy is not None), None)
    stalls, seconds = last.stall_seconds, last.epoch_seconds
    waited = sum(stalls.values()) / seconds if stalls and seconds else None
    known = {
        "hit ratio, last epoch": _percent(last.hit_ratio),
        "origin reads / N, last epoch": _plain(reads_per_n(run, last), ".3f"),
        "samples/s, last epoch": _plain(last.samples_per_second, ",.0f"),
        "of the last epoch spent waiting for data": _percent(waited),
        "validation accuracy": _percent(accuracy),
        "training loss": _plain(last.loss, ".4g"),
        "snapshots": _plain(run.snapshots.get("saves"), ",.0f"),
    }
    sent = sum(e.gradient_bytes or 0.0 for e in run.epochs)
    if sent:
        known["of gradients sent"] = human_bytes(sent)
    for meaning, value in known.items():
        if value:
            yield f'<div class="tile"><b>{escape(value)}</b><span>{escape(meaning)}</span></div>'


def _charts(run: Run) -> Iterator[str]:
    epochs = [e.epoch for e in run.epochs]

    def of(name: str, colour: str, values: Iterable[float | None]) -> Series:
        return Series(name, colour, list(values))

    hits = [of("hit ratio", "c3", (e.hit_ratio for e in run.epochs))]
    yield _figure("Hit ratio", hits, line_chart(epochs, hits, _percent_of, top=1.0))
    reads = [of("origin reads", "c4", (e.counts.get("origin_reads") for e in run.epochs))]
    rule = float(run.num_samples) if run.num_samples else None
    caption = f"dashed: N = {run.num_samples:,}, what an epoch without a cache reads" if run.num_samples else ""
    yield _figure("Origin reads", reads, bar_chart(epochs, reads, _short, rule=rule), caption)
    speed = [of("samples/s", "c1", (e.samples_per_second for e in run.epochs))]
    highest = max((v for v in speed[0].values if v is not None), default=0.0)
    yield _figure("Throughput, samples/s", speed, line_chart(epochs, speed, _short, top=highest or 1.0))
    spent = [of(cause, COLOURS[cause], (e.stall_seconds.get(cause) for e in run.epochs)) for cause in CAUSES]
    spent.insert(0, of("step", COLOURS["step"], (e.step_seconds for e in run.epochs)))
    told = "step: the script had its batch; the others: it waited for one, while loading was busy with …"
    yield _figure("Where the time went, seconds a rank", spent, bar_chart(epochs, spent, _seconds), told)
    yield from _curves(run, epochs, "Loss", "loss", "val_loss", _short, None)
    yield from _curves(run, epochs, "Accuracy", "train_accuracy", "val_accuracy", _percent_of, 1.0)
    blocked = [of("waited for snapshots", "c2", (e.snapshot_seconds for e in run.epochs))]
    if any(e.snapshot_seconds for e in run.epochs):
        yield _figure("Snapshots: time the training waited", blocked, bar_chart(epochs, blocked, _seconds))
    sent = [of("sent", "c5", (e.gradient_bytes for e in run.epochs))]
    if sent[0].is_known:
        yield _figure("Gradients sent, all ranks", sent, bar_chart(epochs, sent, human_bytes))


def _curves(
    run: Run, epochs: Sequence[int], title: str, training: str, validation: str, form: Format, top: float | None
) -> Iterator[str]:
    series = [
        Series("training", "c1", [getattr(e, training) for e in run.epochs]),
        Series("validation", "c2", [getattr(e, validation) for e in run.epochs]),
    ]
    if any(each.is_known for each in series):
        yield _figure(title, series, line_chart(epochs, series, form, top=top))


def _figure(title: str, series: Sequence[Series], chart: str, caption: str = "") -> str:
    known = [each for each in series if each.is_known]
    keys = "".join(f'<i class="{each.colour}"></i>{escape(each.name)}' for each in known)
    legend = f'<div class="legend">{keys}</div>' if len(known) > 1 else ""
    note = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure><h3>{escape(title)}</h3>{legend}{chart}{note}</figure>"


def _table(run: Run) -> str:
    names = (
        "epoch",
        "loss",
        "train acc.",
        "val acc.",
        "samples",
        "hit ratio",
        "origin reads",
        "reads/N",
        "samples/s",
        "seconds",
    )
    heads = (*names, "step", *CAUSES)
    rows = []
    for e in run.epochs:
        cells = [
            str(e.epoch), _plain(e.loss, ".4f"), _percent(e.train_accuracy), _percent(e.val_accuracy),
            _plain(e.counts.get("samples"), ","), _percent(e.hit_ratio), _plain(e.counts.get("origin_reads"), ","),
            _plain(reads_per_n(run, e), ".3f"), _plain(e.samples_per_second, ",.0f"), _plain(e.epoch_seconds, ",.2f"),
            _plain(e.step_seconds, ",.2f"), *(_plain(e.stall_seconds.get(cause), ",.2f") for cause in CAUSES),
        ]  # fmt: skip
        rows.append("<tr>" + "".join(f"<td>{escape(cell or '–')}</td>" for cell in cells) + "</tr>")
    header = "".join(f"<th>{escape(name)}</th>" for name in heads)
    return f"<table><thead><tr>{header}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _quality(directory: Path) -> Iterator[str]:
    """What `shade quality` has found, if it was asked."""
    try:
        with (directory / CSV_FILE).open(newline="", encoding="utf-8", errors="replace") as file:
            rows = [row for row, _ in zip(csv.DictReader(file), range(_NUM_SUSPECTS), strict=False)]
        suspects = [
            [row["suspicion"], row["confidence"], row["usual_confidence"], row["target"], row["sample"] or row["index"]]
            for row in rows
        ]
    except (OSError, csv.Error, KeyError):
        return
    if not suspects:
        return
    yield "<h2>Samples worth a look</h2>"
    heads = ("suspicion", "confidence", "usual in its class", "target")
    cells = "".join(
        "<tr>"
        + "".join(f"<td>{escape(cell or '–')}</td>" for cell in row[:4])
        + f'<td class="text">{escape(row[4])}</td></tr>'
        for row in suspects
    )
    header = "".join(f"<th>{head}</th>" for head in heads) + '<th class="text">sample</th>'
    yield f'<div class="wide"><table><thead><tr>{header}</tr></thead><tbody>{cells}</tbody></table></div>'
    try:
        picture = (directory / SHEET_FILE).read_bytes()
    except OSError:
        return
    if len(picture) <= _MOST_SHEET_BYTES:
        source = base64.b64encode(picture).decode()
        yield f'<p><img alt="the most suspicious samples" src="data:image/png;base64,{source}"></p>'


def _plain(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _percent_of(value: float) -> str:
    return f"{value:.3g}" if value == 0 else f"{100 * value:.3g} %"


def _short(value: float) -> str:
    for factor, unit in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if abs(value) >= factor:
            scale = 1e3 if unit == " k" else factor
            return f"{value / scale:,.4g}{unit}"
    return f"{value:,.4g}"


def _seconds(value: float) -> str:
    return f"{value:,.3g} s"
