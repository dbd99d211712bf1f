"""Ranks join, leave and die, as threads of one process over real gloo groups: a thread can fail at an exact call.

Real processes that are killed and stopped are in tests/faults/test_gradient_elastic.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shade.errors import ConfigError
from shade.gradient._elastic import rendezvous
from shade.gradient._elastic.elastic_engine import ElasticEngine
from shade.gradient._elastic.membership import Membership
from shade.gradient._elastic.membership_change import MembershipChange
from shade.gradient._engine.engine import GradientEngine
from shade.gradient.optim import SparseAdamW, SparseSGD
from tests.support.gradient_ranks import digest, loss_of, network

SPARSE: dict[str, Any] = {"density": 0.05, "bucket_bytes": 4 * 4000, "compressor": "topk"}
QUICK: dict[str, Any] = {
    "timeout_seconds": 10.0,
    "patience_seconds": 10.0,
    "dead_seconds": 0.5,
    "give_up_seconds": 40.0,
}
VOTE_FIELDS = 5


class Killed(Exception):
    """This rank is not there any more."""


class Books:
    """What an engine's gradients were, and what of them has been applied."""

    def __init__(self, engine: ElasticEngine) -> None:
        self._engine = engine
        self.gradients = [np.zeros(each.bucket.size) for each in engine._bucket_states]
        self.applied = [np.zeros(each.bucket.size) for each in engine._bucket_states]
        self._chosen: dict[int, dict[int, Any]] = {}
        apply = engine._apply
        for number, bucket_state in enumerate(engine._bucket_states):
            self._follow(number, bucket_state.feedback)

        def spy(work: Any) -> None:
            for number, chosen in self._chosen.get(work.step, {}).items():
                self.applied[number][chosen.indices_K] += chosen.values_K
            apply(work)

        engine._apply = spy  # type: ignore[method-assign]

    def _follow(self, number: int, feedback: Any) -> None:
        compress = feedback.compress

        def spy(gradient_D: Any, density: float, key: Any, held: Any) -> Any:
            self.gradients[number] += np.asarray(gradient_D, np.float64)
            chosen = compress(gradient_D, density, key, held)
            self._chosen.setdefault(key.step, {})[number] = chosen
            return chosen

        feedback.compress = spy

    def kept(self) -> list[np.ndarray]:
        return [each["residual"].double().numpy() for each in self._engine.state_dict()["residuals"]]


@dataclass
class Outcome:
    """One rank at its end."""

    digest: str
    changes: list[MembershipChange]
    counts: dict[str, float]
    gradients: list[np.ndarray]
    applied: list[np.ndarray]
    kept: list[np.ndarray]
    first_step: int
    rate: float
    moments: str = ""
    raised: Exception | None = None
    has_left: bool = False

    def missing(self) -> list[np.ndarray]:
        """What came in and is neither applied nor kept."""
        return [g - a - k for g, a, k in zip(self.gradients, self.applied, self.kept, strict=True)]


@dataclass
class Rank:
    """How one thread trains."""

    until: int
    at_step: Callable[[ElasticEngine, int], None] = lambda engine, step: None
    """Called before each step."""
    build: Callable[[nn.Module], Any] = lambda model: SparseSGD(model.parameters(), lr=0.1, momentum=0.9)
    make_model: Callable[[], nn.Module] = network
    num_members: int = 3
    settings: dict[str, Any] = field(default_factory=dict)
    membership: Membership | None = None
    seed: int = 0


