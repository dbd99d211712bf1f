"""Writes reports and decisions as lines of JSON, and reads them back with a check of every field.

Invariant: ``read(line(x)) == x``; any other line is refused with `DataError`, and the lines after it are not affected.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any, Final

from shade.errors import DataError
from shade.telemetry import jsonable
from shade.types import Decision, StepReport

MOST_LINE_BYTES: Final = 16 * 1024
"""A decision for two thousand ranks; a report is 300 bytes."""
_MOST_COUNT: Final = 2**63
_WHOLE: Final = {"step", "rank", "num_samples", "bytes_sent", "bytes_received", "effective_step"}


def line(item: StepReport | Decision) -> bytes:
    """Returns one line of JSON with its end. A value that is not finite becomes null, which `read` refuses."""
    kind = "report" if isinstance(item, StepReport) else "decision"
    return json.dumps({kind: jsonable(asdict(item))}, separators=(",", ":")).encode() + b"\n"


def read(data: bytes) -> StepReport | Decision:
    """Reads one line.

    Args:
        data: With or without its end.

    Returns:
        The report or decision.

    Raises:
        DataError: `line` does not write such a line.
    """
    if len(data) > MOST_LINE_BYTES:
        raise DataError.of(f"a line of at most {MOST_LINE_BYTES} bytes", len(data), "another program sent it")
    try:
        row = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError.of("a line of JSON", data[:80], f"{error}") from None
    if isinstance(row, dict) and len(row) == 1:
        if isinstance(row.get("report"), dict):
            return StepReport(**_checked(StepReport, row["report"]))
        if isinstance(row.get("decision"), dict):
            return Decision(**_checked(Decision, row["decision"]))
    raise DataError.of("a report or a decision", data[:80], "both sides must be of one version")


def _checked(kind: type[StepReport] | type[Decision], row: dict[str, Any]) -> dict[str, Any]:
    wanted = {field.name for field in fields(kind)}
    if set(row) != wanted:
        odd = ", ".join(sorted(wanted ^ set(row), key=str))[:200]
        raise DataError.of(f"exactly the fields of a {kind.__name__}", odd, "both sides must be of one version")
    return {name: _value(name, row[name]) for name in wanted}


def _value(name: str, value: Any) -> Any:
    if name == "reason" and isinstance(value, str):
        return value
    if name == "batch_sizes" and isinstance(value, list):
        return tuple(_value("num_samples", each) for each in value)
    if name in _WHOLE and type(value) is int and 0 <= value < _MOST_COUNT:
        return value
    is_number = type(value) in (int, float) and abs(value) < _MOST_COUNT
    if name not in _WHOLE | {"reason", "batch_sizes"} and is_number:
        return float(value)
    raise DataError.of(f"a possible value of {name}", value, "the sender's measurement is broken")
