"""Writes reports and decisions as lines of JSON, and reads them back, field by field and never executed.

msgspec checks the types and ranges while it parses (decision 0035). Invariant: ``read(line(x)) == x``; any other bytes
are refused with `DataError`, and cost nothing but the line.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Final

import msgspec

from shade.errors import DataError
from shade.types import Decision, StepReport

MOST_LINE_BYTES: Final = 16 * 1024
"""Longest line that is read: a decision for two thousand ranks; a report has 300 bytes."""
_Whole = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Number = Annotated[float, msgspec.Meta(gt=-(2.0**63), lt=2.0**63)]
_TYPES: Final[dict[str, Any]] = {"int": _Whole, "float": _Number, "str": str, "tuple[int, ...]": tuple[_Whole, ...]}


def _checked(kind: type[StepReport] | type[Decision]) -> type[msgspec.Struct]:
    """Returns a struct with exactly the fields of a record, each with the range of its type."""
    shape = [(field.name, _TYPES[str(field.type)]) for field in fields(kind)]
    return msgspec.defstruct(kind.__name__, shape, forbid_unknown_fields=True)


_LINE: Final = msgspec.json.Decoder(
    msgspec.defstruct(
        "Line",
        [("report", _checked(StepReport) | None, None), ("decision", _checked(Decision) | None, None)],
        forbid_unknown_fields=True,
    )
)


def line(record: StepReport | Decision) -> bytes:
    """Returns one line of JSON, ended. A number that is not finite is written as null, which the reader refuses."""
    kind = "report" if isinstance(record, StepReport) else "decision"
    return msgspec.json.encode({kind: record}, enc_hook=lambda number: number.item()) + b"\n"


def read(data: bytes) -> StepReport | Decision:
    """Reads one line, with or without its end; raises `DataError` if `line` did not write it."""
    if len(data) > MOST_LINE_BYTES:
        raise DataError.of(f"a line of at most {MOST_LINE_BYTES} bytes", len(data), "another program sent it")
    try:
        found: Any = _LINE.decode(data)
    except (ValueError, RecursionError) as error:  # msgspec's own are ValueErrors
        raise DataError.of("a report or a decision", data[:80], f"{error}; both sides must be of one version") from None
    if (found.report is None) == (found.decision is None):
        raise DataError.of("a report or a decision", data[:80], "both sides must be of one version")
    if found.report is not None:
        return StepReport(**msgspec.structs.asdict(found.report))
    return Decision(**msgspec.structs.asdict(found.decision))