def train(place: str, plan: Rank, outcomes: list[Outcome | Exception]) -> None:
    """A rank's whole life."""
    torch.set_num_threads(1)
    plan.membership = Membership(place, plan.num_members, **QUICK)
    model = plan.make_model()
    optimizer = plan.build(model)
    try:
        engine = ElasticEngine(model, optimizer, plan.membership, **{**SPARSE, **plan.settings})
    except Exception as error:  # noqa: BLE001 - the test looks at it
        outcomes.append(error)
        return
    books, first_step = Books(engine), engine.step_count
    try:
        while engine.step_count < plan.until and not engine.has_left:
            step = engine.step_count
            plan.at_step(engine, step)
            loss_of(model, plan.seed, step).backward()
            engine.step()
        if not engine.has_left:
            engine.finish()
    except Killed as error:
        engine._detach()
        outcomes.append(error)
        return
    zeros = [np.zeros(each.bucket.size) for each in engine._bucket_states]
    outcomes.append(
        Outcome(
            digest=digest(model),
            changes=engine.changes,
            counts=engine.counts,
            gradients=books.gradients,
            applied=books.applied,
            kept=zeros if engine.has_left else books.kept(),
            first_step=first_step,
            rate=optimizer.param_groups[0]["lr"],
            moments=digest_of_moments(optimizer),
            has_left=engine.has_left,
        )
    )
    engine.close()


def digest_of_moments(optimizer: Any) -> str:
    holder = nn.ParameterList(
        nn.Parameter(tensor) for state in optimizer.state.values() for name, tensor in state.items() if name != "step"
    )
    return digest(holder)


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Any]]]:
    monkeypatch.setattr(rendezvous, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr("shade.gradient._elastic.elastic_engine._PUBLISH_SECONDS", 0.0)
    store = rendezvous.serve()

    def run(*plans: Rank) -> list[Any]:
        outcomes: list[Any] = []
        for number, plan in enumerate(plans):
            plan.seed = number
        threads = [threading.Thread(target=train, args=(f"127.0.0.1:{store.port}", each, outcomes)) for each in plans]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive(), "it hangs"
        return outcomes

    yield run
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and shade_threads():
        time.sleep(0.05)
    assert shade_threads() == []


def shade_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("shade")]


def die(engine: ElasticEngine) -> None:
    """As a killed process: no good-bye at the rendezvous, connections gone."""
    rendezvous_client = engine._membership._rendezvous
    rendezvous_client._heartbeat_key = lambda _: "line/unknown"  # type: ignore[method-assign]
    rendezvous_client._inbox.put(None)
    engine._detach()
    engine._gradient_hooks.close()


def dying(rank: int, step: int) -> Callable[[ElasticEngine, int], None]:
    def at_step(engine: ElasticEngine, now: int) -> None:
        if (engine.rank, now) == (rank, step) and not engine.changes:
            time.sleep(0.5)  # until its last status is published
            die(engine)
            raise Killed

    return at_step


def survivors_of(outcomes: list[Any]) -> list[Outcome]:
    for each in outcomes:
        if isinstance(each, Exception) and not isinstance(each, Killed):
            raise each
    return [each for each in outcomes if isinstance(each, Outcome)]


def largest(arrays: list[np.ndarray]) -> float:
    return max(float(np.abs(each).max()) for each in arrays)


@pytest.mark.parametrize("staleness", [0, 1])
def test_training_continues_without_a_lost_rank_and_loses_only_its_residual(
    play: Any, staleness: int, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"staleness": staleness}
    survivors = survivors_of(play(*[Rank(12, dying(1, 5), settings=settings) for _ in range(3)]))
    assert len(survivors) == 2
    assert survivors[0].digest == survivors[1].digest
    for each in survivors:
        (change,) = each.changes
        assert (change.world_size, change.num_lost, change.num_joined, change.num_left) == (2, 1, 0, 0)
        assert change.num_repaired == 0
        assert 0.1 < change.lost_share < 0.6  # about a third
        assert change.seconds < 10
        assert (each.counts["gradient_generations"], each.counts["gradient_lost_ranks"]) == (1, 1)
        assert largest(each.missing()) < 1e-4
        assert largest(each.kept) > 1e-3
    assert "2 ranks continue from step" in caplog.text
    assert "of the squared norm of the residuals" in caplog.text


