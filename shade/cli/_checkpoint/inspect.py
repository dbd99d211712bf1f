"""Implements ``shade checkpoint list`` and ``show``: which snapshots exist, where they are, and what one contains."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from shade.cli._checkpoint.common import Locations, Verb, add_locations, add_step, moment, opened
from shade.cli.tables import size, table
from shade.errors import StoreError

if TYPE_CHECKING:
    from shade.checkpoint._format.manifest import Manifest
    from shade.checkpoint._restore.reader import Snapshot

_LIST_EXAMPLES: Final = """\
examples:
  shade checkpoint list --persist-to /mnt/ckpt
  shade checkpoint list --store redis://10.0.0.1:6379 --persist-to /mnt/ckpt --run vgg
  shade checkpoint list --persist-to s3://bucket/ckpt --json

This machine's shared memory is read as well.

state:
  durable     in storage
  to flush    in memory only, waiting for a flusher: see shade checkpoint flush
  in memory   in memory only, without a flusher

exit code: 0; 1 if a named location does not answer
"""
_SHOW_EXAMPLES: Final = """\
examples:
  shade checkpoint show 1200 --persist-to /mnt/ckpt
  shade checkpoint show 1200 --persist-to /mnt/ckpt --tensors 50 --depth 3
  shade checkpoint show 1200 --persist-to /mnt/ckpt --json     the commit record and every manifest
"""


def _list_arguments(parser: argparse.ArgumentParser) -> None:
    add_locations(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _list(given: argparse.Namespace) -> int:
    with opened(given, shared_memory=True) as locations:
        snapshots = locations.snapshots()
        states = [_state(locations, snapshot) for snapshot in snapshots]
        if given.json:
            facts = [
                {**asdict(each.record), "locations": list(map(str, each.sources)), "state": state}
                for each, state in zip(snapshots, states, strict=True)
            ]
            sys.stdout.write(json.dumps(facts, indent=2) + "\n")
        elif not snapshots:
            sys.stdout.write("" if locations.is_partial else f"no snapshots of run {locations.run}\n")
        else:
            rows = [("step", "saved", "size", "ranks", "state", "lies in", "metrics")]
            for each, state in zip(snapshots, states, strict=True):
                record = each.record
                metrics = ", ".join(f"{name} {value:.6g}" for name, value in sorted(record.metrics.items()))
                where = ", ".join(dict.fromkeys(each.tiers))
                cells = (moment(record.saved_at), size(record.num_bytes), f"{record.world_size}", state, where, metrics)
                rows.append((f"{record.step}", *cells))
            sys.stdout.write(f"run {locations.run}\n\n{table(rows, '><>><<<')}")
        return 1 if locations.is_partial else 0


def _state(locations: Locations, snapshot: Snapshot) -> str:
    if any(source.tier is locations.storage for source in snapshot.sources):
        return "durable"
    try:
        if locations.memory is not None and any(
            source.tier is locations.memory and locations.memory.is_dirty(source.location)
            for source in snapshot.sources
        ):
            return "to flush"
    except StoreError:
        locations.is_partial = True
    return "in memory"


def _show_arguments(parser: argparse.ArgumentParser) -> None:
    add_step(parser)
    add_locations(parser)
    parser.add_argument("--tensors", type=int, default=10, metavar="N", help="list the N biggest (10)")
    parser.add_argument("--depth", type=int, default=2, metavar="N", help="levels of the outline (2)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def _show(given: argparse.Namespace) -> int:
    with opened(given) as locations:
        snapshot = locations.of_step(given.step)
        if snapshot is None:
            return 1
        record = snapshot.record
        manifests = [locations.reader.manifest(snapshot, rank) for rank in range(record.world_size)]
        if given.json:
            every = [json.loads(manifest.to_bytes()) for manifest in manifests]
            sys.stdout.write(json.dumps({"commit": json.loads(record.to_bytes()), "manifests": every}, indent=2) + "\n")
            return 0
        sys.stdout.write(
            f"run {record.run}, step {record.step}: saved {moment(record.saved_at)}, {size(record.num_bytes)}, "
            f"{record.world_size} rank{'s' * (record.world_size != 1)}, save number {record.sequence}\n"
        )
        for name, value in sorted(record.metrics.items()):
            sys.stdout.write(f"metric {name}: {value:.6g}\n")
        for source in snapshot.sources:
            sys.stdout.write(f"lies in {source}\n")
        if record.base is not None:
            known = "a snapshot that is in no tier" if snapshot.base is None else f"step {snapshot.base.record.step}"
            sys.stdout.write(f"builds on {known}\n")
        sys.stdout.write(
            f"\n{_shards(manifests)}\n{_biggest(manifests, given.tensors)}\n{_bounds(manifests, given.tensors)}"
        )
        sys.stdout.write(_outline(manifests, given.depth))
    return 0


def _shards(manifests: Iterable[Manifest]) -> str:
    rows = [("rank", "data", "stored", "codec", "chunks", "tensors")]
    for each in manifests:
        counts = (f"{len(each.chunks)}", f"{len(each.tensors)}")
        rows.append((f"{each.rank}", size(each.num_bytes), size(each.stored_bytes), each.codec, *counts))
    return table(rows, ">>><>>")


def _biggest(manifests: Iterable[Manifest], num: int) -> str:
    entries = [(name, entry, each.rank) for each in manifests for name, entry in each.tensors.items()]
    entries.sort(key=lambda each: (each[1].start - each[1].stop, each[0]))
    rows = [("biggest", "type", "shape", "rank", "tensor")]
    for name, entry, rank in entries[:num]:
        shape = " × ".join(map(str, entry.shape)) or "scalar"
        rows.append((size(entry.stop - entry.start), entry.dtype, shape, f"{rank}", name))
    return table(rows, "><<><")


def _bounds(manifests: Iterable[Manifest], num: int) -> str:
    """Returns the error bounds, the largest first; an empty text if all tensors are exact."""
    bounds = [(name, bound) for each in manifests for name, bound in each.bounds.items() if bound.max_abs > 0]
    if not bounds:
        return ""
    bounds.sort(key=lambda each: (-each[1].relative, each[0]))
    rows = [("off by at most", "in an item", f"of {len(bounds)} tensors that are not exact")]
    rows += [(f"{bound.relative:.2g}", f"{bound.max_abs:.2g}", name) for name, bound in bounds[:num]]
    return f"{table(rows, '>><')}\n"


def _outline(manifests: Iterable[Manifest], depth: int) -> str:
    """Returns the size below each name, to a depth."""
    sums: dict[tuple[str, ...], list[int]] = {}
    for each in manifests:
        for name, entry in each.tensors.items():
            parts = tuple(name.split("/"))
            for level in range(1, min(depth, len(parts)) + 1):
                found = sums.setdefault(parts[:level], [0, 0])
                found[0] += 1
                found[1] += entry.stop - entry.start
    rows: list[tuple[Any, ...]] = [("tensors", "size", "tree")]
    for parts, (count, num_bytes) in sorted(sums.items()):
        rows.append((f"{count}", size(num_bytes), f"{'  ' * (len(parts) - 1)}{parts[-1]}"))
    return table(rows, ">><")


LIST: Final = Verb(
    "list",
    "list the snapshots and their locations",
    "Lists every snapshot of a run, newest first.",
    _LIST_EXAMPLES,
    _list_arguments,
    _list,
)
SHOW: Final = Verb(
    "show",
    "show the content of a snapshot",
    "Shows what a snapshot consists of.",
    _SHOW_EXAMPLES,
    _show_arguments,
    _show,
)
