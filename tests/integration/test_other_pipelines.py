"""Pipelines of other libraries that read through the cache: torchdata's nodes, Hugging Face data sets, Ray Data.

With the real packages; where one is missing, its tests skip. The examples themselves run in `test_ecosystem`.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from shade import ShadeDataset, ShadeSampler
from shade.data import MixtureSampler, PackedDataset
from shade.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.redis,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata 0.11 with torch 2.9 and later
]


def example(name: str, *packages: str) -> ModuleType:
    for package in packages:
        pytest.importorskip(package, exc_type=ImportError)
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "examples"))


@pytest.fixture(autouse=True)
def cache_is_never_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shade.cache.breaker.SLOW_SECONDS", 1e9)


class FileReads:
    """A data set whose reads are seen from every process: each appends a line to a file."""

    def __init__(self, path: Path, num_samples: int = 64) -> None:
        self._path, self._num_samples = path, num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        with self._path.open("a") as file:
            file.write(f"{index}\n")
        return np.full(16, index, np.float32), index

    def take(self) -> list[int]:
        """The reads since the last call."""
        found = [int(line) for line in self._path.read_text().splitlines()] if self._path.exists() else []
        self._path.unlink(missing_ok=True)
        return found


# ── torchdata's nodes ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("stop", "threads"),
    [*(pytest.param(each, 3, marks=pytest.mark.slow) for each in (13, 25)), (33, 0), (50, 3)],
)
def test_a_loader_of_nodes_continues_in_mid_epoch(stop: int, threads: int) -> None:
    """Stopped in an epoch, and right after its last step; the state comes from threads that read ahead."""
    nodes = example("torchdata_nodes", "torchdata")
    whole, first, second = (nodes.Training(threads) for _ in range(3))
    try:
        expected = whole.run(3)
        found = first.run(3, stop_after=stop)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        found += second.run(3 - stop // 25)
    finally:
        for training in (whole, first, second):
            training.close()
    assert found[:50] == expected[:50]
    assert sorted(index for step in found[:25] for index in step) == list(range(200))
    if not threads:  # nothing was under way: losses, draws and weights are those of the whole run
        assert found == expected
        assert torch.equal(whole.model.weight, second.model.weight)


def test_the_cache_has_the_samplers_plan_in_a_pipeline_of_nodes() -> None:
    nodes = example("torchdata_nodes", "torchdata")
    training = nodes.Training(2)
    training.run(1)
    before = training.dataset.stats()["hits"]
    training.run(1)
    assert training.dataset.stats()["hits"] - before >= 100  # half of the samples; as many in the next epoch's order
    training.close()


@pytest.mark.parametrize("batch_size", [5, 8])
def test_samples_that_threads_read_one_by_one_continue_between_batches_alone(batch_size: int) -> None:
    example("torchdata_nodes", "torchdata")
    nodes: Any = importlib.import_module("torchdata.nodes")

    def make() -> tuple[Any, ShadeSampler]:
        sampler = ShadeSampler(range(80), batch_size=8, mode="uniform")
        read = nodes.ParallelMapper(nodes.SamplerWrapper(sampler), range(80).__getitem__, num_workers=2)
        return nodes.Loader(nodes.Mapper(nodes.Batcher(read, batch_size, drop_last=False), list)), sampler

    (whole, _), (first, _), (second, sampler) = make(), make(), make()
    expected = list(whole)
    batches = iter(first)
    found = [next(batches) for _ in range(3)]
    second.load_state_dict(first.state_dict())
    if batch_size == sampler.batch_size:
        assert found + list(second) == expected
    else:
        with pytest.raises(ConfigError, match="a place between two batches"):
            list(second)


def test_a_mixture_continues_in_a_pipeline_of_nodes() -> None:
    example("torchdata_nodes", "torchdata")
    nodes: Any = importlib.import_module("torchdata.nodes")
    random = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(random.integers(1, 40, 100))])
    data = PackedDataset({"web": (random.integers(0, 99, offsets[-1]), offsets)}, length=32)

    def make() -> Any:
        sampler = MixtureSampler(data, weights={"web": 1.0}, batch_size=4, round_sequences=40)
        read = nodes.ParallelMapper(nodes.IterableWrapper(sampler), data.__getitem__, num_workers=3)
        return nodes.Loader(nodes.Mapper(nodes.Batcher(read, 4), default_collate))

    whole, first, second = make(), make(), make()
    expected = [batch["tokens"] for _ in range(2) for batch in whole]
    batches = iter(first)
    found = [next(batches)["tokens"] for _ in range(4)]
    second.load_state_dict(first.state_dict())
    found += [batch["tokens"] for _ in range(2) for batch in second]
    assert len(found) == len(expected) == 20
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_processes_of_a_pipeline_share_a_server_and_not_a_private_store(tmp_path: Path) -> None:
    example("torchdata_nodes", "torchdata")
    nodes: Any = importlib.import_module("torchdata.nodes")
    data = FileReads(tmp_path / "reads")
    batches = [list(range(first, first + 8)) for first in range(0, 64, 8)]

    def read(dataset: ShadeDataset) -> list[int]:
        mapper = nodes.ParallelMapper(
            nodes.IterableWrapper(batches), dataset.__getitems__, 2, method="process", multiprocessing_context="fork"
        )
        return [index for batch in nodes.Loader(mapper) for _, _, index in batch]

    dataset = ShadeDataset(data, cache="local://", working_set_fraction=1.0, version="1")
    data.take()
    assert read(dataset) == list(range(64))
    assert sorted(data.take()) == list(range(64))
    assert read(dataset) == list(range(64))
    assert data.take() == []
    dataset.close()
    private = ShadeDataset(data, cache="memory://", version="1")
    with pytest.raises(ConfigError, match="a store that processes share"):
        read(private)
    private.close()


# ── Hugging Face data sets ──────────────────────────────────────────────────────────────────────────────────────────


def rows_of(tmp_path: Path, **options: Any) -> tuple[FileReads, ShadeDataset, Any]:
    """A Hugging Face data set of 64 samples that reads through the cache."""
    module = example("huggingface_datasets", "datasets")
    data = FileReads(tmp_path / "reads")

    class Rows(FileReads):
        def __getitem__(self, index: int) -> Any:
            point, label = super().__getitem__(index)
            return {"point": point, "label": label}

    options = {"cache": "local://", "working_set_fraction": 0.5, "version": "1"} | options
    dataset = ShadeDataset(Rows(tmp_path / "reads"), **options)
    data.take()
    return data, dataset, module.through_cache(dataset)


def indices_of(batches: Any) -> list[list[int]]:
    found = []
    for batch in batches:
        assert (batch["point"] == batch["index"][:, None]).all()
        assert (batch["label"] == batch["index"]).all()
        found.append(batch["index"].tolist())
    return found


def test_a_batch_of_a_hugging_face_data_set_is_one_batch_of_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, dataset, rows = rows_of(tmp_path)
    asked, ask = [], ShadeDataset.__getitems__
    monkeypatch.setattr(ShadeDataset, "__getitems__", lambda self, batch: asked.append(batch) or ask(self, batch))
    for epoch in range(2):
        seen = indices_of(DataLoader(rows.shuffle(seed=epoch), batch_size=8))
        assert sorted(index for batch in seen for index in batch) == list(range(64))
        assert asked[8 * epoch :] == seen
        assert len(data.take()) == (32 if epoch else 64)
    dataset.close()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_sampler_plans_the_cache_of_a_hugging_face_data_set_and_resumes(workers: int, tmp_path: Path) -> None:
    data, dataset, rows = rows_of(tmp_path)
    loaders: Any = importlib.import_module("torchdata.stateful_dataloader")

    def loader_of(sampler: ShadeSampler) -> Any:
        return loaders.StatefulDataLoader(rows, batch_size=8, sampler=sampler, num_workers=workers)

    sampler = ShadeSampler(dataset, batch_size=8, mode="uniform")
    expected, num_reads = [], []
    loader = loader_of(sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        expected.append(indices_of(loader))
        num_reads.append(len(data.take()))
    assert num_reads == [64, 32, 32]
    first, second = (loader_of(ShadeSampler(dataset, batch_size=8, mode="uniform")) for _ in range(2))
    batches = iter(first)
    found = [next(batches)["index"].tolist() for _ in range(3)]
    second.load_state_dict(first.state_dict())
    del batches
    assert found + indices_of(second) == expected[0]
    dataset.close()


def test_parts_of_a_hugging_face_data_set_are_read_by_their_own_indices(tmp_path: Path) -> None:
    _, dataset, rows = rows_of(tmp_path)
    distributed: Any = importlib.import_module("datasets.distributed")
    parts = [distributed.split_dataset_by_node(rows.shuffle(seed=1), rank, 3) for rank in range(3)]
    seen = Counter(int(row["index"]) for part in parts for row in part)
    assert seen == Counter(range(64))
    assert [int(row["index"]) for row in rows.select([5, 3, 3])] == [5, 3, 3]
    halves = rows.train_test_split(test_size=0.25, seed=0)
    assert sorted(int(row["index"]) for half in halves.values() for row in half) == list(range(64))
    dataset.close()


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_resumes_a_hugging_face_data_set_without_reading_what_it_skips(tmp_path: Path) -> None:
    data, dataset, rows = rows_of(tmp_path, cache=None)
    example("transformers_trainer", "transformers", "accelerate")
    transformers: Any = importlib.import_module("transformers")

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line, self.seen = torch.nn.Linear(16, 64), []

        def forward(self, point: torch.Tensor, labels: torch.Tensor, index: torch.Tensor) -> Any:
            self.seen.append(index.tolist())
            return (torch.nn.functional.cross_entropy(self.line(point), labels),)

    def train(folder: str, checkpoint: Path | None = None) -> Model:
        torch.manual_seed(0)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / folder), use_cpu=True, report_to=[], disable_tqdm=True, num_train_epochs=2,
            save_steps=5, per_device_train_batch_size=8, remove_unused_columns=False,
        )  # fmt: skip
        model = Model()
        transformers.Trainer(model, arguments, train_dataset=rows).train(resume_from_checkpoint=checkpoint)
        return model

    whole = train("a")
    data.take()
    resumed = train("b", tmp_path / "a" / "checkpoint-5")
    assert resumed.seen == whole.seen[5:]
    assert len(data.take()) == 16 * 8 - 5 * 8
    assert torch.equal(resumed.line.weight, whole.line.weight)
    dataset.close()


# ── Ray Data ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
def test_actors_of_ray_data_read_in_the_samplers_order_through_one_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'examples'}")  # of the workers
    module = example("ray_data", "ray.data")
    ray: Any = importlib.import_module("ray")
    data = FileReads(tmp_path / "reads")
    ray.init(num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
    cache = f"disk://{tmp_path}/cache?capacity=1GiB"
    path = str(tmp_path / "reads")

    class Reads(module.ReadThroughCache):  # type: ignore[name-defined,misc]  # pickled with what it uses
        def __init__(self, cache: str) -> None:
            from pathlib import Path

            class Rows:
                def __len__(self) -> int:
                    return 64

                def __getitem__(self, index: int) -> Any:
                    with Path(path).open("a") as file:
                        file.write(f"{index}\n")
                    return np.full(16, index, np.float32), index

            self._dataset = ShadeDataset(Rows(), cache=cache, working_set_fraction=1.0, version="1")

    monkeypatch.setattr(module, "ReadThroughCache", Reads)
    try:
        sampler = ShadeSampler(data, batch_size=module.BATCH, mode="uniform")
        read = ShadeSampler(data, batch_size=module.BATCH, mode="uniform")
        for epoch in range(2):
            for each in (sampler, read):
                each.set_epoch(epoch)
            expected = np.array(list(sampler)).reshape(-1, module.BATCH).tolist()
            assert indices_of(module.batches_of(read, cache)) == expected
            num_probes = 2 * 48  # of two actors
            assert len(data.take()) - num_probes <= (0 if epoch else 64)
    finally:
        ray.shutdown()