@pytest.mark.parametrize("staleness", [0, 1])
def test_survivors_one_step_apart_agree_before_they_continue(play: Any, staleness: int) -> None:
    """Rank 2 dies when it has voted on step 5; rank 0 gets all votes and applies the step, rank 1 gets none."""

    def at_step(engine: ElasticEngine, now: int) -> None:
        world = engine._topology.world
        if now != 0 or engine.changes:
            return
        gather, rank = world.gather_fields, world.rank

        def hooked(fields_N: Any) -> Any:
            is_vote = len(fields_N) == VOTE_FIELDS and int(fields_N[1]) == 5
            everything = gather(fields_N)
            if is_vote and rank == 2:
                time.sleep(0.5)
                die_in_vote(engine)
            if is_vote and rank == 1:
                world._lost = "a test cut it off"
                raise world._error()
            return everything

        world.gather_fields = hooked  # type: ignore[method-assign]

    def die_in_vote(engine: ElasticEngine) -> None:
        rendezvous_client = engine._membership._rendezvous
        rendezvous_client._heartbeat_key = lambda _: "line/unknown"  # type: ignore[method-assign]
        rendezvous_client._inbox.put(None)
        engine._topology.close()
        engine._check_transport.close()
        raise Killed

    outcomes = play(*[Rank(12, at_step, settings={"staleness": staleness, "clip_norm": 0.2}) for _ in range(3)])
    survivors = survivors_of(outcomes)
    assert len(survivors) == 2
    assert survivors[0].digest == survivors[1].digest
    assert sorted(each.counts["gradient_caught_up_steps"] for each in survivors) == [0, 1]
    for each in survivors:
        assert [change.num_repaired for change in each.changes] == [0]
        assert largest(each.missing()) < 1e-4  # no part of step 5 is lost, or sent twice


def test_a_leaving_rank_hands_over_its_residual(play: Any) -> None:
    def at_step(engine: ElasticEngine, now: int) -> None:
        if (engine.rank, now) == (2, 6) and not engine.changes:
            engine.leave()

    outcomes = survivors_of(play(*[Rank(12, at_step, settings={"staleness": 1}) for _ in range(3)]))
    assert [each.has_left for each in outcomes].count(True) == 1
    total = [sum(parts) for parts in zip(*[each.missing() for each in outcomes], strict=True)]
    assert largest(total) < 1e-4
    stayed = [each for each in outcomes if not each.has_left]
    assert stayed[0].digest == stayed[1].digest
    for each in stayed:
        (change,) = each.changes
        assert (change.num_left, change.num_lost, change.lost_share, change.num_repaired) == (1, 0, 0.0, 0)
        assert change.seconds < 5
    own = [largest(each.missing()) for each in stayed]
    assert max(own) > 1e-3, "one of them has got it"
    assert min(own) < 1e-4, "and the other has not"


def test_a_joining_rank_gets_weights_moments_rates_and_step(play: Any) -> None:
    def build(model: nn.Module) -> SparseAdamW:
        return SparseAdamW(model.parameters(), lr=1e-3)

    def lowering(engine: ElasticEngine, now: int) -> None:
        time.sleep(0.05)  # so that the others are still there when the third comes
        if now == 3:
            engine._optimizer.param_groups[0]["lr"] = 5e-4

    def late() -> nn.Module:
        time.sleep(1.0)
        return network(seed=9)

    plans = [Rank(80, lowering, build, num_members=2, settings={"staleness": 1}) for _ in range(2)]
    plans.append(Rank(80, lambda *_: time.sleep(0.05), build, late, num_members=2, settings={"staleness": 1}))
    outcomes = survivors_of(play(*plans))
    assert len({each.digest for each in outcomes}) == 1
    assert len({each.moments for each in outcomes}) == 1
    (joined,) = [each for each in outcomes if not each.changes]
    assert 3 < joined.first_step < 80
    assert joined.rate == 5e-4
    for each in outcomes:
        assert largest(each.missing()) < 1e-4
        for change in each.changes:
            assert (change.num_joined, change.num_lost, change.world_size, change.num_repaired) == (1, 0, 3, 0)
            assert change.step == joined.first_step


