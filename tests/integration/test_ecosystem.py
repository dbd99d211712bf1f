"""The frameworks that people train with, as they are: torchdata, Lightning, Accelerate, Hugging Face's Trainer, Ray
Train, Grain.

The examples are what is tested, so that what people copy is what works. Where a package is missing, its tests skip.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler

from shade import ShadeDataset, ShadeSampler
from shade.store._servers.server import LocalServer

ROOT = Path(__file__).resolve().parents[2]
NEEDS = {
    "stateful_loader": ("torchdata",),
    "lightning_trainer": ("torchdata", "lightning"),
    "accelerate_loop": ("accelerate",),
    "transformers_trainer": ("torchdata", "transformers", "accelerate", "datasets"),
    "audio": ("datasets",),
    "grain_source": ("grain",),
    "torchdata_nodes": ("torchdata",),
    "video_clips": ("av",),
    "huggingface_datasets": ("datasets",),
    "ray_data": ("ray.data",),
    "ray_train": ("ray.train.torch",),
}
SLOW = {"ray_data", "ray_train"}
pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata 0.11 with torch 2.9 and later
]


def load(name: str) -> ModuleType:
    for package in NEEDS[name]:
        pytest.importorskip(package, exc_type=ImportError)
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "examples"))


@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in NEEDS])
def test_an_example_runs_as_it_is(name: str, tmp_path: Path) -> None:
    load(name)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    told = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py")],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr[-3000:]
    assert told.stdout.strip()
    assert "False" not in told.stdout, "what it compares is not the same"


# ── torchdata ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("before", "after"), [(0, 0), (2, 2)])
@pytest.mark.parametrize("stop", [7, 33, 50])
def test_a_stateful_loader_goes_on_in_mid_epoch(stop: int, before: int, after: int, tmp_path: Path) -> None:
    """Stopped in the first epoch, in the second, and right after its last step."""
    example = load("stateful_loader")
    whole, first, second = example.Training(), example.Training(before), example.Training(after)
    try:
        expected = whole.run(3)
        found = first.run(3, stop_after=stop)
        first.save(tmp_path / "state")
        second.restore(tmp_path / "state")
        found += second.run(3)
    finally:
        for training in (whole, first, second):
            training.close()
    # Epochs 0 and 1 are full; the third is drawn from the losses, and those of batches under way may be an epoch old.
    num_fixed = 50 if before else len(expected)
    assert found[:num_fixed] == expected[:num_fixed]
    assert len(found) == len(expected)


def test_what_a_loader_restores_is_what_training_goes_on_with(tmp_path: Path) -> None:
    """Without workers nothing is under way: the model comes out the same, bit for bit."""
    example = load("stateful_loader")
    whole, first, second = example.Training(), example.Training(), example.Training()
    try:
        whole.run(4)
        first.run(4, stop_after=60)
        first.save(tmp_path / "state")
        second.restore(tmp_path / "state")
        second.run(4)
        assert torch.equal(whole.model.weight, second.model.weight)
    finally:
        for training in (whole, first, second):
            training.close()


def test_a_state_between_two_epochs_begins_the_next(tmp_path: Path) -> None:
    example = load("stateful_loader")
    first, second = example.Training(), example.Training()
    try:
        first.run(1)
        first.save(tmp_path / "state")
        second.restore(tmp_path / "state")
        second.epoch = 1
        steps = second.run(2)
    finally:
        for training in (first, second):
            training.close()
    assert sorted(index for step in steps for index in step) == list(range(200))


def test_loader_and_sampler_of_two_batch_sizes_are_told(tmp_path: Path) -> None:
    example = load("stateful_loader")
    loaders = importlib.import_module("torchdata.stateful_dataloader")
    dataset = example.make_data()
    sampler = ShadeSampler(dataset, batch_size=8)
    loader = loaders.StatefulDataLoader(dataset, batch_size=5, sampler=sampler)
    for _, _ in zip(range(3), loader, strict=False):
        pass
    state = loader.state_dict()
    other = ShadeSampler(dataset, batch_size=8)
    loader = loaders.StatefulDataLoader(dataset, batch_size=5, sampler=other)
    loader.load_state_dict(state)
    with pytest.raises(ValueError, match="one batch_size"):
        next(iter(loader))
    for each in (sampler, other):
        each.close()


# ── Lightning ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.filterwarnings("ignore")
def test_lightning_trains_epochs_of_different_lengths(tmp_path: Path) -> None:
    example = load("lightning_trainer")
    model, data = example.Classifier(), example.Data()
    example.make_trainer(tmp_path).fit(model, datamodule=data)
    lengths = [len(model.seen[:25]), len(model.seen[25:50]), len(model.seen) - 50]
    assert lengths[:2] == [25, 25]
    assert 0 < lengths[2] < 50, "epochs 2 and 3 are drawn by importance, and shorter"
    for epoch in (0, 1):
        seen = [index for step in model.seen[25 * epoch : 25 * epoch + 25] for index in step]
        assert sorted(seen) == list(range(200))
    assert model.seen[:25] != model.seen[25:50], "Lightning has said the epoch"


@pytest.mark.filterwarnings("ignore")
def test_lightning_goes_on_in_mid_epoch(tmp_path: Path) -> None:
    example = load("lightning_trainer")
    callbacks = importlib.import_module("lightning.pytorch.callbacks")
    torch.manual_seed(0)
    whole = example.Classifier()
    keep = callbacks.ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=33, save_top_k=-1)
    options = {"enable_checkpointing": True, "callbacks": [keep]}
    example.make_trainer(tmp_path, epochs=2, **options).fit(whole, datamodule=example.Data())
    (checkpoint,) = [path for path in tmp_path.glob("*.ckpt") if "step=33" in path.name]
    resumed = example.Classifier()
    trainer = example.make_trainer(tmp_path, epochs=2)
    trainer.fit(resumed, datamodule=example.Data(), ckpt_path=checkpoint, weights_only=False)
    assert resumed.seen == whole.seen[33:]
    assert torch.equal(resumed.layer.weight, whole.layer.weight)


@pytest.mark.filterwarnings("ignore")
def test_lightning_leaves_the_sampler_in_its_place() -> None:
    """As on two ranks, where it puts a DistributedSampler around whatever it does not know."""
    load("lightning_trainer")
    connector = importlib.import_module("lightning.pytorch.trainer.connectors.data_connector")
    lightning = importlib.import_module("lightning")
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)

    class TwoRanks:
        is_distributed = True

    sampler = ShadeSampler(range(100), batch_size=4, mode="uniform")
    loader = torch.utils.data.DataLoader(range(100), batch_size=4, sampler=sampler)
    plain = torch.utils.data.DataLoader(range(100), batch_size=4)
    asked = connector._DataConnector(trainer)
    trainer._accelerator_connector.use_distributed_sampler = True
    type(trainer._accelerator_connector).is_distributed = property(lambda self: True)
    try:
        assert asked._requires_distributed_sampler(plain), "it would for another"
        assert not asked._requires_distributed_sampler(loader)
    finally:
        del type(trainer._accelerator_connector).is_distributed
    sampler.close()


# ── Accelerate ──────────────────────────────────────────────────────────────────────────────────────────────────────

PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
import accelerate, accelerate_loop, os
if sys.argv[4] == "wrong":
    plain = accelerate_loop.Accelerator.prepare
    loader_of = accelerate_loop.DataLoader
    accelerate_loop.DataLoader = lambda *words, **options: accelerate.Accelerator(cpu=True).prepare(
        loader_of(*words, **options))
seen = accelerate_loop.train(sys.argv[2], epochs=2)
rank = os.environ["RANK"]
open(f"{sys.argv[3]}/{rank}.json", "w").write(json.dumps(seen))
"""


