"""``shade checkpoint …`` over sound and damaged snapshots, in real files and a real server."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shade.checkpoint._buffer import shared_memory_folder
from shade.checkpoint._buffer.shared_memory_tier import SharedMemoryTier
from shade.checkpoint._format.manifest import Commit
from shade.checkpoint._interchange.export import import_state
from shade.checkpoint._tiers.memory import MemoryTier
from shade.checkpoint._tiers.run_lock import RunLock, runs_in_store
from shade.checkpoint._tiers.storage import StorageTier
from shade.cli import doctor, main
from shade.cli._checkpoint import VERBS
from shade.storage import open_volume
from shade.store import Store, open_store
from shade.store._servers.server import LocalServer

pytestmark = pytest.mark.multiprocess

Capture = pytest.CaptureFixture[str]
STATE = {
    "model": {"weight": torch.arange(3_000_000, dtype=torch.float32), "bias": torch.ones(10)},
    "optimizer": {"state": {0: {"step": torch.tensor(7.0), "exp_avg": torch.full((1000,), 0.5)}}, "lr": 0.1},
}


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with LocalServer() as running:
        yield running


@pytest.fixture
def store(server: LocalServer) -> Iterator[Store]:
    server.ask("FLUSHALL")
    with open_store(server.url, timeout_seconds=5) as opened:
        yield opened


@pytest.fixture
def url(server: LocalServer) -> str:
    return server.url.reveal()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ckpt"


def keep_in_folder(folder: Path, step: int, run: str = "vgg") -> Path:
    """A snapshot in storage; its data file."""
    with open_volume(str(folder)) as volume:
        import_state(STATE, StorageTier(volume, run), run, step)
    return folder / run / f"step-{step:010d}" / "rank-0.safetensors"


def keep_in_memory(store: Store, step: int, run: str = "vgg", *, flushed: bool = True) -> None:
    """A snapshot in the store."""
    tier = MemoryTier(store, run, flushed=flushed)
    try:
        import_state(STATE, tier, run, step)
    finally:
        tier.close()


def keep_in_both(store: Store, url: str, folder: Path, step: int) -> Path:
    """The same snapshot in the store and in storage; its data file."""
    keep_in_memory(store, step)
    assert main(["checkpoint", "flush", url, "--persist-to", str(folder), "--run", "vgg", "--once"]) == 0
    return folder / "vgg" / f"step-{step:010d}" / "rank-0.safetensors"


def shade(capsys: Capture, *words: str | Path) -> tuple[int, str, str]:
    """Runs a verb; exit code, output, errors."""
    capsys.readouterr()
    code = main(["checkpoint", *map(str, words)])
    told = capsys.readouterr()
    return code, told.out, told.err


def flip(path: Path, offset: int) -> None:
    """One bit of a file."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def chunk_keys(store: Store) -> list[str]:
    return sorted(key for key in store.scan("shade:checkpoint:") if "chunk:" in key)


