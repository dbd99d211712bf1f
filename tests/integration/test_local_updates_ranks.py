"""Local updates of several ranks: against the papers' formulas, under faults at every call, resumed, beside plain DDP.

Ranks are threads over collectives in memory, see `tests.simulation.played_ranks`. Real processes are in
tests/integration/test_gradient_hook.py, and in tests/faults/test_gradient_elastic.py, where they are killed.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shade.errors import ConfigError, GradientError, NonFiniteGradientError, PayloadError
from shade.gradient._compress.quantiser import QUANTISERS
from shade.gradient._local.local_updates import DiLoCo, LocalSGD, LocalUpdates
from tests.simulation.played_ranks import KINDS, Fault, Killed, PlayedMembership, PlayedRanks
from tests.support.gradient_ranks import digest, loss_of, network

CHUNK = 4096


def matrices(seed: int = 0) -> nn.Sequential:
    """Two matrices, of which one is longer than a chunk; no part is always sent whole."""
    model = nn.Sequential(nn.Linear(48, 64, bias=False), nn.Linear(64, 96, bias=False))
    generator = torch.Generator().manual_seed(seed)  # threads share torch's own
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def wander(model: nn.Module, name: str, step: int) -> None:
    """An inner step: the same for the same rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + ord(name))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator)


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()])


@dataclass
class Life:
    """One rank's training, and what is left of it."""

    name: str
    until: int = 12
    settings: dict[str, Any] = field(default_factory=dict)
    at_step: Callable[[LocalUpdates, int], None] = lambda updates, step: None
    """Called before each inner step."""
    joins_at: int = 0
    """Outer steps of the others before it comes."""
    kind: type[LocalUpdates] = LocalUpdates
    seen: dict[int, bytes] = field(default_factory=dict)
    """Anchors by the number of outer steps."""
    weights: list[torch.Tensor] = field(default_factory=list)
    """After each inner step."""
    raised: list[Exception] = field(default_factory=list)
    end: str = ""
    """A digest of its weights, or what ended it."""
    last: int = -1
    """The generation at its end."""
    updates: LocalUpdates | None = None

    def run(self, ranks: PlayedRanks, others: Sequence[Life]) -> None:
        try:
            if self.joins_at:
                with ranks.changed:
                    ranks.changed.wait_for(
                        lambda: any(each.end or max(each.seen, default=0) >= self.joins_at for each in others), 60
                    )
            self._train(ranks)
        except Killed:
            self.end = "killed"
        except GradientError as error:
            self.end = f"refused: {error}"
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.raised.append(error)
            self.end = repr(error)
        finally:
            ranks.leave(self.name)

    def _train(self, ranks: PlayedRanks) -> None:
        torch.set_num_threads(1)
        model, membership = matrices(ord(self.name)), PlayedMembership(ranks, self.name)
        updates = self.updates = self.kind(model, membership=membership, **self.settings)  # type: ignore[arg-type]
        while updates.step_count < self.until:
            self.at_step(updates, updates.step_count)
            if updates.step_count >= self.until - updates._schedule.every - 1:
                with ranks.changed:  # who has stood still comes back in time
                    ranks.wait_for(lambda: not ranks.returning)
            wander(model, self.name, updates.step_count)
            self._try(updates.step)
            self.weights.append(weights(model).clone())
            self.seen[updates.outer_count] = b"".join(each.numpy().tobytes() for each in updates._anchors.weights)
        while not self._try(updates.synchronise):
            pass
        self.weights.append(weights(model).clone())
        self.end, self.last = digest(model), membership.generation.number
        updates.close()

    def _try(self, act: Callable[[], Any]) -> bool:
        try:
            act()
        except (PayloadError, NonFiniteGradientError) as error:
            self.raised.append(error)
            return False
        return True


def play(ranks: PlayedRanks, lives: Sequence[Life]) -> None:
    """Lives all of them to their end."""
    threads = [threading.Thread(target=each.run, args=(ranks, lives), daemon=True) for each in lives]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
        assert not thread.is_alive(), "it hangs"


def played(num_ranks: int, **settings: Any) -> list[Life]:
    """Equal lives of some ranks, without a fault."""
    lives = [Life("abcdefgh"[rank], settings=settings) for rank in range(num_ranks)]
    play(PlayedRanks([each.name for each in lives]), lives)
    assert all(not each.raised and each.end for each in lives), [each.end for each in lives]
    return lives