def two_ranks(server: LocalServer, folder: Path, way: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(PROGRAM)
    words = ["--nproc-per-node", "2", "--standalone", str(folder / "program.py"), str(ROOT / "examples")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words, f"unix://{server.socket_path}", str(folder), way],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


@pytest.mark.multiprocess
@pytest.mark.redis
def test_accelerate_on_two_ranks_sees_every_sample_once(server: LocalServer, tmp_path: Path) -> None:
    load("accelerate_loop")
    told = two_ranks(server, tmp_path, "right")
    assert told.returncode == 0, told.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert len(ranks[0]) == len(ranks[1]) == 26
    for epoch in range(2):
        seen = [i for steps in ranks for step in steps[13 * epoch : 13 * epoch + 13] for i in step]
        assert sorted(seen) == list(range(200))


@pytest.mark.multiprocess
@pytest.mark.redis
def test_a_loader_given_to_accelerate_is_told_what_to_do(server: LocalServer, tmp_path: Path) -> None:
    load("accelerate_loop")
    told = two_ranks(server, tmp_path, "wrong")
    assert told.returncode != 0
    assert "leave the loader out of accelerator.prepare" in told.stderr


def test_on_one_rank_accelerate_may_have_the_loader() -> None:
    load("accelerate_loop")
    accelerate = importlib.import_module("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    sampler = ShadeSampler(range(40), batch_size=4, mode="uniform")
    loader = accelerator.prepare(torch.utils.data.DataLoader(range(40), batch_size=4, sampler=sampler))
    orders = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        orders.append([index for batch in loader for index in batch.tolist()])
    assert all(sorted(order) == list(range(40)) for order in orders)
    assert orders[0] != orders[1]
    sampler.close()


# ── Hugging Face: the Trainer, data sets of dicts ───────────────────────────────────────────────────────────────────


@pytest.mark.multiprocess
@pytest.mark.redis
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workers", [0, 2])
def test_the_trainer_goes_on_in_mid_epoch(workers: int, server: LocalServer, tmp_path: Path) -> None:
    example = load("transformers_trainer")
    dataset = ShadeDataset(example.make_text(), cache=f"unix://{server.socket_path}", working_set_fraction=0.5)
    options = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 27, "dataloader_num_workers": workers}
    whole = example.make_trainer(tmp_path / "a", dataset, **options)
    whole.train()
    resumed = example.make_trainer(tmp_path / "b", dataset, **options)
    example.resume(resumed, tmp_path / "a" / "checkpoint-27")
    for trainer in (whole, resumed):
        trainer.sampler.close()
    assert len(whole.seen) == 40
    assert resumed.seen == whole.seen[27:]
    assert torch.equal(resumed.model.line.weight, whole.model.line.weight)
    dataset.close()


def test_text_comes_back_as_it_was_and_from_the_cache() -> None:
    example = load("transformers_trainer")
    text = example.make_text(40)
    dataset = ShadeDataset(text, cache="memory://", working_set_fraction=1.0)
    sampler = ShadeSampler(dataset, batch_size=8, mode="uniform")
    assert dataset.cache is not None
    for epoch in range(2):
        sampler.set_epoch(epoch)
        before = dataset.cache.residency.totals()
        for batch in BatchSampler(sampler, 8, drop_last=False):
            for (row, index), wanted in zip(dataset.__getitems__(batch), batch, strict=True):
                assert index == wanted
                assert row == text[index]
    assert (dataset.cache.residency.totals() - before)["hits"] == 40
    sampler.close()
    dataset.close()


def test_waveforms_keep_their_numbers() -> None:
    example = load("audio")
    waves = example.make_waveforms(12)
    dataset = ShadeDataset(waves, cache="memory://", working_set_fraction=1.0)
    row, index = dataset[7]
    assert index == 7
    assert row["wave"].dtype == waves[7]["wave"].dtype
    assert (row["wave"] == waves[7]["wave"]).all()
    dataset.close()


def test_images_of_a_hugging_face_data_set(tmp_path: Path) -> None:
    load("audio")
    datasets: Any = importlib.import_module("datasets")
    from PIL import Image

    pictures = [Image.new("RGB", (6, 5), (number, 0, 255 - number)) for number in range(8)]
    rows = datasets.Dataset.from_dict(
        {"image": pictures, "label": list(range(8))},
        features=datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")}),
    )
    dataset = ShadeDataset(rows, cache="memory://", working_set_fraction=1.0)
    for _ in range(2):
        row, index = dataset[3]
        assert (index, row["label"], row["image"].getpixel((0, 0))) == (3, 3, (3, 0, 252))
    dataset.close()


def test_a_transform_that_would_be_cached_is_told_of() -> None:
    load("audio")
    datasets: Any = importlib.import_module("datasets")
    rows = datasets.Dataset.from_dict({"x": [1.0, 2.0]}).with_transform(lambda row: row)
    with pytest.warns(UserWarning, match="applies its own transform before caching"):
        ShadeDataset(rows, cache="memory://").close()


# ── Grain ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class FilesRead:
    """A data set whose reads are seen from every process: each appends a line to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with self._path.open("a") as file:
            file.write(f"{index}\n")
        return torch.full((16,), float(index)), index

    def num_reads(self) -> int:
        return len(self._path.read_text().splitlines()) if self._path.exists() else 0


def grain_source(tmp_path: Path) -> tuple[FilesRead, ShadeDataset, Any]:
    example = load("grain_source")
    files = FilesRead(tmp_path / "reads")
    dataset = ShadeDataset(files, cache="local://", working_set_fraction=0.5, version="1")
    return files, dataset, example.ShadeSource(dataset)


@pytest.mark.redis
def test_a_source_is_what_grain_takes_and_half_of_it_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shade.cache.breaker.SLOW_SECONDS", 1e9)
    files, dataset, source = grain_source(tmp_path)
    grain: Any = importlib.import_module("grain")
    assert isinstance(source, grain.sources.RandomAccessDataSource)
    batches = grain.MapDataset.source(source).seed(0).shuffle().repeat(2).batch(6).to_iter_dataset()
    before, seen = files.num_reads(), []
    for batch in batches:
        assert (batch["point"] == batch["index"][:, None]).all()
        assert (batch["label"] == batch["index"]).all()
        seen += batch["index"].tolist()
    assert sorted(seen) == sorted([*range(60), *range(60)])
    assert seen[:60] != seen[60:]
    num_threads = 16  # of Grain; near the limit each may have room for its sample that another would have used
    assert 60 + 30 <= files.num_reads() - before <= 60 + 30 + num_threads
    dataset.close()


@pytest.mark.redis
def test_a_grain_loader_continues_in_mid_epoch(tmp_path: Path) -> None:
    _, dataset, source = grain_source(tmp_path)
    grain: Any = importlib.import_module("grain")
    sampler = grain.samplers.IndexSampler(60, shuffle=True, seed=0, num_epochs=2)
    loader = grain.DataLoader(data_source=source, sampler=sampler, operations=[grain.transforms.Batch(6)])
    iterator = iter(loader)
    first = [next(iterator)["index"].tolist() for _ in range(13)]
    state = iterator.get_state()
    rest = [batch["index"].tolist() for batch in iterator]
    again = iter(loader)
    again.set_state(state)
    assert [batch["index"].tolist() for batch in again] == rest
    assert sorted(index for batch in first + rest for index in batch) == sorted([*range(60), *range(60)])
    dataset.close()


@pytest.mark.redis
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
def test_grains_worker_processes_share_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")  # of the workers
    files, dataset, source = grain_source(tmp_path)
    grain: Any = importlib.import_module("grain")
    options = grain.multiprocessing.MultiprocessingOptions(num_workers=2)
    batches = grain.MapDataset.source(source).seed(0).shuffle().repeat(4).batch(6).to_iter_dataset()
    before, seen = files.num_reads(), []
    for batch in batches.mp_prefetch(options):
        assert (batch["point"] == batch["index"][:, None]).all()
        seen += batch["index"].tolist()
    assert sorted(seen) == sorted([*range(60)] * 4)
    assert files.num_reads() - before <= 60 + 3 * 30 + 6, "what one worker has read is a hit for the other"
    assert dataset.cache is not None
    held = [key for key in dataset.cache.store.scan("shade:") if key.rpartition("}")[2].isdigit()]
    assert 0 < len(held) <= 30
    dataset.close()
