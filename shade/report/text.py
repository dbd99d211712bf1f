"""Writes a run as text a person reads top to bottom, and as CSV a spreadsheet reads.

Results come first, settings last. Each number in ``report.txt`` has a sentence that says how to read it. A value that
no row held is a dash, never a zero. Lines have at most 80 characters, so that tables survive a terminal, a mail and a
log.
"""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shade.errors import shown_place, shown_url
from shade.report.forecast import plain_loading, workers_of
from shade.report.rows import CAUSES, COUNTERS, EpochSummary, Run, load_run
from shade.report.style import human_bytes, percent

RECEIPT = ("drawn", "mean_inclusion", "weight_sum_z", "effective_sample_size", "max_weight", "class_drift")

TROUBLES = {
    "corrupt": "entries came back from the store damaged; each was dropped and read from the origin again",
    "store_errors": "calls to the store failed; the samples were read from the origin, nothing was lost but time",
    "bad_samples": "samples could not be read or decoded and were left out; the log names them",
    "yielded": "samples left the cache early to make room for snapshots; a larger maxmemory would have kept them",
    "declined": "samples were not admitted",
}

LEGEND = """\
How to read it
  hit ratio  share of the samples whose bytes did not come from the origin, the
             storage of the data set.
  reads/N    origin reads of an epoch over the size of the data set. Plain
             loading: 1.000; less is what the cache and the sampling saved.
  step       the script had its batch: transfer, forward, backward, optimizer.
  origin …   time that training waited for a batch while loading was busy with
             origin, cache, decode or transform; wait: none of them (workers
             start, batches change hands). Little of it: nothing to gain.
  rest       what is left of the epoch: validation, the end of the epoch.
  samples/s  all ranks together. The first epoch is slow: the cache is empty.
             The last ones may draw more samples than those before.
  run        sums; the last loss and accuracies; of reads/N the mean.
  weights    z near 0 is a sound draw; |z| > 4 is a bug, please report it. An
             effective sample size near the number drawn: weights are even."""
"""Fits a terminal of 80 columns, as all of the text does."""
_WIDTH = 80


