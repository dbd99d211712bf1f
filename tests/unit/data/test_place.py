"""The place in the stream: what a state says, and what follows it, for loops and loaders of many kinds."""

from __future__ import annotations

import itertools
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils.data import BatchSampler, DataLoader, Sampler, TensorDataset

from shade import ShadeDataset, ShadeLoader, ShadeSampler
from shade.data import MixtureSampler, PackedDataset
from shade.errors import ConfigError
from tests.support.data_plane import loss_of

N, B, STEPS = 40, 4, 10
pytestmark = [
    pytest.mark.filterwarnings("ignore::shade.data._sampler.usage.ForgottenCallWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


@pytest.fixture(scope="module")
def data() -> ShadeDataset:
    return ShadeDataset(TensorDataset(torch.arange(float(N))), cache=None)


def made(data: ShadeDataset, kind: Any = DataLoader, **options: Any) -> tuple[ShadeSampler, Any]:
    sampler = ShadeSampler(data, batch_size=B, mode="uniform", seed=1)
    return sampler, kind(data, **({"batch_size": B, "sampler": sampler, "num_workers": 0} | options))


def taken(batches: Any, limit: int | None = None) -> list[list[int]]:
    return [batch[-1].tolist() for batch in itertools.islice(batches, limit)]


# ── an epoch's end ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("kind", "who"), [(DataLoader, "sampler"), (ShadeLoader, "sampler"), (ShadeLoader, "loader")], ids=str
)
@pytest.mark.parametrize("says", [False, True], ids=["counted", "said"])
def test_a_state_at_an_epochs_end_is_followed_by_the_next_epoch(
    data: ShadeDataset, kind: Any, who: str, says: bool
) -> None:
    sampler, loader = made(data, kind)
    orders = []
    for epoch in range(5):
        if says:
            sampler.set_epoch(epoch)
        orders.append(taken(loader))
        if epoch == 1:
            state = (sampler if who == "sampler" else loader).state_dict()
    sampler, loader = made(data, kind)
    (sampler if who == "sampler" else loader).load_state_dict(state)
    passes = []
    for epoch in range(sampler.epoch, 5):
        if says:
            sampler.set_epoch(epoch)
        passes.append(taken(loader))
    assert passes == [[], *orders[2:]], "nothing is left of the saved epoch, which a loop begins with"


def test_a_state_is_taken_up_by_a_sampler_that_has_trained(data: ShadeDataset) -> None:
    """Without `set_epoch`, which would count the epoch that is loaded as one that has trained."""
    sampler, loader = made(data)
    orders = [taken(loader) for _ in range(3)]
    sampler, loader = made(data)
    taken(loader)
    taken(loader, 4)
    sampler.load_state_dict(sampler.state_dict())
    assert [taken(loader), taken(loader)] == [orders[1][4:], orders[2]]


def test_an_epoch_that_was_said_before_the_loaders_state_is_saved_begins_at_its_start(data: ShadeDataset) -> None:
    sampler, _ = made(data)
    iterator = iter(sampler)
    list(iterator)
    sampler.set_epoch(1)
    state = {"sampler": sampler.state_dict(), "iterator": iterator.state_dict()}
    resumed, _ = made(data)
    resumed.load_state_dict(state["sampler"])
    again = iter(resumed)
    again.load_state_dict(state["iterator"])
    assert list(again) == list(sampler)


@pytest.mark.parametrize("is_placed", [False, True])
@pytest.mark.parametrize("said", [None, 0, 1])
def test_what_the_loop_said_before_its_loader_came_to_an_epochs_end(
    data: ShadeDataset, is_placed: bool, said: int | None
) -> None:
    """A loop that says the ended epoch has nothing left of it; one that says the next one gets all of it."""
    sampler, _ = made(data)
    taken_whole = list(sampler)
    state = sampler.state_dict()
    sampler.set_epoch(1)
    following = list(sampler)
    resumed, _ = made(data)
    if said is not None:
        resumed.set_epoch(said)
    resumed.load_state_dict(state)
    ended = iter(resumed)
    ended.load_state_dict({"num_taken": len(taken_whole), "batch_size": B, "epoch": 0})
    given = list(ended if is_placed else iter(resumed))
    assert given == (following if said == 1 or (said is None and not is_placed) else [])
    if said != 1:
        resumed.set_epoch(1)
    assert list(resumed) == following


# ── whose batches the loop gets ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.multiprocess
def test_batches_that_come_out_of_order_are_refused_and_the_cure_works(data: ShadeDataset) -> None:
    _, loader = made(data, num_workers=2, in_order=False)
    with pytest.raises(ConfigError, match="leave in_order out of the loader"):
        next(iter(loader))
    for options in ({"num_workers": 2}, {"num_workers": 1, "in_order": False}, {"num_workers": 0, "in_order": False}):
        sampler, loader = made(data, **options)
        batches = iter(loader)
        first = taken(batches, 3)
        state = sampler.state_dict()
        del batches
        sampler, loader = made(data)
        sampler.load_state_dict(state)
        assert sorted(itertools.chain(*first, *taken(loader))) == list(range(N))


class Around(Sampler[int]):
    """A user's own sampler around ours."""

    def __init__(self, sampler: ShadeSampler, view: Callable[[Iterator[int]], Iterator[int]]) -> None:
        self.sampler, self.view = sampler, view

    def __iter__(self) -> Iterator[int]:
        return iter(self.view(iter(self.sampler)))


def pooled(indices: Iterator[int]) -> Iterator[int]:
    while pool := list(itertools.islice(indices, 3 * B)):
        yield from sorted(pool)


REGROUPED = {
    "filtered": (lambda indices: (index for index in indices if index % 2), B),
    "repeated": (lambda indices: (index for index in indices for _ in range(2)), B),
    "pooled": (pooled, B),
    "smaller batches": (iter, B // 2),
    "larger batches": (iter, 2 * B),
    "no batches": (iter, None),
}


@pytest.mark.multiprocess
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", REGROUPED)
def test_a_place_in_batches_that_are_not_the_samplers_is_not_made_up(
    data: ShadeDataset, kind: str, workers: int
) -> None:
    view, batch_size = REGROUPED[kind]
    sampler, _ = made(data)
    loader = DataLoader(data, batch_size=batch_size, sampler=Around(sampler, view), num_workers=workers)
    batches = iter(loader)
    for _ in range(3 if batch_size else 2 * B + 1):
        next(batches)
    with pytest.warns(UserWarning, match="the sampler does not know what took its indices"):
        state = sampler.state_dict()
    assert state["steps_done"] == 0
    assert list(batches)
    assert sampler.state_dict()["steps_done"] == STEPS, "all is done when all was given"


def test_a_users_own_sampler_that_passes_indices_on_resumes(data: ShadeDataset) -> None:
    whole = taken(made(data)[1])
    sampler, _ = made(data)
    batches = iter(DataLoader(data, batch_sampler=BatchSampler(Around(sampler, iter), B, drop_last=False)))
    assert taken(batches, 3) == whole[:3]
    resumed, _ = made(data)
    resumed.load_state_dict(sampler.state_dict())
    assert taken(DataLoader(data, batch_size=B, sampler=Around(resumed, iter))) == whole[3:]


@pytest.mark.multiprocess
def test_a_batch_that_failed_in_a_worker_is_left_out_by_the_resume_as_well() -> None:
    class Failing(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            if index == bad:
                raise OSError("unreadable")
            return super().__getitem__(index)

    inside = Failing(torch.arange(float(N)))
    sampler = ShadeSampler(inside, batch_size=B, mode="uniform", seed=1)
    bad = whole[B + 1] if (whole := list(sampler)) else 0
    sampler = ShadeSampler(inside, batch_size=B, mode="uniform", seed=1)
    batches = iter(DataLoader(inside, batch_size=B, sampler=sampler, num_workers=1))
    next(batches)
    with pytest.raises(OSError, match="unreadable"):
        next(batches)
    next(batches)
    assert sampler.steps_done == 3


# ── loops that fetch ahead ──────────────────────────────────────────────────────────────────────────────────────────


def ahead(loader: Any, num_ahead: int) -> Iterator[Any]:
    batches = iter(loader)
    waiting = deque(itertools.islice(batches, num_ahead))
    for batch in batches:
        waiting.append(batch)
        yield waiting.popleft()
    yield from waiting


@pytest.mark.parametrize(("kind", "who"), [(DataLoader, "sampler"), (ShadeLoader, "sampler"), (ShadeLoader, "loader")])
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("num_ahead", [0, 1, 3])
@pytest.mark.filterwarnings("ignore:the state says step")
def test_a_loop_that_fetches_ahead_resumes_behind_the_batch_that_it_trained_on(
    data: ShadeDataset, kind: Any, who: str, accumulated: int, num_ahead: int
) -> None:
    def train(state: Any = None, stop: int | None = None) -> tuple[list[list[int]], Any]:
        sampler, loader = made(data, kind)
        stateful = sampler if who == "sampler" else loader
        steps: list[list[int]] = []
        if state is not None:
            stateful.load_state_dict(state)
        for epoch in range(sampler.epoch, 2):
            sampler.set_epoch(epoch)
            batches = ahead(loader, num_ahead)
            while group := taken(batches, accumulated):
                steps.append([*itertools.chain(*group)])
                stateful.count_step()
                if len(steps) == stop:
                    return steps, stateful.state_dict()
        return steps, None

    whole, _ = train()
    for stop in range(2 if num_ahead else 1, len(whole) + 1):
        first, state = train(stop=stop)
        assert first + train(state)[0] == whole, f"stopped after {stop}"


def test_a_state_after_the_first_step_says_that_a_batch_may_have_been_fetched_ahead(data: ShadeDataset) -> None:
    sampler, loader = made(data)
    batches = ahead(loader, 1)
    next(batches)
    sampler.count_step()
    with pytest.warns(UserWarning, match=r"add the line `sampler\.report\(indices, losses\)`"):
        sampler.state_dict()
    sampler, loader = made(data)
    batches = ahead(loader, 1)
    for batch in itertools.islice(batches, 1):
        sampler.report(batch[-1], loss_of(batch[-1]))
    sampler.count_step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sampler.state_dict()["steps_done"] == 1


def test_a_state_after_the_last_batch_was_fetched_in_the_second_step_says_so(data: ShadeDataset) -> None:
    """Three batches: one is fetched ahead, or two are accumulated, and the last is alone."""
    sampler, loader = made(ShadeDataset(TensorDataset(torch.arange(float(3 * B))), cache=None))
    batches = ahead(loader, 1)
    for _ in itertools.islice(batches, 2):
        sampler.count_step()
    with pytest.warns(UserWarning, match="or save later"):
        assert sampler.state_dict()["steps_done"] == 3
    sampler, loader = made(ShadeDataset(TensorDataset(torch.arange(float(4 * B))), cache=None))
    batches = iter(loader)
    while taken(batches, 2):
        sampler.count_step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sampler.state_dict()["steps_done"] == 4


@pytest.mark.parametrize(("num_ahead", "num_steps"), [(0, 1), (1, 2), (1, 3), (1, 4), (2, 4)])
def test_a_short_epoch_shows_at_its_end_how_far_ahead_a_loop_fetches(num_ahead: int, num_steps: int) -> None:
    sampler, loader = made(ShadeDataset(TensorDataset(torch.arange(float(num_steps * B))), cache=None))
    for _ in ahead(loader, num_ahead):
        sampler.count_step()
    sampler.set_epoch(1)
    for step, _ in enumerate(ahead(loader, num_ahead), 1):
        sampler.count_step()
        assert sampler.steps_done == step
    assert step == num_steps


# ── through torch.distributed.checkpoint ────────────────────────────────────────────────────────────────────────────


def through_dcp(saved: Any, found: Any, folder: Any) -> None:
    dcp.save({"it": saved}, checkpoint_id=folder, no_dist=True)
    dcp.load({"it": found}, checkpoint_id=folder, no_dist=True)


@pytest.mark.parametrize("who", ["sampler", "loader", "shuffling loader"])
@pytest.mark.parametrize("stop", [3, None])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_state_passes_through_dcp_whole(tmp_path: Any, who: str, stop: int | None) -> None:
    """Its epochs are drawn from losses, and DCP loads only the keys that a new object's state has."""
    data = ShadeDataset(TensorDataset(torch.arange(100.0)), cache=None)

    def make() -> tuple[Any, Any]:
        if who == "shuffling loader":
            order = torch.Generator().manual_seed(3)
            loader = ShadeLoader(data, batch_size=B, shuffle=True, generator=order, num_workers=0)
            return loader, loader
        sampler = ShadeSampler(data, batch_size=B, seed=0)
        loader = (DataLoader if who == "sampler" else ShadeLoader)(data, batch_size=B, sampler=sampler, num_workers=0)
        return sampler if who == "sampler" else loader, loader

    def train(loader: Any, epoch: int | None, limit: int | None = None) -> list[list[int]]:
        seen: list[list[int]] = []
        ours = isinstance(loader.sampler, ShadeSampler)
        if ours and epoch is not None:
            loader.sampler.set_epoch(epoch)
        for _, indices in itertools.islice(loader, limit):
            if ours:
                loader.sampler.weights(indices)
                loader.sampler.report(indices, loss_of(indices))
            seen.append(indices.tolist())
        return seen

    saved, loader = make()
    for epoch in range(3):
        train(loader, epoch, stop if epoch == 2 else None)
    (right, one), (found, other) = make(), make()
    right.load_state_dict(saved.state_dict())
    through_dcp(saved, found, tmp_path)
    for epoch in (2, 3):
        expected = train(one, epoch)
        assert train(other, epoch) == expected
    assert expected


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_mixture_passes_through_dcp(tmp_path: Any) -> None:
    lengths = {"web": (5, 9, 12, 4, 7), "code": (20, 3, 8)}
    sources = {name: [torch.arange(length) for length in each] for name, each in lengths.items()}
    data = PackedDataset(sources, length=16)

    def make() -> MixtureSampler:
        return MixtureSampler(data, weights={"web": 3.0, "code": 1.0}, batch_size=2, round_sequences=8, seed=5)

    saved, right, found = make(), make(), make()
    list(saved)
    list(itertools.islice(saved, 4))
    right.load_state_dict(saved.state_dict())
    through_dcp(saved, found, tmp_path)
    for _ in range(2):
        assert list(found) == list(right)
