"""What ``shade top`` shows: the state of a telemetry server, and a run's folder, as lines of text.

All that came over a network or out of a file is looked at as it is shown: a field that is missing is a dash, and a
character that a terminal would obey is a question mark.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from shade.cli import top_nodes
from shade.cli.checkpoint_verb import size, table

_TAIL_BYTES: Final = 1 << 20
_COLUMNS: Final = (
    "rank", "step", "samples/s", "density", "compute", "exchange", "waits", "sent", "received", "silent", "compress"
)  # fmt: skip
"""What matters least stands last: a narrow terminal cuts it off."""
_ENDS: Final = {"process": "if killed now", "machine": "with this machine", "cluster": "with all machines"}
"""As `shade.checkpoint._preemption.recovery_estimate.RecoveryEstimate.row` names them."""


def of_server(state: Mapping[str, Any]) -> list[str]:
    """Every rank's steps, and the last decision.

    Args:
        state: As `shade.control.server.History.state`.

    Returns:
        Lines.
    """
    rows = [_COLUMNS]
    ranks = [rank for rank in state.get("ranks", ()) if isinstance(rank, dict)]
    for rank in ranks:
        rows.append(
            (
                _number(rank, "rank", ".0f"),
                _number(rank, "step", ".0f"),
                _number(rank, "samples_per_second", ",.1f"),
                _number(rank, "density", ".3%"),
                _number(rank, "compute_seconds", ".3f", " s"),
                _number(rank, "exchange_seconds", ".3f", " s"),
                _number(rank, "wait_fraction", ".0%"),
                size(_value(rank, "bytes_sent") or 0),
                size(_value(rank, "bytes_received") or 0),
                _number(rank, "silent_seconds", ".1f", " s"),
                _number(rank, "compress_seconds", ".3f", " s"),
            )
        )
    if not ranks:
        return ["no rank has reported yet"]
    total = sum(_value(rank, "samples_per_second") or 0 for rank in ranks)
    lines = [*table(rows, ">" * len(_COLUMNS)).splitlines(), f"all ranks: {total:,.1f} samples/s"]
    decision = state.get("decision")
    if isinstance(decision, dict):
        number, step = _number(state, "num_decisions", ".0f"), _number(decision, "effective_step", ".0f")
        lines.append(f"decision {number}, from step {step}: {printable(decision.get('reason', ''))}")
    else:
        lines.append("no decision yet")
    return lines


def of_run(folder: Path) -> list[str]:
    """Where a run is, where its time goes, what an end would cost, and what its cache's nodes hold.

    Args:
        folder: A run directory.

    Returns:
        Lines.
    """
    lines: list[str] = []
    live: Any = None
    url: Any = None
    with contextlib.suppress(OSError, ValueError):
        now = json.loads((folder / "progress.json").read_bytes())
        if isinstance(now, dict):
            epoch, step = (_value(now, "epoch") or 0) + 1, _number(now, "step", ".0f")
            lines.append(
                f"epoch {epoch:.0f}, step {step} of {_number(now, 'num_steps', '.0f')}: "
                f"{_number(now, 'samples_per_second', ',.0f')} samples/s, hits {_number(now, 'hit_ratio', '.1%')}, "
                f"waits {_number(now, 'waiting_fraction', '.0%')} for data"
            )
            lines += _spent(now)
            url = now.get("cache")
            live = now.get("if_ended_now")
    rows = _rows(folder / "metrics.jsonl")
    epochs = [row for row in rows if row.get("kind") == "epoch" and row.get("rank") == 0]
    if epochs:
        last = epochs[-1]
        hits, misses = _value(last, "hits") or 0, _value(last, "misses") or 0
        ratio = f"{hits / (hits + misses):.1%}" if hits + misses else "-"
        lines.append(
            f"epoch {(_value(last, 'epoch') or 0) + 1:.0f} is done: hits {ratio}, loss {_number(last, 'loss', '.4g')}"
        )
    told = [row["checkpoint"] for row in rows if row.get("rank") == 0 and isinstance(row.get("checkpoint"), dict)]
    if isinstance(live, dict):
        lines.append(gauge(live))
    elif told and isinstance(told[-1].get("if_ended_now"), dict):
        lines.append(f"when it last wrote: {gauge(told[-1]['if_ended_now'])}")
    if isinstance(url, str):
        lines += map(printable, top_nodes.lines(url))
    return lines or ["no figures yet"]


def gauge(row: Mapping[str, Any]) -> str:
    """What an end would cost, in a sentence; ends that cost the same are told once.

    Args:
        row: As `shade.checkpoint._preemption.recovery_estimate.RecoveryEstimate.row`.

    Returns:
        ``if killed now: lose 3 steps / 1.2 s, recover in 0.40 s from own memory``.
    """
    told: list[str] = []
    tier: object = None
    for end, words in _ENDS.items():
        if told and row.get(f"checkpoint_{end}_tier") == tier:
            continue
        tier = row.get(f"checkpoint_{end}_tier")
        steps = _number(row, f"checkpoint_{end}_lost_steps", ".0f")
        lost = f"lose {steps} step{'s' * (steps != '1')} / {_number(row, f'checkpoint_{end}_lost_seconds', '.1f')} s"
        took = _value(row, f"checkpoint_{end}_recover_seconds")
        back = "recover" if took is None else f"recover in {took:.2f} s"
        told.append(
            f"{words}: {lost}, " + ("nothing to recover from" if tier is None else f"{back} from {printable(tier)}")
        )
    return "; ".join(told)


def printable(text: object) -> str:
    """Without anything that a terminal obeys."""
    return "".join(each if each.isprintable() else "?" for each in str(text))


def _spent(now: Mapping[str, Any]) -> list[str]:
    """What the present epoch has read, and on what its time went, the largest share first."""
    reads, stalls = _value(now, "origin_reads"), now.get("stall_seconds")
    rank = f", rank 0 of {ranks:.0f}" if (ranks := _value(now, "num_ranks") or 1) > 1 else ""
    told = [] if reads is None else [f"read {reads:,.0f} from the origin in this epoch{rank}"]
    if isinstance(stalls, dict):
        spent = {"step": _value(now, "step_seconds") or 0.0, **{str(c): _value(stalls, c) or 0.0 for c in stalls}}
        total = sum(spent.values())
        if total > 0:
            shares = sorted(spent.items(), key=lambda each: -each[1])
            told.append("time: " + " · ".join(f"{printable(c)} {s / total:.0%}" for c, s in shares))
    return ["; ".join(told)] if told else []


def _rows(path: Path) -> list[dict[str, Any]]:
    """The last rows of a metrics file, however long it has become."""
    rows = []
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        for line in file:
            with contextlib.suppress(ValueError, RecursionError):
                row = json.loads(line)
                rows += [row] if isinstance(row, dict) else []
    return rows


def _value(row: Mapping[str, Any], name: str) -> float | None:
    value = row.get(name)
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e300 else None


def _number(row: Mapping[str, Any], name: str, form: str, unit: str = "") -> str:
    value = _value(row, name)
    return "-" if value is None else f"{value:{form}}{unit}"
