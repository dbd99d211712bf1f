"""Implements ``shade checkpoint verify``, ``repair`` and ``scrub``.

Each reads every byte of every copy. A snapshot may be replaced while it is read: a slot is claimed again, or
retention removes a folder. So damage counts only if the same record is still in that location afterwards.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from shade.cli._checkpoint.common import Locations, Verb, add_locations, opened
from shade.cli.tables import table
from shade.errors import CorruptCheckpointError, StorageError, StoreError
from shade.terminal import bytes_bar

if TYPE_CHECKING:
    from shade.checkpoint._restore.reader import Damage, Snapshot

_VERIFY_EXAMPLES: Final = """\
examples:
  shade checkpoint verify --persist-to /mnt/ckpt               the newest
  shade checkpoint verify all --persist-to /mnt/ckpt --store redis://10.0.0.1:6379
  shade checkpoint verify 1200 --persist-to /mnt/ckpt --json

Reads every byte of every copy and compares it with what was committed; changes nothing.
exit code: 0 all intact; 1 damage, or no snapshot; 2 the command could not be carried out
"""
_REPAIR_EXAMPLES: Final = """\
examples:
  shade checkpoint repair 1200 --persist-to /mnt/ckpt --store redis://10.0.0.1:6379

What is damaged or missing in one copy is written again from another copy or another location.
exit code: 0 all intact now; 1 something is lost in every copy, or there is no snapshot
"""
_SCRUB_EXAMPLES: Final = """\
examples:
  shade checkpoint scrub --persist-to /mnt/ckpt --store redis://10.0.0.1:6379
  0 3 * * * shade checkpoint scrub --persist-to /mnt/ckpt      every night, from cron

