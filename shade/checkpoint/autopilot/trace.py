"""When machines went away: a trace of preemptions as a CSV file, read, checked, made up.

::

    time_seconds,kind,down_seconds
    1830.5,machine,120
    4000,process,0
    86400,end,

``kind`` is what the event takes: ``process``, a trainer and nothing else; ``machine``, one machine with its memory;
``cluster``, all memory there is. ``down_seconds`` is how long it takes until as many machines are there again (none
where a spare stands by). ``end`` says how long was watched; without it the last event ends the trace. Columns may stand
in any order, ``kind`` may be left out (``machine``), and so may ``down_seconds`` (0): a list of times, as providers
publish it, is a trace with a line ``time_seconds`` above it. Lines that begin with # say something to people.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from shade.errors import ConfigError, DataError

Kind = Literal["process", "machine", "cluster"]
KINDS: Final[tuple[Kind, ...]] = ("process", "machine", "cluster")
_COLUMNS: Final = ("time_seconds", "kind", "down_seconds")
_END: Final = "end"


@dataclass(frozen=True)
class Failure:
    """One event."""

    time_seconds: float
    """Since the trace began."""
    kind: Kind = "machine"
    down_seconds: float = 0.0
    """Until training could go on, before it has restored anything."""


@dataclass(frozen=True)
class PreemptionTrace:
    """Events in order, and how long was watched."""

    failures: tuple[Failure, ...]
    length_seconds: float

    @property
    def mtbf_seconds(self) -> float:
        """Mean time between failures, as far as the trace shows: infinity where nothing failed."""
        return self.length_seconds / len(self.failures) if self.failures else float("inf")

    @classmethod
    def load(cls, path: Path) -> PreemptionTrace:
        """Reads a file.

        Args:
            path: Of it; the format is at the top.

        Returns:
            The trace.

        Raises:
            DataError: It is no such file; the message names the line.
        """
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError.of("a trace in CSV", f"{path}: {error}", "name a readable file") from error
        return cls.parse(lines, str(path))

    @classmethod
    def parse(cls, lines: Iterable[str], name: str = "trace") -> PreemptionTrace:
        """Reads lines; as `load`.

        Args:
            lines: With the names of the columns in the first that is no remark.
            name: For messages.

        Returns:
            The trace.

        Raises:
            DataError: They are no trace.
        """
        rows = csv.reader(line if line.strip() and not line.lstrip().startswith("#") else "" for line in lines)
        columns: list[str] = []
        failures: list[Failure] = []
        end: float | None = None
        for row in rows:
            if not row:
                continue
            cells = [cell.strip() for cell in row]
            if not columns:
                columns = cells
                if "time_seconds" not in columns or not set(columns) <= set(_COLUMNS):
                    raise DataError.of(f"columns {', '.join(_COLUMNS)}", ", ".join(cells), f"name them in {name}")
                continue
            place = f"{name}, line {rows.line_num}"
            if end is not None:
                raise DataError.of(f"nothing after {_END}", ",".join(row), f"see {place}")
            named = dict(zip(columns, cells, strict=False))
            time = _seconds(named["time_seconds"], place)
            if failures and time < failures[-1].time_seconds:
                raise DataError.of("times in order", named["time_seconds"], f"sort the lines; see {place}")
            kind = named.get("kind") or "machine"
            if kind == _END:
                end = time
            elif kind in KINDS:
                down = _seconds(named.get("down_seconds") or "0", place)
                failures.append(Failure(time, kind, down))
            else:
                raise DataError.of(f"one of {', '.join(KINDS)}, {_END}", kind, f"see {place}")
        length = end if end is not None else failures[-1].time_seconds if failures else 0.0
        if length <= 0:
            raise DataError.of("a trace that lasts", f"{name} of {length} s", f"add a line for each event, or {_END}")
        return cls(tuple(failures), length)

    def to_csv(self) -> str:
        """The same as text; `parse` gives it back bit for bit."""
        rows = [f"{each.time_seconds!r},{each.kind},{each.down_seconds!r}" for each in self.failures]
        return "\n".join([",".join(_COLUMNS), *rows, f"{self.length_seconds!r},{_END},"]) + "\n"

    @classmethod
    def synthetic(
        cls,
        mtbf_seconds: float,
        length_seconds: float,
        seed: int = 0,
        *,
        down_seconds: float = 0.0,
        kind: Kind = "machine",
    ) -> PreemptionTrace:
        """Makes one up: failures at random moments, independent of each other.

        Args:
            mtbf_seconds: Mean time between two of them, > 0.
            length_seconds: Of the trace, > 0.
            seed: Of the moments.
            down_seconds: After each.
            kind: Of all.

        Returns:
            The trace.

        Raises:
            ConfigError: One of the times is not positive.
        """
        if not (mtbf_seconds > 0 and length_seconds > 0):
            cure = "give both in seconds"
            raise ConfigError.of("a mean time between failures and a length > 0", (mtbf_seconds, length_seconds), cure)
        generator, failures, time = random.Random(seed), [], 0.0
        while (time := time + generator.expovariate(1 / mtbf_seconds)) < length_seconds:
            failures.append(Failure(time, kind, down_seconds))
        return cls(tuple(failures), length_seconds)


def _seconds(text: str, place: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise DataError.of("seconds ≥ 0", text, f"see {place}")
    return value
