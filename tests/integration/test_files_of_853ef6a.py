"""Files that commit 853ef6a wrote are read by this one: snapshots, exports, run directories, cache entries, states.

`tests/fixtures_853ef6a/README.md` says what the files are and how they were made. Every test works on a copy.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.datasets import ImageFolder

from shade import Checkpointer, GradientEngine, ShadeDataset, ShadeSampler, SparseSGD, open_store
from shade.checkpoint.dcp import ShadeReader
from shade.cli import main
from shade.store._servers.server import LocalServer
from tests.support.launching import STREAM, run, stream_of

pytestmark = pytest.mark.multiprocess

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures_853ef6a"
MODIFIED_NS = 1_600_000_000_000_000_000
"""Time of change of every image when its fingerprint was taken."""
LOSSY_WIDTH = 33

Things = tuple[nn.Module, torch.optim.Optimizer]
Begin = Callable[..., Checkpointer]


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """The tensors that were saved, by run and step."""
    states: dict[str, Any] = torch.load(FIXTURES / "expected.pt", weights_only=True)
    return states


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """A copy of the storage."""
    return Path(shutil.copytree(FIXTURES / "storage", tmp_path / "storage"))


@pytest.fixture
def opened(storage: Path) -> Iterator[Begin]:
    """Opens checkpointers on the copy."""
    made: list[Checkpointer] = []

    def begin(run: str, **more: Any) -> Checkpointer:
        settings = {"persist_to": str(storage), "run": run, "every": "never", "keep": "last=9"}
        made.append(Checkpointer(**(settings | more)))
        return made[-1]

    yield begin
    for each in made:
        each.close()


def training(width: int = 10) -> Things:
    """Fresh things, with other numbers than those that were saved."""
    torch.manual_seed(77)
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 3))
    return model, torch.optim.Adam(model.parameters(), lr=0.5)


def same(found: Any, saved: Any) -> bool:
    """Equal bit for bit, in structure and dtype too."""
    if isinstance(saved, torch.Tensor):
        return found.dtype == saved.dtype and torch.equal(found, saved)
    if isinstance(saved, dict):
        return found.keys() == saved.keys() and all(same(found[key], saved[key]) for key in saved)
    if isinstance(saved, list | tuple):
        return len(found) == len(saved) and all(same(one, other) for one, other in zip(found, saved, strict=True))
    return bool(found == saved)


def check(things: Things, saved: dict[str, Any]) -> None:
    """Compares a model and its optimizer with what was saved."""
    model, optimizer = things
    assert same(dict(model.state_dict()), dict(saved["model"]))
    assert same(optimizer.state_dict(), saved["optimizer"])


def shade(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str]:
    """Runs the command; exit code and output."""
    capsys.readouterr()
    code = main([str(word) for word in words])
    return code, capsys.readouterr().out


class TestSnapshots:
    """Snapshots in storage and in a server."""

    @pytest.mark.parametrize("run", ["plain", "delta", "ranks"])
    def test_every_step_comes_back_exactly(self, run: str, opened: Begin, expected: dict[str, Any]) -> None:
        checkpointer, things = opened(run), training()
        checkpointer.attach(model=things[0], optimizer=things[1])
        assert sorted(each.record.step for each in checkpointer.list()) == list(expected[run])
        for step, saved in expected[run].items():
            restored = checkpointer.restore(step)
            assert (restored.step, restored.tiers, dict(restored.bounds)) == (step, ("storage",), {})
            check(things, saved)

    def test_lossy_one_comes_back_as_853ef6a_restored_it(self, opened: Begin, expected: dict[str, Any]) -> None:
        checkpointer, things = opened("lossy"), training(LOSSY_WIDTH)
        checkpointer.attach(model=things[0], optimizer=things[1])
        restored = checkpointer.restore_latest()
        saved = expected["lossy"]
        assert restored.step == saved["step"]
        assert {name: [b.max_abs, b.relative] for name, b in restored.bounds.items()} == saved["bounds"] != {}
        check(things, saved)

    def test_the_run_continues(self, opened: Begin, expected: dict[str, Any]) -> None:
        checkpointer, things = opened("delta", codec="xor-zstd"), training()
        checkpointer.attach(model=things[0], optimizer=things[1])
        assert checkpointer.restore_latest().step == 4
        checkpointer.step()
        checkpointer.save()
        checkpointer.wait_durable(60)
        assert [each.record.step for each in checkpointer.list()][:2] == [5, 4]
        checkpointer.restore(4)
        check(things, expected["delta"][4])

    @pytest.mark.multiprocess
    @pytest.mark.redis
    def test_a_server_gives_it_back(self, server: LocalServer, expected: dict[str, Any]) -> None:
        url = server.url.reveal()
        fill(url, FIXTURES / "memory.json")
        things = training()
        with Checkpointer(url, run="memory", every="never") as checkpointer:
            checkpointer.attach(model=things[0], optimizer=things[1])
            for step in (1, 2):
                restored = checkpointer.restore(step)
                assert (restored.step, restored.tiers) == (step, ("cluster memory",))
                check(things, expected["memory"][step])

    def test_commands_read_them(self, storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for run_id, steps in (("plain", 2), ("delta", 4), ("lossy", 2), ("ranks", 1), ("engine", 1), ("sharded", 1)):
            where = ("--persist", storage, "--run", run_id)
            code, out = shade(capsys, "checkpoint", "verify", "all", *where)
            assert code == 0, out
            code, out = shade(capsys, "checkpoint", "list", "--json", *where)
            assert (code, out.count('"step"')) == (0, steps), out

    @pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
    def test_sharded_state_through_dcp(self, storage: Path, expected: dict[str, Any]) -> None:
        state = {"model": {"weight": torch.zeros(40, 10), "bias": torch.zeros(10, dtype=torch.bfloat16)}, "epoch": 0}
        with ShadeReader(persist_to=str(storage), run="sharded") as reader:
            dcp.load(state, storage_reader=reader, no_dist=True)
        assert same(state, expected["sharded"])


class TestExports:
    """What ``shade checkpoint export`` wrote."""

    @pytest.mark.parametrize("name", ["whole.safetensors", "whole.pt", "whole-dcp"])
    def test_export_is_imported_again(
        self, name: str, storage: Path, opened: Begin, expected: dict[str, Any], capsys: pytest.CaptureFixture[str]
    ) -> None:
        where = ("--persist", storage, "--run", "imported", "--step", "2")
        code, out = shade(capsys, "checkpoint", "import", FIXTURES / "exports" / name, *where)
        assert code == 0, out
        checkpointer, things = opened("imported"), training()
        checkpointer.attach(model=things[0], optimizer=things[1])
        assert checkpointer.restore_latest().step == 2
        check(things, expected["plain"][2])

    def test_export_is_the_same_file(self, storage: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        to, old = tmp_path / "now.safetensors", FIXTURES / "exports" / "whole.safetensors"
        words = ("--to", to, "--format", "safetensors", "--persist", storage, "--run", "plain")
        code, out = shade(capsys, "checkpoint", "export", "2", *words)
        assert code == 0, out
        assert same(load_file(to), load_file(old))
        assert to.read_bytes() == old.read_bytes()


class TestEngine:
    """The state of two ranks' gradient engines, in a file and in a snapshot, goes into one rank's."""

    @pytest.fixture(autouse=True)
    def _group(self, tmp_path: Path) -> Iterator[None]:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
        yield
        dist.destroy_process_group()

    @pytest.mark.parametrize("kept_in", ["file", "snapshot"])
    def test_training_continues_as_it_did(self, kept_in: str, opened: Begin) -> None:
        saved = torch.load(FIXTURES / "engine.pt", weights_only=False)
        ranks = saved["ranks"]
        for state in ranks:
            assert any(np.any(np.asarray(each["residual"])) for each in state["engine"]["residuals"])
        torch.manual_seed(77)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4))
        optimizer = SparseSGD(model.parameters(), lr=0.5, momentum=0.1)
        with GradientEngine(model, optimizer, density=0.05, bucket_bytes=4000) as engine:
            if kept_in == "file":
                model.load_state_dict(ranks[0]["model"])
                optimizer.load_state_dict(ranks[0]["optimizer"])
                engine.load_state_dicts([state["engine"] for state in ranks])
            else:
                checkpointer = opened("engine")
                checkpointer.attach(model=model, optimizer=optimizer, engine=engine)
                assert checkpointer.restore_latest().step == 5
            assert engine.step_count == 5
            assert same(dict(model.state_dict()), dict(ranks[0]["model"]))
            for step in range(5, 8):
                torch.manual_seed(100 + step)
                products = [(parameter * torch.randn(parameter.shape)).sum() for parameter in model.parameters()]
                torch.stack(products).sum().backward()
                engine.step()
            engine.finish()
            assert same(dict(model.state_dict()), saved["later"])


def fill(url: str, dump: Path) -> None:
    """Writes the keys and values of a dump into a server."""
    items = {key: base64.b64decode(value) for key, value in json.loads(dump.read_text()).items()}
    with open_store(url) as store:
        assert all(store.set_many(items))


def copy_images(source: Path, to: Path) -> Path:
    """A copy whose files have the time of change of the originals, which is part of a data set's fingerprint."""
    shutil.copytree(source, to)
    for path in to.rglob("*.png"):
        os.utime(path, ns=(MODIFIED_NS, MODIFIED_NS))
    return to


