"""DDP's communication hook and infrequent synchronisation between real processes."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from shade.errors import ConfigError, GradientError, NonFiniteGradientError, PayloadError, StateMismatchError
from shade.gradient._engine import comm_hook
from shade.gradient._engine.comm_hook import SparseState, sparse_hook
from shade.gradient._local.local_updates import DiLoCo, LocalSGD, LocalUpdates
from tests.support.gradient_ranks import damage, digest, distance, loss_of, network, play, results_of

pytestmark = pytest.mark.multiprocess


def wrapped(model: nn.Module, **settings: Any) -> tuple[nn.parallel.DistributedDataParallel, SparseState]:
    """A model under DDP with several small buckets, and the state of its hook."""
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.02)
    state = SparseState(ddp, timeout_seconds=30.0, **settings)
    ddp.register_comm_hook(state, sparse_hook)
    return ddp, state


def kept(state: SparseState) -> dict[str, np.ndarray]:
    return {name: np.array(each["residual"], np.float64) for name, each in state.state_dict()["kept"].items()}


def story_of_all_sent(rank: int, world_size: int) -> float:
    """Distance from plain DDP with AdamW when everything is sent."""
    model, reference = network(), network()
    ddp, state = wrapped(model, density=1.0, quantiser="none")
    plain = nn.parallel.DistributedDataParallel(reference)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, reference)]
    for step in range(20):
        for network_, optimizer in zip((ddp, plain), optimizers, strict=True):
            loss_of(network_, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    state.close()
    return distance(model, reference)


class Spectrum(nn.Module):
    """An embedding with sparse gradients, a complex filter, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 16, sparse=True)
        self.response = nn.Parameter(torch.randn(16, dtype=torch.complex64))
        self.layer = nn.Linear(16, 5)

    def forward(self, rank: int, step: int) -> torch.Tensor:
        places = torch.randint(0, 50, (8,), generator=torch.Generator().manual_seed(10 * step + rank))
        spectrum = torch.fft.fft(self.table(places)) * self.response
        return self.layer(torch.fft.ifft(spectrum).real).square().mean()


