"""The engine between real processes: same weights everywhere, whatever happens."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from shade.errors import ConfigError, GradientError, NonFiniteGradientError, PayloadError
from shade.gradient._engine.comm_hook import SparseState
from shade.gradient._engine.engine import GradientEngine
from shade.gradient._local.local_updates import DiLoCo
from shade.gradient.optim import SparseAdamW, SparseSGD
from shade.types import Decision
from tests.support.gradient_ranks import batch, damage, digest, distance, loss_of, network, play, results_of

pytestmark = pytest.mark.multiprocess

SMALL: dict[str, Any] = {"bucket_bytes": 4 * 4000, "timeout_seconds": 30.0, "density": 0.05}
EXACT: dict[str, Any] = {**SMALL, "density": 1.0, "quantiser": "none"}


def train(engine: GradientEngine, model: nn.Module, rank: int, steps: range) -> None:
    for step in steps:
        loss_of(model, rank, step).backward()
        engine.step()


def residual_sum(engine: GradientEngine) -> list[float]:
    return [float(np.asarray(each["residual"], np.float64).sum()) for each in engine.state_dict()["residuals"]]


def residuals(engine: GradientEngine) -> list[np.ndarray]:
    return [np.array(each["residual"], np.float64) for each in engine.state_dict()["residuals"]]


# ── stories ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def story_of_replicas(rank: int, world_size: int) -> list[Any]:
    """Per staleness and compressor: digests of two equal runs, the longest of 100 steps."""
    outcomes = []
    for staleness, compressor, quantiser in (
        (0, "topk", "int8"),
        (1, "threshold-v16", "bf16"),
        (1, "random-k", "none"),
    ):
        twice = []
        for _ in range(2):
            model = network(seed=rank)
            optimizer = (
                SparseAdamW(model.parameters(), lr=1e-3) if staleness else SparseSGD(model.parameters(), lr=0.05)
            )
            settings = {**SMALL, "compressor": compressor, "quantiser": quantiser, "staleness": staleness}
            with GradientEngine(model, optimizer, **settings) as engine:
                train(engine, model, rank, range(100 if quantiser == "bf16" else 30))
                engine.finish()
                twice.append(digest(model))
        outcomes.append(twice)
    return outcomes


def story_of_ddp(rank: int, world_size: int) -> list[float]:
    """Everything sent: distance from DDP with torch.optim, without and with clipping; and from a late loop."""
    outcomes = []
    for clip_norm in (None, 0.3):
        model, reference = network(), network()
        ddp = nn.parallel.DistributedDataParallel(reference)
        dense = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
        optimizer = SparseSGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
        dense_plan = torch.optim.lr_scheduler.StepLR(dense, 10, 0.5)
        plan = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
        with GradientEngine(model, optimizer, **EXACT, clip_norm=clip_norm) as engine:
            for step in range(50):
                loss_of(model, rank, step).backward()
                engine.step()
                plan.step()
                loss_of(ddp, rank, step).backward()
                if clip_norm:
                    nn.utils.clip_grad_norm_(reference.parameters(), clip_norm)
                dense.step()
                dense.zero_grad()
                dense_plan.step()
            engine.finish()
        outcomes.append(distance(model, reference))
    model, reference, ahead = network(), network(), None
    optimizer = SparseSGD(model.parameters(), lr=0.1, momentum=0.9)
    dense = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    with GradientEngine(model, optimizer, **EXACT, staleness=1) as engine:
        for step in range(50):
            loss_of(model, rank, step).backward()
            engine.step()
            losses = [loss_of(reference, each, step) for each in range(world_size)]
            gradients = torch.autograd.grad(sum(losses) / world_size, list(reference.parameters()))
            if ahead is not None:
                for parameter, gradient in zip(reference.parameters(), ahead, strict=True):
                    parameter.grad = gradient
                dense.step()
            ahead = gradients
        outcomes.append(distance(model, reference))
    return outcomes


def story_of_mass(rank: int, world_size: int) -> list[float]:
    """Largest difference between what the gradients were and what was sent plus what is kept, per staleness."""
    outcomes = []
    for staleness in (0, 1):
        model = network()
        optimizer = SparseSGD(model.parameters(), lr=0.0)
        with GradientEngine(model, optimizer, **SMALL, staleness=staleness) as engine:
            gradients = [np.zeros(each.bucket.size) for each in engine._bucket_states]
            sent = [np.zeros(each.bucket.size) for each in engine._bucket_states]
            for bucket_state, total in zip(engine._bucket_states, sent, strict=True):
                compress = bucket_state.feedback.compress

                def spy(*given: Any, compress: Any = compress, total: Any = total) -> Any:
                    chosen = compress(*given)
                    total[chosen.indices_K] += chosen.values_K
                    return chosen

                bucket_state.feedback.compress = spy  # type: ignore[method-assign]
            for step in range(20):
                loss = loss_of(model, rank, step)
                for bucket_state, total in zip(engine._bucket_states, gradients, strict=True):
                    for own, view in zip(
                        torch.autograd.grad(loss, bucket_state.bucket.parameters, retain_graph=True),
                        bucket_state.bucket.views(torch.from_numpy(total)),
                        strict=True,
                    ):
                        view += own
                loss.backward()
                engine.step()
            engine.finish()
            kept = residuals(engine)
            lost = [np.abs(g - s - k).max() for g, s, k in zip(gradients, sent, kept, strict=True)]
            assert max(np.abs(each).max() for each in kept) > 1e-3
            outcomes.append(float(max(lost)))
    return outcomes


def story_of_nan(rank: int, world_size: int) -> list[Any]:
    """NaN on rank 1 in one step: what each raised; whether weights and residuals stood still; digest at the end."""
    outcomes = []
    for staleness in (0, 1):
        model = network()
        with GradientEngine(model, SparseSGD(model.parameters(), lr=0.1), **SMALL, staleness=staleness) as engine:
            train(engine, model, rank, range(5))
            if staleness:
                engine.finish()
            before, kept = digest(model), residual_sum(engine)
            loss = loss_of(model, rank, 5)
            (loss * float("nan") if rank == 1 else loss).backward()
            raised = ""
            try:
                engine.step()
                engine.finish()
            except NonFiniteGradientError as error:
                raised = str(error)
            stood = [digest(model) == before, residual_sum(engine) == kept]
            train(engine, model, rank, range(6, 10))
            engine.finish()
            outcomes.append([raised, stood, digest(model), engine.counts["gradient_failed_steps"]])
    return outcomes


def story_of_overflow(rank: int, world_size: int) -> list[Any]:
    """Under a scaler an overflow on rank 0 skips on all: scales, digest, skips, distance from a run without it."""
    models = []
    for overflows in (True, False):
        model = network()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
        with GradientEngine(model, SparseSGD(model.parameters(), lr=0.1), **EXACT, scaler=scaler) as engine:
            scales = []
            for step in range(10):
                if step == 5:
                    if not overflows:
                        continue
                    loss = loss_of(model, rank, step) * (float("inf") if rank == 0 else 1.0)
                else:
                    loss = loss_of(model, rank, step)
                scaler.scale(loss).backward()
                engine.step()
                scales.append(scaler.get_scale())
            models.append(model)
            if overflows:
                outcome = [scales, digest(model), engine.counts["gradient_skipped_steps"]]
    return [*outcome, distance(*models)]


def story_of_damage(rank: int, world_size: int) -> list[Any]:
    """A payload arrives damaged on rank 0 only: what each raised, whether weights stood, what is lost, the end."""
    outcomes = []
    for staleness in (0, 1):
        model = network()
        with GradientEngine(model, SparseSGD(model.parameters(), lr=0.1), **SMALL, staleness=staleness) as engine:
            train(engine, model, rank, range(3))
            engine.finish()
            hit = []

            def hurt(payloads: list[Any], hit: list[bool] = hit) -> None:
                if rank == 0 and not hit:
                    payloads[1][len(payloads[1]) // 2] ^= 4
                    hit.append(True)

            damage(engine._topology.world, hurt)
            before, raised = digest(model), ""
            expected = [kept.copy() for kept in residuals(engine)]
            loss = loss_of(model, rank, 3)
            for bucket_state, kept in zip(engine._bucket_states, expected, strict=True):
                own = torch.autograd.grad(loss, bucket_state.bucket.parameters, retain_graph=True)
                for gradient, view in zip(own, bucket_state.bucket.views(torch.from_numpy(kept)), strict=True):
                    view += gradient
            loss.backward()
            try:
                engine.step()
                engine.finish()
            except PayloadError as error:
                raised = str(error)
            lost = max(float(np.abs(a - b).max()) for a, b in zip(residuals(engine), expected, strict=True))
            stood = digest(model) == before
            train(engine, model, rank, range(4, 8))
            engine.finish()
            outcomes.append([raised, stood, lost, digest(model)])
    return outcomes


def story_of_steps_apart(rank: int, world_size: int) -> str:
    model = network()
    with GradientEngine(model, SparseSGD(model.parameters(), lr=0.1), **SMALL) as engine:
        train(engine, model, rank, range(2))
        if rank == 1:
            state = engine.state_dict()
            engine.load_state_dict({**state, "step": 7})
        try:
            train(engine, model, rank, range(2, 3))
        except PayloadError as error:
            return str(error)
    return "nothing raised"


def story_of_a_defect(rank: int, world_size: int) -> str:
    """A stage of rank 1 fails in its own way: the others hear of it at once."""
    model = network()
    with GradientEngine(model, SparseSGD(model.parameters(), lr=0.1), **SMALL) as engine:
        if rank == 1:
            engine._bucket_states[0].feedback.compress = None  # type: ignore[method-assign, assignment]
        try:
            train(engine, model, rank, range(1))
        except GradientError as error:
            return f"{type(error.__cause__).__name__}: {error}"
    return "nothing raised"


def story_of_refusals(rank: int, world_size: int) -> list[Any]:
    """What each rank raises where rank 1 alone does something that is refused, by staleness; the seconds it took."""

    def rebinds(model: nn.Module, optimizer: SparseSGD) -> None:
        model[0].weight.data = torch.zeros(3, 3)  # type: ignore[index, union-attr]

    def adds(model: nn.Module, optimizer: SparseSGD) -> None:
        more = nn.Linear(5, 5)
        optimizer.add_param_group({"params": list(more.parameters())})
        more(torch.ones(1, 5)).sum().backward()

    def goes_back_twice(model: nn.Module, optimizer: SparseSGD) -> None:
        loss_of(model, rank, 3).backward()

    outcomes: list[Any] = []
    for staleness in (0, 1):
        for does in (rebinds, adds, goes_back_twice):
            model, begun = network(), time.monotonic()
            optimizer = SparseSGD(model.parameters(), lr=0.1)
            engine = GradientEngine(model, optimizer, **SMALL, staleness=staleness)
            train(engine, model, rank, range(2))
            loss_of(model, rank, 2).backward()
            raised = "nothing"
            try:
                if rank == 1:
                    does(model, optimizer)
                engine.step()
                train(engine, model, rank, range(3, 4))
            except (ConfigError, GradientError) as error:
                raised = f"{type(error).__name__}: {error}"
            outcomes.append([raised, time.monotonic() - begun])
            dist.barrier()  # rank 1 lives on: its end is not what the other hears
            engine.close()
    return outcomes


def story_of_refused_ends(rank: int, world_size: int) -> list[str]:
    """What each rank raises where `finish` and the constructors are refused on rank 1 alone."""
    outcomes: list[str] = []
    model, other = network(), network()
    engine = GradientEngine(model, SparseSGD(model.parameters(), lr=0.1), **SMALL)
    if rank == 1:
        loss_of(model, rank, 0).backward()
    calls: list[Any] = [
        engine.finish,
        lambda: GradientEngine(other, SparseSGD(other.parameters(), lr=0.1), **{**SMALL, "density": 1.0 - rank}),
        lambda: DiLoCo(network(), every=1 - rank),
        lambda: SparseState(network(), density=1.0 - rank),
    ]
    for call in calls:
        try:
            call()
        except (ConfigError, GradientError) as error:
            outcomes.append(f"{type(error).__name__}: {error}")
        dist.barrier()
    engine.close()
    return outcomes


def story_of_sharding(rank: int, world_size: int) -> list[str]:
    """What the constructors say of a model under FSDP2, and under FSDP."""
    outcomes = []
    for make in (
        lambda model: GradientEngine(model, SparseSGD(model.parameters(), lr=0.1), **SMALL),
        lambda model: DiLoCo(model, every=1),
    ):
        for wrap in (
            lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (world_size,))),
            lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
        ):
            try:
                make(wrap(network()))
            except ConfigError as error:
                outcomes.append(str(error))
    return outcomes


def story_of_decisions(rank: int, world_size: int) -> list[Any]:
    """Density by step, and batch size, around a decision of rank 0, per staleness."""
    outcomes = []
    for staleness in (0, 1):
        model, seen = network(), []
        with GradientEngine(model, SparseSGD(model.parameters(), lr=0.1), **SMALL, staleness=staleness) as engine:
            for step in range(10):
                if step == 2 and rank == 0:
                    engine.propose(Decision(0.5, tuple(range(10, 10 + world_size)), 6, "a test"))
                if step == 7 and rank == 0:
                    engine.propose(Decision(0.25, (), 0, "at once"))
                seen.append([engine.density, engine.batch_size])
                train(engine, model, rank, range(step, step + 1))
        outcomes.append(seen)
    return outcomes


def story_of_samples(rank: int, world_size: int) -> float:
    """Ranks with unequal batches, one with none: distance from one process that has all samples."""
    model, reference = network(), network()
    dense = torch.optim.SGD(reference.parameters(), lr=0.1)
    with GradientEngine(model, SparseSGD(model.parameters(), lr=0.1), **EXACT) as engine:
        for step in range(10):
            sizes = [
                4 + 12 * ((each + step) % world_size) if (each, step) != (0, 4) else 0 for each in range(world_size)
            ]
            engine.num_samples = sizes[rank]
            if sizes[rank]:
                loss_of(model, rank, step, sizes[rank]).backward()
            engine.step()
            drawn = [batch(each, step, size) for each, size in enumerate(sizes) if size]
            inputs, labels = (torch.cat(parts) for parts in zip(*drawn, strict=True))
            nn.functional.cross_entropy(reference(inputs), labels).backward()
            dense.step()
            dense.zero_grad()
    return distance(model, reference)


def story_of_buffers(rank: int, world_size: int) -> list[Any]:
    """BatchNorm: statistics differ until `finish`, and are the ranks' mean then; counts are rank 0's."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(32, 80), nn.BatchNorm1d(80), nn.Linear(80, 5))
    with GradientEngine(model, SparseSGD(model.parameters(), lr=0.1), **SMALL) as engine:
        train(engine, model, rank, range(3))
        own = model[1].running_mean.clone()
        engine.finish()
    everyone = [torch.empty_like(own) for _ in range(world_size)]
    dist.all_gather(everyone, own)
    mean = torch.stack(everyone).double().mean(0).float()
    return [bool((everyone[0] != everyone[1]).any()), bool(torch.equal(model[1].running_mean, mean)), digest(model)]


