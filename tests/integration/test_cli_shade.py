"""The command `shade`, verb by verb; servers are real ones, and gone afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shade.cli import main
from shade.cli.command import parser
from shade.policy.trace import Trace
from shade.store import open_store
from shade.store._servers.server import LocalServer
from tests.support.launching import ROOT, environment, make_images, truncate

pytestmark = pytest.mark.multiprocess

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("SHADE_CACHE", "SHADE_REDIS_PASSWORD", "SHADE_REDIS_USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def refused(capsys: Capture, *words: str) -> str:
    """Runs a command that must be refused; its one line."""
    try:
        code = main(words)
    except SystemExit as ended:
        code = int(str(ended.code))
    told = capsys.readouterr()
    assert (code, told.out, told.err.count("\n")) == (2, "", 1), told
    return told.err


class TestHelp:
    """What a newcomer sees."""

    @pytest.mark.parametrize(
        "words",
        [[], ["run"], ["cache"], ["cache", "up"], ["report"], ["simulate"], ["tune"], ["top"], ["doctor"]],
    )
    def test_every_verb_teaches(self, words: list[str], capsys: Capture) -> None:
        with pytest.raises(SystemExit) as ended:
            main([*words, "--help"])
        told = capsys.readouterr().out
        assert ended.value.code == 0
        assert told.startswith(f"usage: {' '.join(['shade', *words])}")
        assert words == ["report"] or "examples:" in told
        assert max(map(len, told.splitlines())) <= 120

    def test_the_commands_of_the_examples_exist(self) -> None:
        examples = [line.split("  ")[1].split() for line in str(parser().epilog).splitlines() if "  shade " in line]
        assert len(examples) >= 7
        for _, verb, *words in examples:
            if verb != "run":
                parser().parse_args([verb, *words])

    @pytest.mark.multiprocess
    def test_it_is_quick_as_it_loads_no_torch(self) -> None:
        program = "import sys; from shade.cli import main; main(['cache', 'status'])\nassert 'torch' not in sys.modules"
        told = subprocess.run(
            [sys.executable, "-c", program], env=environment(), cwd=ROOT / "docs", capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert told.returncode == 0, told.stderr

    @pytest.mark.parametrize(
        "line", ["foo", "cache", "cache upp", "report", "simulate", "doctor --what", "cache up --nodes x"]
    )
    def test_what_is_not_known_is_one_line(self, line: str, capsys: Capture) -> None:
        assert refused(capsys, *line.split()).startswith("shade")

    @pytest.mark.parametrize(
        ("line", "meant"),
        [
            ("cahce up", "cache"),
            ("runn", "run"),
            ("cache stauts", "status"),
            ("cache up --nods 3", "--nodes"),
            ("cache up --memroy=8GiB", "--memory"),
            ("doctor --cach redis://h", "--cache"),
            ("checkpoint verfy", "verify"),
            ("checkpoint list --perist x", "--persist-to"),
            ("run s.py data --epoch 3", "--epochs"),
            ("run s.py data -wws 0.2", "-wss"),
            ("run s.py data --on-bad-sample skpi", "skip"),
        ],
    )
    def test_a_slip_is_answered_with_what_was_meant(self, line: str, meant: str, capsys: Capture) -> None:
        told = refused(capsys, *line.split())
        assert f"(did you mean '{meant}'?); see --help" in told
        assert told.startswith("shade")

    def test_what_is_like_nothing_is_not_guessed_at(self, capsys: Capture) -> None:
        assert "did you mean" not in refused(capsys, "xyzzy")
        assert "did you mean" not in refused(capsys, "run", "--qqqq")

    def test_without_a_word_it_teaches(self, capsys: Capture) -> None:
        assert main([]) == 2
        assert "shade doctor" in capsys.readouterr().err


class TestRun:
    """``shade run`` is the launcher."""

    def test_it_is_the_launcher_by_another_name(self, capsys: Capture) -> None:
        assert refused(capsys, "run", "gone.py", "data").startswith("shade run: expected a training script, got 'gone")
        assert refused(capsys, "run", "--epoch", "3").startswith("shade run: unrecognized arguments: --epoch")


class TestCache:
    """``shade cache``."""

    @pytest.mark.multiprocess
    def test_one_server_from_up_to_down(self, capsys: Capture) -> None:
        assert main(["cache", "up", "--dir", "c", "--memory", "64MiB"]) == 0
        try:
            url = capsys.readouterr().out.strip()
            with open_store(url) as store:
                store.ping()
                assert store.stats().nodes[0].max_bytes == 64 * 2**20
            assert main(["cache", "status", "--dir", "c"]) == 0
            told = capsys.readouterr().out
            assert told.startswith(url)
            assert "primary" in told
            assert "of 64 MiB" in told
            assert "end those servers first" in refused(capsys, "cache", "up", "--dir", "c", "--memory", "1GiB")
        finally:
            assert main(["cache", "down", "--dir", "c"]) == 0
        assert capsys.readouterr().out == "1 server ended\n"
        assert "a directory given to `up`" in refused(capsys, "cache", "down", "--dir", "c")

    @pytest.mark.multiprocess
    def test_a_cluster_with_a_password_that_nobody_repeats(
        self, capsys: Capture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SHADE_REDIS_PASSWORD", "s3cret")
        assert main(["cache", "up", "--dir", "c", "--nodes", "3"]) == 0
        try:
            up = capsys.readouterr()
            assert main(["cache", "status", "--dir", "c"]) == 0
            status = capsys.readouterr()
            with open_store(up.out.strip()) as store:
                store.ping()
            assert main(["doctor", "--cache", up.out.strip()]) == 0
            doctor = capsys.readouterr()
        finally:
            assert main(["cache", "down", "--dir", "c"]) == 0
        assert "s3cret" not in "".join([*up, *status, *doctor])
        assert "SHADE_REDIS_PASSWORD" in up.err
        assert status.out.count("primary") == 3
        assert doctor.out.count("cluster-require-full-coverage") == 3

    @pytest.mark.parametrize(
        "line", ["--nodes 2", "--nodes 1 --replicas 1", "--memory lots", "--ports 1 2", "--dir /proc/nothing"]
    )
    def test_what_cannot_be_is_refused(self, line: str, capsys: Capture) -> None:
        assert "; " in refused(capsys, "cache", "up", *line.split())


class TestSimulate:
    """``shade simulate``."""

    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        generator = np.random.default_rng(0)
        orders = tuple(generator.permutation(100).astype(np.int64) for _ in range(4))
        (tmp_path / "run").mkdir()
        Trace(np.full(100, 2**20, dtype=np.int64), orders, 10).save(tmp_path / "run" / "trace.npz")
        return tmp_path / "run"

    def test_a_table_a_line_a_policy(self, run: Path, capsys: Capture) -> None:
        words = ["simulate", str(run), "--capacity", "20%,50MiB,1GiB", "--policy", "plan,static,lru"]
        assert main(words) == 0
        table = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
        assert [cell.strip().partition(":")[0] for cell in table[0]] == ["policy", "f=0.2", "f=0.5", "f=10.24"]
        assert [line[0].strip() for line in table[1:]] == ["plan", "static", "lru"]
        assert [cell.strip() for cell in table[2][1:]] == ["20.0%, 0.800", "50.0%, 0.500", "100.0%, 0.000"]

    def test_the_trace_file_itself_and_a_picture(self, run: Path, capsys: Capture) -> None:
        assert main(["simulate", str(run / "trace.npz"), "--plot", "c.png"]) == 0
        assert Path("c.png").read_bytes().startswith(b"\x89PNG")
        assert "4 epochs, the first 1 left out; 100 samples" in capsys.readouterr().out

    @pytest.mark.parametrize(
        "line",
        [
            "--capacity much",
            "--capacity -5%",
            "--capacity nan%",
            "--capacity 20%,",
            "--policy plan,lur",
            "--skip-epochs 4",
            "--plot /proc/nothing/c.png",
            "--plot c.nonsense",
        ],
    )
    def test_what_cannot_be_is_refused(self, line: str, run: Path, capsys: Capture) -> None:
        refused(capsys, "simulate", str(run), *line.split())

    def test_so_is_what_is_no_trace(self, run: Path, capsys: Capture) -> None:
        (run / "trace.npz").write_text("x")
        assert "a whole trace" in refused(capsys, "simulate", str(run))
        assert "there is no such file" in refused(capsys, "simulate", "gone")
        assert "metrics.jsonl" in refused(capsys, "report", str(run))


class TestDoctor:
    """``shade doctor`` on this machine; what it makes of others is in the unit tests."""

    def test_this_machine_can_run_these_tests(self, tmp_path: Path, capsys: Capture) -> None:
        data = make_images(tmp_path / "data")
        assert main(["doctor", "--data", str(data)]) == 0
        told = capsys.readouterr().out
        assert "48 images" in told
        for row in ("python", "torch", "hiredis", "redis server", "shared memory", "memory", "disk", "open files"):
            assert f" {row}" in told

    def test_bad_data_fails_with_the_cure(self, tmp_path: Path, capsys: Capture) -> None:
        truncate(make_images(tmp_path / "data") / "class2" / "000.png")
        assert main(["doctor", "--data", "data"]) == 1
        told = capsys.readouterr().out
        assert "fail  data set" in told
        assert "→ replace or remove that file" in told

    @pytest.mark.parametrize(
        ("url", "cure"),
        [
            ("redis://127.0.0.1:1", "shade cache status"),
            ("redsi://h", "known: "),
            ("local://host", "write local://"),
        ],
    )
    def test_a_cache_that_is_none(self, url: str, cure: str, capsys: Capture) -> None:
        assert main(["doctor", "--cache", url]) == 1
        told = capsys.readouterr().out
        assert "fail  cache" in told
        assert cure in told

    @pytest.mark.parametrize(
        "url",
        [
            "redis://:p?hunter2@h.invalid",
            "redis://h.invalid?password=hunter2",
            "me:hunter2@h.invalid",
            "redis://me:hunter2@h.invalid",
            "redis+cluster://me:hunter2@127.0.0.1:1",
        ],
    )
    def test_no_command_repeats_a_password(self, url: str, tmp_path: Path, capsys: Capture) -> None:
        data = str(make_images(tmp_path / "data", num_classes=1, per_class=1))
        assert main(["doctor", "--cache", url]) == 1
        run = ["run", "bench_cifar10.py", data, "--batch_size", "1", "--dry-run"]
        for words in (
            *([*run, flag, url] for flag in ("--cache", "--checkpoint")),
            ["checkpoint", "list", "--store", url],
        ):
            assert main(words) == 2
        assert main(["top", f"http://{url.rpartition('//')[2]}", "--once"]) == 2
        told = capsys.readouterr()
        assert "hunter2" not in told.out + told.err

    @pytest.mark.multiprocess
    def test_a_database_is_no_cache_and_is_told_why(self, tmp_path: Path, capsys: Capture) -> None:
        settings = {"maxmemory-policy": "allkeys-lru", "save": "60 1", "appendonly": "yes"}
        with LocalServer(directory=tmp_path, settings=settings, password="right") as server:
            assert main(["doctor", "--cache", f"unix://:wrong@{server.socket_path}"]) == 1
            assert "→ correct the user, the password" in capsys.readouterr().out
            assert main(["doctor", "--cache", f"unix://:right@{server.socket_path}"]) == 0
        told = capsys.readouterr().out
        assert "right" not in told
        for found in ("maxmemory-policy 'allkeys-lru'", "save '60 1'", "appendonly 'yes'", "no limit"):
            assert found in told
        assert told.count("warn ") >= 4

    @pytest.mark.multiprocess
    def test_a_user_with_few_rights_is_no_fault(self, tmp_path: Path, capsys: Capture) -> None:
        settings = {"user": "few on >pw ~* -@all +ping +get +info +dbsize +select +client|setname"}
        with LocalServer(directory=tmp_path, settings=settings) as server:
            assert main(["doctor", "--cache", f"unix://few:pw@{server.socket_path}"]) == 0
        told = capsys.readouterr().out
        assert "CONFIG is refused to this user, training does not need it" in told
        assert "CONFIG SET" not in told

    @pytest.mark.multiprocess
    def test_a_managed_server_gets_cures_that_its_user_can_follow(self, tmp_path: Path, capsys: Capture) -> None:
        """Without the right to CONFIG; the default user plays the provider's console."""
        rights = "~* -@all +ping +get +info +dbsize +select +client|setname"
        settings = {"user": f"few on >pw {rights}", "maxmemory-policy": "allkeys-lru", "appendonly": "yes"}
        with LocalServer(directory=tmp_path, settings=settings) as server:
            url = f"unix://few:pw@{server.socket_path}"
            assert main(["doctor", "--cache", url]) == 0
            told = capsys.readouterr().out
            assert "CONFIG SET" not in told
            assert "→ set maxmemory-policy to 'noeviction' where the provider keeps a server's parameters" in told
            assert "→ set appendonly to 'no' where the provider" in told
            assert "→ add ?capacity=8GiB to the URL" in told
            for setting, value in (("maxmemory-policy", "noeviction"), ("appendonly", "no")):
                assert server.ask("CONFIG", "SET", setting, value) == b"OK"
            assert main(["doctor", "--cache", f"{url}?capacity=8GiB"]) == 0
        told = capsys.readouterr().out
        assert "as a cache should have it: maxmemory-policy, appendonly" in told
        assert "?capacity= bounds the cache" in told
        assert server.socket_path not in [line.split()[1] for line in told.splitlines() if line.startswith("warn")]