Verifies and repairs every snapshot, newest first.
exit code: 0 all intact now; 1 something is lost in every copy
"""
_MOST_SHOWN: Final = 8
"""Longest list of chunk numbers."""


@dataclass
class _Finding:
    """The result for one snapshot."""

    step: int | None
    """None where the record cannot be read."""
    damages: list[Damage] = field(default_factory=list)
    """One per location."""
    lost: str | None = None
    """What is lost in every copy."""
    mended: int = 0
    """Number of chunks written again."""

    @property
    def is_sound(self) -> bool:
        return self.lost is None and not any(self.damages)


def _examine(locations: Locations, snapshot: Snapshot) -> _Finding:
    """Reads everything; ignores damage in locations that another snapshot has taken meanwhile."""
    from shade.checkpoint._restore.reader import check_decodable

    record = snapshot.record
    finding = _Finding(record.step)
    copies = sum(source.tier.num_copies for source in snapshot.sources)
    with bytes_bar(f"step {record.step}", record.num_bytes * copies) as bar:
        try:
            finding.damages = locations.reader.examine(snapshot, lambda num_bytes: bar.update(num_bytes))
            check_decodable(locations.reader, snapshot)
        except CorruptCheckpointError as error:
            finding.lost = str(error)
    if finding.is_sound:
        return finding
    there = {
        (each.tier.name, each.location) for now in locations.snapshots() if now.record == record for each in now.sources
    }
    finding.damages = [each for each in finding.damages if (each.source.tier.name, each.source.location) in there]
    if not there:
        finding.lost = None
    return finding


def _unreadable(locations: Locations) -> list[_Finding]:
    """Returns a finding for each record that cannot be read, twice in a row: a slot may have been claimed meanwhile."""
    locations.snapshots()
    before = set(locations.reader.damaged)
    if before:
        locations.snapshots()
    return [
        _Finding(
            None,
            lost=f"{location}: its record cannot be read, so the snapshot does not count; if no copy of the "
            "record can be put back, remove what lies there",
        )
        for location in sorted(before.intersection(locations.reader.damaged))
    ]


def _repair(locations: Locations, snapshot: Snapshot, finding: _Finding) -> _Finding:
    """Repairs what an examination found, and examines the snapshot again."""
    if finding.is_sound or finding.lost is not None:
        return finding
    lost = None
    mended = 0
    try:
        mended = locations.reader.repair(snapshot, finding.damages)
    except (CorruptCheckpointError, StoreError, StorageError) as error:
        lost = str(error)
    after = _examine(locations, snapshot)
    after.mended = mended
    after.lost = after.lost or (lost if any(after.damages) else None)
    return after


def _report(findings: list[_Finding], *, as_json: bool) -> int:
    if as_json:
        facts = [
            {
                "step": each.step,
                "sound": each.is_sound,
                "mended_chunks": each.mended,
                "lost": each.lost,
                "locations": [
                    {
                        "location": str(damage.source.location),
                        "tier": damage.source.tier.name,
                        "manifests": sorted(damage.manifests),
                        "files": sorted(damage.files),
                        "chunks": {str(rank): sorted(numbers) for rank, numbers in sorted(damage.chunks.items())},
                    }
                    for damage in each.damages
                ],
            }
            for each in findings
        ]
        sys.stdout.write(json.dumps(facts, indent=2) + "\n")
    else:
        rows = [("step", "lies in", "found")]
        for each in findings:
            rows += [(f"{each.step}", str(damage.source), _words(damage, each.mended)) for damage in each.damages]
            if each.lost is not None:
                rows.append(("?" if each.step is None else f"{each.step}", "", " ".join(each.lost.split())))
        sys.stdout.write(table(rows, "><<"))
        bad = sum(not each.is_sound for each in findings)
        sys.stdout.write(f"\n{len(findings)} snapshot{'s' * (len(findings) != 1)}, {bad} damaged\n")
    return 0 if all(each.is_sound for each in findings) else 1


def _words(damage: Damage, mended: int) -> str:
    if not damage:
        return f"sound, {mended} chunk{'s' * (mended != 1)} of the snapshot mended" if mended else "sound"
    parts = [f"manifest of rank {rank}" for rank in sorted(damage.manifests)]
    parts += [f"header or length of the file of rank {rank}" for rank in sorted(damage.files)]
    for rank, numbers in sorted(damage.chunks.items()):
        shown = ", ".join(map(str, sorted(numbers)[:_MOST_SHOWN])) + " …" * (len(numbers) > _MOST_SHOWN)
        parts.append(f"{len(numbers)} chunk{'s' * (len(numbers) != 1)} of rank {rank} ({shown})")
    return f"damaged: {', '.join(parts)}"


def _chosen(locations: Locations, which: str) -> list[Snapshot]:
    found = locations.snapshots()
    if which == "all" or not found:
        return found
    if which == "newest":
        return found[:1]
    snapshot = locations.of_step(int(which))
    return [] if snapshot is None else [snapshot]


def _which(text: str) -> str:
    if text not in ("all", "newest") and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a step, all or newest, got {text!r}")
    return text


def _verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("which", type=_which, nargs="?", default="newest", metavar="STEP|all", help="(the newest)")
    add_locations(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _repair_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("which", type=_which, metavar="STEP", help="a step of shade checkpoint list, newest or all")
    add_locations(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _scrub_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(which="all")
    add_locations(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _answer(given: argparse.Namespace, *, repairing: bool) -> int:
    with opened(given) as locations:
        findings = []
        for snapshot in _chosen(locations, given.which):
            finding = _examine(locations, snapshot)
            findings.append(_repair(locations, snapshot, finding) if repairing else finding)
        findings += _unreadable(locations)
        if not findings:
            sys.stderr.write(f"no snapshot of run {locations.run} to read\n")
            return 1
        return max(_report(findings, as_json=given.json), 1 if locations.is_partial else 0)


VERIFY: Final = Verb(
    "verify",
    "check every byte of every copy",
    "Checks snapshots against what was committed.",
    _VERIFY_EXAMPLES,
    _verify_arguments,
    lambda given: _answer(given, repairing=False),
)
REPAIR: Final = Verb(
    "repair",
    "repair damaged copies from intact ones",
    "Repairs a snapshot.",
    _REPAIR_EXAMPLES,
    _repair_arguments,
    lambda given: _answer(given, repairing=True),
)
SCRUB: Final = Verb(
    "scrub",
    "verify and repair everything",
    "Verifies and repairs every snapshot.",
    _SCRUB_EXAMPLES,
    _scrub_arguments,
    lambda given: _answer(given, repairing=True),
)
