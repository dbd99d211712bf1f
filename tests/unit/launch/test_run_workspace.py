"""The run directory: made, taken back, and the accounts of a run that was killed."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from shade.checkpoint._format.manifest import Commit
from shade.checkpoint._tiers import identity
from shade.config import RunConfig
from shade.errors import ConfigError
from shade.launch.preflight import memory_folder
from shade.launch.run import Workspace
from shade.storage import open_volume


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A working directory."""
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


def config_of(out: Path, *, resume: bool = False) -> RunConfig:
    return RunConfig(out=str(out), script="s.py", train_paths=("data",), resume=resume)


def test_it_makes_the_directory_and_links_the_log(here: Path, tmp_path: Path) -> None:
    place = Workspace(config_of(tmp_path / "runs" / "r"), here)
    place.train_log.write_text("hitting 3\n")
    assert (here / "train.log").read_text() == "hitting 3\n"


def test_undo_leaves_no_trace(here: Path, tmp_path: Path) -> None:
    Workspace(config_of(tmp_path / "runs" / "r"), here).undo()
    assert list(here.iterdir()) == []
    assert list(tmp_path.iterdir()) == [here]


def test_undo_keeps_what_was_there(here: Path, tmp_path: Path) -> None:
    Workspace(config_of(tmp_path / "runs" / "first"), here)
    Workspace(config_of(tmp_path / "runs" / "second"), here).undo()
    assert [run.name for run in (tmp_path / "runs").iterdir()] == ["first"]
    assert (here / "train.log").resolve() == tmp_path / "runs" / "first" / "train.log"


def test_of_two_runs_in_one_directory_the_second_is_refused_and_takes_nothing_away(here: Path, tmp_path: Path) -> None:
    first = Workspace(config_of(tmp_path / "r"), here)
    before = sorted(path.name for path in first.out.iterdir())
    with pytest.raises(ConfigError, match="an --out without a run in it"):
        Workspace(config_of(tmp_path / "r"), here)
    assert sorted(path.name for path in first.out.iterdir()) == before
    Workspace(config_of(tmp_path / "r"), here, is_again=True).undo()
    assert list(first.out.iterdir()) == []


def test_undo_leaves_another_machines_directory_alone(here: Path, tmp_path: Path) -> None:
    second = Workspace(config_of(tmp_path / "runs" / "r" / "node1"), here)
    first = Workspace(config_of(tmp_path / "runs" / "r"), here)
    first.undo()
    assert second.train_log.exists()
    second.undo()
    assert not (tmp_path / "runs").exists()


def test_undo_keeps_metrics(here: Path, tmp_path: Path) -> None:
    place = Workspace(config_of(tmp_path / "r"), here)
    place.metrics.write_text("{}\n")
    place.undo()
    assert place.metrics.exists()
    assert (here / "train.log").is_symlink()


def record_of(run: str) -> bytes:
    return Commit(
        run=run, step=7, sequence=1, world_size=1, manifests=("0" * 32,), num_bytes=0, saved_at=0.0
    ).to_bytes()


def test_undo_keeps_a_snapshot_in_the_run_directory(here: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path / "r")
    place = Workspace(config, here)
    folder = place.out / "checkpoints" / config.run / "step-0000000007"
    folder.mkdir(parents=True)
    (folder / "commit.json").write_bytes(record_of(config.run))
    place.undo()
    assert (folder / "commit.json").exists()


def test_undo_keeps_a_snapshot_in_shared_memory_and_takes_buffers_without_one(here: Path, tmp_path: Path) -> None:
    for name, is_there in (("kept", True), ("empty", False)):
        config = config_of(tmp_path / name)
        place = Workspace(config, here)
        with open_volume(str(config.storage)) as volume:
            identity.of_storage(volume, config.run, make=True)
        memory = memory_folder(config, None)
        assert memory is not None
        memory.mkdir(parents=True)
        try:
            (memory / "rank-0.0.data").touch()
            if is_there:
                (memory / "rank-0.0.commit").write_bytes(record_of(config.run))
            place.undo()
            assert (place.out.exists(), memory.exists()) == (is_there, is_there)
        finally:
            shutil.rmtree(memory, ignore_errors=True)


