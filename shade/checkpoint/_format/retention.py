"""Decides which snapshots stay in durable storage, by rules like ``"last=3,every=1000,best=val_loss"``.

Rules only keep snapshots; one that no rule keeps may be removed. The newest is always kept, so that the rules never
leave a run without a snapshot. If a step was saved twice, only the newer snapshot counts. The result depends only on
the records, not on their order or the machine.

A kept snapshot keeps its bases down to the keyframe, and a removed one is removed before its base, so that a crash in
between leaves only readable snapshots. Invariant: no record is left without its base.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from shade.checkpoint._format.manifest import Commit
from shade.errors import ConfigError

DEFAULT: Final = "last=2"
"""The newest, and one more in case the newest turns out damaged."""
_RULES: Final = "last=N, every=N, best=METRIC[:max][:N] or all, separated by commas"


@dataclass(frozen=True)
class Best:
    """Keeps the snapshots with the best values of a metric."""

    metric: str
    """Name in `Commit.metrics`; snapshots without it, or with a NaN, are ignored."""
    largest: bool = False
    """Whether larger is better."""
    num: int = 1

    def of(self, newest_first: Sequence[Commit]) -> list[Commit]:
        """Returns the best records; of equal ones the newer."""
        sign = -1.0 if self.largest else 1.0
        measured = [record for record in newest_first if not math.isnan(record.metrics.get(self.metric, math.nan))]
        return sorted(measured, key=lambda record: sign * record.metrics[self.metric])[: self.num]


@dataclass(frozen=True)
class Keep:
    """A set of rules; a snapshot stays if any rule keeps it."""

    last: int = 1
    """Number of newest snapshots to keep."""
    every: int = 0
    """Keeps the first at or after each multiple of this many steps; 0 for none."""
    best: tuple[Best, ...] = ()
    all: bool = False

    @classmethod
    def parse(cls, text: str) -> Keep:
        """Parses ``last=3``, ``last=2,every=1000``, ``best=val_loss`` (the smallest), ``best=accuracy:max:3`` (the
        three largest) or ``all``. Raises `ConfigError` if the text is no such rule; the message shows one."""
        last, every, best, everything = 1, 0, [], False
        given: list[str] = []
        if not isinstance(text, str):
            raise ConfigError.of(_RULES, text, f"write it in quotes, as in {DEFAULT!r}")
        for rule in map(str.strip, text.split(",")):
            name, _, value = rule.partition("=")
            given.append(name)
            if rule == "all":
                everything = True
            elif name == "last":
                last = _number(value, text)
            elif name == "every":
                every = _number(value, text)
            elif name == "best" and value:
                best.append(_best(value, text))
            else:
                raise ConfigError.of(_RULES, text, f"correct {rule!r}, as in {DEFAULT},every=1000,best=val_loss")
        if any(given.count(name) > 1 for name in ("last", "every")):
            raise ConfigError.of("last= and every= once each", text, "drop the repetition")
        return cls(last, every, tuple(best), everything)

    def kept(self, records: Iterable[Commit], others: Iterable[Commit] = ()) -> list[Commit]:
        """Returns the records that stay, newest first, of every snapshot that a run has in one location. ``others`` may
        arrive there later: their bases stay too."""
        newest_first = sorted(records, key=lambda record: (record.sequence, record.step), reverse=True)
        if self.all:
            return newest_first
        latest: dict[int, Commit] = {}
        for record in newest_first:
            latest.setdefault(record.step, record)
        distinct = list(latest.values())
        chosen = distinct[: self.last]
        if self.every:
            first: dict[int, Commit] = {}
            for record in distinct:
                number = record.step // self.every
                if number > 0 and (number not in first or record.step < first[number].step):
                    first[number] = record
            chosen += first.values()
        chosen += (record for rule in self.best for record in rule.of(distinct))
        known = {record.digest: record for record in newest_first}
        kept = {record.digest for record in chosen}
        kept |= {base.digest for record in (*chosen, *others) for base in lineage(record, known)}
        return [record for digest, record in known.items() if digest in kept]

    def discardable(self, records: Iterable[Commit], others: Iterable[Commit] = ()) -> list[Commit]:
        """Returns the records that may be removed: oldest first, but each before its base; never the newest."""
        known = {record.digest: record for record in records}
        kept = {record.digest for record in self.kept(known.values(), others)}

        def age(record: Commit) -> tuple[int, int, int, int]:
            *_, keyframe = record, *lineage(record, known)
            return keyframe.sequence, keyframe.step, -record.sequence, -record.step

        return sorted((record for digest, record in known.items() if digest not in kept), key=age)

    @property
    def lasting(self) -> Keep:
        """The same rules without ``last``: what they keep must reach storage, however slow it is."""
        return replace(self, last=1)

    def __str__(self) -> str:
        if self.all:
            return "all"
        rules = [f"last={self.last}"] + [f"every={self.every}"] * bool(self.every)
        rules += [f"best={each.metric}{':max' * each.largest}{f':{each.num}' * (each.num > 1)}" for each in self.best]
        return ",".join(rules)


def lineage(record: Commit, known: Mapping[str, Commit]) -> Iterator[Commit]:
    """Yields the records that a snapshot builds on, nearest first, down to its keyframe or to one not in ``known``."""
    while record.base is not None and record.base in known:
        record = known[record.base]
        yield record


def _best(value: str, text: str) -> Best:
    metric, *words = value.split(":")
    numbers = [word for word in words if word not in ("min", "max")]
    if not metric or len(numbers) > 1 or len(words) - len(numbers) > 1:
        raise ConfigError.of("best=METRIC, best=METRIC:max or best=METRIC:max:3", f"best={value}", "write one of these")
    return Best(metric, "max" in words, _number(numbers[0], text) if numbers else 1)


def _number(value: str, text: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError.of(f"a whole number of at least 1 in {text!r}", value, f"write one, as in {DEFAULT}")
    return int(value)
