"""Provides what a certificate needs: a trail of the run's losses, a copy of a snapshot, a comparison by bits.

A run that resumes bit for bit passes through the same losses to the same tensors. `shade.cli._checkpoint.repair`
replays some steps from a snapshot in a fresh process and compares the loss of every step with the trail, which shows
*when* the runs diverge, and every tensor with the run's next snapshot, which shows *what* differs.

The trail has a line per step, ``{"step": 12, "loss": "0x1.3333340000000p+1"}``: the exact sum of rank 0's losses.
Losses stay on their device until a few dozen are written together, so no step waits for one. About 45 bytes per step.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch

from shade.checkpoint._restore.reader import Reader, Snapshot
from shade.checkpoint._restore.restore import ReadSnapshot
from shade.checkpoint._tiers.tier import Shard, Tier

TRAIL_FILE: Final = "trail.jsonl"
"""Name of the file in the run directory."""
_LOSSES_PER_WRITE: Final = 64


class Trail:
    """Writes the trail of losses.

    Args:
        path: File to append to: a resumed run repeats some steps, and the last line of a step counts.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending: list[tuple[int, torch.Tensor]] = []

    def record(self, step: int, loss: torch.Tensor) -> None:
        """Records the loss of a step of the run: a scalar on any device."""
        self._pending.append((step, loss))
        if len(self._pending) >= _LOSSES_PER_WRITE:
            self.flush()

    def flush(self) -> None:
        """Writes the pending losses; waits for the device."""
        if self._pending:
            losses = torch.stack([loss for _, loss in self._pending]).double().tolist()
            rows = [{"step": step, "loss": loss.hex()} for (step, _), loss in zip(self._pending, losses, strict=True)]
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(f"{json.dumps(row)}\n" for row in rows)
            self._pending.clear()


def read_trail(path: Path) -> dict[int, str]:
    """Reads a trail: loss by step, in hexadecimal; empty if the file is missing."""
    losses: dict[int, str] = {}
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):  # torn by a kill
                row = json.loads(line)
                losses[int(row["step"])] = str(row["loss"])
    return losses


def copy_snapshot(reader: Reader, snapshot: Snapshot, target: Tier) -> None:
    """Copies a snapshot into another tier, verified, after its bases.

    Raises CorruptCheckpointError if it is lost in every copy, or StorageError if it cannot be written.
    """
    record = snapshot.record
    if snapshot.base is not None and snapshot.base.record not in target.held().values():
        copy_snapshot(reader, snapshot.base, target)
    manifests = [reader.manifest(snapshot, rank) for rank in range(record.world_size)]
    location = target.prepare(record.step, [manifest.stored_bytes for manifest in manifests])
    for manifest in manifests:
        target.put(location, Shard(manifest, (content for _, content in reader.chunks(snapshot, manifest))))
    target.commit(location, record)


def differences(one: ReadSnapshot, other: ReadSnapshot) -> Iterator[str]:
    """Yields what differs between two snapshots, bit for bit.

    Args:
        one: A snapshot that was read completely.
        other: Another one.

    Yields:
        Names of tensors, in the order of the state; then paths of other values: ``optimizer/param_groups/0/lr``.
    """
    for name, tensor in one.tensors.items():
        match = other.tensors.get(name)
        if match is None or not _same_bits(tensor, match):
            yield name
    yield from (name for name in other.tensors if name not in one.tensors)
    yield from _paths(one.tree, other.tree, "")


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)))


def _paths(one: Any, other: Any, path: str) -> Iterator[str]:
    """Yields the paths at which two skeletons differ; `_capture.flatten` documents skeletons."""
    if type(one) is type(other) is dict and one.keys() == other.keys() and len(one) == 1:
        ((kind, content),), (match,) = one.items(), other.values()
        if kind in ("dict", "OrderedDict", "Counter") and isinstance(content, list) and content[0] == match[0]:
            keys = content[0] if isinstance(content[0], list) else range(len(content[1]))
            for key, mine, theirs in zip(keys, *_values(content[1], match[1]), strict=False):
                yield from _paths(mine, theirs, f"{path}/{key}" if path else str(key))
        elif content != match:
            yield from _paths(content, match, path)
    elif type(one) is type(other) is list and len(one) == len(other):
        for number, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            yield from _paths(mine, theirs, f"{path}/{number}")
    elif one != other:
        yield path or "the state"


def _values(one: Any, other: Any) -> tuple[list[Any], list[Any]]:
    return (one, other) if isinstance(one, list) and isinstance(other, list) else ([one], [other])