def story_of_other_gradients(rank: int, world_size: int) -> list[Any]:
    """Distance from plain DDP with sparse and complex gradients; digest and largest residual where little is sent."""
    model, reference = Spectrum(), Spectrum()
    with patch.object(dist, "is_initialized", return_value=False):  # as Lightning makes it, before the ranks have met
        state = SparseState(model, density=1.0, quantiser="none", timeout_seconds=30.0)
    ddp, plain = (nn.parallel.DistributedDataParallel(each) for each in (model, reference))
    ddp.register_comm_hook(state, sparse_hook)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    for step in range(8):
        for each, optimizer in zip((ddp, plain), optimizers, strict=True):
            each(rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    state.close()
    little = Spectrum()
    ddp, state = wrapped(little, density=0.05, compressor="topk")
    optimizer = torch.optim.SGD(little.parameters(), lr=0.1)
    for step in range(8):
        ddp(rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    largest = max(float(np.abs(each).max()) for each in kept(state).values())
    state.close()
    return [distance(model, reference), digest(little), largest]


def story_of_a_hook_that_cannot_deliver(rank: int, world_size: int) -> list[str]:
    """The thread cannot even put NaN into DDP's bucket on rank 1: what each rank raises instead of waiting for ever."""
    model = network()
    ddp, state = wrapped(model, density=0.05)
    raised = "nothing"
    with patch.object(comm_hook, "_filled", None) if rank == 1 else nullcontext():
        try:
            loss_of(ddp, rank, 0).backward()
        except Exception as error:  # noqa: BLE001 - whatever DDP makes of it
            raised = str(error)
    dist.barrier()
    state.close()
    return [raised]


def story_of_new_buckets(rank: int, world_size: int) -> list[Any]:
    """DDP cuts its buckets anew: how many kinds there were, what was lost of the gradients, digest, resumed digest."""
    model = network(seed=rank)
    ddp, state = wrapped(model, density=0.05, compressor="topk")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sent = {name: np.zeros(parameter.numel()) for name, parameter in model.named_parameters()}
    total = {name: np.zeros(parameter.numel()) for name, parameter in model.named_parameters()}
    names = {parameter: name for name, parameter in model.named_parameters()}
    layouts, find = set(), state._residual_store.of

    def of(parameters: Any) -> Any:
        feedback, key = find(parameters), tuple(names[each] for each in parameters)
        if key not in layouts:
            layouts.add(key)
            compress = feedback.compress

            def spy(gradient: Any, density: float, draw: Any, held: Any) -> Any:
                chosen = compress(gradient, density, draw, held)
                ends = np.cumsum([sent[name].size for name in key])[:-1]
                for name, part in zip(key, np.split(chosen.dense(), ends), strict=True):
                    sent[name] += part
                return chosen

            feedback.compress = spy
        return feedback

    state._residual_store.of = of  # type: ignore[method-assign]
    for step in range(8):
        gradients = torch.autograd.grad(loss_of(model, rank, step), list(model.parameters()))
        for name, gradient in zip(total, gradients, strict=True):
            total[name] += gradient.flatten().double().numpy()
        loss_of(ddp, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    lost = max(float(np.abs(total[name] - sent[name] - each).max()) for name, each in kept(state).items())
    state.close()
    return [len(layouts), lost, digest(model)]


class Branches(nn.Module):
    """Uses one of two branches; and a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.never = nn.Linear(32, 32), nn.Linear(32, 32)
        self.branches = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])

    def forward(self, inputs: torch.Tensor, branch: int) -> torch.Tensor:
        out: torch.Tensor = self.branches[branch](torch.tanh(self.stem(inputs)))
        return out


def story_of_branches(rank: int, world_size: int) -> list[float]:
    """Branches used in turn, by all ranks together or not: what was lost of the gradients, as a share."""
    losses = []
    for offset in (0, rank):
        model = Branches()
        ddp = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        state = SparseState(ddp, timeout_seconds=30.0, density=0.05, compressor="topk", quantiser="none")
        ddp.register_comm_hook(state, sparse_hook)
        arrived, total = ([torch.zeros_like(each) for each in model.parameters()] for _ in range(2))
        for step in range(12):
            inputs = torch.randn(16, 32, generator=torch.Generator().manual_seed(2 * step + rank))
            branch = (step + offset) % 2
            loss = model(inputs, branch).square().mean()
            own = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
            for each, gradient in zip(total, own, strict=True):
                each += 0 if gradient is None else gradient / world_size
            ddp(inputs, branch).square().mean().backward()
            for each, parameter in zip(arrived, model.parameters(), strict=True):
                each += 0 if parameter.grad is None else parameter.grad
                parameter.grad = None
        residuals = state.state_dict()["kept"]
        left = [residuals[name]["residual"].view_as(each) / world_size for name, each in model.named_parameters()]
        lost = torch.cat([(whole - kept_back).flatten() for whole, kept_back in zip(total, left, strict=True)])
        torch.distributed.all_reduce(lost)
        lost -= torch.cat([each.flatten() for each in arrived])
        losses.append(float(lost.abs().max()))
        state.close()
    return losses


def story_of_join(rank: int, world_size: int) -> list[Any]:
    """Rank 1 has three batches more: distance from plain DDP, digest."""
    models = network(), network()
    ddp, state = wrapped(models[0], density=1.0, quantiser="none")
    for each in (ddp, nn.parallel.DistributedDataParallel(models[1])):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        with each.join():
            for step in range(3 + 3 * rank):
                loss_of(each, rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
    state.close()
    return [distance(*models), digest(models[0])]


def story_of_no_samples(rank: int, world_size: int) -> list[Any]:
    """Rank 1 has no samples in the second of four steps: the step's number after each, digest."""
    model = network()
    ddp, state = wrapped(model, density=0.05, compressor="random-k")
    optimizer, steps = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(4):
        state.num_samples = int((rank, step) != (1, 1))
        loss_of(ddp, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(state.step)
    state.close()
    return [steps, digest(model)]


def story_of_resuming(rank: int, world_size: int) -> list[Any]:
    """Five steps, a state, five more in a new DDP: whether what is kept came through, step, digest, refusal."""
    model, saved, came_through = network(), None, False
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for steps in (range(5), range(5, 10)):
        ddp, state = wrapped(model, density=0.05, compressor="topk")
        if saved is not None:
            before = {name: np.array(each["residual"], np.float64) for name, each in saved["kept"].items()}
            state.load_state_dict(saved)
            came_through = all(np.array_equal(before[name], each) for name, each in kept(state).items())
            came_through &= max(np.abs(each).max() for each in before.values()) > 1e-3
        for step in steps:
            loss_of(ddp, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        saved = state.state_dict()
        try:
            state.load_state_dict({**saved, "kept": {"0.weight": {"residual": torch.zeros(3)}}})
        except StateMismatchError as error:
            refusal = str(error)
        state.close()
    return [bool(came_through), saved["step"], digest(model), refusal]


def story_of_hook_nan(rank: int, world_size: int) -> list[Any]:
    """NaN on rank 1: raised on all without a scaler, skipped on all with one; then training continues."""
    outcomes: list[Any] = []
    for scaled in (False, True):
        model = network()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=scaled)
        ddp, state = wrapped(model, density=0.05, scaler=scaler)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        raised = ""
        for step in range(8):
            before, memory = digest(model), kept(state)
            loss = loss_of(ddp, rank, step)
            try:
                scaler.scale(loss * float("nan") if (rank, step) == (1, 3) else loss).backward()
                scaler.step(optimizer)
                scaler.update()
            except NonFiniteGradientError as error:
                raised = str(error)
            optimizer.zero_grad()
            if step == 3:
                after = kept(state)
                stood = [digest(model) == before, all(np.array_equal(memory[name], after[name]) for name in memory)]
        state.close()
        outcomes.append([raised, stood, scaler.get_scale(), digest(model)])
    return outcomes


def story_of_hook_damage(rank: int, world_size: int) -> list[Any]:
    """A damaged payload on rank 1 in one bucket: raised by all ranks' backward."""
    model = network()
    ddp, state = wrapped(model, density=0.05)
    optimizer, raised = torch.optim.SGD(model.parameters(), lr=0.1), []

    def hurt(payloads: list[Any]) -> None:
        if (rank, state._step) == (1, 2):
            payloads[0][60] ^= 1

    damage(state._topology.world, hurt)
    for step in range(5):
        try:
            loss_of(ddp, rank, step).backward()
            optimizer.step()
        except PayloadError as error:
            raised.append(f"{step}: {error}")
        optimizer.zero_grad()
    state.close()
    return [raised, digest(model)]


def story_of_hook_refusal(rank: int, world_size: int) -> list[Any]:
    """The state of rank 1 alone was given another model: what each rank's backward raises, and the seconds it took."""
    model, begun = network(), time.monotonic()
    ddp = nn.parallel.DistributedDataParallel(model)
    state = SparseState(network() if rank else ddp, timeout_seconds=30.0)
    ddp.register_comm_hook(state, sparse_hook)
    raised = "nothing"
    try:
        loss_of(ddp, rank, 0).backward()
    except (ConfigError, GradientError) as error:
        raised = f"{type(error).__name__}: {error}"
    took = time.monotonic() - begun
    dist.barrier()
    state.close()
    return [raised, took]


def story_of_local_sgd(rank: int, world_size: int) -> list[Any]:
    """H = 1: distance from the mean of all ranks' weights, made by hand; and whether H = 3 waits for the third step."""
    model = network(seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    references = [network() for _ in range(world_size)]
    with LocalSGD(model, every=1, timeout_seconds=30.0) as local:
        for step in range(10):
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            local.step()
            for each, reference in enumerate(references):
                gradients = torch.autograd.grad(loss_of(reference, each, step), list(reference.parameters()))
                with torch.no_grad():
                    for parameter, gradient in zip(reference.parameters(), gradients, strict=True):
                        parameter -= 0.1 * gradient
            with torch.no_grad():
                for parameters in zip(*(each.parameters() for each in references), strict=True):
                    mean = torch.stack(list(parameters)).mean(0)
                    for parameter in parameters:
                        parameter.copy_(mean)
    with LocalSGD(model, every=3, timeout_seconds=30.0) as local:
        synchronised = [local.step() for _ in range(6)]
    return [distance(model, references[0]), digest(model), synchronised]


def story_of_rebound_local_sgd(rank: int, world_size: int) -> list[Any]:
    """Weights bound to other memory: distance from the mean by hand. Then three changes that are refused; a digest."""
    model, reference = network(), network()
    with LocalSGD(model, every=1, timeout_seconds=30.0) as local:
        for parameter in model.parameters():
            parameter.data = parameter.data * (1.0 + rank)
        local.step()
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.mul_((1.0 + world_size) / 2)
        off = distance(model, reference)
    refusals = []

    def converts(model: nn.Module) -> None:
        model.to(torch.bfloat16)

    def adds(model: nn.Module) -> None:
        model.added = nn.Linear(2, 2)

    def replaces(model: nn.Module) -> None:
        model[0].weight = nn.Parameter(torch.zeros(96, 32))  # type: ignore[index]

    for change in (converts, adds, replaces):
        changed = network()
        with LocalSGD(changed, every=1, timeout_seconds=30.0) as local:
            change(changed)
            try:
                local.step()
            except ConfigError as error:
                refusals.append(f"ConfigError: {error}")
    return [off, refusals, digest(model)]


def story_of_diloco(rank: int, world_size: int) -> list[Any]:
    """Loss before and after, dense, sparse, beside the inner steps; digests; and those of a run that was saved in the
    middle and resumed."""
    outcomes: list[Any] = []
    sparse = {"density": 0.05, "quantiser": "bf16", "compressor": "topk"}
    cases = (DiLoCo, {}), (DiLoCo, sparse), (LocalUpdates, {"density": 0.05, "fragments": 2, "delay": 6})
    for kind, given in cases:
        digests, losses = [], []
        for parts in ([range(60)], [range(25), range(25, 60)]):
            model, saved = network(seed=rank), None
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
            for steps in parts:
                weights = {name: each.clone() for name, each in model.state_dict().items()}
                with kind(model, every=10, timeout_seconds=30.0, **given) as outer:
                    if saved is not None:
                        model.load_state_dict(weights)
                        outer.load_state_dict(saved)
                    losses.append(float(loss_of(model, 7, 1000, 256).detach()))
                    for step in steps:
                        loss_of(model, rank, step).backward()
                        optimizer.step()
                        optimizer.zero_grad()
                        outer.step()
                    saved = outer.state_dict()
                    saved = {**saved, "anchors": [each.clone() for each in saved["anchors"]]}
                    if steps[-1] == 59:
                        outer.synchronise()
            losses.append(float(loss_of(model, 7, 1000, 256).detach()))
            digests.append(digest(model))
        outcomes.append([losses[0], losses[1], digests])
    return outcomes


def story_of_diloco_nan(rank: int, world_size: int) -> list[Any]:
    """A rank whose weights are NaN: all ranks keep their own."""
    model = network()
    with DiLoCo(model, every=1, timeout_seconds=30.0) as outer:
        with torch.no_grad():
            model[0].weight[0, 0] = float("nan") if rank == 0 else 5.0
        before = digest(model)
        try:
            outer.step()
        except NonFiniteGradientError as error:
            return [str(error), digest(model) == before]
    return ["nothing raised"]


STORIES = [
    story_of_all_sent,
    story_of_branches,
    story_of_join,
    story_of_no_samples,
    story_of_new_buckets,
    story_of_resuming,
    story_of_hook_nan,
    story_of_hook_damage,
    story_of_hook_refusal,
    story_of_rebound_local_sgd,
    story_of_local_sgd,
    story_of_diloco,
    story_of_diloco_nan,
    story_of_other_gradients,
    story_of_a_hook_that_cannot_deliver,
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return play(STORIES, 2, tmp_path_factory.mktemp("pair"))


def test_a_refusal_of_the_hook_on_one_rank_is_raised_on_all_with_its_cause(pair: Any) -> None:
    (theirs, seconds), (own, _) = results_of(pair, story_of_hook_refusal)
    assert own.startswith("ConfigError: expected parameters of the state's model, got ")
    assert own.endswith("give SparseState the model that DDP wraps")
    assert theirs == f"GradientError: step 0 failed on rank 1, so no rank applied it: {own}"
    assert seconds < 30.0


def test_local_sgd_takes_in_weights_that_a_script_rebinds_and_refuses_others(pair: Any) -> None:
    first, second = results_of(pair, story_of_rebound_local_sgd)
    assert first == second
    off, refusals, _ = first
    assert off < 1e-6
    assert [each.partition(":")[0] for each in refusals] == ["ConfigError"] * 3
    assert "expected '0.weight' as at the start" in refusals[0]
    assert "others as ['added.weight', 'added.bias']" in refusals[1]
    assert "others as ['0.weight']" in refusals[2]


@pytest.mark.multiprocess
def test_all_sent_the_hook_is_plain_ddp(pair: Any) -> None:
    assert max(results_of(pair, story_of_all_sent)) < 1e-5


def test_sparse_and_complex_gradients_pass_the_hook(pair: Any) -> None:
    outcomes = results_of(pair, story_of_other_gradients)
    assert max(off for off, _, _ in outcomes) < 1e-6
    assert outcomes[0][1] == outcomes[1][1]
    assert min(largest for _, _, largest in outcomes) > 0


def test_a_hook_that_fails_raises_and_never_waits(pair: Any) -> None:
    (first,), (second,) = results_of(pair, story_of_a_hook_that_cannot_deliver)
    assert first == "nothing"
    assert "'NoneType' object is not callable" in second


def test_branches_in_turn_and_unused_layers_lose_nothing(pair: Any) -> None:
    for together, apart in results_of(pair, story_of_branches):
        assert together < 1e-5
        assert apart < 1e-5


def test_ranks_with_fewer_batches_join(pair: Any) -> None:
    first, second = results_of(pair, story_of_join)
    assert max(first[0], second[0]) < 1e-5
    assert first[1] == second[1]


def test_a_rank_without_samples_stays_in_step(pair: Any) -> None:
    first, second = results_of(pair, story_of_no_samples)
    assert first == second
    assert first[0] == [1, 2, 3, 4]


def test_what_is_kept_follows_parameters_into_new_buckets(pair: Any) -> None:
    first, second = results_of(pair, story_of_new_buckets)
    assert first[0] > len(list(network().parameters())) // 3  # some before the first step, others after it
    assert max(first[1], second[1]) < 1e-5
    assert first[2] == second[2]


def test_a_resumed_hook_continues_where_it_was(pair: Any) -> None:
    first, second = results_of(pair, story_of_resuming)
    assert first == second
    assert first[:2] == [True, 10]
    assert "'0.weight' with 3072 elements" in first[3]


def test_nan_under_the_hook_is_raised_or_skipped_on_all_ranks(pair: Any) -> None:
    first, second = results_of(pair, story_of_hook_nan)
    assert first == second
    (raised, stood, _, _), (skipped, stood_too, scale, _) = first
    assert "rank 1" in raised
    assert skipped == ""
    assert [stood, stood_too] == [[True, True]] * 2
    assert scale == 2.0**7


def test_a_damaged_payload_under_the_hook_is_raised_on_all_ranks(pair: Any) -> None:
    first, second = results_of(pair, story_of_hook_damage)
    assert len(first[0]) == len(second[0]) == 1
    assert first[0][0].startswith("2: ")
    assert "rank 1" in first[0][0]
    assert first[1] == second[1]


def test_local_sgd_at_every_step_is_the_mean_of_the_weights(pair: Any) -> None:
    first, second = results_of(pair, story_of_local_sgd)
    assert max(first[0], second[0]) < 1e-5
    assert first[1] == second[1]
    assert first[2] == [False, False, True] * 2


def test_diloco_learns_stays_alike_and_resumes(pair: Any) -> None:
    first, second = results_of(pair, story_of_diloco)
    assert first == second
    for before, after, (whole, resumed) in first:
        assert after < 0.8 * before
        assert whole == resumed


def test_weights_that_are_nan_are_not_averaged(pair: Any) -> None:
    for raised, stood in results_of(pair, story_of_diloco_nan):
        assert "rank 0" in raised
        assert stood


def test_no_thread_is_left(pair: Any) -> None:
    assert [each["threads"] for each in pair] == [[]] * 2
