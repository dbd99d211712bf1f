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
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler

from shade import ShadeDataset, ShadeSampler
from shade.checkpoint import Checkpointer
from shade.errors import ConfigError
from shade.store._servers.server import LocalServer
from tests.support.exits import ending_of, without_closing

ROOT = Path(__file__).resolve().parents[2]
NEEDS = {
    "stateful_loader": ("torchdata",),
    "lightning_trainer": ("lightning",),
    "accelerate_loop": ("accelerate",),
    "transformers_trainer": ("transformers", "accelerate", "datasets"),
    "audio": ("datasets",),
    "grain_source": ("grain",),
    "torchdata_nodes": ("torchdata",),
    "video_clips": ("av",),
    "huggingface_datasets": ("datasets",),
    "ray_data": ("ray.data",),
    "ray_train": ("ray.train.torch",),
}
ON_TWO_RANKS = ("accelerate_loop", "ray_train", "transformers_trainer", "lightning_trainer")
QUICK = (("stateful_loader", 1, True), ("torchdata_nodes", 1, False))
"""Name, ranks and whether it closes: the two that stand for the others in a quick run."""
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


def ways() -> list[Any]:
    """Each example on one rank, and on two where it can be launched so; as it stands, and closing nothing."""
    # Lightning closes what `ShadeDataModule` has opened.
    alone = [(name, 1, closes) for name in NEEDS for closes in (True, False) if closes or name != "lightning_trainer"]
    found = alone + [(name, 2, closes) for name, _, closes in alone if name in ON_TWO_RANKS]
    return [
        pytest.param(*way, id=f"{way[0]}-{way[1]}{'' if way[2] else '-closing nothing'}", marks=marks)
        for way in found
        for marks in [[] if way in QUICK else [pytest.mark.slow, pytest.mark.timeout(900)]]
    ]


@pytest.mark.parametrize(("name", "ranks", "closes"), ways())
def test_an_example_ends_and_leaves_nothing(name: str, ranks: int, closes: bool, tmp_path: Path) -> None:
    load(name)
    text = (ROOT / "examples" / f"{name}.py").read_text()
    unclosed, changes = without_closing(text)
    assert changes or closes
    script = tmp_path / f"{name}.py"
    script.write_text(text if closes else unclosed)
    with LocalServer() if ranks > 1 else nullcontext() as server:
        command: list[str | Path] = [script]
        if server is not None and name == "ray_train":  # which starts its ranks itself
            command += [server.url.reveal(), "2"]
        elif server is not None:
            launched = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
            command = [*launched, script, server.url.reveal()]
        ended = ending_of([sys.executable, *command], tmp_path)
    ended.check()
    assert ended.said.strip()
    assert "False" not in ended.said, "what it compares is not the same"


# ── torchdata ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("before", "after"), [pytest.param(0, 0, marks=pytest.mark.slow), (2, 1)])
@pytest.mark.parametrize(
    "stop", [pytest.param(7, marks=pytest.mark.slow), 33, pytest.param(50, marks=pytest.mark.slow)]
)
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
    assert found == expected, "also the third epoch, which is drawn from the losses"


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


