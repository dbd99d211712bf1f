"""Kills real processes that save to a real store and real storage, again and again, and restores after each.

No disk can be made to forget at will, so what `campaign` proves on a virtual one is tried here for what only a real
one has: its own order of operations, its own caches, its own idea of a rename. Snapshots lie under a run id of our own,
which is removed in the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from shade.checkpoint._commit.protocol import agree, store
from shade.checkpoint._flush.flusher import Flusher
from shade.checkpoint._format.retention import Keep
from shade.checkpoint._restore.reader import Reader
from shade.checkpoint._restore.restore import read_newest
from shade.checkpoint._tiers.memory import MemoryTier
from shade.checkpoint._tiers.storage import StorageTier
from shade.checkpoint._tiers.tier import Tier
from shade.errors import CheckpointError
from shade.rank_group import SingleProcessGroup
from shade.storage.base import open_volume
from shade.store import open_store
from shade.store.base import Store
from tests.simulation.torture.bench import retire
from tests.simulation.torture.ledger import Ledger, Saved, saved

SHARD_BYTES: Final = 2**21
_CHUNK_BYTES: Final = 2**18
_KEEP: Final = Keep.parse("last=2")
_LONGEST_SECONDS: Final = 0.4
_TIMEOUT_SECONDS: Final = 5.0


@dataclass
class LiveReport:
    """What came of it."""

    seed: int
    num_kills: int = 0
    num_saves: int = 0
    num_durable: int = 0
    objections: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Where:
    """The places under torture; None: not there."""

    store: str | None
    persist_to: str | None
    run: str

    @contextlib.contextmanager
    def opened(self) -> Iterator[tuple[MemoryTier | None, StorageTier | None, Store | None]]:
        """Memory, storage, and the store under the memory."""
        with contextlib.ExitStack() as resources:
            memory = storage = servers = None
            if self.store is not None:
                servers = resources.enter_context(open_store(self.store, timeout_seconds=_TIMEOUT_SECONDS))
                servers.ping()
                memory = MemoryTier(servers, self.run, flushed=self.persist_to is not None)
                resources.callback(memory.close)
            if self.persist_to is not None:
                storage = StorageTier(open_volume(self.persist_to), self.run)
                resources.callback(storage.close)
            yield memory, storage, servers


def torture(
    store_url: str | None,
    persist_url: str | None,
    *,
    kills: int,
    seed: int,
    told: Callable[[LiveReport], None] | None = None,
) -> LiveReport:
    """Kills and restores.

    Args:
        store_url: A store that other processes reach, or None.
        persist_url: Storage, or None.
        kills: How often.
        seed: Of the moments and the victims.
        told: Called after each.

    Returns:
        What came of it.
    """
    where = Where(store_url, persist_url, f"torture-{secrets.token_hex(4)}")
    dice, ledger, report = random.Random(seed), Ledger(), LiveReport(seed)
    first = 1
    try:
        with where.opened() as (memory, storage, _):
            while report.num_kills < kills:
                begun = _round(where, ledger, dice, first, has_flusher=memory is not None and storage is not None)
                report.num_kills += 1
                report.num_saves += begun + 1 - first
                report.num_durable = len(ledger.durable)
                first = max(first, begun) + 1
                tiers: list[Tier] = [tier for tier in (memory, storage) if tier is not None]
                floor = ledger.floor(memory_is_there=True)
                report.objections += _look(tiers, ledger, floor, f"kill {report.num_kills}")
                if storage is not None:
                    floor = ledger.floor(memory_is_there=False)
                    report.objections += _look([storage], ledger, floor, f"kill {report.num_kills}, storage alone")
                if told is not None:
                    told(report)
    finally:
        _remove(where)
    return report


def _content(run: str, sequence: int) -> Saved:
    return saved(10 * sequence, sequence, 1, run, shard_bytes=SHARD_BYTES, chunk_bytes=_CHUNK_BYTES)


def _round(where: Where, ledger: Ledger, dice: random.Random, first: int, *, has_flusher: bool) -> int:
    """Lets processes work for a moment, kills, notes what they have said; the last save that was begun."""
    roles = ["saver"] + ["flusher"] * has_flusher
    processes = {role: _start(role, where, first) for role in roles}
    waiting = next(iter(processes.values())).stdout
    assert waiting is not None
    told = [waiting.readline()]  # it has started: from here on every moment is as good as another
    time.sleep(dice.random() * _LONGEST_SECONDS)
    victims = dice.choice([[role] for role in roles] + [roles])
    for role in victims:
        processes[role].kill()
    time.sleep(dice.random() * 0.1 * (victims != roles))
    for process in processes.values():
        process.kill()
        rest, _ = process.communicate()
        told += rest.splitlines()
    begun = first - 1
    for line in told:
        word, _, number = line.strip().partition(" ")
        if not number.isdecimal():
            continue
        one = _content(where.run, int(number))
        ledger.add(one)
        if word == "begun":
            ledger.offered.add(one.record.digest)
            begun = max(begun, int(number))
        else:
            (ledger.durable if word == "durable" else ledger.committed).add(one.record.digest)
    return begun


def _start(role: str, where: Where, first: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.simulation.torture.live"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdin is not None
    process.stdin.write(json.dumps({"role": role, "first": first, **vars(where)}) + "\n")
    process.stdin.flush()
    return process


def _look(tiers: list[Tier], ledger: Ledger, floor: int, when: str) -> list[str]:
    try:
        found = read_newest(Reader(tiers), SingleProcessGroup())
    except CheckpointError as error:
        return [f"{when}: nothing could be restored: {error}"]
    if found is None:
        return [f"{when}: found nothing, although save {floor} had been promised"] if floor >= 0 else []
    tensors = {name: tensor.numpy().tobytes() for name, tensor in found.tensors.items()}
    objection = ledger.objection(found.record, tensors, floor)
    return [] if objection is None else [f"{when}: {objection}"]


def _remove(where: Where) -> None:
    with where.opened() as (_, _, servers):
        if servers is not None:
            servers.delete_many(list(servers.scan(f"shade:checkpoint:{where.run}:")))
    if where.persist_to is not None:
        with open_volume(where.persist_to) as volume:
            volume.delete_many(volume.list(f"{where.run}/"))
            volume.sweep(f"{where.run}/")


# ── the processes that are killed ───────────────────────────────────────────────────────────────────────────────────


def main() -> None:
    """One of them; what it shall be comes on standard input, as addresses may hold passwords."""
    told: dict[str, Any] = json.loads(sys.stdin.readline())
    where = Where(told["store"], told["persist_to"], told["run"])
    with where.opened() as (memory, storage, _):
        if told["role"] == "saver":
            _save(where.run, memory, storage, told["first"])
        else:
            assert memory is not None
            assert storage is not None
            _flush(memory, storage)


def _say(word: str, sequence: int) -> None:
    sys.stdout.write(f"{word} {sequence}\n")
    sys.stdout.flush()


def _save(run: str, memory: MemoryTier | None, storage: StorageTier | None, sequence: int) -> None:
    while True:
        one = _content(run, sequence)
        _say("begun", sequence)
        if memory is not None and _stored(memory, one):
            _say("committed", sequence)
        elif storage is not None and _stored(storage, one):
            _say("durable", sequence)
        if storage is not None:
            retire(storage, _KEEP)
        sequence += 1


def _stored(tier: Tier, one: Saved) -> bool:
    group, saved_at = SingleProcessGroup(), one.record.saved_at
    record, shard_bytes, _ = agree(group, one.manifests[0], None, sequence=one.record.sequence, saved_at=saved_at)
    try:
        store(tier, group, record, shard_bytes, one.manifests[0], lambda: one.chunks[0])
    except CheckpointError:
        return False
    return True


def _flush(memory: MemoryTier, storage: StorageTier) -> None:
    flusher = Flusher(memory, storage, _KEEP)
    while True:
        flushed = flusher.flush_one()
        if flushed is not None:
            _say("durable", flushed.record.sequence)
        else:
            time.sleep(0.005)


if __name__ == "__main__":
    main()