class TestCache:
    """Entries in a server, and a sampler's state."""

    @pytest.mark.multiprocess
    @pytest.mark.redis
    @pytest.mark.parametrize("form", ["encoded", "decoded", "item"])
    def test_every_entry_is_a_hit(self, form: str, server: LocalServer, tmp_path: Path) -> None:
        url = server.url.reveal()
        fill(url, FIXTURES / "cache" / f"{form}.json")
        images = copy_images(FIXTURES / "cache" / "images", tmp_path / "images")
        tensors = torch.load(FIXTURES / "cache" / "items.pt", weights_only=True)
        plain: Any = TensorDataset(*tensors) if form == "item" else ImageFolder(str(images))
        saved = [tuple(np.asarray(part).copy() for part in plain[index]) for index in range(12)]
        more = {"form": "decoded"} if form == "decoded" else {}
        dataset = ShadeDataset(plain, cache=url, working_set_fraction=1.0, **more)
        sampler = ShadeSampler(dataset, batch_size=4, seed=0, mode="uniform", num_replicas=1, rank=0)
        for path in images.rglob("*.png"):
            path.write_bytes(b"not an image")  # a miss would fail
        if form == "item":
            for tensor in plain.tensors:
                tensor.zero_()
        sampler.set_epoch(0)
        seen = {}
        for batch in DataLoader(dataset, batch_size=4, sampler=sampler, collate_fn=list):
            sampler.report(torch.tensor([sample[-1] for sample in batch]), torch.ones(len(batch)))
            seen |= {int(sample[-1]): tuple(np.asarray(part) for part in sample[:-1]) for sample in batch}
        assert sorted(seen) == list(range(12))
        for index, parts in seen.items():
            assert all(np.array_equal(one, other) for one, other in zip(parts, saved[index], strict=True)), index
        sampler.close()
        dataset.close()

    @pytest.mark.filterwarnings("ignore:the training loop never called sampler.weights")
    def test_sampler_continues_in_mid_epoch(self, tmp_path: Path) -> None:
        images = copy_images(FIXTURES / "cache" / "images", tmp_path / "images")
        dataset = ShadeDataset(ImageFolder(str(images)), cache="memory://", working_set_fraction=0.5)
        sampler = ShadeSampler(dataset, batch_size=2, seed=0, num_replicas=1, rank=0)
        sampler.load_state_dict(torch.load(FIXTURES / "cache" / "sampler.pt", weights_only=False))
        loader = DataLoader(dataset, batch_size=2, sampler=sampler, collate_fn=list)
        drawn = []
        for epoch in (2, 3):
            sampler.set_epoch(epoch)
            drawn.append([])
            for batch in loader:
                index_B = torch.tensor([sample[-1] for sample in batch])
                sampler.report(index_B, 1.0 + index_B % 5)
                drawn[-1] += index_B.tolist()
        assert drawn == json.loads((FIXTURES / "cache" / "sampler.json").read_text())