def test_a_snapshot_that_was_never_committed_is_no_result(here: Path, tmp_path: Path) -> None:
    place = Workspace(config_of(tmp_path / "r"), here)
    (place.out / "checkpoints" / "r-0" / "step-0000000007").mkdir(parents=True)
    (place.out / "checkpoints" / "r-0" / "step-0000000007" / "rank-0.json").touch()
    place.undo()
    assert not place.out.exists()


def test_undo_keeps_a_directory_of_the_user(here: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    place = Workspace(config_of(tmp_path / "mine"), here)
    config_of(place.out).save()
    place.undo()
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_a_file_of_the_user_is_not_replaced_by_the_link(here: Path, tmp_path: Path) -> None:
    (here / "train.log").write_text("mine")
    Workspace(config_of(tmp_path / "r"), here)
    assert (here / "train.log").read_text() == "mine"


def test_a_run_in_the_working_directory_has_its_log_and_no_link(here: Path) -> None:
    assert not Workspace(config_of(here), here).train_log.is_symlink()


def test_leftovers_of_an_earlier_attempt_are_gone(here: Path, tmp_path: Path) -> None:
    out = tmp_path / "r"
    out.mkdir()
    for name in ("failure-0.txt", "failure-11.txt", "progress.json"):
        (out / name).write_text("old")
    place = Workspace(config_of(out), here)
    assert place.failure is None
    assert not (out / "progress.json").exists()


def test_the_failure_is_that_of_the_first_rank_that_told(here: Path, tmp_path: Path) -> None:
    place = Workspace(config_of(tmp_path / "r"), here)
    (place.out / "failure-0.txt").write_text("")
    (place.out / "failure-1.txt").write_text("expected this\n")
    assert place.failure == "expected this"


def test_a_directory_that_cannot_be_made_is_the_users_error(here: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="choose another --out"):
        Workspace(config_of(tmp_path / "file" / "r"), here)


class TestAccounts:
    """Lines in train.log against rows in metrics.jsonl, when a run is resumed."""

    LOG = "hitting 1\nmiss 2\nepoch 0 rank 0\nmiss 3\nhitting 4\nmiss 5\n"

    def resume(self, here: Path, out: Path, *rows: dict[str, object], **changed: int) -> list[dict[str, object]]:
        out.mkdir()
        (out / "train.log").write_text(self.LOG)
        (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        Workspace(dataclasses.replace(config_of(out, resume=True), **changed), here)
        return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]

    def test_what_no_row_tells_of_gets_a_row(self, here: Path, tmp_path: Path) -> None:
        told = self.resume(here, tmp_path / "r", {"hits": 1, "misses": 0}, {"hits": 0, "misses": 1})
        assert told[-1] == {"kind": "lost", "hits": 1, "misses": 2}

    def test_a_run_that_ended_well_lost_nothing(self, here: Path, tmp_path: Path) -> None:
        assert len(self.resume(here, tmp_path / "r", {"hits": 2, "misses": 3})) == 1

    def test_several_machines_have_several_logs(self, here: Path, tmp_path: Path) -> None:
        assert self.resume(here, tmp_path / "r", nodes=2) == []

    def test_a_torn_row_is_passed_over(self, here: Path, tmp_path: Path) -> None:
        out = tmp_path / "r"
        out.mkdir()
        (out / "train.log").write_text(self.LOG)
        (out / "metrics.jsonl").write_text('{"hits": 1, "misses": 3}\n{"hits": 1, "mis')
        Workspace(config_of(out, resume=True), here)
        last = (out / "metrics.jsonl").read_text().splitlines()[-1]
        assert json.loads(last) == {"kind": "lost", "hits": 1, "misses": 0}
