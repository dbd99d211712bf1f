"""MixtureSampler and PackedDataset: what a sequence holds, who takes it, how weights change, what is refused."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from shade import ShadeDataset, ShadeLoader
from shade.data import MixtureSampler, PackedDataset, cu_seqlens
from shade.errors import ConfigError, DataError
from shade.sampling import PackedSequence
from shade.sampling.packing import TokenRange

L = 64
WEIGHTS = {"web": 0.5, "code": 0.3, "books": 0.2}


def documents(seed: int, count: int, mean: int) -> list[np.ndarray]:
    """Documents whose tokens are all different, so that a token says where it is from."""
    random = np.random.default_rng(seed)
    lengths = random.geometric(1 / mean, count)
    ends = np.cumsum(lengths)
    return [np.arange(end - length, end) + seed * 100_000 for end, length in zip(ends, lengths, strict=True)]


DOCUMENTS = {"web": documents(0, 200, 12), "code": documents(1, 40, 50), "books": documents(2, 3, 400)}


def arrays(pieces: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate(pieces).astype(np.uint32), np.cumsum([0, *map(len, pieces)])


def dataset(**options: Any) -> PackedDataset:
    sources = {name: arrays(each) for name, each in DOCUMENTS.items()}
    return PackedDataset(sources | options, length=L)


def sampler_of(data: PackedDataset | None = None, **options: Any) -> MixtureSampler:
    settings: dict[str, Any] = {"weights": WEIGHTS, "batch_size": 12, "round_sequences": 48, "seed": 5}
    return MixtureSampler(data or dataset(), **(settings | options))


def rounds(sampler: MixtureSampler, number: int) -> list[PackedSequence]:
    return [packed for _ in range(number) for packed in sampler]


# ── a sequence ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_item_is_what_its_pieces_say() -> None:
    data = dataset()
    for packed in rounds(sampler_of(data), 1):
        item = data[packed]
        assert {name: (each.shape, each.dtype) for name, each in item.items()} == {
            "tokens": ((L,), torch.int64),
            "labels": ((L,), torch.int64),
            "positions": ((L,), torch.int64),
            "documents": ((L,), torch.int32),
            "sources": ((L,), torch.int32),
        }
        expected: list[tuple[int, ...]] = []
        for number, (source, document, start, stop) in enumerate(packed.pieces):
            whole = DOCUMENTS[data.names[source]][document]
            for place in range(start, stop):
                follows = place + 1 < len(whole)
                label = int(whole[place + 1]) if follows else -100
                expected.append((int(whole[place]), label, place - start, number, source if follows else -1))
        expected += [(0, -100, place, -1, -1) for place in range(L - len(expected))]
        assert list(zip(*(each.tolist() for each in item.values()), strict=True)) == expected


def test_items_of_a_map_style_data_set_are_the_same() -> None:
    tensors = [torch.from_numpy(each.astype(np.int32)) for each in DOCUMENTS["code"]]
    plain, wrapped = dataset(), dataset(code=tensors)
    assert wrapped.digest == plain.digest
    for packed in rounds(sampler_of(plain), 1):
        for name, each in plain[packed].items():
            assert torch.equal(wrapped[packed][name], each)


def test_a_document_that_changed_its_length_is_refused() -> None:
    tensors = [torch.arange(9), torch.arange(5)]
    data = PackedDataset({"one": tensors}, length=L)
    tensors[1] = torch.arange(6)
    with pytest.raises(ConfigError, match="document 1 of 'one' with 5 tokens"):
        data[PackedSequence(0, (TokenRange(0, 1, 0, 5),))]


def test_boundaries_for_kernels_of_many_lengths() -> None:
    positions = torch.tensor([[0, 1, 2, 0], [0, 0, 1, 2]])
    assert cu_seqlens(positions).tolist() == [0, 3, 4, 5, 8]
    assert cu_seqlens(positions).dtype == torch.int32
    data = dataset()
    batch = next(iter(DataLoader(data, batch_size=12, sampler=sampler_of(data))))
    ends = cu_seqlens(batch["positions"])
    flat = batch["documents"].reshape(-1) + 1000 * torch.arange(12).repeat_interleave(L)
    changes = torch.nonzero(flat[1:] != flat[:-1]).reshape(-1) + 1
    assert ends.tolist() == [0, *changes.tolist(), 12 * L]


def test_a_mapped_file_is_not_copied_into_workers(tmp_path: Path) -> None:
    tokens, offsets = arrays(documents(0, 5000, 12))
    np.save(tmp_path / "tokens.npy", tokens)
    mapped = PackedDataset({"web": (np.load(tmp_path / "tokens.npy", mmap_mode="r"), offsets)}, length=L)
    sent = pickle.dumps(mapped)
    assert len(sent) < 5001 * 8 * 3 < len(pickle.dumps(PackedDataset({"web": (tokens, offsets)}, length=L)))
    packed = PackedSequence(0, (TokenRange(0, 7, 0, 3), TokenRange(0, 4999, 0, 2)))
    assert torch.equal(pickle.loads(sent)[packed]["tokens"], mapped[packed]["tokens"])


# ── the stream ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("world_size", [2, 3, 4, 6, 12])
def test_ranks_share_the_stream_of_one(world_size: int) -> None:
    batch = 12 // world_size
    one = rounds(sampler_of(), 2)
    shares = [rounds(sampler_of(num_replicas=world_size, rank=rank, batch_size=batch), 2) for rank in range(world_size)]
    dealt = [p for step in range(8) for share in shares for p in share[step * batch : (step + 1) * batch]]
    assert dealt == one
    assert [packed.number for packed in one] == list(range(96))


def test_resume_in_mid_round_on_other_numbers_of_ranks() -> None:
    expected = rounds(sampler_of(), 3)
    got, state = [], None
    for world_size, num_steps in ((4, 3), (3, 2), (1, 4), (6, 3)):
        ranks = []
        for rank in range(world_size):
            sampler = sampler_of(num_replicas=world_size, rank=rank, batch_size=12 // world_size)
            if state is not None:
                sampler.load_state_dict(copy.deepcopy(state))
            taken: list[PackedSequence] = []
            while len(taken) < num_steps * sampler.batch_size:
                for packed in sampler:
                    taken.append(packed)
                    if len(taken) == num_steps * sampler.batch_size:
                        break
            ranks.append((sampler, taken))
        for step in range(num_steps):
            for sampler, taken in ranks:
                got += taken[step * sampler.batch_size : (step + 1) * sampler.batch_size]
        states = [sampler.state_dict() for sampler, _ in ranks]
        assert all(repr(each) == repr(states[0]) for each in states)
        state = states[0]
    assert got == expected[: 12 * 12]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("reports", [False, True])
@pytest.mark.multiprocess
def test_a_loader_that_reads_ahead_resumes_where_the_loop_was(num_workers: int, reports: bool) -> None:
    data = dataset()

    def batches(sampler: MixtureSampler, limit: int) -> list[list[int]]:
        loader, found = DataLoader(data, batch_size=12, sampler=sampler, num_workers=num_workers), []
        while True:
            for batch in loader:
                found.append(batch["tokens"][:, 0].tolist())
                if reports:
                    sampler.report(batch["sources"], torch.ones(12, L))
                if len(found) == limit:
                    return found

    expected = batches(sampler_of(data), 10)
    for cut in (1, 3, 4, 6):
        saving = sampler_of(data)
        head = batches(saving, cut)
        resuming = sampler_of(data)
        resuming.load_state_dict(saving.state_dict())
        assert head + batches(resuming, 10 - cut) == expected


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 with torch 2.9 and later
def test_a_loader_that_keeps_its_own_place_resumes_there() -> None:
    data, found = dataset(), []
    expected = [data[packed]["tokens"].tolist() for packed in rounds(sampler_of(data), 1)]
    loader = StatefulDataLoader(data, batch_size=12, sampler=sampler_of(data), collate_fn=lambda items: items)
    for step, items in enumerate(loader):
        found += [item["tokens"].tolist() for item in items]
        if step == 1:
            break
    state = loader.state_dict()
    again = StatefulDataLoader(data, batch_size=12, sampler=sampler_of(data), collate_fn=lambda items: items)
    again.load_state_dict(state)
    for items in again:
        found += [item["tokens"].tolist() for item in items]
    assert found == expected


def test_a_look_at_a_batch_costs_nothing() -> None:
    data = dataset()
    expected = rounds(sampler_of(data), 1)
    sampler = sampler_of(data)
    next(iter(DataLoader(data, batch_size=12, sampler=sampler)))
    assert list(sampler) == expected


def test_rounds_count_themselves_and_set_epoch_agrees() -> None:
    sampler = sampler_of()
    sampler.set_epoch(0)
    list(sampler)
    sampler.set_epoch(1)
    with pytest.raises(ConfigError, match="round 1, which comes next"):
        sampler.set_epoch(3)
    list(sampler)
    assert sampler.round == 1
    assert len(sampler) == 48


# ── weights ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def train(sampler: MixtureSampler, data: PackedDataset, number: int, loss_S: torch.Tensor) -> list[list[int]]:
    found = []
    for _ in range(number):
        for batch in DataLoader(data, batch_size=sampler.batch_size, sampler=sampler):
            found.append(batch["tokens"][:, 0].tolist())
            sampler.report(batch["sources"], loss_S[batch["sources"].long().clamp(min=0)])
    return found


def test_weights_follow_the_losses_of_the_round_before() -> None:
    data = dataset()
    sampler = sampler_of(data, adapt=1.0, floor=0.5, round_sequences=240)
    train(sampler, data, 3, torch.tensor([1.0, 6.0, 1.0]))
    first, second, third = sampler.receipts
    assert list(first.wanted.values()) == pytest.approx([0.5, 0.3, 0.2])
    assert list(second.wanted.values()) == pytest.approx([0.25, 0.65, 0.1], abs=0.01)  # two at the floor
    assert first.losses == {"web": 1.0, "code": 6.0, "books": 1.0}
    assert third.wanted == second.wanted  # from the given weights, not from the last ones
    assert third.losses is None
    for receipt, share in ((first, 0.3), (second, 0.65)):
        assert receipt.tokens["code"] / sum(receipt.tokens.values()) == pytest.approx(share, abs=0.015)
        assert receipt.filled >= 0.98
    assert second.passes["books"] >= 1


def test_what_is_no_label_or_not_finite_does_not_count() -> None:
    data = dataset()
    sampler, sources = sampler_of(data, adapt=1.0), torch.tensor([[0, 0, 1, -1], [2, 2, 2, -1]])
    losses = torch.tensor([[1.0, 3.0, float("nan"), 9.0], [4.0, float("inf"), 5.0, float("nan")]])
    list(sampler)
    sampler.report(sources, losses.requires_grad_())
    for _ in range(3):
        sampler.report(torch.full((2, 4), -1), losses)
    next(iter(sampler))
    assert sampler.receipts[0].losses is not None
    assert list(sampler.receipts[0].losses.values()) == pytest.approx([2.0, float("nan"), 4.5], nan_ok=True)
    # Without a loss, code counts as the mean of the others.
    assert list(sampler.receipts[1].wanted.values()) == pytest.approx(
        np.array([0.5 * 2, 0.3 * 3.25, 0.2 * 4.5]) / (1 + 0.975 + 0.9)
    )


def test_losses_of_half_a_round_survive_a_resume() -> None:
    data, loss_S = dataset(), torch.tensor([1.0, 2.5, 0.5])
    whole = sampler_of(data, adapt=1.0)
    expected = train(whole, data, 2, loss_S)
    first = sampler_of(data, adapt=1.0)
    loader, head = DataLoader(data, batch_size=12, sampler=first), []
    for batch in loader:
        head.append(batch["tokens"][:, 0].tolist())
        first.report(batch["sources"], loss_S[batch["sources"].long().clamp(min=0)])
        if len(head) == 2:
            break
    second = sampler_of(data, adapt=1.0)
    second.load_state_dict(first.state_dict())
    assert len(second) == 24
    assert head + train(second, data, 2, loss_S) == expected
    assert second.receipts[-1].wanted == whole.receipts[-1].wanted


def test_a_round_without_a_report_is_refused() -> None:
    sampler = sampler_of(adapt=1.0)
    list(sampler)
    with pytest.raises(ConfigError, match=r"call sampler\.report"):
        list(sampler)


# ── bad input ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"weights": {"web": 1.0}}, "a weight for each of"),
        ({"weights": WEIGHTS | {"code": 0.0}}, "weights > 0"),
        ({"weights": WEIGHTS | {"code": float("inf")}}, "weights > 0"),
        ({"round_sequences": 50}, "a multiple of 12"),
        ({"round_sequences": 0}, "a multiple of 12"),
        ({"batch_size": 0}, "batch_size ≥ 1"),
        ({"adapt": -1.0}, "adapt"),
        ({"floor": 1.5}, "floor"),
        ({"window": 0}, "window"),
        ({"num_replicas": 2, "rank": 2}, "a rank below"),
        ({"num_replicas": 2, "rank": 0, "adapt": 1.0, "batch_size": 6}, "torch.distributed to be initialised"),
    ],
    ids=str,
)
def test_bad_settings_say_what_to_do(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        sampler_of(**options)


@pytest.mark.parametrize(
    ("sources", "named"),
    [
        ({}, "a source at least"),
        ({"a": (np.zeros(3), [0, 3])}, "a 1-D array of integers"),
        ({"a": (np.zeros((3, 1), int), [0, 3])}, "a 1-D array of integers"),
        ({"a": (np.zeros(3, int), [0, 4])}, "ascending offsets"),
        ({"a": (np.zeros(3, int), [0, 2, 1])}, "ascending offsets"),
        ({"a": (np.zeros(3, int), [])}, "ascending offsets"),
        ({"a": (np.zeros(3, int), [0, 0])}, "a token at least"),
        ({"a": [torch.zeros(3)]}, "1-D integer tensors"),
        ({"a": [{"input_ids": [1, 2], "mask": [1, 1]}]}, r"a dict of input_ids, mask at 0'; .*dataset\['input_ids'\]"),
        ({"a": [{"text": "no tokens"}]}, r"dataset\['text'\] of Hugging Face"),
        ({"a": ["no tokens"]}, "got 'str at 0'; wrap the data set so that an item is its token ids alone"),
        ({"a": [torch.zeros(3, 1, dtype=torch.int64)]}, "1-D integer tensors"),
    ],
    ids=str,
)
def test_bad_sources_say_what_to_do(sources: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        PackedDataset(sources, length=L)


def test_a_document_without_tokens_is_one() -> None:
    data = PackedDataset({"a": [[1, 2, 3], [], [4, 5, 6]], "b": [[]] * 2 + [[7] * L]}, length=L)
    assert [length.tolist() for length in data.length_S] == [[3, 0, 3], [0, 0, L]]


def test_a_column_of_hugging_face_has_the_tokens() -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed; pip install datasets")
    documents = [list(range(1, 3 + number % 7)) for number in range(40)]
    rows = datasets.Dataset.from_dict({"input_ids": documents, "mask": documents})
    for refused in (rows, ShadeDataset(rows, cache="memory://")):
        with pytest.raises(
            ConfigError, match=r"a dict of input_ids, mask at 0'; name the column: dataset\['input_ids'\]"
        ):
            PackedDataset({"a": refused}, length=L)
    for cured in (rows["input_ids"], ShadeDataset(rows["input_ids"], cache="memory://")):
        data = PackedDataset({"a": cured}, length=L)
        assert data.length_S[0].tolist() == [len(each) for each in documents]


def test_bad_uses_say_what_to_do() -> None:
    with pytest.raises(ConfigError, match="length ≥ 2"):
        PackedDataset({"a": (np.zeros(3, int), [0, 3])}, length=1)
    with pytest.raises(ConfigError, match="sampler=MixtureSampler"):
        next(iter(DataLoader(dataset(), batch_size=2)))
    with pytest.raises(ConfigError, match="of one shape"):
        sampler_of().report(torch.zeros(2, 4), torch.zeros(2))


@pytest.mark.parametrize(
    "other",
    [{"seed": 1}, {"round_sequences": 24}, {"batch_size": 6}, {"adapt": 1.0}, {"weights": WEIGHTS | {"web": 1.0}}],
    ids=str,
)
def test_a_state_of_other_settings_is_refused(other: dict[str, Any]) -> None:
    state = sampler_of().state_dict()
    with pytest.raises(ConfigError, match="as in the saved run"):
        sampler_of(**other).load_state_dict(state)


def test_a_state_of_other_documents_is_refused() -> None:
    state = sampler_of().state_dict()
    other = dataset(code=arrays(documents(1, 41, 50)))
    with pytest.raises(ConfigError, match="resume with the sources of that run"):
        sampler_of(other).load_state_dict(state)


# ── documents from a cache ──────────────────────────────────────────────────────────────────────────────────────────


class CountedDocuments:
    """Token documents that count how often they are read, in this process."""

    def __init__(self, pieces: list[np.ndarray]) -> None:
        self.pieces, self.reads = pieces, list[int]()

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads.append(index)
        return torch.from_numpy(self.pieces[index])


def cached(name: str, cache: str | None = "memory://", **options: Any) -> ShadeDataset:
    settings: dict[str, Any] = {"working_set_fraction": 1.0, "version": "1"} | options
    return ShadeDataset(CountedDocuments(DOCUMENTS[name]), cache=cache, **settings)


@pytest.fixture
def no_slow_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shade.cache.breaker.SLOW_SECONDS", 1e9)


@pytest.mark.usefixtures("no_slow_cache")
def test_documents_of_a_shade_dataset_come_from_its_cache_a_batch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = sorted(DOCUMENTS["web"], key=len, reverse=True)  # the first, which is probed, says how large one may be
    documents = CountedDocuments(pieces)
    web = ShadeDataset(documents, cache="memory://", working_set_fraction=1.0, version="1")
    data, plain = dataset(web=web), dataset(web=arrays(pieces))
    assert data.digest == plain.digest
    documents.reads.clear()
    asked, ask = [], ShadeDataset.__getitems__
    monkeypatch.setattr(ShadeDataset, "__getitems__", lambda self, batch: asked.append(batch) or ask(self, batch))
    batch = rounds(sampler_of(data), 1)
    for found, expected in zip(data.__getitems__(batch), map(plain.__getitem__, batch), strict=True):
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert len(asked) == 1
    wanted = {piece.document for each in batch for piece in each.pieces if piece.source == 0}
    assert sorted(asked[0]) == sorted(wanted)
    assert documents.reads == []
    assert data.stats()["hits"] == web.stats()["hits"] > 0
    assert 0 < data.stats()["hit_ratio"] < 1  # the first read was to learn the lengths
    assert plain.stats() == {}
    web.close()


@pytest.mark.usefixtures("no_slow_cache")
def test_a_prefix_makes_tokens_and_its_result_is_cached() -> None:
    def doubled(tokens: torch.Tensor) -> torch.Tensor:
        return tokens * 2

    code = cached("code", prefix=doubled, version=None)
    data, plain = dataset(code=code), dataset(code=arrays([each * 2 for each in DOCUMENTS["code"]]))
    for packed in rounds(sampler_of(data), 1):
        assert torch.equal(data[packed]["tokens"], plain[packed]["tokens"])
    code.close()


def test_what_a_cached_source_cannot_be_says_what_to_do() -> None:
    labelled = ShadeDataset([(torch.arange(5), 1)] * 3, cache=None)
    with pytest.raises(ConfigError, match=r"1-D integer tensors as the items of 'a'.*2 parts at 0.*token ids alone"):
        PackedDataset({"a": labelled}, length=L)
    with pytest.raises(DataError, match="give PackedDataset a ShadeDataset of each source"):
        ShadeDataset(dataset(), cache=None)
    noisy = ShadeDataset([torch.arange(9)] * 40, cache=None, transform=lambda tokens: tokens[: torch.randint(1, 9, ())])
    data = PackedDataset({"a": noisy}, length=L)
    with pytest.raises(ConfigError, match="random steps after the packing"):
        list(map(data.__getitem__, MixtureSampler(data, weights={"a": 1}, batch_size=1, round_sequences=9)))


# ── ShadeLoader ─────────────────────────────────────────────────────────────────────────────────────────────────────


def tokens_of(loader: Any, sampler: MixtureSampler, limit: int, *, reports: bool = True) -> list[list[int]]:
    """The first token of each sequence of so many batches."""
    found = []
    while True:
        for batch in loader:
            found.append(batch["tokens"][:, 0].tolist())
            if reports:
                sampler.report(batch["sources"], batch["sources"].clamp(0) + 1.0)
            if len(found) == limit:
                return found


@pytest.mark.multiprocess
@pytest.mark.redis
@pytest.mark.usefixtures("no_slow_cache")
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("reports", [False, True])
@pytest.mark.parametrize("cache", [None, "local://"])
def test_a_shade_loader_gives_the_stream_and_resumes_where_the_loop_was(
    num_workers: int, reports: bool, cache: str | None
) -> None:
    web = None if cache is None else cached("web", cache)
    data = dataset() if web is None else dataset(web=web)
    options: dict[str, Any] = {"adapt": 1.0} if reports else {}

    def opened() -> tuple[ShadeLoader, MixtureSampler]:
        sampler = sampler_of(data, **options)
        return ShadeLoader(data, batch_size=12, sampler=sampler, num_workers=num_workers), sampler

    plain = sampler_of(**options)
    expected = tokens_of(DataLoader(dataset(), batch_size=12, sampler=plain), plain, 10, reports=reports)
    assert tokens_of(*opened(), 10, reports=reports) == expected
    for cut in (1, 3, 4, 6, 8):
        loader, sampler = opened()
        head = tokens_of(loader, sampler, cut, reports=reports)
        again, resuming = opened()
        again.load_state_dict(copy.deepcopy(loader.state_dict()))
        assert head + tokens_of(again, resuming, 10 - cut, reports=reports) == expected
        assert again.epoch == 2
    if web is not None:
        assert web.stats()["hit_ratio"] > 0.5
        web.close()


def test_a_shade_loader_of_packed_sequences_says_what_it_needs() -> None:
    data = dataset()
    with pytest.raises(ConfigError, match="a MixtureSampler of the PackedDataset, got 'none'"):
        ShadeLoader(data, batch_size=12)
    with pytest.raises(ConfigError, match="a MixtureSampler of the PackedDataset, got 'RandomSampler'"):
        ShadeLoader(data, batch_size=12, sampler=torch.utils.data.RandomSampler(data))
    with pytest.raises(ConfigError, match="batch_size=12, as the sampler's"):
        ShadeLoader(data, batch_size=6, sampler=sampler_of(data))
    with pytest.raises(ConfigError, match="decode_on='device' with"):
        ShadeLoader(data, batch_size=12, sampler=sampler_of(data), decode_on="device", device="cpu")
    state = ShadeLoader(data, batch_size=12, sampler=sampler_of(data)).state_dict()
    with pytest.raises(ConfigError, match="the same kind of sampler"):
        ShadeLoader(ShadeDataset(range(40), cache=None), batch_size=12).load_state_dict(state)