class TestRunDirectory:
    """A run of the launcher that was killed before step 15 of 24."""

    @pytest.fixture
    def out(self, tmp_path: Path) -> Path:
        """A copy of the run directory; what it names is here."""
        images = copy_images(FIXTURES / "run" / "images", tmp_path / "images")
        out = Path(shutil.copytree(FIXTURES / "run" / "out", tmp_path / "out"))
        config = (out / "run.json").read_text().replace("@RUN@", str(out)).replace("@IMAGES@", str(images))
        (out / "run.json").write_text(config.replace("@PROGRAM@", str(STREAM)))
        return out

    def test_commands_read_it(self, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
        code, told = shade(capsys, "report", out)
        assert (code, "Hit ratio" in told) == (0, True), told
        code, told = shade(capsys, "simulate", out)
        assert (code, "44 origin reads" in told) == (0, True), told
        code, told = shade(capsys, "simulate", out, "--add-workers", "2")
        assert (code, "2 more workers" in told) == (0, True), told
        code, told = shade(capsys, "quality", out)
        assert (code, "quality.csv has all of them" in told) == (0, True), told
        code, told = shade(capsys, "top", out, "--once")
        assert code == 0, told

    @pytest.mark.slow
    @pytest.mark.multiprocess
    def test_it_is_resumed_with_the_samples_it_would_have_drawn(self, out: Path, tmp_path: Path) -> None:
        log = tmp_path / "log"
        log.mkdir()
        (lease,) = out.glob("checkpoints/*/lease.json")
        lease.write_text(lease.read_text().replace('"beat_seconds": 5.0', '"beat_seconds": 0.2'))  # a new run waits 3
        ended = run("--resume", out, cwd=tmp_path, STREAM_LOG=str(log))
        assert ended.returncode == 0, ended.stderr + (out / "output.log").read_text()[-2000:]
        drawn = json.loads((FIXTURES / "run" / "drawn.json").read_text())
        before = {int(step): ids for step, ids in drawn["killed"].items()}
        after = stream_of(log, 1)
        assert min(after) == 15
        assert before | after == {int(step): ids for step, ids in drawn["whole"].items()}
        trained = torch.load(log / "parameters.pt", weights_only=True)
        whole = torch.load(FIXTURES / "run" / "parameters.pt", weights_only=True)
        for name, tensor in whole.items():  # other processors may sum in another order
            torch.testing.assert_close(trained[name], tensor, rtol=1e-5, atol=1e-6)


class TestTune:
    """The files of ``shade tune``."""

    def test_a_finished_study_is_not_run_again(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = Path(shutil.copytree(FIXTURES / "tune", tmp_path / "tune"))
        profile, journal = (folder / name for name in ("profile.json", "evaluations.jsonl"))
        before = json.loads(profile.read_text()), journal.read_text()
        about = json.loads(journal.read_text().splitlines()[0])["study"]["about"]
        words = ["--command", about["command"], "--metric", "accuracy", "--batch", "32:128", "--batch-multiple", "32"]
        code, out = shade(capsys, "tune", *words, "--evaluations", "5", "--initial", "4", "--out", folder)
        assert (code, "best measured: 0.99897 at batch 64, density 0.00103" in out) == (0, True), out
        assert (json.loads(profile.read_text()), journal.read_text()) == before