@pytest.mark.parametrize(
    "epochs", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("is_next", [False, True], ids=["the saved epoch said", "the next one said"])
def test_a_state_between_two_epochs_is_followed_by_the_next(
    epochs: int, workers: int, is_next: bool, tmp_path: Path
) -> None:
    """A loop may begin with the epoch that was saved, of which nothing is left, or with the next one."""
    example = load("stateful_loader")
    first, second = example.Training(workers), example.Training(workers)
    try:
        first.run(epochs)
        first.save(tmp_path / "state")
        second.restore(tmp_path / "state")
        second.epoch += is_next
        steps = second.run(4)
        assert second.sampler.epoch == 3
        lengths = {1: 25, 2: 0, 3: 0}
        assert len(steps) > lengths[epochs]
        if epochs == 1:
            assert sorted(index for step in steps[:25] for index in step) == list(range(200))
        assert len(steps) < lengths[epochs] + 25 * (4 - max(epochs, 2)) + 1
    finally:
        for training in (first, second):
            training.close()


def few(monkeypatch: pytest.MonkeyPatch, example: ModuleType, name: str = "make_data") -> None:
    """Five steps in an epoch, four in the third."""
    monkeypatch.setattr(example, name, partial(getattr(example, name), 40))


@pytest.mark.parametrize(
    ("saved", "before", "after"),
    [
        pytest.param("loader", 0, 0, marks=pytest.mark.slow),
        ("loader", 2, 1),
        ("sampler", 0, 2),
        pytest.param("sampler", 2, 0, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_stateful_loader_stopped_at_any_step(
    saved: str, before: int, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader's state, which is the sampler's: it holds every loss, with any workers."""
    example = load("stateful_loader")
    few(monkeypatch, example)
    whole = example.Training()
    expected = whole.run(3)
    stops = range(1, len(expected) + 1) if not before + after else (1, 4, 5, 8, 10, 12, len(expected))
    runs = [whole]
    try:
        assert len(expected) < 15
        for stop in stops:
            first, second = example.Training(before), example.Training(after)
            runs += [first, second]
            found = first.run(3, stop_after=stop)
            if saved == "loader":
                first.save(tmp_path / "state")
                second.restore(tmp_path / "state")
            else:
                for part in ("sampler", "model", "optimizer"):
                    getattr(second, part).load_state_dict(getattr(first, part).state_dict())
                second.epoch = second.sampler.epoch
            assert found + second.run(3) == expected, f"stopped after {stop}"
            assert torch.equal(second.model.weight, whole.model.weight)
    finally:
        for training in runs:
            training.close()


@pytest.mark.parametrize("workers", [(0, 2), (2, 0), (2, 1), (1, 2)], ids=str)
def test_torchdata_refuses_a_state_of_other_workers(workers: tuple[int, int], tmp_path: Path) -> None:
    """What docs/how-to/stateful-dataloader.md says of its own loader."""
    example = load("stateful_loader")
    loaders = importlib.import_module("torchdata.stateful_dataloader")
    samplers = [ShadeSampler(example.make_data(), batch_size=8) for _ in range(2)]
    first, second = (
        loaders.StatefulDataLoader(example.make_data(), batch_size=8, sampler=sampler, num_workers=number)
        for sampler, number in zip(samplers, workers, strict=True)
    )
    batches = iter(first)
    next(batches)
    second.load_state_dict(first.state_dict())
    with pytest.raises(AssertionError):
        next(iter(second))
    del batches
    for sampler in samplers:
        sampler.close()


def test_a_sampled_loader_of_another_batch_size_is_refused() -> None:
    example = load("stateful_loader")
    with pytest.raises(ConfigError, match="batch_size 8, got 5"):
        example.SampledDataLoader(example.make_data(), 5, sampler=ShadeSampler(example.make_data(), batch_size=8))


def test_a_sampled_loader_that_is_attached_resumes_with_other_workers(tmp_path: Path) -> None:
    example = load("stateful_loader")
    with Checkpointer(persist_to=tmp_path, every="never") as checkpointer:
        data = example.make_data()
        loader = example.SampledDataLoader(data, 8, sampler={"mode": "uniform"})
        checkpointer.attach(loader=loader)
        for _ in zip(range(3), loader, strict=False):
            checkpointer.step()
        checkpointer.save()
    with Checkpointer(persist_to=tmp_path, every="never") as checkpointer:
        other = example.SampledDataLoader(data, 8, sampler={"mode": "uniform"}, num_workers=2)
        checkpointer.attach(loader=other)
        assert checkpointer.restore_latest().step == 3
        assert (other.sampler.epoch, other.sampler.steps_done) == (0, loader.sampler.steps_done)
    loader.sampler.close()
    other.sampler.close()


def test_nodes_stopped_at_any_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of the first two epochs is fixed; the third is drawn from the losses, of which some are under way."""
    example = load("torchdata_nodes")
    few(monkeypatch, example)
    runs = [whole := example.Training(2)]
    expected = whole.run(2)
    try:
        for stop in [*range(1, 11), "after an epoch"]:
            first, second = example.Training(2), example.Training(1)
            runs += [first, second]
            found = first.run(1) if stop == "after an epoch" else first.run(2, stop_after=stop)
            second.load_state_dict(first.state_dict())
            # A pass whose state has nothing left begins the next epoch.
            found += second.run(2 - -(-(len(found) + (len(found) % 5 == 0)) // 5) + 1) if len(found) < 10 else []
            assert found == expected, f"stopped {stop}"
    finally:
        for training in runs:
            training.close()


def test_loader_and_sampler_of_two_batch_sizes_are_told(tmp_path: Path) -> None:
    example = load("stateful_loader")
    loaders = importlib.import_module("torchdata.stateful_dataloader")
    dataset = example.make_data()
    sampler = ShadeSampler(dataset, batch_size=8)
    loader = loaders.StatefulDataLoader(dataset, batch_size=5, sampler=sampler)
    for _, _ in zip(range(3), loader, strict=False):
        pass
    with pytest.warns(UserWarning, match="load batches of the sampler's batch_size"):
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
    model, data = example.Classifier(), example.make_module()
    example.make_trainer(tmp_path).fit(model, datamodule=data)
    lengths = [len(model.seen[:25]), len(model.seen[25:50]), len(model.seen) - 50]
    assert lengths[:2] == [25, 25]
    assert 0 < lengths[2] < 50, "epochs 2 and 3 are drawn by importance, and shorter"
    for epoch in (0, 1):
        seen = [index for step in model.seen[25 * epoch : 25 * epoch + 25] for index in step]
        assert sorted(seen) == list(range(200))
    assert model.seen[:25] != model.seen[25:50], "Lightning has said the epoch"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_lightning_stopped_at_any_step_and_after_any_epoch(
    workers: int, validates: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = load("lightning_trainer")
    few(monkeypatch, example)
    callbacks = importlib.import_module("lightning.pytorch.callbacks")

    class Validated(example.Classifier):  # type: ignore[misc,name-defined]
        def validation_step(self, batch: Any, batch_index: int) -> None:
            self.layer(batch[0])

    def fit(*keep: Any, **options: Any) -> Any:
        torch.manual_seed(0)
        model = Validated() if validates else example.Classifier()
        data = example.make_module(workers=workers)
        if validates:
            data.val_dataloader = lambda: torch.utils.data.DataLoader(example.make_data(), batch_size=8)
        trainer = example.make_trainer(tmp_path, 3, enable_checkpointing=bool(keep), callbacks=[*keep])
        trainer.fit(model, datamodule=data, **options)
        return model

    named = {"dirpath": tmp_path, "save_top_k": -1, "auto_insert_metric_name": False}
    steps = callbacks.ModelCheckpoint(filename="step-{step}", every_n_train_steps=1, **named)
    epochs = callbacks.ModelCheckpoint(filename="epoch-{step}", every_n_epochs=1, **named)
    whole = fit(steps, epochs)
    assert 10 < len(whole.seen) < 15, "epoch 2 is drawn by importance, and shorter"
    checkpoints = sorted(tmp_path.glob("*-*.ckpt"))
    assert len(checkpoints) == len(whole.seen) + 3
    for checkpoint in checkpoints:
        resumed = fit(ckpt_path=checkpoint, weights_only=False)
        assert resumed.seen == whole.seen[int(checkpoint.stem.rpartition("-")[2]) :], checkpoint.stem
        assert torch.equal(resumed.layer.weight, whole.layer.weight)


@pytest.mark.filterwarnings("ignore")
def test_lightnings_checkpoints_are_snapshots_the_best_and_after_an_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = load("lightning_trainer")
    few(monkeypatch, example)
    weights: dict[int, torch.Tensor] = {}

    class Failing(example.Classifier):  # type: ignore[misc,name-defined]
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_index: int) -> None:
            weights[self.global_step] = self.layer.weight.detach().clone()
            if self.global_step == 8:
                raise ValueError

        def training_step(self, batch: Any, batch_index: int) -> torch.Tensor:
            self.log("distance", abs(self.global_step - 4.0))  # the fifth step is the best
            return super().training_step(batch, batch_index)

    saver = example.ModelCheckpoint(
        tmp_path / "notes", "{step}", "distance", save_top_k=2, every_n_train_steps=1, save_on_exception=True
    )
    callbacks = [saver, example.ShadeCheckpoints(tmp_path / "snapshots")]
    trainer = example.make_trainer(tmp_path, 3, enable_checkpointing=True, callbacks=callbacks)
    with pytest.raises(ValueError, match=r"^$"):
        trainer.fit(Failing(), datamodule=example.make_module())
    io = trainer.strategy.checkpoint_io
    io.teardown()
    notes = sorted((tmp_path / "notes").iterdir())
    assert len(notes) == len(list((tmp_path / "snapshots").glob("lightning/step-*"))) == 3
    saved = {int(note.stem.rpartition("=")[2]): io.load_checkpoint(note)["state_dict"] for note in notes}
    assert 5 in saved, "the best"
    assert 8 in saved, "after the exception"
    assert saver.best_model_path == str(tmp_path / "notes" / "step=5.ckpt")
    for step, state in saved.items():
        assert torch.equal(state["layer.weight"], weights[step])
    torch.save({"of": "Lightning"}, tmp_path / "own.ckpt")
    assert io.load_checkpoint(tmp_path / "own.ckpt") == {"of": "Lightning"}


@pytest.mark.filterwarnings("ignore")
def test_lightning_loads_a_loaders_own_state_only_within_an_epoch(tmp_path: Path) -> None:
    """Which is why the example's DataModule has one; and Lightning warns of a loader that has none."""
    load("lightning_trainer")
    lightning = importlib.import_module("lightning")
    loaded: list[int] = []

    class Loader(torch.utils.data.DataLoader[Any]):
        def state_dict(self) -> dict[str, Any]:
            return {"some": "state"}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            loaded.append(1)

    class Plain(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, batch_index: int) -> torch.Tensor:
            if self.stop == (self.current_epoch, batch_index):
                self.trainer.save_checkpoint(tmp_path / "within.ckpt")
            return self.layer(batch).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    callbacks = importlib.import_module("lightning.pytorch.callbacks")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    keep = callbacks.ModelCheckpoint(dirpath=tmp_path, filename="ended-{epoch}", save_top_k=-1)
    for name, number in ((None, 0), ("within.ckpt", 1), ("ended-epoch=0.ckpt", 0)):
        model = Plain()
        model.stop = (1, 2) if name is None else None
        loaded.clear()
        trainer = lightning.Trainer(max_epochs=2, default_root_dir=tmp_path, callbacks=[keep] * (name is None), **quiet)
        path = None if name is None else tmp_path / name
        trainer.fit(model, Loader(torch.zeros(8, 1), batch_size=2), ckpt_path=path, weights_only=False)
        assert len(loaded) == number, name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reloads", [0, 1])
def test_lightning_counts_the_steps_of_a_loader_once(reloads: int) -> None:
    """Which is why the page says `reload_dataloaders_every_n_epochs=1`."""
    load("lightning_trainer")
    lightning = importlib.import_module("lightning")
    counted: list[int] = []

    class Shorter(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.zeros(4 - 2 * self.current_epoch, 1))

        def training_step(self, batch: Any, batch_index: int) -> torch.Tensor:
            return self.layer(batch).mean()

        def on_train_epoch_end(self) -> None:
            counted.append(self.trainer.num_training_batches)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    quiet |= {"enable_checkpointing": False, "reload_dataloaders_every_n_epochs": reloads}
    lightning.Trainer(max_epochs=2, **quiet).fit(Shorter())
    assert counted == ([4, 2] if reloads else [4, 4])


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
seen, _ = accelerate_loop.train(sys.argv[2], epochs=2)
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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_an_accelerated_loader_continues_at_any_step(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a sampler that hears of losses, on other workers too."""
    example = load("accelerate_loop")
    few(monkeypatch, example)
    whole, expected = example.train("local://", workers=workers)

    class Stopped(Exception):
        pass

    class Stopping(example.AccelerateLoader):  # type: ignore[misc,name-defined]
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                if self.checkpointer.step_count == stop:
                    self.checkpointer.close()
                    raise Stopped
                yield batch

    ordinary = example.AccelerateLoader
    for stop in range(1, len(whole)):
        monkeypatch.setattr(example, "AccelerateLoader", Stopping)
        with pytest.raises(Stopped):
            example.train("local://", workers=workers, folder=tmp_path / str(stop))
        monkeypatch.setattr(example, "AccelerateLoader", ordinary)
        rest, model = example.train("local://", workers=2 - workers, folder=tmp_path / str(stop))
        assert rest == whole[stop:], f"stopped after {stop}"
        assert torch.equal(model.weight, expected.weight)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_sampler_in_accelerates_checkpoint_continues_at_any_step(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = load("accelerate_loop")
    few(monkeypatch, example)
    accelerate: Any = importlib.import_module("accelerate")
    dataset = ShadeDataset(example.make_data(), cache=None)

    def train(stop: int | None = None, folder: Path | None = None) -> tuple[list[list[int]], torch.nn.Module]:
        accelerator = accelerate.Accelerator(cpu=True)
        sampler = ShadeSampler(dataset, batch_size=8, seed=0)
        loader = torch.utils.data.DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=workers)
        torch.manual_seed(0)
        line = torch.nn.Linear(16, 4)
        model, optimizer = accelerator.prepare(line, torch.optim.SGD(line.parameters(), lr=0.1))
        accelerator.register_for_checkpointing(sampler)
        if folder is not None and stop is None:
            accelerator.load_state(folder)
        seen: list[list[int]] = []
        for epoch in range(sampler.epoch, 3):
            sampler.set_epoch(epoch)
            for points, labels, indices in loader:
                losses_B = torch.nn.functional.cross_entropy(model(points), labels, reduction="none")
                accelerator.backward((losses_B * sampler.weights(indices)).mean())
                sampler.report(indices, losses_B)
                optimizer.step()
                optimizer.zero_grad()
                seen.append(indices.tolist())
                if len(seen) == stop:
                    accelerator.save_state(folder)
                    sampler.close()
                    return seen, line
        sampler.close()
        return seen, line

    whole, expected = train()
    for stop in range(1, len(whole) + 1):
        first, _ = train(stop, tmp_path / str(stop))
        rest, line = train(None, tmp_path / str(stop))
        assert first + rest == whole, f"stopped after {stop}"
        assert torch.equal(line.weight, expected.weight)


# ── Hugging Face: the Trainer, data sets of dicts ───────────────────────────────────────────────────────────────────


def trained(
    example: ModuleType, folder: Path, dataset: ShadeDataset, stop: int | None = None, own: bool = False, **options: Any
) -> tuple[Any, list[list[int]]]:
    """Trains up to a step, from where the folder's snapshots end, or the Trainer's ``own`` checkpoints; returns the
    trainer, and the samples of each step."""
    transformers: Any = importlib.import_module("transformers")

    class Stop(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= state.global_step == stop

    trainer = example.make_trainer(folder, dataset, **options)
    seen: list[list[int]] = []
    report = trainer.sampler.report
    trainer.sampler.report = lambda indices, losses: (seen.append(indices.tolist()), report(indices, losses))
    trainer.add_callback(Stop())
    if own:
        trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))
    else:
        shade = example.ShadeTrainerCallback(trainer, persist_to=folder / "snapshots", every="never")
        trainer.train(resume_from_checkpoint=shade.restore())
        shade.checkpointer.close()
    trainer.sampler.close()
    return trainer, seen


def play_trainer(
    example: ModuleType, folder: Path, stops: slice, *, epochs: int = 3, workers: int = 0, **options: Any
) -> None:
    """Stops the Trainer after some of its steps, the last of an epoch included, and compares all that follow."""
    dataset = ShadeDataset(example.make_text(40), cache="local://", working_set_fraction=0.5)
    options |= {"num_train_epochs": epochs, "dataloader_num_workers": workers}
    whole, steps = trained(example, folder / "whole", dataset, **options)
    assert whole.state.max_steps == 5 * epochs, "the Trainer counts the steps of the first epoch"
    assert 5 * (epochs - 1) < len(steps) < 5 * epochs
    for stop in range(1, len(steps) + 1)[stops]:
        _, first = trained(example, folder / str(stop), dataset, stop, **options)
        resumed, rest = trained(example, folder / str(stop), dataset, **options)
        assert (first, rest) == (steps[:stop], steps[stop:]), f"stopped after {stop}"
        assert torch.equal(resumed.model.line.weight, whole.model.line.weight)
    dataset.close()


@pytest.mark.redis
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_trainer_accumulates_gradients_over_steps_of_epochs_that_are_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the uniform mode, where the loss is the Trainer's own."""
    example = load("transformers_trainer")
    monkeypatch.setattr(example, "ShadeSampler", partial(ShadeSampler, mode="uniform"))
    dataset = ShadeDataset(example.make_text(48), cache="memory://")
    options = {"num_train_epochs": 2, "gradient_accumulation_steps": 2}
    whole, steps = trained(example, tmp_path / "whole", dataset, **options)
    assert whole.state.global_step == 6
    for stop in range(1, 7):
        trained(example, tmp_path / str(stop), dataset, stop, **options)
        resumed, rest = trained(example, tmp_path / str(stop), dataset, **options)
        assert rest == steps[2 * stop :]
        assert torch.equal(resumed.model.line.weight, whole.model.line.weight)
    dataset.close()


@pytest.mark.filterwarnings("ignore")
def test_what_the_trainer_cannot_do_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = load("transformers_trainer")
    dataset = ShadeDataset(example.make_text(40), cache=None)
    with pytest.raises(ConfigError, match="to divide the 5 steps of an epoch, got 2"):
        example.make_trainer(tmp_path, dataset, gradient_accumulation_steps=2)
    saving = {"num_train_epochs": 1, "save_strategy": "steps", "save_steps": 2}
    trained(example, tmp_path / "own", dataset, **saving)
    trainer = example.make_trainer(tmp_path / "own", dataset, **saving | {"num_train_epochs": 2})
    (tmp_path / "own" / "checkpoint-5" / "sampler.pt").unlink()  # as of another Trainer
    with pytest.raises(ConfigError, match=r"resumes after step 5, .* with sampler.pt, .* ShadeTrainerCallback"):
        trainer.train(resume_from_checkpoint=True)
    trainer = example.make_trainer(tmp_path / "own", dataset, **saving)
    shade = example.ShadeTrainerCallback(trainer, persist_to=tmp_path / "own" / "snapshots")
    assert shade.restore()
    with pytest.raises(ConfigError, match="a start at step 5, got 0"):
        trainer.train()
    shade.checkpointer.close()
    with pytest.raises(ConfigError, match=r"labels int \(B,\).*uniform"):
        trainer.sample_losses({}, {"labels": torch.zeros(8, 4)})
    for version, name, value, message in (
        (2, "is_deepspeed_enabled", True, "got 'DeepSpeed'; let the Trainer save it"),
        (2, "model_init", example.BagOfWords, "got 'model_init='; pass the model"),
        (1, "is_fsdp_enabled", True, r"got 'FSDP1'; fsdp_config=.*2"),
        (2, "is_fsdp_enabled", True, r"got .adapters of PEFT under FSDP2.; leave fsdp= out"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr("shade.integrations._resume_folder.is_peft_model", lambda model: True)
            plugin = SimpleNamespace(fsdp_version=version)
            patch.setattr(trainer.accelerator.state, "fsdp_plugin", plugin, raising=False)
            patch.setattr(trainer, name, value)
            with pytest.raises(ConfigError, match=message):
                example.ShadeTrainerCallback(trainer, persist_to=tmp_path)


@pytest.mark.redis
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_trainers_own_checkpoints_hold_the_sampler(tmp_path: Path) -> None:
    example = load("transformers_trainer")
    dataset = ShadeDataset(example.make_text(40), cache="local://", working_set_fraction=0.5)
    options = {"num_train_epochs": 3, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "own": True}
    whole, steps = trained(example, tmp_path / "whole", dataset, **options)
    for stop in range(1, len(steps)):
        trained(example, tmp_path / str(stop), dataset, stop, **options)
        resumed, rest = trained(example, tmp_path / str(stop), dataset, **options)
        assert rest == steps[stop:], f"stopped after {stop}"
        assert torch.equal(resumed.model.line.weight, whole.model.line.weight)
    dataset.close()


@pytest.mark.redis
@pytest.mark.filterwarnings("ignore")
def test_the_trainer_goes_on_within_an_epoch_and_after_one(tmp_path: Path) -> None:
    play_trainer(load("transformers_trainer"), tmp_path, slice(2, None, 4))
    play_trainer(load("transformers_trainer"), tmp_path / "ends", slice(4, None, 5))


@pytest.mark.redis
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("epochs", "workers"), [(3, 0), (3, 2), (5, 0)])
def test_the_trainer_stopped_at_any_step(epochs: int, workers: int, tmp_path: Path) -> None:
    """Five epochs: the Trainer, which counts steps of the first, is more than an epoch behind at the end."""
    play_trainer(load("transformers_trainer"), tmp_path, slice(None), epochs=epochs, workers=workers)


@pytest.mark.redis
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["bag of words", "bert"])
def test_the_trainer_trains_its_own_models_evaluates_and_keeps_the_best(kind: str, tmp_path: Path) -> None:
    example = load("transformers_trainer")
    transformers: Any = importlib.import_module("transformers")
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    text = example.make_text(64)
    dataset = ShadeDataset(text, cache="memory://")

    class Ruin(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_epoch_end(self, args: Any, state: Any, control: Any, model: torch.nn.Module, **_: Any) -> None:
            if state.epoch > 2:
                with torch.no_grad():
                    getattr(model, "line" if kind != "bert" else "classifier").weight.mul_(-100)

    for epochs in (2, 3):
        torch.manual_seed(0)
        config = transformers.BertConfig(vocab_size=60, **shape)
        model = example.BagOfWords() if kind != "bert" else transformers.BertForSequenceClassification(config)
        options = {"num_train_epochs": epochs, "eval_strategy": "epoch"}
        trainer = example.make_trainer(tmp_path, dataset, model=model, eval_dataset=text, **options)
        trainer.add_callback(Ruin())
        shade = example.ShadeTrainerCallback(trainer, persist_to=tmp_path / "snapshots", keep="last=1,best=eval_loss")
        trainer.train(resume_from_checkpoint=shade.restore())
        losses = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
        assert len(losses) == epochs, "also those of before"
        shade.checkpointer.wait_committed()
        kept = {snapshot.record.step: snapshot.record.metrics for snapshot in shade.checkpointer.list()}
        shade.checkpointer.close()
        trainer.sampler.close()
    best = losses.index(min(losses)) + 1
    assert best < 3, "the last epoch ruins the model"
    assert set(kept) == {8 * best, trainer.state.global_step}
    assert kept[8 * best]["eval_loss"] == min(losses)
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


# ── Ray Train ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.redis
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")
def test_ray_train_stopped_at_any_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run of three epochs, in which the worker is killed after each step once, and one that nothing disturbs."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'examples'}")  # of the workers
    example = load("ray_train")
    ray: Any = importlib.import_module("ray")
    plain, failures = example.train, ray.train.FailureConfig

    def train(config: dict[str, Any]) -> None:
        import threading

        import ray_train

        assert threading.current_thread() is not threading.main_thread(), "where Python delivers no signal"
        folder = Path(config["snapshots"]).parent
        num_kills = len(list(folder.glob("kill-*")))
        if (mark := folder / "kill-was-given").exists():
            mark.rename(folder / f"kill-after-{num_kills}")
            num_kills = len(list(folder.glob("kill-*")))
        ray_train.make_data.__defaults__ = (24,)
        ordinary = ray_train.RayLoader
        ray_train.RayLoader = lambda *given, **options: ordinary(*given, **options | {"every": 1})
        plain(config | {"kill_at": num_kills + 1 if config["kill_at"] else 0})

    monkeypatch.setattr(example, "train", train)
    monkeypatch.setattr(ray.train, "FailureConfig", lambda max_failures: failures(max_failures=10 * max_failures))
    ray.init(num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
    try:
        weights = []
        for name in ("undisturbed", "killed"):
            result = example.run(tmp_path / name, kill_at=int(name == "killed"))
            with result.checkpoint.as_directory() as folder:
                weights.append(torch.load(Path(folder) / "model.pt", weights_only=True)["weight"])
    finally:
        ray.shutdown()
    assert len(list((tmp_path / "killed").glob("kill-after-*"))) >= 7
    assert torch.equal(*weights)


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
