"""JSON that is written in one way only, and read with suspicion.

Canonical: members sorted, no spaces, nothing escaped that need not be. So equal content is equal bytes, and a digest of
one is a digest of the other. Each ``as_…`` gives back what it was given, if that is of the kind that it says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Final

from shade.errors import CorruptCheckpointError
from shade.types import Bytes

MAX_INT: Final = 2**63 - 1
_DIGEST: Final = re.compile(r"[0-9a-f]{32}")


def canonical(body: Any, default: Callable[[Any], Any] | None = None) -> bytes:
    """The one text of a JSON value; ``default`` makes one of what is none."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=default).encode()


def parsed(content: Bytes) -> Any:
    """A JSON value; NaN and infinity are none.

    Args:
        content: Its text.

    Returns:
        The value.

    Raises:
        CorruptCheckpointError: It is no JSON.
    """
    try:
        return json.loads(bytes(content), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"a record of {len(content)} bytes that is not JSON: {error}") from error


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def check_canonical(make: Callable[[], bytes], content: Bytes) -> None:
    """Whether a record says the same again, its own digest included: no member twice, no space, nothing left out.

    Args:
        make: Writes the record that was read.
        content: What it was read from.

    Raises:
        CorruptCheckpointError: It does not.
    """
    try:
        again = make()
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"a record that cannot be written: {error}") from error
    if again != content:
        raise CorruptCheckpointError(f"a record of {len(content)} bytes that does not match its digest or its form")


def expect(found: object, right: object, what: str) -> None:
    """Raises a CorruptCheckpointError that shows what was found, unless it is right."""
    if not right:
        raise CorruptCheckpointError(f"a record with a wrong {what}: {repr(found)[:80]}")


def as_object(found: Any, what: str) -> dict[str, Any]:
    """A JSON object."""
    expect(found, type(found) is dict, what)
    made: dict[str, Any] = found
    return made


def as_list(found: Any, what: str) -> list[Any]:
    """A JSON array."""
    expect(found, type(found) is list, what)
    made: list[Any] = found
    return made


def as_count(found: Any, what: str, least: int = 0, most: int = MAX_INT) -> int:
    """An integer in a range."""
    expect(found, type(found) is int and least <= found <= most, what)
    return int(found)


def as_number(found: Any, what: str) -> float:
    """A number."""
    expect(found, type(found) is float or (type(found) is int and abs(found) <= MAX_INT), what)
    made: float = found
    return made


def as_digest(found: Any, what: str) -> str:
    """32 hex digits."""
    expect(found, type(found) is str and _DIGEST.fullmatch(found), what)
    return str(found)
