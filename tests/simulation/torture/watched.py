"""A tier that tells the ledger when a record is offered, and, for shared memory, lets each of its steps go wrong.

The tier lies in real shared memory: there is nothing between a store to a mapped page and its effect. So its
operations are the steps of the protocol, and the two halves of a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from typing_extensions import override

from shade.checkpoint._format.manifest import Commit, Manifest
from shade.checkpoint._tiers.tier import Shard, Tier
from shade.types import Bytes
from tests.simulation.torture.ledger import Ledger
from tests.simulation.torture.world import Act, World


class Watched(Tier):
    """Hands everything on.

    Args:
        inner: The tier.
        ledger: Is told of records.
        world: Steps its methods, where they are operations themselves.
        actor: The process.
    """

    def __init__(self, inner: Tier, ledger: Ledger, world: World | None = None, actor: str = "") -> None:
        self.inner, self._ledger, self._world, self._actor = inner, ledger, world, actor
        self.name, self.every_rank_commits = inner.name, inner.every_rank_commits  # type: ignore[misc]
        self.num_copies = inner.num_copies

    def _do(self, name: str, whole: Callable[[], Any]) -> Any:
        if self._world is None:
            return whole()
        return self._world.perform(self._actor, Act(self.inner.name, name, "", whole))

    @override
    def prepare(self, step: int, shard_bytes: Sequence[int]) -> str:
        place: str = self._do("prepare", lambda: self.inner.prepare(step, shard_bytes))
        return place

    @override
    def put(self, place: str, shard: Shard) -> None:
        self._do("put", lambda: self.inner.put(place, shard))

    @override
    def commit(self, place: str, record: Commit) -> None:
        self._ledger.offered.add(record.digest)
        self._do("commit", lambda: self.inner.commit(place, record))

    @override
    def held(self, known: Mapping[str, Commit] | None = None) -> Mapping[str, Commit]:
        found = self.inner.held()
        self.damaged = self.inner.damaged
        return found

    @override
    def read_manifest(self, place: str, rank: int, copy: int = 0) -> bytes | None:
        return self.inner.read_manifest(place, rank, copy)

    @override
    def read_chunks(self, place: str, manifest: Manifest, numbers: Sequence[int], copy: int = 0) -> list[Bytes | None]:
        return self.inner.read_chunks(place, manifest, numbers, copy)

    @override
    def repair(self, place: str, manifest: Manifest, damaged: Mapping[int, Bytes]) -> None:
        self.inner.repair(place, manifest, damaged)

    @override
    def discard(self, place: str) -> None:
        self._do("discard", lambda: self.inner.discard(place))

    @override
    def close(self) -> None:
        self.inner.close()
