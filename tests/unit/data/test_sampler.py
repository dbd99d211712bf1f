"""ShadeSampler: DistributedSampler's manners, and a stream that can be cut anywhere and continues the same."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, random_split

from shade import ShadeDataset, ShadeSampler
from shade.data._sampler.usage import ForgottenCallWarning
from shade.errors import ConfigError, UnknownNameError
from shade.sampling import base
from shade.types import Stateful
from tests.support.data_plane import Reversed, loss_of

N, B = 53, 4
EPOCHS = 5


@contextmanager
def sampler_of(num_samples: int = N, **options: Any) -> Iterator[ShadeSampler]:
    options.setdefault("batch_size", B)
    sampler = ShadeSampler(range(num_samples), **options)
    try:
        yield sampler
    finally:
        sampler.close()


def steps(sampler: ShadeSampler, first: int = 0, epochs: int = EPOCHS, *, limit: int | None = None) -> list[list[int]]:
    """The batches of a complete training loop."""
    seen: list[list[int]] = []
    for epoch in range(first, epochs):
        sampler.set_epoch(epoch)
        for batch in torch.utils.data.BatchSampler(sampler, sampler.batch_size, drop_last=False):
            index_B = torch.tensor(batch)
            sampler.weights(index_B)
            sampler.report(index_B, loss_of(index_B))
            seen.append([epoch, *batch])
            if limit is not None and len(seen) == limit:
                return seen
    return seen


# ── DistributedSampler's manners ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("num_samples", [48, 53, 49])
def test_ranks_share_the_epoch_and_take_the_same_steps(world_size: int, drop_last: bool, num_samples: int) -> None:
    lists = []
    for rank in range(world_size):
        with sampler_of(num_samples, num_replicas=world_size, rank=rank, mode="uniform", drop_last=drop_last) as one:
            one.set_epoch(3)
            lists.append(list(one))
            assert len(one) == len(lists[-1])
            num_steps = one.num_steps
    assert {-(-len(mine) // B) for mine in lists} == {num_steps}
    together = [index for mine in lists for index in mine]
    whole = num_samples // (B * world_size) * B * world_size
    if drop_last:
        assert len(together) == len(set(together)) == whole
    else:
        assert set(together) == set(range(num_samples))
        padding = max(0, world_size - (num_samples - whole)) if num_samples > whole else 0
        assert len(together) == num_samples + padding


def test_no_shuffle_is_ascending() -> None:
    with sampler_of(shuffle=False, mode="uniform") as sampler:
        assert list(sampler) == list(range(N))


def test_epochs_and_seeds_differ() -> None:
    with sampler_of(mode="uniform", seed=1) as one, sampler_of(mode="uniform", seed=2) as other:
        one.set_epoch(0)
        first = list(one)
        one.set_epoch(1)
        assert first != list(one)
        assert first != list(other)


def test_the_same_epoch_twice_is_the_same_twice() -> None:
    with sampler_of(keep=0.6) as sampler:
        steps(sampler, 0, 3)
        sampler.set_epoch(3)
        first = list(sampler)
        assert list(sampler) == first
        sampler.set_epoch(3)
        assert list(sampler) == first


def test_a_broken_off_epoch_starts_over_and_the_next_is_undisturbed() -> None:
    with sampler_of(mode="uniform") as broken, sampler_of(mode="uniform") as whole:
        for sampler in (broken, whole):
            sampler.set_epoch(0)
        iterator = iter(broken)
        head = [next(iterator) for _ in range(10)]
        assert list(broken)[:10] == head
        list(whole)
        for sampler in (broken, whole):
            sampler.set_epoch(1)
        assert list(broken) == list(whole)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": N + 1}, "smaller batch size"),
        ({"num_replicas": 2, "rank": 2, "mode": "uniform"}, "rank"),
        ({"num_replicas": 2, "rank": -1, "mode": "uniform"}, "rank"),
        ({"num_replicas": 2, "rank": 0}, "init_process_group"),
        ({"mode": "uniform", "keep": 0.5}, "keep"),
        ({"keep": 1.5}, "keep"),
        ({"replication_factor": 2}, "replication_factor"),
    ],
    ids=str,
)
def test_impossible_arguments_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ShadeSampler(range(N), **({"batch_size": B} | options))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="unbiased"):
        ShadeSampler(range(N), batch_size=B, mode="unbaised")
    with pytest.raises(UnknownNameError, match="plan"):
        ShadeDataset(TensorDataset(torch.zeros(4)), cache="memory://", policy="plann")
    dataset = ShadeDataset(TensorDataset(torch.zeros(40)), cache="memory://", policy="plan")
    with pytest.raises(ConfigError, match="draw ahead"):
        ShadeSampler(dataset, batch_size=B, mode="pads")
    dataset.close()


def test_an_order_that_is_not_drawn_yet_is_not_made_up() -> None:
    with sampler_of() as sampler:
        list(sampler)
        assert sorted(sampler.order_of(1)) == list(range(N))
        with pytest.raises(ConfigError, match="begun"):
            sampler.order_of(7)


# ── weights and reminders ───────────────────────────────────────────────────────────────────────────────────────────


def test_weights_are_the_inverse_of_the_chance_and_belong_to_the_index() -> None:
    with sampler_of(1000, batch_size=20, keep=0.5) as sampler:
        steps(sampler, 0, 2)
        sampler.set_epoch(2)
        order = torch.tensor(list(sampler))
        weight_K = sampler.weights(order)
        assert 1.0 < float(weight_K.max()) <= 1 / 0.3 + 1e-3
        assert float(weight_K.sum()) == pytest.approx(1000, rel=0.1)
        easy, hard = loss_of(order).topk(100, largest=False).indices, loss_of(order).topk(100).indices
        assert weight_K[easy].mean() > weight_K[hard].mean()
        shuffled = torch.randperm(len(order))
        assert torch.equal(sampler.weights(order[shuffled]), weight_K[shuffled])


def test_an_uneven_last_step_weighs_samples_and_not_ranks() -> None:
    """11 samples on two ranks in steps of 4 + 4: the last step is 2 + 1, DDP averages the two means."""
    weights = {}
    for rank in range(2):
        with sampler_of(11, num_replicas=2, rank=rank, mode="uniform") as sampler:
            mine = torch.tensor(list(sampler))
            last = mine[4:]
            weights[rank] = (sampler.weights(last) / len(last)).tolist()
            assert sampler.weights(mine[:4]).tolist() == [1.0] * 4
    assert weights[0] + weights[1] == pytest.approx([2 / 3] * 3)


def forgetful(calls: set[str], epochs: int = 4) -> list[str]:
    """Returns the warnings of a loop with only these calls."""
    with warnings.catch_warnings(record=True) as caught, sampler_of(keep=0.6) as sampler:
        warnings.simplefilter("always")
        for epoch in range(epochs):
            if "set_epoch" in calls:
                sampler.set_epoch(epoch)
            for batch in torch.utils.data.BatchSampler(sampler, B, drop_last=False):
                index_B = torch.tensor(batch)
                if "weights" in calls:
                    sampler.weights(index_B)
                if "report" in calls:
                    sampler.report(index_B, loss_of(index_B))
    assert all(issubclass(w.category, ForgottenCallWarning) for w in caught)
    return [str(w.message) for w in caught]


def test_each_forgotten_call_warns_once_with_the_line_to_add() -> None:
    assert forgetful({"set_epoch", "report", "weights"}) == []
    (warning,) = forgetful({"report", "weights"})
    assert "sampler.set_epoch(epoch)" in warning
    (warning,) = forgetful({"set_epoch", "weights"})
    assert "sampler.report(indices, losses)" in warning
    (warning,) = forgetful({"set_epoch", "report"})
    assert "sampler.weights(indices)" in warning
    assert len(forgetful(set())) == 2, "without losses there are no weights to forget"


def test_without_set_epoch_epochs_are_counted() -> None:
    with sampler_of(mode="uniform") as silent, sampler_of(mode="uniform") as proper:
        streams = []
        for epoch in range(3):
            proper.set_epoch(epoch)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                streams.append((list(silent), list(proper)))
        assert all(one == other for one, other in streams)


# ── state ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def through_torch(state: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint file does to it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize(
    "options", [{"keep": 0.6}, {"mode": "uniform"}, {"mode": "pads"}, {"keep": 0.6, "epochs": 5}], ids=str
)
def test_stopped_at_any_step_the_rest_is_identical(options: dict[str, Any]) -> None:
    with sampler_of(**options) as sampler:
        whole = steps(sampler)
    for stop in range(1, len(whole) + 1):
        with sampler_of(**options) as sampler:
            head = steps(sampler, limit=stop)
            state = through_torch(sampler.state_dict())
        with sampler_of(**options) as sampler:
            assert isinstance(sampler, Stateful)
            sampler.load_state_dict(state)
            finished = sampler.steps_done >= sampler.num_steps
            rest = steps(sampler, sampler.epoch + finished)
        assert head + rest == whole, f"stopped after {stop}"


@pytest.mark.parametrize("options", [{"keep": 0.6}, {"mode": "uniform"}, {"mode": "pads"}], ids=str)
@pytest.mark.parametrize("stop", [3, None], ids=["in an epoch", "at the end"])
def test_a_run_is_continued_for_more_epochs(options: dict[str, Any], stop: int | None) -> None:
    with sampler_of(**options, epochs=2) as sampler:
        whole = steps(sampler, epochs=2)
    with sampler_of(**options, epochs=2) as sampler:
        head = steps(sampler, epochs=2, limit=stop)
        state = through_torch(sampler.state_dict())
    with sampler_of(**options, epochs=EPOCHS) as sampler:
        sampler.load_state_dict(state)
        rest = steps(sampler, sampler.epoch + (sampler.steps_done >= sampler.num_steps))
    first = [batch for batch in whole if batch[0] == 0]
    assert (head + rest)[: len(first)] == first
    assert {batch[0] for batch in head + rest} == set(range(EPOCHS))
    if options.get("mode") != "pads":
        assert sorted(index for epoch, *batch in rest if epoch == EPOCHS - 1 for index in batch) == list(range(N))


def test_weights_survive_a_resume() -> None:
    with sampler_of(keep=0.6) as sampler:
        steps(sampler, 0, 2)
        sampler.set_epoch(2)
        index_B = torch.tensor(list(sampler)[:B])
        before = sampler.weights(index_B)
        state = through_torch(sampler.state_dict())
    with sampler_of(keep=0.6) as sampler:
        sampler.load_state_dict(state)
        assert torch.equal(sampler.weights(index_B), before)
        assert len(sampler) == len(sampler.order_of(2))


def test_a_large_run_resumes_and_has_another_order_than_a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "LARGE", N - 1)
    with sampler_of() as saving:
        expected = steps(saving)
        state = saving.state_dict()
    with sampler_of() as same:
        same.load_state_dict(state)
    monkeypatch.setattr(base, "LARGE", N)
    with sampler_of() as small:
        assert steps(small) != expected


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"keep": 0.5},
        {"batch_size": 2},
        {"mode": "uniform"},
        {"shuffle": False},
        {"drop_last": True},
        {"score": "rank"},
        {"num_samples": N + 1},
    ],
    ids=str,
)
def test_a_state_of_other_settings_is_refused(other: dict[str, Any]) -> None:
    with sampler_of(keep=0.6) as sampler:
        steps(sampler, limit=3)
        state = sampler.state_dict()
    options = {"keep": 0.6} | other
    if other.get("mode") == "uniform":
        del options["keep"]
    with sampler_of(**options) as sampler, pytest.raises(ConfigError):
        sampler.load_state_dict(state)


def test_a_damaged_order_is_refused() -> None:
    with sampler_of(keep=0.6) as sampler:
        steps(sampler, limit=3)
        state = sampler.state_dict()
    state["draws"][0][0]["order"][3] += 1
    with sampler_of(keep=0.6) as sampler, pytest.raises(ConfigError, match="hash"):
        sampler.load_state_dict(state)


def test_a_data_set_that_is_not_ours_is_only_sampled() -> None:
    dataset = TensorDataset(torch.arange(N))
    with sampler_of(mode="uniform") as sampler:
        loader = DataLoader(dataset, batch_size=B, sampler=sampler)
        assert sorted(int(i) for (batch,) in loader for i in batch) == list(range(N))
        assert np.array_equal(np.sort(sampler.order_of(0)), np.arange(N))


# ── wrappers, and several passes at once ────────────────────────────────────────────────────────────────────────────


def items(num_samples: int = 40) -> Any:
    return TensorDataset(torch.arange(float(num_samples)))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda one: ConcatDataset([one, items()]),
        lambda one: random_split(one, [30, 10])[0],
        lambda one: Subset(Subset(one, range(40)), range(40)),
        lambda one: ConcatDataset([Subset(one, range(20)), items()]),
    ],
)
def test_a_wrapper_that_renumbers_a_shade_dataset_is_refused_and_works_inside(wrap: Any) -> None:
    inside: Any = wrap(items())
    around = wrap(ShadeDataset(items(), cache=None))
    with pytest.raises(ConfigError, match=r"write ShadeDataset\((Subset|ConcatDataset)\("):
        ShadeSampler(around, batch_size=B)
    with pytest.raises(ConfigError, match="a data set that is not wrapped yet"):
        ShadeDataset(around, cache=None)
    data = ShadeDataset(inside, cache="memory://")
    sampler = ShadeSampler(data, batch_size=B, keep=0.5, score="loss")
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for value_B, index_B in DataLoader(data, batch_size=B, sampler=sampler):
            assert value_B.tolist() == [float(inside[int(index)][0]) for index in index_B]
            sampler.weights(index_B)
            sampler.report(index_B, value_B)
    scores = sampler.scores()
    assert scores is not None
    assert len(scores) == len(inside)
    sampler.close()
    data.close()


def test_a_wrapper_that_numbers_samples_alike_is_taken() -> None:
    class Views(Dataset[Any]):
        def __init__(self, dataset: Any) -> None:
            self.dataset = dataset

        def __len__(self) -> int:
            return len(self.dataset)

    ShadeSampler(Views(ShadeDataset(items(), cache=None)), batch_size=B).close()


@pytest.mark.parametrize("given", ["sampler", "loader alone"])
def test_a_wrapper_that_reorders_a_shade_dataset_is_refused_at_the_first_report(given: str) -> None:
    data = ShadeDataset(items(), cache=None)
    outer: Any = Reversed(data)
    sampler = ShadeSampler(outer if given == "sampler" else data, batch_size=B)
    value_B, index_B = next(iter(DataLoader(outer, batch_size=B, sampler=sampler)))
    with pytest.raises(ConfigError, match=r"ShadeDataset\(Reordered\(data\)"):
        sampler.report(index_B, value_B)
    sampler.close()
    inside = ShadeDataset(Reversed(items()), cache=None)
    sampler = ShadeSampler(inside, batch_size=B)
    for value_B, index_B in DataLoader(inside, batch_size=B, sampler=sampler):
        assert value_B.tolist() == (39 - index_B).tolist()
        sampler.report(index_B, value_B)
    sampler.close()


@pytest.mark.parametrize("mode", ["uniform", "unbiased"])
@pytest.mark.filterwarnings("ignore::shade.data._sampler.usage.ForgottenCallWarning")
@pytest.mark.parametrize("how", ["nested", "zipped", "look", "kept", "exception"])
def test_passes_that_are_under_way_at_once_are_whole(mode: str, how: str) -> None:
    data = ShadeDataset(items(), cache="memory://", working_set_fraction=0.5)
    sampler = ShadeSampler(data, batch_size=B, mode=mode)
    loader = DataLoader(data, batch_size=B, sampler=sampler)
    sampler.set_epoch(0)

    def drawn(batches: Any) -> list[int]:
        return [index for batch in batches for index in batch[-1].tolist()]

    passes: list[list[int]] = []
    kept: Any = iter(loader)
    if how == "nested":
        first = drawn([next(kept)])
        passes = [drawn(loader), first + drawn(kept)]
    elif how == "zipped":
        both = list(zip(loader, loader, strict=True))
        passes = [drawn(one for one, _ in both), drawn(other for _, other in both)]
    elif how == "look":
        first = drawn([next(kept), next(kept)])
        next(iter(loader))
        passes = [first + drawn(kept)]
    elif how == "kept":
        next(kept)
        passes = [drawn(loader), drawn(loader)]
    else:
        next(kept)
        sampler.set_epoch(1)
        passes = [drawn(loader)]
    sampler.set_epoch(2)
    assert [sorted(each) for each in [*passes, drawn(loader)]] == [list(range(40))] * (len(passes) + 1)
    sampler.close()
    data.close()


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("batch_size", [1, B])
def test_a_reordering_wrapper_is_refused_with_any_batch_and_in_passes_at_once(batch_size: int, overlaps: bool) -> None:
    data = ShadeDataset(items(), cache=None)
    outer: Any = Reversed(data)
    sampler = ShadeSampler(outer, batch_size=batch_size, mode="uniform")
    loader = DataLoader(outer, batch_size=batch_size, sampler=sampler)
    kept = iter(loader) if overlaps else None
    if kept is not None:
        next(kept)
    value_B, index_B = next(iter(loader))
    with pytest.raises(ConfigError, match=r"sample 39 as number 0 of the Reversed.*ShadeDataset\(Reordered\(data\)"):
        sampler.report(index_B, value_B)
    sampler.close()


class Peeking(Reversed):
    """In order, but it draws the sample that it looks at first."""

    def __getitem__(self, index: int) -> Any:
        self.dataset[int(torch.randint(len(self), ()))]
        return self.dataset[index]


def test_a_wrapper_that_keeps_the_order_is_taken_without_a_read_or_a_draw() -> None:
    data = ShadeDataset(items(), cache="memory://")
    sampler = ShadeSampler(Peeking(data), batch_size=1, mode="uniform")
    value_B, index_B = next(iter(DataLoader(data, batch_size=1, sampler=sampler)))
    before = data.stats()["samples"], torch.get_rng_state()
    sampler.report(index_B, value_B)
    assert data.stats()["samples"] == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    sampler.close()
    data.close()


def test_a_sample_that_was_not_handed_out_yet_is_no_batch_of_the_loop() -> None:
    with sampler_of(batch_size=1, mode="uniform") as sampler:
        loader = DataLoader(TensorDataset(torch.arange(N)), batch_size=1, sampler=sampler)
        for _, (index_B,) in zip(range(3), loader, strict=False):
            sampler.report(index_B, torch.ones(1))
        with pytest.raises(ConfigError, match="not handed out yet"):
            sampler.report(torch.from_numpy(sampler.order_of(0)[7:8]), torch.ones(1))


@pytest.mark.filterwarnings("ignore::shade.data._sampler.usage.ForgottenCallWarning")
def test_batches_of_an_outer_pass_may_be_reported_after_an_inner_one() -> None:
    data = TensorDataset(torch.arange(float(N)))
    with sampler_of(mode="uniform") as sampler:
        loader = DataLoader(data, batch_size=B, sampler=sampler)
        for epoch in range(3):
            for number, (value_B,) in enumerate(loader):
                sampler.report(value_B.long(), value_B)
                if number == 1 and epoch < 2:
                    assert len(list(loader)) == len(loader)
        assert sampler.steps_done == sampler.num_steps


def test_a_look_at_one_batch_warns_of_nothing_and_counts_no_epoch() -> None:
    with warnings.catch_warnings(), sampler_of(keep=0.6) as sampler:
        warnings.simplefilter("error")
        next(iter(sampler))
        steps(sampler)
    with warnings.catch_warnings(), sampler_of(mode="uniform") as sampler, sampler_of(mode="uniform") as other:
        warnings.simplefilter("error")
        next(iter(sampler))
        assert list(sampler) == list(other)


def epoch_of(sampler: ShadeSampler, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(N)), batch_size=B, sampler=sampler, **options)


@pytest.mark.multiprocess
@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 2, "persistent_workers": True}], ids=str)
@pytest.mark.parametrize("left", ["kept", "dropped"])
def test_without_reports_the_place_is_what_the_loop_got(options: dict[str, Any], left: str) -> None:
    with sampler_of(mode="uniform") as whole, sampler_of(mode="uniform") as stopped, sampler_of(mode="uniform") as rest:
        expected = [batch.tolist() for (batch,) in epoch_of(whole)]
        assert whole.state_dict()["steps_done"] == len(expected)
        iterator = iter(loader := epoch_of(stopped, **options))
        for _ in range(5):
            next(iterator)
        if left == "dropped":
            del iterator, loader
        rest.load_state_dict(through_torch(stopped.state_dict()))
        assert [batch.tolist() for (batch,) in epoch_of(rest)] == expected[5:]


def test_a_place_that_nobody_knows_warns() -> None:
    with sampler_of(mode="uniform") as sampler:
        next(iterator := iter(torch.utils.data.BatchSampler(sampler, B, drop_last=False)))
        next(iterator)
        with pytest.warns(
            UserWarning, match=r"step 0, because no loss was reported.*sampler\.report\(indices, losses\)"
        ):
            assert sampler.state_dict()["steps_done"] == 0


@pytest.mark.multiprocess
@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 2, "persistent_workers": True}], ids=str)
@pytest.mark.parametrize("sets_epoch", [False, True])
def test_looks_after_a_resume_leave_the_place(options: dict[str, Any], sets_epoch: bool) -> None:
    called: list[int] = []
    with sampler_of(keep=0.6) as whole, sampler_of(keep=0.6) as resumed:
        seen = steps(whole, limit=5)
        expected = [batch for epoch, *batch in steps_left(whole, seen)]
        resumed.load_state_dict(through_torch(whole.state_dict()))
        resumed.at_resume(lambda: called.append(1))
        loader = epoch_of(resumed, **options)
        for look in range(2):
            if sets_epoch:
                resumed.set_epoch(0)
            next(iter(loader))
            assert resumed.steps_done == 5 + ("persistent_workers" in options), look  # whose pass is not dropped
        if sets_epoch:
            resumed.set_epoch(0)
        assert [batch.tolist() for (batch,) in loader] == expected
        assert len(called) == 3, "the generators are those of the save in each of them"


def steps_left(sampler: ShadeSampler, seen: list[list[int]]) -> list[list[int]]:
    """The batches of the present epoch that `seen` does not have."""
    order = sampler.order_of(sampler.epoch).tolist()
    return [[sampler.epoch, *order[at : at + B]] for at in range(len(seen) * B, len(order), B)]


# ── reports that are not once a batch ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("rhythm", "num_batches"),
    [("once", 5), ("twice", 5), ("every other", 4), ("halves", 5), ("permuted", 5), ("look between", 5)],
)
@pytest.mark.filterwarnings("ignore:report\\(\\) got")
def test_a_resume_loses_no_sample_however_batches_are_reported(rhythm: str, num_batches: int) -> None:
    seen: list[int] = []
    with sampler_of(mode="uniform") as sampler:
        sampler.set_epoch(0)
        for number, batch in enumerate(torch.utils.data.BatchSampler(sampler, B, drop_last=False)):
            index_B = torch.tensor(batch)
            if rhythm == "look between" and number == 2:
                next(iter(sampler))
            reports = {"twice": [index_B] * 2, "halves": [index_B[:2], index_B[2:]], "permuted": [index_B.flip(0)]}
            if rhythm != "every other" or number % 2:
                for part in reports.get(rhythm, [index_B]):
                    sampler.report(part, loss_of(part))
            seen += batch
            if number + 1 == num_batches:
                break
        assert sampler.steps_done == num_batches
        state = sampler.state_dict()
    with sampler_of(mode="uniform") as sampler:
        sampler.load_state_dict(state)
        sampler.set_epoch(0)
        assert sorted([*seen, *sampler]) == list(range(N))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("size", [2, 3, 6])
def test_a_loader_with_another_batch_size_is_named(size: int) -> None:
    def train(sampler: ShadeSampler) -> None:
        for batch in torch.utils.data.BatchSampler(sampler, size, drop_last=False):
            sampler.report(torch.tensor(batch), torch.ones(len(batch)))

    with sampler_of(mode="uniform") as sampler, pytest.raises((ConfigError, UserWarning), match="batch_size"):
        train(sampler)


def test_indices_that_are_of_no_sample_are_refused() -> None:
    with sampler_of() as sampler:
        next(iter(sampler))
        for index_B in (torch.tensor([0, N]), torch.tensor([-1, 0])):
            with pytest.raises(ConfigError, match="that came with the batch"):
                sampler.weights(index_B)
        with pytest.raises(ConfigError, match="came with a batch of this epoch"):
            sampler.report(torch.tensor([N, N + 1]), torch.ones(2))


def test_losses_that_are_not_one_a_sample_are_refused_with_a_cure_that_works() -> None:
    with sampler_of() as sampler:
        index_B = torch.tensor([next(iter(sampler))] * B)
        for losses in (torch.ones(B * 5), torch.ones(B, 5)):
            with pytest.raises(ConfigError, match=r"losses\.view\(len\(indices\), -1\)\.mean\(1\)"):
                sampler.report(index_B, losses)
            sampler.report(index_B, losses.view(len(index_B), -1).mean(1))
        with pytest.raises(ConfigError, match="reduction='none'"):
            sampler.report(index_B, torch.tensor(1.0))
        for wrong in ([1.0] * B, np.ones(B), {"box": torch.ones(B)}):
            with pytest.raises(ConfigError, match=r"torch\.as_tensor"):
                sampler.report(index_B, wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"torch\.as_tensor"):
            sampler.report(index_B.tolist(), torch.ones(B))  # type: ignore[arg-type]
        sampler.report(torch.as_tensor(index_B.tolist()), torch.as_tensor(np.ones(B)))


# ── schedules that count steps ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"mode": "unbiased", "epochs": 8},
        {"mode": "unbiased", "keep": 0.35},
        {"mode": "unbiased", "keep": 1.0},
        {"mode": "pads", "replication_factor": 2.0},
        {"mode": "uniform"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_the_steps_of_a_whole_run_are_known_before_it(options: dict[str, Any], drop_last: bool) -> None:
    with sampler_of(**options, drop_last=drop_last) as sampler:
        foretold = sampler.total_steps(8)
        assert foretold == len(steps(sampler, epochs=8))


def test_a_schedule_over_the_steps_of_the_run_reaches_its_end() -> None:
    with sampler_of(mode="unbiased", epochs=8) as sampler:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=sampler.total_steps(8))
        rates = []
        for _ in steps(sampler, epochs=8):
            rates += schedule.get_last_lr()
            optimizer.step()
            schedule.step()
        assert rates[-1] < 1e-6 < min(rates[:-1]), "the smallest rate comes in the last step"
        with pytest.raises(ValueError, match="Tried to step"):
            schedule.step()


def lengths_asked(asks: Any, **options: Any) -> list[str]:
    """The warnings of a loop that asks the sampler something before its first epoch."""
    with sampler_of(**options) as sampler, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asks(sampler)
        steps(sampler)
    return [str(warning.message) for warning in caught]


def test_a_loop_that_counts_full_epochs_is_warned_once_with_the_line_to_write() -> None:
    (warning,) = lengths_asked(len, mode="unbiased")
    assert "epoch 2 has 9 steps, a full epoch 14" in warning
    assert "sampler.total_steps(epochs)" in warning
    assert lengths_asked(lambda sampler: (len(sampler), sampler.total_steps(EPOCHS)), mode="unbiased") == []
    assert lengths_asked(lambda sampler: None, mode="unbiased") == []
    assert lengths_asked(len, mode="uniform") == []


def test_a_sampler_that_is_closed_still_has_its_state() -> None:
    sampler = ShadeSampler(TensorDataset(torch.arange(20.0).view(20, 1)), batch_size=4)
    for part in torch.tensor(list(sampler)).split(4):
        sampler.report(part, torch.ones(len(part)))
    state = sampler.state_dict()
    sampler.close()
    assert str(sampler.state_dict()) == str(state)