# ── the formulas ────────────────────────────────────────────────────────────────────────────────────────────────────


def picked(error: torch.Tensor, density: float, quantiser: str) -> torch.Tensor:
    """The largest of each chunk, as the others see them."""
    mask = torch.zeros_like(error, dtype=torch.bool)
    for start in range(0, len(error), CHUNK):
        chunk = error[start : start + CHUNK]
        number = math.ceil((start + len(chunk)) * density) - math.ceil(start * density)
        mask[start + chunk.abs().sort(descending=True, stable=True).indices[:number]] = True
    codec, values = QUANTISERS.get(quantiser)(), error[mask].numpy()
    sent = torch.zeros_like(error)
    sent[mask] = torch.from_numpy(codec.decode(codec.encode(values), len(values)).copy())
    return sent


def reference(names: str, steps: int, **given: Any) -> list[list[torch.Tensor]]:
    """SparseLoCo's algorithm 1, with Nesterov's momentum and streamed fragments; the weights of each rank by step."""
    usual = {"every": 1, "fragments": 1, "delay": 0, "momentum": 0.0, "lr": 1.0, "density": 1 / 64, "decay": 0.95}
    usual |= {"quantiser": "int2"}
    every, fragments, delay, momentum, lr, density, decay, quantiser = (usual | given).values()
    models = [matrices(ord(names[0])) for _ in names]
    # The larger matrix goes to the first fragment.
    parts = [slice(0, None)] if fragments == 1 else [slice(48 * 64, None), slice(0, 48 * 64)]
    theta = weights(models[0]).clone()
    velocity, errors = torch.zeros_like(theta), [torch.zeros_like(theta) for _ in names]
    flights: list[tuple[int, slice, torch.Tensor, list[torch.Tensor]]] = []
    seen: list[list[torch.Tensor]] = []
    for step in range(1, steps + 1):
        for model, name in zip(models, names, strict=True):
            wander(model, name, step - 1)
        local = [weights(model).clone() for model in models]

        def land(part: slice, mean: torch.Tensor, captured: list[torch.Tensor], local: Any = local) -> None:
            if momentum:
                velocity[part] = velocity[part] * momentum + mean
                mean = mean + velocity[part] * momentum
            theta[part] = theta[part] - mean * lr
            for own, then in zip(local, captured, strict=True):
                own[part] = theta[part] if delay == 0 else own[part] - then + theta[part]

        while flights and flights[0][0] <= step:
            land(*flights.pop(0)[1:])
        for place, part in enumerate(parts):
            if (step - every * (place + 1) // fragments) % every == 0:
                mean = torch.zeros_like(theta[part])
                for error, own in zip(errors, local, strict=True):
                    error[part] = error[part] * decay + (theta[part] - own[part])
                    sent = picked(error[part], density, quantiser)
                    error[part] -= sent
                    mean = mean + sent * np.float32(1 / len(names))
                flights.append((step + delay, part, mean, [own[part].clone() for own in local]))
                if not delay:
                    land(*flights.pop(0)[1:])
        for model, own in zip(models, local, strict=True):
            nn.utils.vector_to_parameters(own.clone(), model.parameters())
        seen.append([own.clone() for own in local])
    return seen


@pytest.mark.parametrize(
    "settings",
    [
        {"every": 3},
        {"every": 3, "quantiser": "none", "density": 0.01, "decay": 0.5, "lr": 0.7},
        {"every": 4, "momentum": 0.9, "lr": 0.7, "quantiser": "bf16"},
        {"every": 4, "fragments": 2, "delay": 1},
        {"every": 4, "fragments": 2, "delay": 3, "momentum": 0.5, "quantiser": "none"},
        {"every": 5, "delay": 4},
        {"every": 4, "fragments": 2},
    ],
    ids=str,
)
def test_it_is_what_the_papers_write_bit_for_bit(settings: dict[str, Any]) -> None:
    lives = played(4, **settings)
    expected = reference("abcd", 12, **settings)
    for rank, life in enumerate(lives):
        for ours, theirs in zip(life.weights, expected, strict=False):
            assert torch.equal(ours, theirs[rank])
    assert len({each.end for each in lives}) == 1, "after synchronise all are alike"
    assert all(each.seen == lives[0].seen for each in lives)


def test_ranks_weigh_by_their_samples_and_one_without_any_sends_nothing() -> None:
    def at_step(updates: LocalUpdates, step: int) -> None:
        updates.num_samples = {0: 3, 1: 1, 2: 0}[updates.rank]

    lives = [Life(name, until=1, settings={"every": 1}, at_step=at_step, kind=LocalSGD) for name in "abc"]
    play(PlayedRanks("abc"), lives)
    models = [matrices(ord("a")) for _ in "abc"]
    for model, name in zip(models, "abc", strict=True):
        wander(model, name, 0)
    expected = 0.75 * weights(models[0]) + 0.25 * weights(models[1])
    for life in lives:
        assert torch.allclose(life.weights[0], expected, atol=1e-6)


def test_bytes_of_real_messages_are_below_the_bar() -> None:
    """0.0015 bytes a parameter, inner step and peer, at H = 30."""
    lives = [Life(name, until=30, settings={"every": 30}) for name in "ab"]
    sent: list[int] = []

    def at_step(updates: LocalUpdates, step: int) -> None:
        if step == 29:
            sent.append(-updates._topology.world.bytes_sent)

    for each in lives:
        each.at_step = at_step
    play(PlayedRanks("ab"), lives)
    num_parameters = 48 * 64 + 64 * 96
    for each in lives:
        assert each.updates is not None
        payload = each.updates._topology.world.bytes_sent
        assert 0 < payload < 0.0015 * 30 * num_parameters


# ── faults ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def check(ranks: PlayedRanks, lives: Sequence[Life]) -> list[Life]:
    """Whoever got to the end together holds the same bits, and whoever took an outer step took the same one."""
    for each in lives:
        assert each.end, "it ends"
        assert all(isinstance(error, PayloadError) for error in each.raised), each.raised
    ended = [each for each in lives if len(each.end) == 64]
    # One that comes back when the others have just ended goes on alone.
    assert len({(each.last, each.end) for each in ended}) == len({each.last for each in ended})
    for count in {count for each in ended for count in each.seen}:
        assert len({each.seen[count] for each in ended if count in each.seen}) == 1, count
    return ended


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("settings", "first"),
    [({"every": 2}, 2), ({"every": 4, "fragments": 2, "delay": 3, "momentum": 0.9}, 3)],
    ids=["at once", "beside inner steps"],
)
def test_a_fault_at_each_call_of_an_outer_step(kind: str, settings: dict[str, Any], first: int) -> None:
    for call in range(first, first + 3):  # counts, payloads, vote
        lives = [Life(name, settings=settings) for name in "abc"]
        ranks = PlayedRanks("abc", [Fault("b", call, kind)])
        play(ranks, lives)
        ended = check(ranks, lives)
        assert [each.kind for each in ranks.struck] == [kind]
        is_dead = kind in ("before", "after", "torn")
        assert len(ended) == (2 if is_dead else 3)
        for each in ended:
            assert each.updates is not None
            sizes = [change.world_size for change in each.updates.changes]
            if is_dead:
                assert sizes == [2]
            elif kind == "silent":
                assert 3 in sizes
            else:
                assert sizes == []


