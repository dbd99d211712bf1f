"""Every codec by its name, through a Checkpointer: real files, a real server, a flusher of its own."""

from __future__ import annotations

import json
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shade.checkpoint._buffer.shared_memory_folder import own_folder
from shade.checkpoint._codecs.base import CODECS
from shade.checkpoint._codecs.delta import Delta
from shade.checkpoint._format.manifest import Manifest
from shade.checkpoint._integrations.dcp_writer import ShadeWriter
from shade.checkpoint._save.packing import PackedShard
from shade.checkpoint._save.stream_upload import StreamUpload
from shade.checkpoint._session.checkpointer import Checkpointer
from shade.checkpoint._session.open_tiers import Tiers
from shade.cli import main
from shade.errors import CheckpointError, ConfigError, StorageError
from shade.storage.directory import DirectoryVolume
from shade.store._servers.server import LocalServer

pytestmark = pytest.mark.multiprocess

DELTAS = [name for name in CODECS if issubclass(CODECS.get(name), Delta)]
ROUGH = [name for name in CODECS if not CODECS.get(name).is_exact]


class Training:
    """A model, its optimizer, a frozen part."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
        self.model.add_module("frozen", torch.nn.Linear(64, 64).requires_grad_(False))
        self.optimizer = torch.optim.Adam([each for each in self.model.parameters() if each.requires_grad])

    def step(self) -> None:
        self.model(torch.randn(16, 64)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, torch.Tensor]:
        found = {f"model/{name}": each.clone() for name, each in self.model.state_dict().items()}
        for number, entry in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer/state/{number}/{name}": each.clone() for name, each in entry.items()}
        return found


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., tuple[Training, Checkpointer]]]:
    opened: list[Checkpointer] = []
    run = f"codecs-{secrets.token_hex(6)}"

    def make(**more: Any) -> tuple[Training, Checkpointer]:
        training = Training()
        settings = {"persist_to": str(tmp_path / "durable"), "run": run, "every": "never", "keyframe_every": 3}
        made = Checkpointer(**settings | more)
        made.attach(model=training.model, optimizer=training.optimizer)
        opened.append(made)
        return training, made

    yield make
    for each in opened:
        each.close()
    shutil.rmtree(own_folder(run), ignore_errors=True)


def advance(training: Training, checkpointer: Checkpointer) -> None:
    """Takes a step and begins a save."""
    training.step()
    checkpointer.step()
    checkpointer.save()


def compare(saved: dict[str, torch.Tensor], training: Training, bounds: dict[str, Any]) -> None:
    for name, tensor in training.state().items():
        if name in bounds:
            assert float((saved[name].double() - tensor.double()).abs().max()) <= bounds[name].max_abs
        else:
            assert torch.equal(saved[name], tensor), name


@pytest.mark.parametrize("codec", list(CODECS))
def test_a_run_goes_on_from_storage(
    codec: str, begin: Callable[..., tuple[Training, Checkpointer]], caplog: pytest.LogCaptureFixture
) -> None:
    training, checkpointer = begin(codec=codec)
    saved = {}
    for _ in range(5):
        advance(training, checkpointer)
        saved = training.state()
        checkpointer.wait_committed()
    checkpointer.close()
    again, other = begin(codec=codec)
    caplog.clear()
    restored = other.restore_latest()
    assert (restored.step, restored.tiers) == (5, ("storage",))
    compare(saved, again, dict(restored.bounds))
    assert bool(restored.bounds) is (codec in ROUGH)
    assert ("comes back with loss" in caplog.text) is (codec in ROUGH), "it is said loudly, or there is nothing to say"
    again.step()
    other.step()
    other.save()
    other.wait_committed()
    newest = other.list()[0].record
    assert (newest.step, newest.base) == (6, None), "a process that comes after begins with a keyframe"


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "codec", [pytest.param(each, marks=[] if each in ("xor-zstd", "excp") else pytest.mark.slow) for each in DELTAS]
)
def test_cluster_memory_and_its_flusher_know_the_chain(
    codec: str, begin: Callable[..., tuple[Training, Checkpointer]], tmp_path: Path
) -> None:
    with LocalServer() as server:
        training, checkpointer = begin(codec=codec, store=server.url.reveal(), keep="last=1")
        saved = {}
        for _ in range(8):
            advance(training, checkpointer)
            saved = training.state()
            assert checkpointer.wait_committed() == "cluster memory"
            checkpointer.wait_durable(60)  # the flusher starts slower than a fast machine fills the slots
        newest = checkpointer.list()[0]
        assert newest.record.base is not None
        assert newest.base is not None
        assert {"cluster memory", "storage"} <= set(newest.tiers)
        assert {"storage"} <= set(newest.base.tiers)
        checkpointer.close()
        again, other = begin(codec=codec, store=server.url.reveal())
        restored = other.restore_latest()
        assert (restored.step, restored.tiers) == (8, ("cluster memory",))
        compare(saved, again, dict(restored.bounds))
        other.close()
        server.ask("FLUSHALL")
        last, alone = begin(codec=codec)
        restored = alone.restore_latest()
        assert (restored.step, restored.tiers) == (8, ("storage",))
        compare(saved, last, dict(restored.bounds))


def test_a_crashed_process_finds_in_shared_memory_what_the_others_have(
    begin: Callable[..., tuple[Training, Checkpointer]],
) -> None:
    training, checkpointer = begin(codec="topk-delta")
    for _ in range(2):
        advance(training, checkpointer)
        checkpointer.wait_committed()
    saved = training.state()
    checkpointer._end(keep_buffers=True)
    checkpointer._closed = True
    again, other = begin(codec="topk-delta")
    restored = other.restore_latest()
    assert restored.tiers == ("shared memory",)
    assert restored.bounds
    compare(saved, again, dict(restored.bounds))


def test_the_command_tells_of_bases_and_bounds(
    begin: Callable[..., tuple[Training, Checkpointer]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training, checkpointer = begin(codec="topk-delta", keep="all", max_error=1.0)  # tighter, and all is stored exactly
    for _ in range(3):
        advance(training, checkpointer)
        checkpointer.wait_committed()
    checkpointer.close()
    where = ["--persist-to", str(tmp_path / "durable")]
    assert main(["checkpoint", "show", "3", *where]) == 0
    shown = capsys.readouterr().out
    assert "builds on step 2" in shown
    assert "off by at most" in shown
    assert "model/0.weight" in shown.partition("off by at most")[2]
    assert main(["checkpoint", "show", "1", *where]) == 0
    shown = capsys.readouterr().out
    assert "off by at most" not in shown
    assert "builds on" not in shown
    assert main(["checkpoint", "verify", "all", *where]) == 0
    assert "0 damaged" in capsys.readouterr().out
    target = tmp_path / "state.pt"
    assert main(["checkpoint", "export", "3", "--to", str(target), "--format", "torch", *where]) == 0
    assert "comes back with loss" in capsys.readouterr().err
    assert torch.load(target, weights_only=True)["model"].keys() == training.model.state_dict().keys()
    assert main(["checkpoint", "show", "3", *where, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["commit"]["version"] == 2
    assert "model/0.weight" in told["manifests"][0]["bounds"]
    shutil.rmtree(next((tmp_path / "durable").rglob("step-0000000002")))
    assert main(["checkpoint", "verify", "all", *where]) == 1
    assert "in no tier" in capsys.readouterr().out


def test_what_a_codec_needs_is_said_at_once(
    begin: Callable[..., tuple[Training, Checkpointer]], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="one save in flight"):
        begin(codec="xor-zstd", in_flight=2)
    with pytest.raises(ConfigError, match="none, zstd"):
        ShadeWriter(persist_to=str(tmp_path), codec="topk-delta")
    _, checkpointer = begin(codec="xor-zstd", strategy="pccheck")
    assert checkpointer.config.in_flight == 1


def test_compression_is_off_where_it_loses(
    begin: Callable[..., tuple[Training, Checkpointer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tiers, "time_write", lambda self, num_bytes: num_bytes / 1e15)
    training, checkpointer = begin(codec="xor-zstd", compress="if-faster")
    for _ in range(2):
        advance(training, checkpointer)
        checkpointer.wait_committed()
        snapshot = checkpointer.list()[0]
        manifest = checkpointer._tiers.reader.manifest(snapshot, 0)
        assert {entry.codec for entry in manifest.chunks} == {"none"}


# ── streamed to storage ─────────────────────────────────────────────────────────────────────────────────────────────


def stored(checkpointer: Checkpointer) -> Manifest:
    return checkpointer._tiers.reader.manifest(checkpointer.list()[0], 0)


def half_random(training: Training) -> None:
    """Gives zstd something to compress and something not to."""
    with torch.no_grad():
        next(training.model.parameters()).zero_()


@pytest.mark.parametrize("compress", ["always", "if-faster"])
@pytest.mark.parametrize("strategy", ["asymmetric", "pccheck", "datastates"])
def test_a_streamed_codec_gives_the_same_snapshot(
    strategy: str,
    compress: str,
    begin: Callable[..., tuple[Training, Checkpointer]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(Tiers, "time_write", lambda self, num_bytes: num_bytes / 1e3)
    streamed: list[str] = []
    packed = StreamUpload.packed

    def noted(self: StreamUpload) -> PackedShard:
        streamed.append(self.manifest.codec)
        return packed(self)

    monkeypatch.setattr(StreamUpload, "packed", noted)
    training, checkpointer = begin(strategy=strategy, codec="zstd", compress=compress)
    half_random(training)
    for _ in range(3):
        advance(training, checkpointer)
        checkpointer.wait_committed()
    saved, manifest = training.state(), stored(checkpointer)
    assert set(streamed) == {"zstd"}
    assert {manifest.chunk_codec(number) for number in range(len(manifest.chunks))} == {"zstd"}
    (data,) = (tmp_path / "durable").glob("*/step-0000000003/rank-0.chunks")
    assert data.stat().st_size == manifest.stored_bytes < manifest.num_bytes
    assert checkpointer.latest is not None
    assert checkpointer.latest.is_in_shared_memory
    with torch.no_grad():
        next(training.model.parameters()).add_(1)
    assert checkpointer.restore_latest().tiers == ("shared memory",)
    compare(saved, training, {})
    checkpointer.close()
    assert (
        main(["checkpoint", "verify", "all", "--persist-to", str(tmp_path / "durable"), "--run", checkpointer.run]) == 0
    )
    again, other = begin(strategy=strategy)
    assert other.restore_latest().tiers == ("storage",)
    compare(saved, again, {})


def test_storage_that_fails_within_a_streamed_codec_fails_that_save_and_no_other(
    begin: Callable[..., tuple[Training, Checkpointer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    training, checkpointer = begin(strategy="asymmetric", codec="zstd")
    fails = [True]
    write = DirectoryVolume.write

    def broken(self: DirectoryVolume, name: str, chunks: Iterable[Any]) -> int:
        if fails[0] and name.endswith(".chunks"):
            next(iter(chunks))
            raise StorageError("no space left")
        return write(self, name, chunks)

    monkeypatch.setattr(DirectoryVolume, "write", broken)
    advance(training, checkpointer)
    with pytest.raises(CheckpointError, match="no space left"):
        checkpointer.wait_committed()
    assert "shade-ahead" not in [thread.name for thread in threading.enumerate()], "nobody encodes any more"
    assert checkpointer.latest is not None
    assert checkpointer.latest.is_in_shared_memory
    fails[0] = False
    advance(training, checkpointer)
    saved = training.state()
    checkpointer.wait_committed()
    checkpointer.close()
    again, other = begin(strategy="asymmetric")
    assert other.restore_latest().step == 2
    compare(saved, again, {})


def test_to_cluster_memory_a_codec_is_not_streamed(begin: Callable[..., tuple[Training, Checkpointer]]) -> None:
    with LocalServer() as server:
        training, checkpointer = begin(store=server.url, persist_to=None, strategy="asymmetric", codec="zstd")
        assert not checkpointer._saver._writer.can_stream
        advance(training, checkpointer)
        saved = training.state()
        checkpointer.wait_committed()
        assert stored(checkpointer).stored_bytes < stored(checkpointer).num_bytes
        checkpointer.close()
        again, other = begin(store=server.url, persist_to=None)
        assert other.restore_latest().step == 1
        compare(saved, again, {})
        other.close()
