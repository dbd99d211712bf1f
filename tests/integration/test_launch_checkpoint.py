"""A run whose snapshots go elsewhere: into a store, into storage of its own, or both, and back from each of them."""

from __future__ import annotations

import math
import shutil
import signal
from pathlib import Path

import pytest
import torch

from shade.checkpoint._buffer.shared_memory_folder import own_folder
from shade.checkpoint._tiers.memory import MemoryTier
from shade.checkpoint._tiers.storage import StorageTier
from shade.config import RunConfig
from shade.launch.run import main
from shade.storage import open_volume
from shade.store import open_store
from shade.store._servers.local_cluster import free_ports
from shade.store._servers.server import LocalServer
from tests.support.launching import (
    STREAM,
    forget,
    make_images,
    rows,
    run,
    same_state,
    saved_step,
    start,
    stream_of,
    wait_for,
)

pytestmark = pytest.mark.multiprocess

KILL_AT, SAVED = 10, 9
"""The stream's script saves every third step."""
WORDS = ("--epochs", "3", "--workers", "0", "--cache", "none", "--batch_size", "8", "--out", "out")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 images."""
    return make_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """Where a run that nobody kills has written its stream and its parameters."""
    here = tmp_path_factory.mktemp("undisturbed")
    told = run(STREAM, data, *WORDS, cwd=here, STREAM_LOG=str(here))
    assert told.returncode == 0, told.stderr
    return here


class Killed:
    """A run that was killed before a step; what is left of it can be looked at, spoilt and resumed."""

    def __init__(self, here: Path, data: Path, *words: str) -> None:
        self.here, self.out = here, here / "out"
        told = run(STREAM, data, *WORDS, *words, cwd=here, STREAM_LOG=str(here), STREAM_KILL=str(KILL_AT))
        assert told.returncode == -signal.SIGKILL, told.stderr
        self.config = RunConfig.load(self.out / "run.json")
        self.shared_memory = own_folder(self.config.run)

    def resume(self, *words: str) -> tuple[dict[int, list[int]], str]:
        """The stream from there on, and what the ranks said."""
        (self.here / "rank0.jsonl").unlink()
        begin = (self.out / "output.log").stat().st_size
        told = run("--resume", "out", *words, cwd=self.here, STREAM_LOG=str(self.here))
        said = (self.out / "output.log").read_text()[begin:]
        assert told.returncode == 0, told.stderr + said
        return stream_of(self.here, 1), said

    def assert_as_if_undisturbed(self, stream: dict[int, list[int]], undisturbed: Path) -> None:
        """The same samples from the snapshot on, the same parameters in the end, nothing left in shared memory."""
        assert stream == {step: ids for step, ids in stream_of(undisturbed, 1).items() if step >= SAVED}
        parameters = [torch.load(log / "parameters.pt", weights_only=True) for log in (self.here, undisturbed)]
        assert same_state(*parameters)
        assert not self.shared_memory.exists()


@pytest.mark.slow
def test_a_run_is_resumed_from_shared_memory_where_nothing_else_is_left(
    undisturbed: Path, data: Path, tmp_path: Path
) -> None:
    killed = Killed(tmp_path, data)
    for snapshot in (killed.out / "checkpoints" / killed.config.run).glob("step-*"):
        shutil.rmtree(snapshot)
    stream, said = killed.resume()
    assert f"restored step {SAVED} from shared memory" in said
    killed.assert_as_if_undisturbed(stream, undisturbed)


@pytest.mark.slow
def test_a_finished_run_is_continued_for_more_epochs(data: Path, tmp_path: Path) -> None:
    words = ("--network", "cnn", "--workers", "0", "--cache", "none", "--batch_size", "16", "--out", "out")
    first = run("bench_cifar10.py", data, *words, "--epochs", "2", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    more = run("--resume", "out", "--epochs", "5", cwd=tmp_path)
    assert more.returncode == 0, more.stderr
    trained = rows(tmp_path / "out")
    assert [row["epoch"] for row in trained] == [0, 1, 2, 3, 4]
    assert all(row["samples"] > 0 for row in trained)
    curve = [0.02 * (1 + math.cos(math.pi * epoch / 5)) / 2 for epoch in (2, 3, 4)]
    assert [row["learning_rate"] for row in trained[2:]] == pytest.approx(curve)
    assert RunConfig.load(tmp_path / "out" / "run.json").epochs == 5


@pytest.mark.slow
def test_a_run_is_resumed_from_the_store_on_another_machine(
    undisturbed: Path, data: Path, server: LocalServer, tmp_path: Path
) -> None:
    """Another machine: shared memory is gone. Storage there is none."""
    url = f"unix://{server.socket_path}"
    killed = Killed(tmp_path, data, "--checkpoint", url)
    assert not (killed.out / "checkpoints").exists()
    shutil.rmtree(killed.shared_memory)
    stream, said = killed.resume()
    assert f"restored step {SAVED} from cluster memory" in said
    killed.assert_as_if_undisturbed(stream, undisturbed)
    with open_store(url) as store:
        memory = MemoryTier(store, killed.config.run)
        newest = max(memory.held().values(), key=lambda record: record.sequence)
        memory.close()
    last = rows(killed.out, end=True)[-1]["checkpoint"]
    assert newest.step == last["committed_step"] == len(stream_of(undisturbed, 1))
    assert last["durable_step"] == 0
    assert "none was in storage yet" in (killed.out / "report.txt").read_text()


@pytest.mark.slow
def test_with_both_the_flusher_brings_what_a_killed_run_left_in_the_store_to_storage(
    undisturbed: Path, data: Path, server: LocalServer, tmp_path: Path
) -> None:
    url, persist = f"unix://{server.socket_path}", tmp_path / "kept"
    killed = Killed(tmp_path, data, "--checkpoint", url, "--persist-to", "kept")
    with open_volume(str(persist)) as volume:
        storage = StorageTier(volume, killed.config.run)
        wait_for(lambda: any(record.step == SAVED for record in storage.held().values()))
        server.ask("FLUSHALL")
        shutil.rmtree(killed.shared_memory)
        stream, said = killed.resume()
        assert f"restored step {SAVED} from storage" in said
        killed.assert_as_if_undisturbed(stream, undisturbed)
        wait_for(lambda: any(record.step == len(stream_of(undisturbed, 1)) for record in storage.held().values()))


@pytest.mark.slow
def test_two_runs_side_by_side_keep_their_snapshots_apart(data: Path, tmp_path: Path) -> None:
    ids = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        told = run(STREAM, data, *WORDS, "--steps", "2", "--persist-to", tmp_path / "kept", cwd=tmp_path / name,
                   STREAM_LOG=str(tmp_path / name))  # fmt: skip
        assert told.returncode == 0, told.stderr
        ids.append(RunConfig.load(tmp_path / name / "out" / "run.json").run)
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == sorted(ids)
    assert len(set(ids)) == 2


@pytest.mark.multiprocess
def test_a_resume_without_a_snapshot_anywhere_is_refused(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = Killed(tmp_path, data)
    shutil.rmtree(killed.out / "checkpoints")
    forget(killed.out)
    monkeypatch.chdir(tmp_path)
    assert main(["--resume", "out"]) == 2
    told = capsys.readouterr().err
    assert "a checkpoint to resume from" in told
    assert killed.config.run in told


@pytest.mark.slow
def test_machines_without_a_file_system_in_common_go_on_from_the_first_ones_snapshot(
    undisturbed: Path, data: Path, tmp_path: Path
) -> None:
    """Two launchers; each knows its own folders only, and the second one's are lost."""
    (port,) = free_ports(1)
    common = ("-n", "2", "-master_address", "127.0.0.1", "-master_port", str(port))
    first = (STREAM, data, *WORDS[:-4], "--batch_size", "4", *common)

    def both(*words: str | Path) -> str:
        machines = []
        for number in (0, 1):
            (tmp_path / str(number)).mkdir(exist_ok=True)
            more = ("--out", "out") if "--resume" not in words else ()
            machines.append(
                start(*words, "-nr", str(number), *more, cwd=tmp_path / str(number), STREAM_LOG=str(tmp_path))
            )
        told = [machine.communicate(timeout=120) for machine in machines]
        assert [machine.returncode for machine in machines] == [0, 0], told
        return (tmp_path / "0" / "out" / "output.log").read_text()

    both(*first, "--steps", "4")
    node_1 = tmp_path / "1" / "out" / "node1"
    assert {path.name for path in node_1.iterdir()} == {"run.json", "output.log", "train.log", "rank1.prom"}
    assert saved_step(tmp_path / "0" / "out") == 4
    for rank in (0, 1):
        (tmp_path / f"rank{rank}.jsonl").unlink()
    said = both("--resume", "out", "--steps", "20", *common)
    assert said.count("restored step 4 from storage") == 1
    stream, expected = stream_of(tmp_path, 2), stream_of(undisturbed, 1)
    assert stream == {step: ids for step, ids in expected.items() if step >= 4}
