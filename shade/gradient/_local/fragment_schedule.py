"""Says when each fragment of a model is captured, and when its result is applied: parts take turns on the link.

References:
    Douillard et al., "Streaming DiLoCo with overlapping communication", 2025 (arXiv 2501.18512), §2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shade.errors import ConfigError


@dataclass(frozen=True)
class FragmentSchedule:
    """The turns of all fragments, at equal distances; that of the last one is at H."""

    every: int
    """H, inner steps between two captures of a fragment."""
    delay: int
    """Inner steps from a capture to its result."""
    fragments: tuple[tuple[int, ...], ...]
    """The numbers of the buckets of each."""

    @classmethod
    def of(cls, sizes: Sequence[int], every: int, num_fragments: int, delay: int) -> FragmentSchedule:
        """Deals buckets to fragments: the largest first, each to the lightest; `ConfigError` if they do not suffice."""
        if len(sizes) < num_fragments:
            cure = "take fewer fragments, or a smaller bucket_bytes"
            raise ConfigError.of(f"at least {num_fragments} buckets for as many fragments", len(sizes), cure)
        found: list[list[int]] = [[] for _ in range(num_fragments)]
        for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
            min(found, key=lambda fragment: sum(sizes[each] for each in fragment)).append(number)
        return cls(every, delay, tuple(tuple(sorted(each)) for each in found))

    def captured_at(self, step: int) -> list[int]:
        """Returns the fragments that are captured after an inner step, counted from 1."""
        num_fragments = len(self.fragments)
        turns = [self.every * (place + 1) // num_fragments for place in range(num_fragments)]
        return [place for place, turn in enumerate(turns) if (step - turn) % self.every == 0]