def test_a_late_rank_gets_anchors_and_momentum_and_one_that_comes_back_keeps_its_residual() -> None:
    settings = {"every": 2, "momentum": 0.9}
    kept: list[float] = []

    def at_step(updates: LocalUpdates, step: int) -> None:
        if updates.changes and not kept:
            kept.extend(float(each["residual"].abs().max()) for each in updates.state_dict()["residuals"])

    lives = [Life(name, 24, settings) for name in "abc"]
    lives[1].at_step = at_step
    lives.append(Life("d", 24, settings, joins_at=3))
    ranks = PlayedRanks("abc", [Fault("b", 8, "silent")])
    play(ranks, lives)
    assert len(check(ranks, lives)) == 4
    assert max(kept) > 0, "it came back with what it had kept"
    assert len({each.updates.world_size for each in lives if each.updates}) == 1


def test_fewer_than_the_least_wait_for_others() -> None:
    lives = [Life(name, 20, {"every": 2}) for name in "ab"] + [Life("c", 20, {"every": 2}, joins_at=99)]
    ranks = PlayedRanks("ab", [Fault("b", 14, "before")], min_members=2)
    play(ranks, lives)
    assert len(check(ranks, lives)) == 2
    assert all(len(each) >= 2 for each in ranks.generations)


def test_one_that_joins_with_other_settings_is_refused_and_the_others_go_on() -> None:
    lives = [Life(name, 16, {"every": 2}) for name in "ab"] + [Life("c", 16, {"every": 3}, joins_at=2)]
    play(PlayedRanks("ab"), lives)
    (error,) = lives[2].raised
    assert isinstance(error, ConfigError)
    assert "every" in str(error)
    assert lives[0].end == lives[1].end != ""