def equal(found: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return torch.equal(found, expected)
    if isinstance(expected, dict):
        return set(found) == set(expected) and all(equal(found[key], expected[key]) for key in expected)
    return bool(found == expected)


class TestHelp:
    """What a newcomer sees."""

    @pytest.mark.parametrize("name", [None, *(verb.name for verb in VERBS)])
    def test_every_verb_teaches(self, name: str | None, capsys: Capture) -> None:
        with pytest.raises(SystemExit) as ended:
            main(["checkpoint", *([name] if name else []), "--help"])
        told = capsys.readouterr().out
        assert ended.value.code == 0
        assert "examples:" in told
        assert "exit code:" in told or name == "show"
        assert max(map(len, told.splitlines())) <= 120

    @pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
    def test_its_examples_parse(self, verb: Any) -> None:
        from shade.cli.command import parser

        lines = map(str.strip, verb.epilog.splitlines())
        examples = [line.split("   ")[0].split() for line in lines if line.startswith("shade checkpoint")]
        assert examples
        for words in examples:
            words = words[1 : words.index("2>>")] if "2>>" in words else words[1:]
            assert parser().parse_args(words).answer is not None

    @pytest.mark.multiprocess
    @pytest.mark.redis
    @pytest.mark.parametrize(
        ("line", "named"),
        [
            ("list", "--store"),
            ("list --persist-to {folder}", "snapshots"),
            ("verify x --persist-to {folder}", "'x'"),
            ("restore 10 --to a.xyz --persist-to {folder}", ".safetensors"),
            ("restore --to a.pt --persist-to {folder}", "STEP"),
            ("import {folder} --format dcp --run a --persist-to {folder}", "nothing at"),
            ("import x.pt --step -1 --run a --persist-to {folder}", "--step"),
            ("flush redis://127.0.0.1:1 --persist-to {folder}", "127.0.0.1"),
            ("flush {url} --persist-to {folder} --keep lats=3", "lats"),
            ("flush {url} --persist-to {folder} --until-ended", "--run"),
            ("flush {url} --persist-to /proc/nowhere", "/proc/nowhere"),
            ("list --store redis://127.0.0.1:1", "127.0.0.1"),
            ("list --store rdis://a", "rdis"),
            ("frobnicate", "frobnicate"),
        ],
    )
    def test_what_cannot_be_is_one_line(self, line: str, named: str, url: str, folder: Path, capsys: Capture) -> None:
        try:
            code = main(["checkpoint", *line.format(url=url, folder=folder).split()])
        except SystemExit as ended:
            code = int(str(ended.code))
        told = capsys.readouterr()
        assert (code, told.out, told.err.count("\n")) == (2, "", 1), told
        assert named in told.err


class TestList:
    """``list`` and ``show``."""

    @pytest.mark.redis
    def test_it_tells_where_each_lies(self, store: Store, url: str, folder: Path, capsys: Capture) -> None:
        keep_in_both(store, url, folder, 10)
        keep_in_memory(store, 20)
        code, out, err = shade(capsys, "list", "--store", url, "--persist-to", folder)
        assert (code, err) == (0, "")
        rows = [line.split() for line in out.splitlines()[3:]]
        assert [row[0] for row in rows] == ["20", "10"]
        assert "to flush" in out.splitlines()[3]
        assert "durable" in out.splitlines()[4]
        assert out.splitlines()[4].endswith("cluster memory, storage")
        code, out, _ = shade(capsys, "list", "--store", url, "--persist-to", folder, "--json")
        facts = json.loads(out)
        assert [(each["step"], each["state"], len(each["locations"])) for each in facts] == [
            (20, "to flush", 1),
            (10, "durable", 2),
        ]

    def test_several_runs_want_a_name(self, folder: Path, capsys: Capture) -> None:
        keep_in_folder(folder, 10, run="a")
        keep_in_folder(folder, 20, run="b")
        code, _, err = shade(capsys, "list", "--persist-to", folder)
        assert code == 2
        assert "a, b" in err
        assert "--run" in err
        code, out, _ = shade(capsys, "list", "--persist-to", folder, "--run", "b")
        assert code == 0
        assert "run b" in out

    def test_a_silent_place_is_told_and_the_rest_is_shown(self, folder: Path, capsys: Capture) -> None:
        keep_in_folder(folder, 10)
        code, out, err = shade(capsys, "list", "--store", "redis://127.0.0.1:1", "--persist-to", folder, "--run", "vgg")
        assert code == 1
        assert "cluster memory cannot be read" in err
        assert err.count("\n") == 1
        assert "durable" in out
        code, out, err = shade(capsys, "list", "--store", "redis://127.0.0.1:1", "--run", "vgg")
        assert (code, out, err.count("\n")) == (1, "", 1)

    def test_show_names_what_is_in_it(self, folder: Path, capsys: Capture) -> None:
        keep_in_folder(folder, 10)
        code, out, _ = shade(capsys, "show", "10", "--persist-to", folder)
        assert code == 0
        assert "model/weight" in out
        assert "12.0 MB" in out
        assert "optimizer" in out
        code, out, _ = shade(capsys, "show", "10", "--persist-to", folder, "--json")
        assert code == 0
        assert "model/weight" in json.loads(out)["manifests"][0]["tensors"]
        assert (
            shade(capsys, "show", "newest", "--persist-to", folder)[:2]
            == shade(capsys, "show", "10", "--persist-to", folder)[:2]
        )
        code, out, err = shade(capsys, "show", "11", "--persist-to", folder)
        assert (code, out) == (1, "")
        assert "there are: 10" in err


class TestDamage:
    """``verify``, ``repair``, ``scrub`` and what ``restore`` makes of damage."""

    def test_a_sound_one_is_sound(self, folder: Path, capsys: Capture) -> None:
        keep_in_folder(folder, 10)
        code, out, err = shade(capsys, "verify", "--persist-to", folder)
        assert (code, err) == (0, "")
        assert "sound" in out
        assert "1 snapshot, 0 damaged" in out

    @pytest.mark.redis
    def test_a_flipped_bit_in_a_file_is_named_and_mended_from_memory(
        self, store: Store, url: str, folder: Path, capsys: Capture
    ) -> None:
        data = keep_in_both(store, url, folder, 10)
        before = data.read_bytes()
        flip(data, len(before) - 5_000_000)
        code, out, _ = shade(capsys, "verify", "10", "--store", url, "--persist-to", folder)
        assert code == 1
        bad = [line for line in out.splitlines() if "storage," in line]
        assert len(bad) == 1
        assert "1 chunk" in bad[0]
        assert "rank 0" in bad[0]
        assert "sound" in next(line for line in out.splitlines() if "cluster memory," in line)
        assert data.read_bytes() != before
        code, _, _ = shade(capsys, "repair", "10", "--store", url, "--persist-to", folder)
        assert code == 0
        assert data.read_bytes() == before
        assert shade(capsys, "verify", "10", "--store", url, "--persist-to", folder)[0] == 0

    @pytest.mark.redis
    def test_a_key_that_is_gone_is_named_and_mended_from_storage(
        self, store: Store, url: str, folder: Path, capsys: Capture
    ) -> None:
        keep_in_both(store, url, folder, 10)
        key = chunk_keys(store)[1]
        (before,) = store.get_many([key])
        store.delete_many([key])
        code, out, _ = shade(capsys, "verify", "10", "--store", url, "--persist-to", folder, "--json")
        assert code == 1
        (fact,) = json.loads(out)
        assert {place["tier"]: place["chunks"] for place in fact["locations"]} == {
            "cluster memory": {"0": [1]},
            "storage": {},
        }
        assert shade(capsys, "scrub", "--store", url, "--persist-to", folder)[0] == 0
        assert store.get_many([key]) == [before]

    @pytest.mark.redis
    def test_restore_takes_each_byte_from_where_it_is_right(
        self, store: Store, url: str, folder: Path, tmp_path: Path, capsys: Capture
    ) -> None:
        data = keep_in_both(store, url, folder, 10)
        store.delete_many([chunk_keys(store)[0]])
        flip(data, data.stat().st_size - 100)
        to = tmp_path / "state.pt"
        code, out, _ = shade(capsys, "restore", "10", "--to", to, "--store", url, "--persist-to", folder)
        assert code == 0
        assert str(to) in out
        assert equal(torch.load(to, weights_only=True), STATE)

    @pytest.mark.redis
    def test_what_is_right_nowhere_is_refused(
        self, store: Store, url: str, folder: Path, tmp_path: Path, capsys: Capture
    ) -> None:
        data = keep_in_both(store, url, folder, 10)
        store.delete_many([chunk_keys(store)[0]])
        flip(data, data.stat().st_size - 12_000_000)
        to = tmp_path / "state.pt"
        where = ("--store", url, "--persist-to", str(folder))
        code, out, err = shade(capsys, "restore", "10", "--to", to, *where)
        assert (code, out) == (1, "")
        assert "chunk 0 of rank 0" in err
        assert not to.exists()
        code, out, _ = shade(capsys, "repair", "10", *where)
        assert code == 1
        assert "chunk 0 of rank 0" in out
        assert shade(capsys, "verify", "all", *where)[0] == 1

    def test_a_truncated_file_and_a_lost_manifest_are_named(self, folder: Path, capsys: Capture) -> None:
        data = keep_in_folder(folder, 10)
        data.write_bytes(data.read_bytes()[:-1])
        code, out, _ = shade(capsys, "verify", "--persist-to", folder)
        assert code == 1
        assert "1 chunk" in out
        (data.parent / "rank-0.json").unlink()
        code, out, _ = shade(capsys, "verify", "--persist-to", folder)
        assert code == 1
        assert "manifest of rank 0" in out

    @pytest.mark.parametrize("damage", ["header", "longer"])
    def test_a_file_whose_chunks_are_sound_may_be_damaged_around_them(
        self, folder: Path, capsys: Capture, damage: str
    ) -> None:
        data = keep_in_folder(folder, 10)
        before = data.read_bytes()
        data.write_bytes(before[:20] + b"XX" + before[22:] if damage == "header" else before + b"more")
        code, out, _ = shade(capsys, "verify", "--persist-to", folder)
        assert code == 1
        assert "header or length of the file of rank 0" in out
        code, out, _ = shade(capsys, "verify", "--persist-to", folder, "--json")
        assert [place["files"] for place in json.loads(out)[0]["locations"]] == [[0]]
        assert shade(capsys, "scrub", "--persist-to", folder)[0] == 0
        assert data.read_bytes() == before

    @pytest.mark.parametrize("verb", [["verify", "all"], ["verify"], ["verify", "10"], ["scrub"]])
    def test_a_record_that_is_empty_is_damage(self, folder: Path, capsys: Capture, verb: list[str]) -> None:
        keep_in_folder(folder, 10)
        data = keep_in_folder(folder, 20)
        (data.parent / "commit.json").write_bytes(b"")
        code, out, _ = shade(capsys, *verb, "--persist-to", folder)
        assert code == 1
        assert "step-0000000020: its record cannot be read" in out
        assert "2 snapshots, 1 damaged" in out

    def test_a_record_that_rots_is_told(self, folder: Path, capsys: Capture) -> None:
        keep_in_folder(folder, 10)
        data = keep_in_folder(folder, 20)
        flip(data.parent / "commit.json", 40)
        code, out, err = shade(capsys, "list", "--persist-to", folder)
        assert code == 0
        assert "step-0000000020" in err
        assert "20" not in out.split()


class TestMove:
    """``export`` and ``import``."""

    @pytest.mark.parametrize(
        ("form", "name"), [("safetensors", "state.safetensors"), ("torch", "state.pt"), ("dcp", "state")]
    )
    def test_there_and_back_again(self, form: str, name: str, folder: Path, tmp_path: Path, capsys: Capture) -> None:
        keep_in_folder(folder, 10)
        to = tmp_path / name
        assert shade(capsys, "export", "newest", "--to", to, "--format", form, "--persist-to", folder)[0] == 0
        code, out, _ = shade(capsys, "import", to, "--step", "30", "--run", "new", "--persist-to", folder)
        assert code == 0
        assert "step 30 of run new" in out
        back = tmp_path / "back.pt"
        assert shade(capsys, "restore", "30", "--to", back, "--run", "new", "--persist-to", folder)[0] == 0
        assert equal(torch.load(back, weights_only=True), STATE)

    def test_one_thing_alone_is_as_its_library_expects_it(self, folder: Path, tmp_path: Path, capsys: Capture) -> None:
        from safetensors.torch import load_file

        keep_in_folder(folder, 10)
        to = tmp_path / "model.safetensors"
        assert shade(capsys, "restore", "10", "--to", to, "--only", "model", "--persist-to", folder)[0] == 0
        assert equal(load_file(to), STATE["model"])
        assert shade(capsys, "import", to, "--as", "model", "--run", "w", "--persist-to", folder)[0] == 0
        assert shade(capsys, "show", "0", "--run", "w", "--persist-to", folder)[0] == 0

    def test_what_is_there_is_not_overwritten(self, folder: Path, tmp_path: Path, capsys: Capture) -> None:
        keep_in_folder(folder, 10)
        to = tmp_path / "state.pt"
        to.write_text("mine")
        code, _, err = shade(capsys, "restore", "10", "--to", to, "--persist-to", folder)
        assert code == 2
        assert "a path that does not exist" in err
        assert to.read_text() == "mine"


class TestFree:
    """What runs left in memory."""

    def test_shows_and_frees_this_machines(self, run: str, tmp_path: Path, capsys: Capture) -> None:
        killed = SharedMemoryTier(run, 0, identity="one")
        killed.claim("file:///mnt/ckpt")
        code, told, _ = shade(capsys, "free")
        assert code == 0
        assert [line.split()[1:] for line in told.splitlines() if run in line] == [
            ["file:///mnt/ckpt", "0", "B", "-", "-", "in", "use"]
        ]
        code, _, error = shade(capsys, "free", run)
        assert (code, error) == (1, f"{run}: in use by a live process, of file:///mnt/ckpt\n")
        killed.close()
        assert shade(capsys, "free", run)[0] == 0
        assert shade(capsys, "free", run)[::2] == (1, f"{run}: nothing lies in this machine's shared memory\n")

    def test_prunes_what_lies_elsewhere_too_and_doctor_shows_it(
        self, run: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shared_memory_folder, "shared_memory", lambda: tmp_path)
        folders = {name: tmp_path / f"shade-{os.getuid()}" / name / "one" for name in ("both", "here", "live")}
        record = Commit("here", 4, 1, 1, ("0" * 32,), 8192, 1e9).to_bytes()
        for folder in folders.values():
            folder.mkdir(parents=True)
            (folder / "about").write_text("file:///mnt/ckpt")
            (folder / "rank-0.data").write_bytes(bytes(8192))
        (folders["here"] / "rank-0.a.commit").write_bytes(record)
        live = SharedMemoryTier("live", 0, identity="one", folder=tmp_path)
        live.claim("file:///mnt/ckpt")
        assert "16.4 kB of 2 runs that have ended" in str(doctor.left_in_memory())
        code, told, _ = shade(capsys, "prune")
        assert code == 0
        assert [line.split()[:2] for line in told.splitlines()[:-1]] == [
            ["both:", "freed"],
            ["here:", "only"],
            ["live:", "in"],
        ]
        assert [name for name, folder in folders.items() if folder.exists()] == ["here", "live"]
        live.close()

    def test_removes_a_run_from_a_store_and_no_other(self, store: Store, url: str, capsys: Capture) -> None:
        keep_in_memory(store, 10)
        keep_in_memory(store, 10, "vgg2")
        assert shade(capsys, "free", "vgg", "--store", url)[0] == 0
        assert runs_in_store(store) == ["vgg2"]
        assert shade(capsys, "free", "vgg", "--store", url)[0] == 1
        with RunLock(store, "vgg2"):
            assert shade(capsys, "free", "vgg2", "--store", url)[0] == 2
        assert shade(capsys, "free", "--store", url)[0] == 2
