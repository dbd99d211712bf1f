"""``shade top`` shows a training live: what each rank does, the last decision, what a failure would cost.

On a terminal `rich` redraws the screen until ``q`` or Ctrl-C; a pipe or a file gets one look. The command only reads,
and may be started and ended at any time. A run's ``progress.json`` names its store without the password, which comes
from the environment; one look costs a connection and one INFO a node.

Invariant: what came over a network or out of a file is checked as it is shown. A missing field is a dash, and a
character that a terminal would obey is a question mark.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import select
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shade.cli.tables import printable, size, table
from shade.errors import ConfigError, ShadeError, shown_place

if TYPE_CHECKING:
    from rich.text import Text


def cache_nodes(url: str) -> Iterator[str]:
    """Yields a line for each node of the store at a URL without password, or one line that no node answers."""
    from shade.store import open_store
    from shade.store.url import StoreURL

    if not url.startswith(("unix:", "redis")):
        return  # only the run's own processes reach its private memory
    try:
        named = dataclasses.replace(StoreURL.parse(url), password=None)
        with open_store(str(named)) as store:
            nodes = store.stats().nodes
    except (ShadeError, OSError) as error:
        yield printable(f"cache nodes: no answer ({' '.join(str(error).split())})")
        return
    rows = [("cache node", "role", "memory", "of", "full", "entries")]
    for node in nodes:
        used = node.used_bytes + node.overhead_bytes
        limit = size(node.max_bytes) if node.max_bytes else "no limit"
        full = f"{used / node.max_bytes:.1%}" if node.max_bytes else "-"
        rows.append((node.address, node.role, size(used), limit, full, f"{node.num_keys:,}"))
    yield from table(rows, "<<>>>>").splitlines()


_TAIL_BYTES: Final = 1 << 20
_COLUMNS: Final = (
    "rank", "step", "samples/s", "density", "compute", "exchange", "waits", "sent", "received", "silent", "compress"
)  # fmt: skip
"""Columns; a narrow terminal drops the last, least important ones."""
_ENDS: Final = {"process": "if killed now", "machine": "with this machine", "cluster": "with all machines"}
"""The names in `shade.checkpoint._preemption.recovery_estimate.RecoveryEstimate.row`."""


def of_server(state: Mapping[str, Any]) -> list[str]:
    """Returns lines about every rank's steps and the last decision, from `shade.control.server.History.state`."""
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
                _number(rank, "wait_fraction", ".1%"),
                size(_value(rank, "bytes_sent") or 0),
                size(_value(rank, "bytes_received") or 0),
                _number(rank, "silent_seconds", ".1f", " s"),
                _number(rank, "compress_seconds", ".3f", " s"),
            )
        )
    if not ranks:
        return ["no rank has reported yet; the run's directory, named beside or instead, shows its progress"]
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
    """Returns lines about a run directory: progress, shares of time, the cost of a failure, and its cache's nodes."""
    lines: list[str] = []
    live: Any = None
    url: Any = None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        now = json.loads((folder / "progress.json").read_bytes())
        if isinstance(now, dict) and isinstance(now.get("note"), str):
            lines.append(printable(now["note"]))
        elif isinstance(now, dict):
            epoch, step = (_value(now, "epoch") or 0) + 1, _number(now, "step", ".0f")
            lines.append(
                f"epoch {epoch:.0f}, step {step} of {_number(now, 'num_steps', '.0f')}: "
                f"{_number(now, 'samples_per_second', ',.0f')} samples/s, hits {_number(now, 'hit_ratio', '.1%')}, "
                f"waits {_number(now, 'waiting_fraction', '.1%')} for data"
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
    saves = [row["checkpoint"] for row in rows if row.get("rank") == 0 and isinstance(row.get("checkpoint"), dict)]
    if isinstance(live, dict):
        lines.append(gauge(live))
    elif saves and isinstance(saves[-1].get("if_ended_now"), dict):
        lines.append(f"when it last wrote: {gauge(saves[-1]['if_ended_now'])}")
    if isinstance(url, str):
        lines += cache_nodes(url)
    return lines or ["no figures yet"]


def gauge(row: Mapping[str, Any]) -> str:
    """Returns what an end would cost, as a sentence from `RecoveryEstimate.row`; ends of equal cost stand once.

    For example: ``if killed now: lose 3 steps / 1.2 s, recover in 0.40 s from shared memory``.
    """
    parts: list[str] = []
    tier: object = None
    for end, words in _ENDS.items():
        if parts and row.get(f"checkpoint_{end}_tier") == tier:
            continue
        tier = row.get(f"checkpoint_{end}_tier")
        steps = _number(row, f"checkpoint_{end}_lost_steps", ".0f")
        lost = f"lose {steps} step{'s' * (steps != '1')} / {_number(row, f'checkpoint_{end}_lost_seconds', '.1f')} s"
        took = _value(row, f"checkpoint_{end}_recover_seconds")
        back = "recover" if took is None else f"recover in {took:.2f} s"
        parts.append(
            f"{words}: {lost}, " + ("nothing to recover from" if tier is None else f"{back} from {printable(tier)}")
        )
    return "; ".join(parts)


def _spent(now: Mapping[str, Any]) -> list[str]:
    """Returns a line about the present epoch's origin reads and shares of time, the largest first."""
    reads, stalls = _value(now, "origin_reads"), now.get("stall_seconds")
    rank = f", rank 0 of {ranks:.0f}" if (ranks := _value(now, "num_ranks") or 1) > 1 else ""
    parts = [] if reads is None else [f"read {reads:,.0f} from the origin in this epoch{rank}"]
    if isinstance(stalls, dict):
        spent = {"step": _value(now, "step_seconds") or 0.0, **{str(c): _value(stalls, c) or 0.0 for c in stalls}}
        total = sum(spent.values())
        if total > 0:
            shares = sorted(spent.items(), key=lambda each: -each[1])
            parts.append("time: " + " · ".join(f"{printable(c)} {s / total:.1%}" for c, s in shares))
    return ["; ".join(parts)] if parts else []


def _rows(path: Path) -> list[dict[str, Any]]:
    """Returns the last rows of a metrics file of any length."""
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


_EXAMPLES: Final = """\
examples:
  shade top http://127.0.0.1:9090                       a run's telemetry server; its log says where
  shade top http://127.0.0.1:9090 runs/20250101-120000  and its folder: reads, stalls, memory
  shade top runs/20250101-120000 --once | cat           one look

compute, exchange   medians of the last 64 steps; the exchange may be hidden behind the compute
time                of the present epoch: the step itself, and the stalls by what the loading was busy with
                    (origin, cache, decode, transform; wait: none of these)
cache node          what the cache's servers hold, asked of them
waits               share of the step that the training stood still for the exchange
silent              since the rank was last heard of

q or Ctrl-C ends it. Beyond this machine the server wants the token in SHADE_TELEMETRY_TOKEN.
"""


def add(verbs: Any) -> None:
    """Adds the verb ``top`` to the command's parser."""
    parser = verbs.add_parser(
        "top",
        help="a live look at a training",
        description="Shows what each rank does, the last decision, and what an end would cost.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("where", nargs="+", metavar="WHERE", help="a telemetry server's URL, a run directory, or both")
    parser.add_argument("--once", action="store_true", help="one look, then end")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="between looks (1)")
    parser.set_defaults(answer=_answer)


def _answer(given: argparse.Namespace) -> int:
    if not 0.05 <= given.interval <= 3600:
        raise ConfigError.of("an --interval from 0.05 to 3600 seconds", given.interval, "leave it at 1")
    if given.once or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        sys.stdout.write("".join(f"{line}\n" for line in _look(given.where)))
        return 0
    from rich.console import Console
    from rich.live import Live

    with _single_keys(), contextlib.suppress(KeyboardInterrupt):
        console = Console(highlight=False)
        with Live(screenful(given.where), console=console, screen=True, auto_refresh=False) as screen:
            while not _is_asked_to_end(given.interval):
                screen.update(screenful(given.where), refresh=True)
    return 0


def _look(where: Sequence[str]) -> list[str]:
    """Returns lines about each URL or folder; raises `ConfigError` for one that does not answer or exist."""
    from shade.control.client import fetch_state

    lines: list[str] = []
    for each in where:
        lines += ["", shown_place(each)] if lines else [shown_place(each)]
        if "://" in each:
            lines += of_server(fetch_state(each))
        elif Path(each).is_dir():
            lines += of_run(Path(each))
        else:
            raise ConfigError.of("a telemetry server's URL or a run directory", each, "as http://127.0.0.1:9090")
    return lines


def screenful(where: Sequence[str]) -> Text:
    """Returns one look for a screen; what does not answer now may answer later, so the screen says so and stays."""
    from rich.text import Text

    lines = [f"shade top  {time.strftime('%H:%M:%S')}  q ends it", ""]
    for each in where:
        try:
            lines += [*_look([each]), ""]
        except ConfigError as error:
            lines += [shown_place(each), printable(f"no answer: {error}"), ""]
    return Text.from_ansi("\n".join(lines))


@contextlib.contextmanager
def _single_keys() -> Iterator[None]:
    """Lets the terminal pass on each key when it is typed; restores its settings at the end."""
    import termios
    import tty

    if not sys.stdin.isatty():
        yield
        return
    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)
    try:
        tty.setcbreak(keys)
        yield
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)


def _is_asked_to_end(seconds: float) -> bool:
    """Waits, and returns whether ``q`` was typed meanwhile."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return False
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], left)[0]:
            typed = os.read(sys.stdin.fileno(), 64)
            if not typed or b"q" in typed:
                return True
    return False