def story_of_unequal_models(rank: int, world_size: int) -> list[str]:
    outcomes = []
    for model, settings in (
        (nn.Linear(32, 64 + rank), SMALL),
        (nn.Linear(32, 64), {**SMALL, "density": 0.01 * (1 + rank)}),
        (nn.Sequential(nn.Linear(32, 64).requires_grad_(rank == 0), nn.Linear(64, 64)), SMALL),
    ):
        try:
            GradientEngine(model, SparseSGD(model.parameters(), lr=0.1), **settings)
        except ConfigError as error:
            outcomes.append(str(error))
    model = network()
    for settings in ({"lr": 0.1 * (1 + rank)}, {"flush_every": 1 + rank}):
        try:
            GradientEngine(model, SparseSGD(model.parameters(), **settings), **SMALL)
        except ConfigError as error:
            outcomes.append(str(error))
    return outcomes


class Heads(nn.Module):
    """A stem and three heads, of which the last is never used; one bucket holds parameters of all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(32, 40)
        self.heads = nn.ModuleList([nn.Linear(40, 60) for _ in range(3)])

    def loss(self, rank: int, step: int) -> torch.Tensor:
        """Uses the second head on rank 0 in every third step."""
        hidden = torch.tanh(self.stem(batch(rank, step)[0]))
        used = self.heads[: 2 if step % 3 == 0 and rank == 0 else 1]
        return torch.stack([head(hidden).square().mean() for head in used]).sum()

    forward = loss


def story_of_unused(rank: int, world_size: int) -> list[Any]:
    """Distance from DDP where some parameters have no gradient on some ranks or on any; digests if little is sent."""
    outcomes: list[Any] = []
    kinds = ((SparseSGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "dampening": 0.3}),
             (SparseAdamW, torch.optim.AdamW, {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.1}))  # fmt: skip
    for local_size in {1, world_size // 2}:
        for ours, plain, settings in kinds:
            model, reference = Heads(), Heads()
            ddp = nn.parallel.DistributedDataParallel(reference, find_unused_parameters=True)
            dense = plain(reference.parameters(), **settings)
            optimizer = ours(model.parameters(), **settings)
            with GradientEngine(model, optimizer, **EXACT, local_size=local_size) as engine:
                for step in range(20):
                    ddp(rank, step).backward()
                    dense.step()
                    dense.zero_grad()
                    model.loss(rank, step).backward()
                    engine.step()
                engine.finish()
            outcomes.append(distance(model, reference))
        model = Heads()
        before = digest(model.heads[2])
        optimizer = SparseSGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        with GradientEngine(model, optimizer, **SMALL, local_size=local_size, staleness=1) as engine:
            for step in range(20):
                model.loss(rank, step).backward()
                engine.step()
                if step == 10:
                    state = engine.state_dict()
                    engine.load_state_dict(state)
            engine.finish()
        outcomes.append([digest(model), digest(model.heads[2]) == before])
    return outcomes


def story_of_a_defect_before_the_sum(rank: int, world_size: int) -> list[Any]:
    """A stage of rank 1 fails before its node adds up: what each rank hears, and after how long."""
    model, begun = network(), time.monotonic()
    with GradientEngine(model, SparseSGD(model.parameters(), lr=0.1), **SMALL, local_size=2) as engine:
        train(engine, model, rank, range(1))
        if rank == 1:
            engine._bucket_states[0].bucket.gather = None  # type: ignore[method-assign, assignment]
        raised = "nothing"
        try:
            train(engine, model, rank, range(1, 2))
        except GradientError as error:
            raised = str(error)
        dist.barrier()
    return [raised, time.monotonic() - begun]


def story_of_other_worlds(rank: int, world_size: int) -> list[Any]:
    """Two ranks, then one, then two: what is kept in all, by the one, by it three steps later, and by each of two."""
    settings = {**SMALL, "staleness": 1}
    model = network()
    with GradientEngine(model, SparseSGD(model.parameters(), lr=0.1), **settings) as engine:
        train(engine, model, rank, range(6))
        state = engine.state_dict()
        states: list[Any] = [None] * world_size
        dist.all_gather_object(states, state)
    total = sum(float(np.asarray(r["residual"], np.float64).sum()) for each in states for r in each["residuals"])
    sums = [total]
    alone = [dist.new_group([each]) for each in range(world_size)]
    own = network()  # rank 1 trains one of its own meanwhile, which nobody looks at: groups are made by all ranks alike
    own.load_state_dict(model.state_dict())
    with GradientEngine(own, SparseSGD(own.parameters(), lr=0.1), **settings, group=alone[rank]) as engine:
        engine.load_state_dicts(states)
        sums.append(sum(residual_sum(engine)))
        train(engine, own, rank, range(6, 9))
        states = [engine.state_dict()]
        sums.append(sum(residual_sum(engine)))
    dist.broadcast_object_list(states, src=0)
    model.load_state_dict(own.state_dict())
    with GradientEngine(model, SparseSGD(model.parameters(), lr=0.1), **settings) as engine:
        engine.load_state_dicts(states)
        sums.append(sum(residual_sum(engine)))
        train(engine, model, rank, range(9, 12))
        engine.finish()
        return [sums, digest(model)]


def story_of_a_flipped_bit(rank: int, world_size: int) -> list[bool]:
    """Rank 1's weights part from the others': whether they had, and whether they are the same after the next look."""
    model, alike = network(), []
    with GradientEngine(model, SparseSGD(model.parameters(), lr=0.1), **SMALL, staleness=1, check_every=5) as engine:
        for steps in (range(7), range(7, 12)):
            train(engine, model, rank, steps)
            if rank == 1 and not alike:
                with torch.no_grad():
                    model[2].weight[3, 3] += 1.0
            digests: list[Any] = [None] * world_size
            dist.all_gather_object(digests, digest(model))
            alike.append(len(set(digests)) == 1)
    return alike


def story_of_nodes(rank: int, world_size: int) -> list[Any]:
    """Two nodes of two: distance from the straight mean when all is sent; digest when little is; elements kept; NaN."""
    model, reference = network(), network()
    dense = torch.optim.SGD(reference.parameters(), lr=0.1)
    with GradientEngine(model, SparseSGD(model.parameters(), lr=0.1), **EXACT, local_size=2) as engine:
        for step in range(10):
            engine.num_samples = 8 * (1 + rank)
            loss_of(model, rank, step, 8 * (1 + rank)).backward()
            engine.step()
            drawn = [batch(each, step, 8 * (1 + each)) for each in range(world_size)]
            inputs, labels = (torch.cat(parts) for parts in zip(*drawn, strict=True))
            nn.functional.cross_entropy(reference(inputs), labels).backward()
            dense.step()
            dense.zero_grad()
    outcomes: list[Any] = [distance(model, reference)]
    model = network(seed=rank)
    settings = {**SMALL, "staleness": 1, "local_size": 2}
    with GradientEngine(model, SparseSGD(model.parameters(), lr=0.1, momentum=0.9), **settings) as engine:
        train(engine, model, rank, range(50))
        engine.finish()
        outcomes += [digest(model), sum(each.feedback.size for each in engine._bucket_states)]
        loss = loss_of(model, rank, 50)
        (loss * float("nan") if rank == 3 else loss).backward()
        try:
            engine.step()
            engine.finish()
        except NonFiniteGradientError as error:
            outcomes.append(str(error))
        train(engine, model, rank, range(51, 55))
        engine.finish()
        outcomes.append(digest(model))
    return outcomes


def story_of_a_thousand_steps(rank: int, world_size: int) -> list[str]:
    outcomes = []
    for staleness in (0, 1):
        model = network(seed=rank)
        optimizer = SparseSGD(model.parameters(), lr=0.05, momentum=0.9)
        with GradientEngine(model, optimizer, **SMALL, staleness=staleness) as engine:
            for part in range(10):
                train(engine, model, rank, range(100 * part, 100 * (part + 1)))
                outcomes.append(digest(model))
    return outcomes


PAIR = [
    story_of_replicas,
    story_of_ddp,
    story_of_mass,
    story_of_nan,
    story_of_overflow,
    story_of_damage,
    story_of_steps_apart,
    story_of_a_defect,
    story_of_refusals,
    story_of_refused_ends,
    story_of_sharding,
    story_of_decisions,
    story_of_samples,
    story_of_buffers,
    story_of_unequal_models,
    story_of_unused,
    story_of_other_worlds,
    story_of_a_flipped_bit,
]
FOUR = [story_of_nodes, story_of_samples, story_of_unused, story_of_a_defect_before_the_sum]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return play(PAIR, 2, tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return play(FOUR, 4, tmp_path_factory.mktemp("four"))


# ── tests ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.multiprocess
def test_replicas_stay_alike_to_the_bit_and_two_runs_are_the_same(pair: Any) -> None:
    first, second = results_of(pair, story_of_replicas)
    assert first == second
    assert all(once == again for once, again in first)
    assert len({once for once, _ in first}) == 3


def test_all_sent_it_is_ddp_with_a_dense_optimizer_and_late_it_is_a_loop_one_step_behind(pair: Any) -> None:
    for plain, clipped, late in results_of(pair, story_of_ddp):
        assert max(plain, clipped, late) < 1e-5


def test_what_was_sent_and_what_is_kept_is_what_the_gradients_were(pair: Any) -> None:
    assert max(max(each) for each in results_of(pair, story_of_mass)) < 1e-5


def test_nan_on_one_rank_is_raised_on_all_and_the_step_never_was(pair: Any) -> None:
    first, second = results_of(pair, story_of_nan)
    assert first == second
    for raised, stood, _, failed in first:
        assert "NaN or infinity on rank 1" in raised
        assert stood == [True, True]
        assert failed == 1


def test_an_overflow_on_one_rank_skips_on_all_and_halves_the_scale(pair: Any) -> None:
    first, second = results_of(pair, story_of_overflow)
    assert first == second
    scales, _, skipped, off = first
    assert scales == [2.0**10] * 3 + [2.0**11] * 2 + [2.0**10] * 4 + [2.0**11]
    assert skipped == 1
    assert off < 1e-6


def test_a_damaged_payload_on_one_rank_is_raised_on_all_and_nothing_is_lost(pair: Any) -> None:
    first, second = results_of(pair, story_of_damage)
    for mine, theirs in zip(first, second, strict=True):
        for raised, stood, lost, _ in (mine, theirs):
            assert "damaged one on rank 0" in raised
            assert stood
            assert lost < 1e-6
        assert mine[3] == theirs[3]


def test_ranks_in_different_steps_hear_of_it(pair: Any) -> None:
    assert all("same step, got [2, 7]" in each for each in results_of(pair, story_of_steps_apart))


def test_a_rank_that_fails_tells_the_others(pair: Any) -> None:
    first, second = results_of(pair, story_of_a_defect)
    cause = "'NoneType' object is not callable"
    assert first == f"NoneType: step 0 failed on rank 1, so no rank applied it: TypeError: {cause}"
    assert second == first.replace("NoneType: step", "TypeError: step")


def test_a_refusal_on_one_rank_is_raised_on_all_with_its_cause(pair: Any) -> None:
    first, second = results_of(pair, story_of_refusals)
    assert len(first) == 6
    for (theirs, seconds), (own, _) in zip(first, second, strict=True):
        assert own.startswith("ConfigError: expected ")
        assert theirs == f"GradientError: step 2 failed on rank 1, so no rank applied it: {own}"
        assert seconds < SMALL["timeout_seconds"]


def test_a_model_under_fsdp_is_refused_by_name(pair: Any) -> None:
    for refusals in results_of(pair, story_of_sharding):
        assert len(refusals) == 4
        assert all(" that hold their own values, '0.weight' too, got 'DTensor'" in each for each in refusals[::2])
        assert all(" that hold their own values, " in each and "'FlatParameter'" in each for each in refusals[1::2])


def test_finish_and_constructors_are_refused_on_all_ranks_if_on_one(pair: Any) -> None:
    first, second = results_of(pair, story_of_refused_ends)
    assert len(first) == len(second) == 4
    for number, (theirs, own) in enumerate(zip(first, second, strict=True)):
        kind, _, cause = own.partition(": ")
        assert kind == "ConfigError"
        is_made_alike = number > 0
        assert theirs == (
            f"ConfigError: refused on rank 1: {cause}"
            if is_made_alike
            else f"GradientError: rank 1 refused, so no rank continues: {own}"
        )


def test_a_decision_takes_effect_at_one_step_on_all_ranks(pair: Any) -> None:
    first, second = results_of(pair, story_of_decisions)
    for staleness, (mine, theirs) in enumerate(zip(first, second, strict=True)):
        assert [density for density, _ in mine] == [density for density, _ in theirs]
        assert [density for density, _ in mine][:6] == [0.05] * 6
        assert [mine[step][0] for step in (6, 7)] == [0.5] * 2
        assert [mine[step][0] for step in (8, 9)] == [0.25 if staleness == 0 else 0.5, 0.25]
        assert [mine[5][1], mine[6][1], theirs[6][1]] == [None, 10, 11]


@pytest.mark.multiprocess
def test_unequal_batches_weigh_by_their_samples(pair: Any, four: Any) -> None:
    assert max(results_of(pair, story_of_samples)) < 1e-5
    assert max(results_of(four, story_of_samples)) < 1e-5


def test_buffers_are_brought_together_when_the_engine_finishes(pair: Any) -> None:
    first, second = results_of(pair, story_of_buffers)
    assert first == second
    assert first[:2] == [True, True]


def test_unequal_models_and_settings_are_named_on_all_ranks(pair: Any) -> None:
    first, second = results_of(pair, story_of_unequal_models)
    assert first == second
    shape, setting, frozen, rate, flushes = first
    assert "parameter weight of rank 1" in shape
    assert "(64, 32)" in shape
    assert "(65, 32)" in shape
    assert "setting density of rank 1" in setting
    assert "frozen" in frozen
    assert "optimizer group 0 of rank 1 to be {'lr': 0.1" in rate
    assert "flush_every of the optimizer of rank 1 to be 1 as on rank 0, got 2" in flushes


def test_what_no_rank_uses_takes_no_step_as_under_ddp(pair: Any, four: Any) -> None:
    for outcomes in (results_of(pair, story_of_unused), results_of(four, story_of_unused)):
        for number, first in enumerate(outcomes[0]):
            if isinstance(first, list):
                assert all(each[number] == first for each in outcomes), "the same bits on every rank"
                assert first[1], "the head that nobody uses is as it was"
            else:
                assert max(each[number] for each in outcomes) < 1e-5


def test_a_rank_that_fails_before_its_node_adds_up_tells_the_others_at_once(four: Any) -> None:
    for raised, seconds in results_of(four, story_of_a_defect_before_the_sum):
        assert "step 1 failed on rank 1, so no rank applied it: TypeError" in raised
        assert seconds < SMALL["timeout_seconds"]


def test_what_is_kept_survives_a_change_of_the_world(pair: Any) -> None:
    first, second = results_of(pair, story_of_other_worlds)
    two, one, later, again = first[0]
    assert one == pytest.approx(two, abs=1e-4)
    assert abs(two) > 1e-3
    assert again == pytest.approx(later, abs=1e-5)
    assert second[0][3] == 0.0
    assert first[1] == second[1]


def test_a_replica_that_has_parted_is_found_and_repaired(pair: Any) -> None:
    assert results_of(pair, story_of_a_flipped_bit) == [[False, True]] * 2


def test_nodes_sum_densely_and_exchange_sparsely(four: Any) -> None:
    outcomes = results_of(four, story_of_nodes)
    for off, before, _, raised, after in outcomes:
        assert off < 1e-5
        assert "NaN or infinity" in raised
        assert (before, after) == (outcomes[0][1], outcomes[0][4])
    elements = sum(each.numel() for each in network().parameters())
    assert outcomes[0][2] + outcomes[1][2] == elements  # each rank keeps its part, and no more


def test_no_thread_is_left(pair: Any, four: Any) -> None:
    assert [each["threads"] for each in (*pair, *four)] == [[]] * 6


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_replicas_are_alike_to_the_bit_after_a_thousand_steps(world_size: int, tmp_path: Path) -> None:
    outcomes = results_of(play([story_of_a_thousand_steps], world_size, tmp_path), story_of_a_thousand_steps)
    assert all(each == outcomes[0] for each in outcomes)
    assert len(set(outcomes[0])) == 20