def test_a_rank_that_joins_with_another_model_is_refused_and_the_others_continue(play: Any) -> None:
    def other() -> nn.Module:
        time.sleep(1.0)
        return nn.Linear(32, 64)

    plans = [Rank(60, lambda *_: time.sleep(0.05), num_members=2) for _ in range(2)]
    outcomes = play(*plans, Rank(60, make_model=other, num_members=2))
    (refused,) = [each for each in outcomes if isinstance(each, ConfigError)]
    assert "parameter 0.weight of rank" in str(refused)
    stayed = [each for each in outcomes if isinstance(each, Outcome)]
    assert len(stayed) == 2
    assert stayed[0].digest == stayed[1].digest
    assert all(each.changes[-1].world_size == 2 for each in stayed)
    assert all(largest(each.missing()) < 1e-4 for each in stayed)


def test_diverged_replicas_are_repaired_when_a_generation_forms(play: Any) -> None:
    def at_step(engine: ElasticEngine, now: int) -> None:
        if (engine.rank, now) == (1, 5) and not engine.changes:
            with torch.no_grad():
                next(engine._model.parameters())[3, 3] += 1.0
        dying(2, 6)(engine, now)

    survivors = survivors_of(play(*[Rank(12, at_step) for _ in range(3)]))
    assert survivors[0].digest == survivors[1].digest
    for each in survivors:
        assert [change.num_repaired for change in each.changes] == [1]
        assert each.counts["gradient_repaired_buckets"] == 1


def test_finish_survives_a_lost_rank(play: Any) -> None:
    def at_step(engine: ElasticEngine, now: int) -> None:
        if now == 6 and not engine.changes:
            if engine.rank == 1:
                time.sleep(0.3)
                die(engine)
                raise Killed
            engine.finish()

    survivors = survivors_of(play(*[Rank(10, at_step, settings={"staleness": 1}) for _ in range(3)]))
    assert survivors[0].digest == survivors[1].digest
    assert [each.changes[0].num_lost for each in survivors] == [1, 1]


def test_the_last_rank_trains_alone_and_admits_others_again(play: Any) -> None:
    def late() -> nn.Module:
        time.sleep(3.0)
        return network()

    def at_step(engine: ElasticEngine, now: int) -> None:
        time.sleep(0.1 if now > 4 else 0)
        dying(1, 4)(engine, now)

    outcomes = survivors_of(
        play(
            Rank(60, at_step, num_members=2),
            Rank(60, at_step, num_members=2),
            Rank(60, lambda *_: time.sleep(0.1), make_model=late, num_members=2),
        )
    )
    assert outcomes[0].digest == outcomes[1].digest
    sizes = max(([change.world_size for change in each.changes] for each in outcomes), key=len)
    assert sizes == [1, 2]


def test_settings_of_the_membership_are_refused() -> None:
    model = network()
    membership = Membership("127.0.0.1:9", 1, **QUICK)
    with pytest.raises(ConfigError, match="timeout_seconds"):
        ElasticEngine(model, SparseSGD(model.parameters(), lr=0.1), membership, timeout_seconds=3)
    membership.close()


def test_its_repr_names_the_generation_and_its_public_attributes_are_those_that_users_need() -> None:
    model, store = network(), rendezvous.serve()
    membership = Membership(f"127.0.0.1:{store.port}", 1, **QUICK)
    with ElasticEngine(model, SparseSGD(model.parameters(), lr=0.1), membership) as engine:
        assert repr(engine).startswith("<ElasticEngine of ")
        assert repr(engine).endswith("rank 0 of 1, step 0, 0.0 MB sent, generation 0>")
        added = {name for name in (*dir(ElasticEngine), *vars(engine)) if not name.startswith("_")}
        assert added - set(dir(GradientEngine)) == {"changes", "has_left", "leave", "rank", "world_size"}
