"""Reports and decisions as lines of JSON, and back; what comes back is looked at field by field, and never executed.

Invariant: ``read(line(x)) == x``; any other bytes are refused with `DataError`, which costs them nothing but the line.
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


def line(told: StepReport | Decision) -> bytes:
    """One line of JSON, ended. A number that is none is written as null, and refused by the reader."""
    kind = "report" if isinstance(told, StepReport) else "decision"
    return json.dumps({kind: jsonable(asdict(told))}, separators=(",", ":")).encode() + b"\n"


def read(data: bytes) -> StepReport | Decision:
    """Reads one line.

    Args:
        data: With or without its end.

    Returns:
        What was told.

    Raises:
        DataError: It is not a line that `line` writes.
    """
    if len(data) > MOST_LINE_BYTES:
        raise DataError.of(f"a line of at most {MOST_LINE_BYTES} bytes", len(data), "it is from something else")
    try:
        told = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError.of("a line of JSON", data[:80], f"{error}") from None
    if isinstance(told, dict) and len(told) == 1:
        if isinstance(told.get("report"), dict):
            return StepReport(**_checked(StepReport, told["report"]))
        if isinstance(told.get("decision"), dict):
            return Decision(**_checked(Decision, told["decision"]))
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
    raise DataError.of(f"a number that {name} can be", value, "the sender measures something odd")
