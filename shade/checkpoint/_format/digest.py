"""Computes digests, and reads and writes canonical JSON: chunks, manifests and records are identified by their digest.

Canonical means members sorted, no spaces, minimal escapes: equal content is equal bytes, so a digest of one is a digest
of the other. What is read is not trusted: each ``as_…`` returns its argument if it has the type that its name says, and
raises otherwise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import xxhash

from shade.errors import CorruptCheckpointError
from shade.types import Bytes

MAX_INT: Final = 2**63 - 1
_MOST_NESTED: Final = 900
_DIGEST: Final = re.compile(r"[0-9a-f]{32}")


def digest_of(*contents: Bytes) -> str:
    """Returns the 128-bit xxh3, in hex, of concatenated bytes: protects against damage, not against an attacker."""
    # One-shot functions of the library hold the GIL while they hash: four threads took as long as one, and a training
    # waited for its own snapshots. update() releases it.
    state = xxhash.xxh3_128()
    for content in contents:
        state.update(content)
    return state.hexdigest()


def canonical(body: Any, default: Callable[[Any], Any] | None = None) -> bytes:
    """Returns the canonical text of a JSON value; ``default`` converts other objects."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=default).encode()


def parse_json(content: Bytes) -> Any:
    """Parses a JSON text without NaN and infinity, or raises CorruptCheckpointError."""
    octets = np.frombuffer(content, np.uint8)
    # From Python 3.14 on the parser follows any nesting; what walks through the result does not.
    opened, closed = np.isin(octets, list(b"[{")), np.isin(octets, list(b"]}"))
    if np.cumsum(opened.astype(np.int64) - closed).max(initial=0) > _MOST_NESTED:
        raise CorruptCheckpointError(f"a record of {len(content)} bytes that is nested too deeply")
    try:
        return json.loads(bytes(content), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"a record of {len(content)} bytes that is not JSON: {error}") from error


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def check_canonical(make: Callable[[], bytes], content: Bytes) -> None:
    """Raises CorruptCheckpointError unless the parsed record is written as the same bytes again, digest included: so it
    has no member twice, no spaces, and nothing left out."""
    try:
        again = make()
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"a record that cannot be written: {error}") from error
    if again != content:
        raise CorruptCheckpointError(f"a record of {len(content)} bytes that does not match its digest or its form")


def expect(found: object, right: object, what: str) -> None:
    """Raises a CorruptCheckpointError that shows what was found, unless ``right`` is true."""
    if not right:
        raise CorruptCheckpointError(f"a record with a wrong {what}: {repr(found)[:80]}")


def as_object(found: Any, what: str) -> dict[str, Any]:
    """Returns a JSON object."""
    expect(found, type(found) is dict, what)
    made: dict[str, Any] = found
    return made


def as_list(found: Any, what: str) -> list[Any]:
    """Returns a JSON array."""
    expect(found, type(found) is list, what)
    made: list[Any] = found
    return made


def as_count(found: Any, what: str, least: int = 0, most: int = MAX_INT) -> int:
    """Returns an integer in a range."""
    expect(found, type(found) is int and least <= found <= most, what)
    return int(found)


def as_number(found: Any, what: str) -> float:
    """Returns a number."""
    expect(found, type(found) is float or (type(found) is int and abs(found) <= MAX_INT), what)
    made: float = found
    return made


def as_digest(found: Any, what: str) -> str:
    """Returns 32 hex digits."""
    expect(found, type(found) is str and _DIGEST.fullmatch(found), what)
    return str(found)