def test_nan_of_one_rank_is_raised_on_all_and_nothing_has_changed() -> None:
    def at_step(updates: LocalUpdates, step: int) -> None:
        weight = updates._buckets[0].parameters[0]
        with torch.no_grad():
            weight[0, 0] = float("nan") if (step, updates.rank) == (3, 1) else weight[0, 0].nan_to_num()

    for settings in ({"every": 4}, {"every": 4, "delay": 2}):
        lives = [Life(name, settings=settings, at_step=at_step) for name in "ab"]
        play(PlayedRanks("ab"), lives)
        for each in lives:
            (error,) = each.raised
            assert isinstance(error, NonFiniteGradientError)
            assert "rank 1" in str(error)
        assert lives[0].end == lives[1].end
        assert lives[0].seen == lives[1].seen


@pytest.mark.slow
@pytest.mark.parametrize("kind", [LocalUpdates, DiLoCo])
def test_it_learns_as_ranks_that_exchange_every_gradient(kind: type[LocalUpdates]) -> None:
    steps, models = 300, [network() for _ in "ab"]
    ranks = PlayedRanks("ab")

    def train(rank: int) -> None:
        torch.set_num_threads(1)
        optimizer = torch.optim.AdamW(models[rank].parameters(), lr=3e-3)
        membership: Any = PlayedMembership(ranks, "ab"[rank])
        with kind(models[rank], every=10, membership=membership) as outer:
            for step in range(steps):
                optimizer.zero_grad()
                loss_of(models[rank], rank, step).backward()
                optimizer.step()
                outer.step()
            outer.synchronise()

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    together = network()
    before, optimizer = (
        float(loss_of(together, 7, 10_000, 512).detach()),
        torch.optim.AdamW(together.parameters(), lr=3e-3),
    )
    for step in range(steps):
        optimizer.zero_grad()
        ((loss_of(together, 0, step) + loss_of(together, 1, step)) / 2).backward()
        optimizer.step()
    for thread in threads:
        thread.join(90)
    with torch.no_grad():
        losses = [float(loss_of(model, 7, 10_000, 512)) for model in (*models, together)]
    assert losses[0] == losses[1]
    assert before - losses[0] > 0.9 * (before - losses[2])


@pytest.mark.slow
def test_five_hundred_schedules_of_faults() -> None:
    rng = np.random.default_rng(0)
    num_struck = num_ended = num_changes = 0
    for schedule in range(500):
        names = "abcde"[: rng.integers(2, 6)]
        every = int(rng.integers(1, 5))
        settings = {
            "every": every,
            "delay": int(rng.integers(0, every)),
            "fragments": int(rng.integers(1, 1 + min(2, every))),
            "momentum": float(rng.choice([0.0, 0.9])),
            "density": float(rng.choice([1 / 64, 0.3])),
        }
        faults = [
            Fault(str(rng.choice(list(names))), int(rng.integers(3, 40)), str(rng.choice(KINDS)))
            for _ in range(rng.integers(1, 4))
        ]
        joining = [Life(name, 24, settings, joins_at=int(rng.integers(1, 5))) for name in "xy"[: rng.integers(0, 3)]]
        lives = [*(Life(name, 24, settings) for name in names), *joining]
        ranks = PlayedRanks(names, faults)
        try:
            play(ranks, lives)
            ended = check(ranks, lives)
        except AssertionError as error:
            raise AssertionError(f"schedule {schedule}: {names}, {settings}, {faults}") from error
        num_struck += len(ranks.struck)
        num_ended += len(ended)
        num_changes += len(ranks.generations) - 1
    assert num_struck > 700
    assert num_ended > 1000
    assert num_changes > 500
