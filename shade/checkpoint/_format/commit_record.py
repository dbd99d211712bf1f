"""The commit record: it makes a snapshot exist.

It lists the digests of the manifests, is written last and is the same in every tier: a snapshot whose record is missing
or does not match does not exist.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from shade.checkpoint._format.digest import (
    as_count,
    as_digest,
    as_list,
    as_number,
    as_object,
    canonical,
    check_canonical,
    digest_of,
    expect,
)
from shade.checkpoint._format.manifest import FORMAT, MAX_RANKS, RUN, fields_of, parsed_fields
from shade.types import Bytes


@dataclass(frozen=True)
class Commit:
    """A commit record."""

    NEWER: ClassVar[frozenset[str]] = frozenset({"base"})
    run: str
    step: int
    sequence: int
    """Counts the saves of a run through all restarts; the record with the higher count is newer."""
    world_size: int
    manifests: tuple[str, ...]
    """Digest of each rank's manifest."""
    num_bytes: int
    """Bytes of data of all ranks together."""
    saved_at: float
    """Seconds since 1970, when the state was copied."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Values that the caller passed: a validation loss to choose the best by."""
    base: str | None = None
    """Version 2: digest of the record of the base; None if the snapshot needs no other."""
    version: int = 1

    def to_bytes(self) -> bytes:
        """Returns canonical JSON that contains its own digest; a metric that is not finite is written as null."""
        metrics = {name: value if math.isfinite(value) else None for name, value in self.metrics.items()}
        body = {"format": FORMAT, **fields_of(self), "metrics": metrics}
        return canonical({**body, "digest": digest_of(canonical(body))})

    @property
    def digest(self) -> str:
        """Digest of the record: the same in every tier."""
        return digest_of(self.to_bytes())

    @classmethod
    def parse(cls, content: Bytes) -> Commit:
        """Parses and checks a record.

        Raises CorruptCheckpointError if it does not match its own digest, or its version is unknown.
        """
        fields = parsed_fields(content, cls, "digest")
        del fields["digest"]  # check_canonical() compares it
        fields["manifests"] = tuple(as_digest(each, "manifests") for each in as_list(fields["manifests"], "manifests"))
        fields["metrics"] = {
            name: math.nan if value is None else as_number(value, "metrics")
            for name, value in as_object(fields["metrics"], "metrics").items()
        }
        record = cls(**fields)
        expect(record.run, type(record.run) is str and RUN.fullmatch(record.run), "run")
        for name in ("step", "sequence", "num_bytes"):
            as_count(fields[name], name)
        as_count(record.world_size, "world_size", 1, MAX_RANKS)
        expect(len(record.manifests), len(record.manifests) == record.world_size, "number of manifests")
        as_number(record.saved_at, "saved_at")
        expect(record.base, record.base is None or as_digest(record.base, "base"), "base")
        check_canonical(record.to_bytes, content)
        return record
