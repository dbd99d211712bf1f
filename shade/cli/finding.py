"""One row of ``shade doctor``: a name, a verdict, what was found, and the cure of what is not fine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """What was found of one thing."""

    name: str
    verdict: str
    """``ok``, ``warn`` or ``fail``."""
    found: str
    cure: str = ""

    def __str__(self) -> str:
        cure = f"\n{'':27}→ {self.cure}" if self.cure else ""
        return f"{self.verdict:<5} {self.name:<20} {self.found}{cure}"


def ok(name: str, found: str) -> Finding:
    """Fine."""
    return Finding(name, "ok", found)


def warn(name: str, found: str, cure: str) -> Finding:
    """Costs speed, or may stop a run later."""
    return Finding(name, "warn", found, cure)


def broken(name: str, error: Exception) -> Finding:
    """Stops a run; one of our own errors, whose last clause is the cure."""
    found, _, cure = str(error).rpartition("; ")
    return fail(name, found, cure) if found else fail(name, cure, "see above")


def fail(name: str, found: str, cure: str) -> Finding:
    """Stops a run."""
    return Finding(name, "fail", found, cure)