def render(run: Run, note: str = "") -> str:
    """Returns the whole of ``report.txt``, with a line about the picture, which may be empty."""
    title = f"shade run report · {run.directory.resolve().name}"
    parts = [
        f"{title}\n{'=' * len(title)}",
        "\n".join(_results(run)),
        "\n".join(_plain_loading(run)),
        "\n".join(_table(run)),
        "\n".join(_times(run)),
        "\n".join(_trends(run)),
        "\n".join(["Details", *(_wrapped(line) for line in details(run))]),
        LEGEND,
        note,
        "\n".join(_settings(run)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _wrapped(line: str, indent: int = 2) -> str:
    """Returns a line folded at `_WIDTH`; a word that is longer, such as a path, stays whole."""
    return textwrap.fill(
        line,
        _WIDTH,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _results(run: Run) -> Iterator[str]:
    yield "Results of the whole run"
    for each in results(run):
        yield f"  {each.name:<26} {each.value:>12}  {each.note}".rstrip()


def render_csv(run: Run) -> str:
    """Returns one line an epoch; every column is always there, empty where the number is unknown."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    plain = ("loss", "train_accuracy", "val_loss", "val_accuracy", "learning_rate", "resident_bytes", "capacity_bytes")
    writer.writerow(
        ["epoch", "ranks", *COUNTERS, "hit_ratio", "origin_reads_per_n", "epoch_seconds", "samples_per_second"]
        + [f"stall_{cause}_seconds" for cause in CAUSES]
        + [*plain, *(f"receipt_{name}" for name in RECEIPT)]
    )
    for e in run.epochs:
        writer.writerow(
            [e.epoch, e.ranks, *(e.counts.get(name) for name in COUNTERS)]
            + [e.hit_ratio, reads_per_n(run, e), e.epoch_seconds, e.samples_per_second]
            + [e.stall_seconds.get(cause) for cause in CAUSES]
            + [getattr(e, name) for name in plain]
            + [e.receipt.get(name) for name in RECEIPT]
        )
    return out.getvalue()


def render_comparison(plain: Run, cached: Run) -> str:
    """Returns two runs of one training side by side: speed, bytes read from storage, accuracy."""
    seconds, sizes, accuracies = [], [], []
    speeds = [run.whole.samples_per_second or 0.0 for run in (plain, cached)]
    for run in (plain, cached):
        known = [e.epoch_seconds for e in run.epochs if e.epoch_seconds is not None]
        seconds.append(sum(known) / max(1, len(known)))
        sizes.append(run.total("origin_bytes") or 0)
        accuracies.append(run.epochs[-1].val_accuracy or 0.0)
    workers = [f"{run.plan.get('workers', '?')} workers" for run in (plain, cached)]
    faster = _speed(speeds[1], speeds[0])
    rows = [
        ("", "plain DataLoader", "shade", ""),
        ("", *workers, ""),
        ("samples a second", *(f"{value:,.0f}" for value in speeds), faster),
        ("seconds an epoch", *(f"{value:.2f}" for value in seconds), ""),
        ("read from storage", *map(human_bytes, sizes), _fewer(sizes[1], max(1, sizes[0]), "less")),
        ("accuracy", *map(percent, accuracies), f"{100 * (accuracies[1] - accuracies[0]):+.1f} points"),
    ]
    return "\n" + "".join(f"{name:<18}{one:>17}{other:>12}   {by}".rstrip() + "\n" for name, one, other, by in rows)


def sparkline(values: Sequence[float | None]) -> str:
    """Returns a curve in one line of text, lowest ▁ to highest █; a gap where the value is unknown."""
    known = [v for v in values if v is not None]
    if not known:
        return ""
    low, span = min(known), (max(known) - min(known)) or 1.0
    return "".join(" " if v is None else "▁▂▃▄▅▆▇█"[min(int((v - low) / span * 8), 7)] for v in values)


def _settings(run: Run) -> Iterator[str]:
    yield "Settings"
    pairs = list(settings(run))
    width = min(max(len(name) for name, _ in pairs), 34)
    for name, value in pairs:
        yield f"  {name:<{width}}  {value if len(value) <= 76 - width else value[: 75 - width] + '…'}"


def settings(run: Run) -> Iterator[tuple[str, str]]:
    """Yields the run's directory and all that its plan sets."""
    yield "directory", str(run.directory)
    yield from flatten(run.plan)


def flatten(plan: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields the plan's settings as name and text, without those that are None and without passwords."""
    for name, value in plan.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        elif value is not None:
            shown = ", ".join(shown_place(str(each)) for each in (value if isinstance(value, list) else [value]))
            yield f"{prefix}{name}", shown


def _table(run: Run) -> Iterator[str]:
    if run.epochs[0].epoch == 0:
        yield "Epochs (0 is the first)"
    else:
        yield "Epochs"
    yield f"{'':13} {'-- accuracy -':^15} {'':7} {'hit':>6} {'origin':>8}".rstrip()
    yield (
        f"{'epoch':>5} {'loss':>7} {'train':>7} {'val':>7} {'samples':>7} {'ratio':>6} {'reads':>8} {'reads/N':>7} "
        f"{'seconds':>8} {'samples/s':>9}"
    )
    for label, e in labelled(run):
        yield (
            f"{label:>5} {_cell(e.loss, 7, '.4f')} {_share(e.train_accuracy, 7)} {_share(e.val_accuracy, 7)} "
            f"{_count(e, 'samples', 7)} {_share(e.hit_ratio, 6)} {_count(e, 'origin_reads', 8)} "
            f"{_cell(reads_per_n(run, e), 7, '.3f')} {_cell(e.epoch_seconds, 8, ',.2f')} "
            f"{_cell(e.samples_per_second, 9, ',.0f')}"
        )


def _times(run: Run) -> Iterator[str]:
    yield "Where the time went, seconds of a rank"
    heads = ("step", *CAUSES, "rest")
    yield " ".join([f"{'epoch':>5}", *(f"{name:>9}" for name in heads)])
    for label, e in labelled(run):
        parts = (e.step_seconds, *(e.stall_seconds.get(cause) for cause in CAUSES), e.rest_seconds)
        yield " ".join([f"{label:>5}", *(_cell(seconds, 9, ",.2f") for seconds in parts)])


def labelled(run: Run) -> list[tuple[str, EpochSummary]]:
    """Returns the rows of a table: each epoch, then the whole run."""
    return [*((str(e.epoch), e) for e in run.epochs), ("run", run.whole)]


def _trends(run: Run) -> Iterator[str]:
    if len(run.epochs) < 2:
        return
    curves: list[tuple[str, list[float | None], Callable[[float], str]]] = [
        ("loss", [e.loss for e in run.epochs], "{:.4f}".format),
        ("val accuracy", [e.val_accuracy for e in run.epochs], percent),
        ("hit ratio", [e.hit_ratio for e in run.epochs], percent),
        ("origin reads", [e.counts.get("origin_reads") for e in run.epochs], "{:,.0f}".format),
    ]
    for name, values, form in curves:
        known = [v for v in values if v is not None]
        if known:
            yield f"{name:<13} {sparkline(values[-50:])}  {form(known[0])} → {form(known[-1])}"


@dataclass(frozen=True)
class Result:
    """One number of the whole run."""

    name: str
    value: str
    note: str = ""


def results(run: Run) -> Iterator[Result]:
    """Yields the numbers of the whole run that are known, the most important first."""
    whole, per_epoch = run.whole, len(run.epochs)
    accuracies = [(e.val_accuracy, e.epoch) for e in run.epochs if e.val_accuracy is not None]
    if accuracies:
        best, epoch = max(accuracies, key=lambda each: (each[0], -each[1]))
        note = "after the last epoch" + (f"; best {percent(best)}, epoch {epoch}" if best > accuracies[-1][0] else "")
        yield Result("validation accuracy", percent(accuracies[-1][0]), note)
    if whole.loss is not None:
        yield Result("training loss", f"{whole.loss:.4g}", "last epoch")
    if whole.epoch_seconds:
        yield Result("time", duration(whole.epoch_seconds), f"{per_epoch} epoch{'s' * (per_epoch > 1)}")
    if whole.samples_per_second is not None:
        yield Result("samples/s", f"{whole.samples_per_second:,.0f}", "all ranks")
    if whole.hit_ratio is not None:
        hits, misses = whole.counts["hits"], whole.counts["misses"]
        yield Result("hit ratio", percent(whole.hit_ratio), f"{hits:,} of {hits + misses:,} samples")
    reads = reads_per_n(run, whole)
    if reads is not None:
        yield Result("origin reads/N", f"{reads:.3f}", "plain loading: 1.000")
    if num_bytes := run.total("origin_bytes"):
        yield Result("read from storage", human_bytes(num_bytes), f"{run.total('origin_reads') or 0:,} reads")
    if whole.stall_seconds and whole.epoch_seconds:
        waited = sum(whole.stall_seconds.values())
        yield Result("waiting for data", percent(waited / whole.epoch_seconds), f"{duration(waited)} in all")
    if saves := run.snapshots.get("saves"):
        waited = run.snapshots.get("blocked_seconds", 0.0)
        yield Result("snapshots", f"{saves:,.0f}", f"training waited {waited:.2f} s")
    if whole.gradient_bytes:
        yield Result("gradients sent", human_bytes(whole.gradient_bytes), "all ranks")


def plain_beside(run: Run) -> Run | None:
    """Returns the run of a plain DataLoader that was trained beside this one to compare; None if there is none."""
    folder = run.directory / "plain"
    return load_run(folder) if (folder / "metrics.jsonl").is_file() else None


def plain_rows(run: Run) -> list[tuple[str, str, str, str]]:
    """Returns what a mean epoch of the run took, what one of plain loading took or, if none was measured, is predicted
    to take, and the difference; empty where nothing is known."""
    if (plain := plain_beside(run)) is not None:
        return _measured_rows(run, plain)
    predicted = plain_loading(run)
    if predicted is None or not run.num_samples:
        return []
    plain_bytes, epoch = predicted
    whole, num_epochs, size = run.whole, len(run.epochs), run.num_samples
    reads = whole.counts["origin_reads"] / num_epochs
    samples = whole.counts.get("samples", 0) / num_epochs
    rows = [
        ("samples an epoch", f"{samples:,.0f}", f"{size:,}", _fewer(samples, size)),
        ("origin reads an epoch", f"{reads:,.0f}", f"{size:,}", _fewer(reads, size)),
    ]
    if plain_bytes:
        mean_bytes = whole.counts.get("origin_bytes", 0) / num_epochs
        less = _fewer(mean_bytes, plain_bytes, "less")
        rows.append(("read from storage an epoch", human_bytes(mean_bytes), human_bytes(plain_bytes), less))
    if epoch is not None and whole.epoch_seconds:
        seconds = whole.epoch_seconds / num_epochs
        speed = samples / seconds
        rows.append(("seconds an epoch", f"{seconds:,.2f}", f"{epoch.seconds:,.2f}", ""))
        ratio = _speed(speed, epoch.samples_per_second)
        rows.append(("samples a second", f"{speed:,.0f}", f"{epoch.samples_per_second:,.0f}", ratio))
    return rows


def _measured_rows(run: Run, plain: Run) -> list[tuple[str, str, str, str]]:
    def means(name: str) -> tuple[float, float]:
        one, other = (each.whole.counts.get(name, 0) / len(each.epochs) for each in (run, plain))
        return one, other

    samples, reads, sizes = means("samples"), means("origin_reads"), means("origin_bytes")
    mine, others = ((each.whole.epoch_seconds or 0.0) / len(each.epochs) for each in (run, plain))
    fast, slow = run.whole.samples_per_second or 0.0, plain.whole.samples_per_second or 0.0
    return [
        ("samples an epoch", f"{samples[0]:,.0f}", f"{samples[1]:,.0f}", _fewer(*samples)),
        ("origin reads an epoch", f"{reads[0]:,.0f}", f"{reads[1]:,.0f}", _fewer(*reads)),
        ("read from storage an epoch", human_bytes(sizes[0]), human_bytes(sizes[1]), _fewer(*sizes, "less")),
        ("seconds an epoch", f"{mine:,.2f}", f"{others:,.2f}", ""),
        ("samples a second", f"{fast:,.0f}", f"{slow:,.0f}", _speed(fast, slow)),
    ]


def plain_title(run: Run) -> str:
    """Returns the title of `plain_rows`: whether plain loading was measured."""
    how = "predicted, not measured" if plain_beside(run) is None else "measured, beside this run"
    return f"Compared with plain loading ({how})"


def plain_note(run: Run) -> str:
    """Returns a sentence that says how plain loading was measured or is predicted."""
    if (plain := plain_beside(run)) is not None:
        return (
            f"Measured: the same training by a DataLoader that shuffles, with {workers_of(plain.plan)} workers, the "
            f"number that read fastest; its record is in {shown_place(str(plain.directory))}."
        )
    workers = workers_of(run.plan)
    hands = f"{workers} worker{'s' * (workers != 1)} a rank" if workers else "no workers"
    return (
        f"Predicted from this run's record: each epoch reads and uses all samples once, with {hands} and no cache; a "
        "read, a decode, a transform and a step cost what they cost on average in this run. A DataLoader that reads "
        "one file after another is slower than that: this run read the files of a batch at the same time. Accuracy is "
        "not predicted."
    )


def _plain_loading(run: Run) -> Iterator[str]:
    rows = plain_rows(run)
    if not rows:
        return
    yield plain_title(run)
    yield f"{'':<30}{'this run':>12}{'plain':>12}"
    for name, one, other, change in rows:
        yield f"  {name:<28}{one:>12}{other:>12}   {change}".rstrip()
    yield _wrapped(plain_note(run)).replace("\n    ", "\n  ")


def _speed(speed: float, other: float) -> str:
    if not speed or not other:
        return ""
    ratio = speed / other
    return f"{ratio:.1f} × as fast" if ratio >= 1 else f"{1 / ratio:.1f} × as slow"


def duration(seconds: float) -> str:
    """Returns seconds, or minutes and hours of longer times."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.1f} min" if minutes < 120 else f"{hours:.1f} h"


def details(run: Run) -> Iterator[str]:
    """Yields the run in sentences."""
    samples, reads = run.total("samples"), run.total("origin_reads")
    hits, misses = run.total("hits"), run.total("misses")
    num_epochs = len(run.epochs)
    if samples is not None:
        again = run.total("duplicates")
        extra = f", {again:,} of them a further use within the same epoch" if again else ""
        seconds = run.whole.epoch_seconds or 0.0
        yield f"{samples:,} samples used in {num_epochs} epoch{'s' * (num_epochs > 1)} and {seconds:,.1f} s{extra}."
    if samples and reads is not None:
        yield f"{reads:,} origin reads: {_fewer(reads, samples)} than one for each sample used."
    if run.num_samples and reads is not None:
        whole = run.num_samples * num_epochs
        yield (
            f"A loader that reads all {run.num_samples:,} samples every epoch makes {whole:,}: "
            f"this run made {_fewer(reads, whole)}."
        )
    if hits is not None and misses is not None and hits + misses:
        yield f"Hit ratio {percent(hits / (hits + misses))}: {hits:,} hits, {misses:,} misses."
    moved = [
        f"{human_bytes(total)} {where}"
        for name, where in (("origin_bytes", "from the origin"), ("cache_bytes", "from the cache"))
        if (total := run.total(name)) is not None
    ]
    if moved:
        yield f"Bytes moved: {', '.join(moved)}."
    last = run.epochs[-1]
    if last.resident_bytes is not None and last.capacity_bytes:
        held, most = human_bytes(last.resident_bytes), human_bytes(last.capacity_bytes)
        yield f"The cache ended at {held} of {most} ({percent(last.resident_bytes / last.capacity_bytes)})."
    if run.cached_format:
        yield _format(run.cached_format)
    zs = [abs(e.receipt["weight_sum_z"]) for e in run.epochs if _is_number(e.receipt.get("weight_sum_z"))]
    if zs:
        verdict = "sound" if max(zs) <= 4 else "BROKEN: the weights are not those of the draw; please report it"
        shares = [
            e.receipt["effective_sample_size"] / e.receipt["drawn"]
            for e in run.epochs
            if _is_number(e.receipt.get("effective_sample_size")) and e.receipt.get("drawn")
        ]
        even = f"; least effective sample size {percent(min(shares))} of those drawn" if shares else ""
        yield f"Gradient weights: largest |z| {max(zs):.2f}, {verdict}{even}."
    if run.snapshots.get("saves"):
        yield _snapshots(run)
    if run.gradient.get("gradient_elements"):
        yield _gradient(run)
    for name, meaning in TROUBLES.items():
        if total := run.total(name):
            yield f"{total:,} {meaning}{_why_declined(run) if name == 'declined' else ''}."
    if run.num_torn:
        yield f"{run.num_torn} torn line(s) of metrics.jsonl were left out: the run was killed while writing."


def _format(known: dict[str, Any]) -> str:
    """Says which cached format was used, and how good its prediction was."""
    predicted, measured = (
        f"{1 / max(1e-9, known[f'{which}_seconds_per_sample']):,.0f} samples/s at "
        f"{percent(known[f'{which}_hit_ratio'])} hits"
        for which in ("predicted", "measured")
    )
    return f"Cached format {known['form']}: predicted to load {predicted}; measured {measured} (median epoch)."


def _why_declined(run: Run) -> str:
    """Says what kept samples out of the cache: a node that is gone fails no call while others of its cluster answer."""
    url = str(run.plan.get("cache", ""))
    is_private = url.startswith(("local:", "memory:"))
    if "+cluster://" in url:
        cause = "a node of the cluster was gone, slow or full"
    elif run.total("store_errors"):
        cause = "the server did not answer"
    elif is_private:
        cause = "they were larger than estimated, and the private cache had no room; a larger -wss gives it more"
    else:
        cause = "the server was full, or other jobs use the capacity"
    where = shown_url(url).replace("***@", "").partition("?")[0] or "URL"
    return f": {cause}" if is_private else f": {cause}; `shade doctor --cache {where}` says more"


def _snapshots(run: Run) -> str:
    known = run.snapshots
    seconds = sum(e.epoch_seconds or 0.0 for e in run.epochs)
    share = f" ({percent(known.get('blocked_seconds', 0.0) / seconds)} of the time)" if seconds else ""
    failed = f", {known['failed']:.0f} of them reached no tier (the log says why)" if known.get("failed") else ""
    durable = known.get("durable_step", 0)
    return (
        f"{known['saves']:.0f} snapshots{failed}; training waited {known.get('blocked_seconds', 0.0):.2f} s for "
        f"them{share}; the newest that outlives the machine is of step {known.get('committed_step', 0):.0f}, "
        + (f"in storage of step {durable:.0f}." if durable else "none was in storage yet.")
    )


def _gradient(run: Run) -> str:
    known = run.gradient
    seconds = sum(e.epoch_seconds or 0.0 for e in run.epochs)
    waited = known.get("gradient_wait_seconds", 0.0)
    share = f" ({percent(waited / seconds)} of the time)" if seconds else ""
    sent = known.get("gradient_chosen", 0.0) / known["gradient_elements"]
    step_bytes = known.get("gradient_bytes_sent", 0.0) / known["gradient_steps"]
    exchanged = f"{percent(sent)} of the gradient was sent, {human_bytes(step_bytes)} a step and rank"
    return f"{exchanged}; training waited {waited:.2f} s for it{share}."


def _fewer(part: float, whole: float, fewer: str = "fewer") -> str:
    if not whole:
        return ""
    return f"{percent(1 - part / whole)} {fewer}" if part <= whole else f"{percent(part / whole - 1)} more"


def reads_per_n(run: Run, e: EpochSummary) -> float | None:
    """Returns origin reads over the size of the data set; of the whole run, those of a mean epoch."""
    reads, num_epochs = e.counts.get("origin_reads"), len(run.epochs) if e is run.whole else 1
    return reads / run.num_samples / num_epochs if run.num_samples and reads is not None else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == value


def _cell(value: float | None, width: int, form: str) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}{form}}"


def _share(value: float | None, width: int) -> str:
    return f"{'-' if value is None else percent(value):>{width}}"


def _count(e: EpochSummary, name: str, width: int) -> str:
    return _cell(e.counts.get(name), width, ",")
