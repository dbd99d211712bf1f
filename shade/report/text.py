"""Writes a run as text a person reads top to bottom, and as CSV a spreadsheet reads.

Each number in ``report.txt`` stands beside a sentence that says how to read it. A value that no row held is a
dash, never a zero. Columns are cut to 120 characters, so that the table survives a terminal, a mail and a log.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any

from shade.errors import shown_place, shown_url
from shade.report.rows import CAUSES, COUNTERS, EpochSummary, Run

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
  hit ratio      share of samples whose bytes did not come from the origin (where the data set lives).
  reads/N        origin reads in the epoch over the size of the data set. A loader without a cache that uses every
                 sample once reads 1.00 per epoch; below that is what the cache and the sampling saved.
  stall seconds  time the training waited for its next batch, per rank, shared out over what the loading was busy
                 with: origin (slow storage), cache (the store), decode, transform; wait is what none of these
                 explains (workers starting, batches changing hands). Small against `seconds`: nothing to gain.
  samples/s      all ranks together. Epoch 0 is slow everywhere: the cache is empty.
  gradient weights: z near 0 is a sound draw (|z| > 4 is a bug, please report it); an effective sample size near
                 the number drawn means the weights are even and the gradient is hardly noisier than without them."""


def render(run: Run, note: str = "") -> str:
    """Returns the whole of ``report.txt``, with a line about the picture, which may be empty."""
    parts = [
        "shade run report\n================",
        "\n".join(_header(run)),
        "\n".join(_table(run)),
        "\n".join(_trends(run)),
        "\n".join(totals(run)),
        LEGEND,
        note,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


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
    """Returns two runs of one training side by side: seconds an epoch, bytes read from storage, accuracy."""
    seconds, sizes, accuracies = [], [], []
    for run in (plain, cached):
        known = [e.epoch_seconds for e in run.epochs if e.epoch_seconds is not None]
        seconds.append(sum(known) / max(1, len(known)))
        sizes.append(run.total("origin_bytes") or 0)
        accuracies.append(run.epochs[-1].val_accuracy or 0.0)
    workers = [f"{run.plan.get('workers', '?')} workers" for run in (plain, cached)]
    ratio = seconds[0] / max(1e-9, seconds[1])
    faster = f"{ratio:.1f} × as fast" if ratio >= 1 else f"{1 / ratio:.1f} × as slow"
    rows = [
        ("", "plain DataLoader", "shade", ""),
        ("", *workers, ""),
        ("seconds an epoch", *(f"{value:.2f}" for value in seconds), faster),
        ("read from storage", *map(human_bytes, sizes), _fewer(sizes[1], max(1, sizes[0])).replace("fewer", "less")),
        ("accuracy", *(f"{value:.1%}" for value in accuracies), f"{100 * (accuracies[1] - accuracies[0]):+.1f} points"),
    ]
    return "\n" + "".join(f"{name:<18}{one:>17}{other:>12}   {by}".rstrip() + "\n" for name, one, other, by in rows)


def sparkline(values: Sequence[float | None]) -> str:
    """Returns a curve in one line of text, lowest ▁ to highest █; a gap where the value is unknown."""
    known = [v for v in values if v is not None]
    if not known:
        return ""
    low, span = min(known), (max(known) - min(known)) or 1.0
    return "".join(" " if v is None else "▁▂▃▄▅▆▇█"[min(int((v - low) / span * 8), 7)] for v in values)


def _header(run: Run) -> Iterator[str]:
    pairs = [("run", str(run.directory)), *flatten(run.plan)]
    width = min(max(len(name) for name, _ in pairs), 34)
    for name, value in pairs:
        yield f"{name:<{width}}  {value if len(value) <= 84 else value[:83] + '…'}"
    if run.num_torn:
        yield f"{run.num_torn} torn line(s) of metrics.jsonl were left out: the run was killed while writing"


def flatten(plan: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields the plan's settings as name and text, without those that are None and without passwords."""
    for name, value in plan.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        elif value is not None:
            shown = ", ".join(shown_place(str(each)) for each in (value if isinstance(value, list) else [value]))
            yield f"{prefix}{name}", shown


def _table(run: Run) -> Iterator[str]:
    yield (
        f"{'':5} {'':7} {'-- accuracy --':^15} {'':8} {'hit':>6} {'origin':>8} {'':7} "
        f"{'------------ stall seconds -----------':^38} "
    ).rstrip()
    stalls = " ".join(f"{name:>7}" for name in ("origin", "cache", "decode", "transf", "wait"))
    yield (
        f"{'epoch':>5} {'loss':>7} {'train':>7} {'val':>7} {'samples':>8} {'ratio':>6} {'reads':>8} {'reads/N':>7} "
        f"{stalls} {'seconds':>7} {'samples/s':>9}"
    )
    for e in run.epochs:
        stall = " ".join(_cell(e.stall_seconds.get(cause), 7, ".2f") for cause in CAUSES)
        reads = _cell(e.counts.get("origin_reads"), 8, ",")
        yield (
            f"{e.epoch:>5} {_cell(e.loss, 7, '.4f')} {_cell(e.train_accuracy, 7, '.2%')} "
            f"{_cell(e.val_accuracy, 7, '.2%')} {_cell(e.counts.get('samples'), 8, ',')} "
            f"{_cell(e.hit_ratio, 6, '.1%')} {reads} {_cell(reads_per_n(run, e), 7, '.3f')} {stall} "
            f"{_cell(e.epoch_seconds, 7, '.2f')} {_cell(e.samples_per_second, 9, ',.0f')}"
        )


def _trends(run: Run) -> Iterator[str]:
    if len(run.epochs) < 2:
        return
    curves: dict[str, list[float | None]] = {
        "loss": [e.loss for e in run.epochs],
        "val accuracy": [e.val_accuracy for e in run.epochs],
        "hit ratio": [e.hit_ratio for e in run.epochs],
        "origin reads": [e.counts.get("origin_reads") for e in run.epochs],
    }
    for name, values in curves.items():
        known = [v for v in values if v is not None]
        if known:
            yield f"{name:<13} {sparkline(values)}  {known[0]:,.5g} → {known[-1]:,.5g}"


def totals(run: Run) -> Iterator[str]:
    """Yields a headline, then the run in sentences."""
    yield "Altogether"
    samples, reads = run.total("samples"), run.total("origin_reads")
    hits, misses = run.total("hits"), run.total("misses")
    seconds = sum(e.epoch_seconds or 0.0 for e in run.epochs)
    if samples is not None:
        again = run.total("duplicates")
        extra = f", {again:,} of them a further use within the same epoch" if again else ""
        yield f"  {samples:,} samples used in {len(run.epochs)} epoch(s) and {seconds:,.1f} s{extra}."
    if samples and reads is not None:
        yield f"  {reads:,} origin reads: {_fewer(reads, samples)} than one for each sample used."
    if run.num_samples and reads is not None:
        whole = run.num_samples * len(run.epochs)
        yield (
            f"  A loader that reads all {run.num_samples:,} samples every epoch makes {whole:,}: "
            f"this run made {_fewer(reads, whole)}."
        )
    if hits is not None and misses is not None and hits + misses:
        yield f"  Hit ratio {hits / (hits + misses):.1%}: {hits:,} hits, {misses:,} misses."
    moved = [
        f"{human_bytes(total)} {where}"
        for name, where in (("origin_bytes", "from the origin"), ("cache_bytes", "from the cache"))
        if (total := run.total(name)) is not None
    ]
    if moved:
        yield f"  Bytes moved: {', '.join(moved)}."
    last = run.epochs[-1]
    if last.resident_bytes is not None and last.capacity_bytes:
        held, most = human_bytes(last.resident_bytes), human_bytes(last.capacity_bytes)
        yield f"  The cache ended at {held} of {most} ({last.resident_bytes / last.capacity_bytes:.1%})."
    zs = [abs(e.receipt["weight_sum_z"]) for e in run.epochs if _is_number(e.receipt.get("weight_sum_z"))]
    if zs:
        verdict = "sound" if max(zs) <= 4 else "BROKEN: the weights are not those of the draw; please report it"
        shares = [
            e.receipt["effective_sample_size"] / e.receipt["drawn"]
            for e in run.epochs
            if _is_number(e.receipt.get("effective_sample_size")) and e.receipt.get("drawn")
        ]
        even = f"; least effective sample size {min(shares):.1%} of those drawn" if shares else ""
        yield f"  Gradient weights: largest |z| {max(zs):.2f}, {verdict}{even}."
    if run.snapshots.get("saves"):
        yield f"  {_snapshots(run)}"
    if run.gradient.get("gradient_elements"):
        yield f"  {_gradient(run)}"
    for name, meaning in TROUBLES.items():
        if total := run.total(name):
            yield f"  {total:,} {meaning}{_why_declined(run) if name == 'declined' else ''}."


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
    share = f" ({known.get('blocked_seconds', 0.0) / seconds:.1%} of the time)" if seconds else ""
    failed = f", {known['failed']:.0f} of them reached no place (the log says why)" if known.get("failed") else ""
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
    share = f" ({waited / seconds:.1%} of the time)" if seconds else ""
    sent = known.get("gradient_chosen", 0.0) / known["gradient_elements"]
    step_bytes = known.get("gradient_bytes_sent", 0.0) / known["gradient_steps"]
    exchanged = f"{sent:.2%} of the gradient was sent, {human_bytes(step_bytes)} a step and rank"
    return f"{exchanged}; training waited {waited:.2f} s for it{share}."


def _fewer(part: int, whole: int) -> str:
    return f"{1 - part / whole:.1%} fewer" if part <= whole else f"{part / whole - 1:.1%} more"


def reads_per_n(run: Run, e: EpochSummary) -> float | None:
    """Returns origin reads over the size of the data set."""
    reads = e.counts.get("origin_reads")
    return reads / run.num_samples if run.num_samples and reads is not None else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == value


def _cell(value: float | None, width: int, form: str) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}{form}}"


def human_bytes(value: float) -> str:
    """Returns bytes with a unit of powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"
