"""What the flags come to: defaults, old runs, caches, passwords, machines."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import test_resolve_flags

from shade import ShadeDataset
from shade.config import RunConfig
from shade.errors import ConfigError
from shade.launch.resolve import parse, parser, resolve
from shade.launch.run import _in_new_directory, main

PASSWORD = "s3cret/pass"


def come_to(line: str, directory: Path) -> tuple[RunConfig, str]:
    config, stores = resolve(parse(line.split()), directory)
    return config, stores.cache


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a script, and no cache named by the environment."""
    for name in ("SHADE_CACHE", "SHADE_REDIS_PASSWORD", "SHADE_REDIS_USERNAME"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "s.py").touch()
    return tmp_path


def test_a_named_script_gets_the_originals_defaults(here: Path) -> None:
    config, url = come_to("s.py data", here)
    assert (config.network, config.batch_size, config.working_set_fraction) == ("resnet18", 256, 0.2)
    assert (config.sampling, config.policy, config.cache, url) == ("unbiased", None, "local://", "local://")
    assert config.script == str(here / "s.py")
    assert config.train_paths == (str(here / "data"),)
    assert Path(config.out).parent == here / "runs"


def test_the_benchmarks_scripts_are_found_by_name(here: Path) -> None:
    config, _ = come_to("bench_cifar10.py data", here)
    assert Path(config.script).name == "bench_cifar10.py"
    assert Path(config.script).is_file()


@pytest.mark.parametrize(
    ("line", "script"),
    [("", "quickstart"), ("--out there", "quickstart"), ("--epochs 2", "bench_cifar10"), ("-g 1", "bench_cifar10")],
)
def test_no_script_trains_the_digits_and_nothing_at_all_compares(
    line: str, script: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(here)
    assert main(["--dry-run", *line.split()]) == 0
    told = capsys.readouterr().out
    assert f"examples/{script}.py" in told
    assert str(here / ".cache" / "digits" / "train") in told
    assert list(here.iterdir()) == [here / "s.py"], "a dry run writes nothing"


@pytest.mark.parametrize(
    ("line", "url"),
    [
        ("--host_ip 10.0.0.7 --port_num 7000 -cn 4", "redis+cluster://10.0.0.7:7000"),
        ("--host_ip 10.0.0.7 --port_num 7000 --nodedist", "redis+cluster://10.0.0.7:7000"),
        ("--host_ip 10.0.0.7 --port_num 7000 -cn 1", "redis://10.0.0.7:7000"),
        ("--host_ip 10.0.0.7 --port_num 7000 -cn 1 --nodedist", "redis://10.0.0.7:7000"),
        ("--host_ip 10.0.0.7", "redis://10.0.0.7:6379"),
        ("--port_num 7000", "redis://127.0.0.1:7000"),
        ("--host_ip 0.0.0.0 --port_num", "redis://127.0.0.1:6379"),
        ("--cache none", "none"),
        ("--cache rediss://10.0.0.7:6380", "rediss://10.0.0.7:6380"),
        ("--cache_training_data", "local://"),
    ],
)
def test_the_cache_is_where_the_flags_say(line: str, url: str, here: Path) -> None:
    assert come_to(f"s.py data {line}", here)[1] == url


def test_runs_of_one_second_have_directories_of_their_own(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda form: "20260101-120000")
    first, twin = (come_to("s.py data", here)[0] for _ in range(2))
    assert first.out == twin.out, "both chose before either was there"
    outs = [_in_new_directory(each).out for each in (first, twin)]
    outs += [_in_new_directory(come_to("s.py data", here)[0]).out]
    assert [Path(out).name for out in outs] == [f"20260101-120000{end}" for end in ("", "-2", "-3")]
    assert all(Path(out).is_dir() for out in outs)


def test_launcher_and_data_set_cache_the_same_share() -> None:
    by_hand = inspect.signature(ShadeDataset).parameters["working_set_fraction"].default
    assert RunConfig(out="o", script="s", train_paths=("d",)).working_set_fraction == by_hand == 0.2
    assert f"cached share ({by_hand})" in parser().format_help()


def test_the_originals_lines_resolve_as_they_stand(here: Path) -> None:
    config, url = come_to(test_resolve_flags.ORIGINAL_CLUSTER, here)
    assert (config.nodes, config.processes, config.node_rank, config.master_socket) == (4, 2, 0, "eno1")
    assert (config.sampling, config.replication_factor, config.working_set_fraction) == ("pads", 3.0, 0.2)
    assert url == "redis+cluster://10.0.0.7:7000"
    config, url = come_to(test_resolve_flags.ORIGINAL_SINGLE, here)
    assert (config.nodes, url) == (1, "redis://10.0.0.7:6379")


def test_the_environment_names_a_cache_and_flags_beat_it(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHADE_CACHE", "redis://10.0.0.9")
    assert come_to("s.py data", here)[1] == "redis://10.0.0.9"
    assert come_to("s.py data --cache none", here)[1] == "none"


def test_a_disk_is_this_machines_folder_and_a_resumed_run_keeps_it(here: Path) -> None:
    config, url = come_to("s.py data --out run --disk tier?capacity=1GB", here)
    assert (config.disk, url) == (f"disk://{here}/tier?capacity=1GB", "local://")
    Path(config.out).mkdir()
    config.save()
    assert come_to("--resume run", here)[0].disk == config.disk
    other, _ = come_to("--resume run --cache none --disk disk:///nvme/x?capacity=2GB", here)
    assert (other.disk, other.cache, other.has_cache) == ("disk:///nvme/x?capacity=2GB", "none", True)
    assert not come_to("s.py data --cache none", here)[0].has_cache


def test_a_password_reaches_the_url_and_not_the_plan(here: Path) -> None:
    config, url = come_to("s.py data --cache redis://me:s3cret@10.0.0.7", here)
    assert url == "redis://me:s3cret@10.0.0.7"
    assert "s3cret" not in str(config)


@pytest.mark.parametrize(
    "line",
    [
        "s.py",
        "gone.py data",
        "s.py data -wss 0",
        "s.py data -wss 1.1",
        "s.py data -wss nan",
        "s.py data -n 2 -nr 2 --cache none",
        "s.py data -nr 1",
        "s.py data -n 0",
        "s.py data -g 0",
        "s.py data --epochs 0",
        "s.py data --batch_size 0",
        "s.py data --workers -1",
        "s.py data --steps 0",
        "s.py data --master_port 70000",
        "s.py data -n 2",
        "s.py data -rep 3 --sampling uniform",
        "s.py data --cache none --host_ip h",
        "s.py data --cache nonsense",
        "s.py data --disk tier",
        "s.py data --disk redis://h?capacity=1GB",
        "s.py data --cache rediss+tls://h",
        "s.py data --host_ip h --port_num PORT",
        "--resume",
        "--resume nowhere",
        "s.py data --density 0.01",
    ],
)
def test_what_cannot_be_is_refused_in_one_line_with_a_cure(line: str, here: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        come_to(line, here)
    assert "\n" not in str(caught.value)
    assert "; " in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        "--persist-to s3://key:hunter2@bucket/x",
        "--persist-to s3://bucket/x?secret=hunter2",
        "--persist-to s3://key:hunter2",
        "--persist-to sftp://me:p?hunter2@h/x",
        "--notice http://me:hunter2@h/x",
    ],
)
def test_a_password_that_run_json_would_keep_is_refused_and_not_repeated(line: str, here: Path) -> None:
    with pytest.raises(ConfigError, match="without a login") as refused:
        come_to(f"s.py data {line}", here)
    assert "hunter2" not in str(refused.value)
    cured = "--notice http://h/x" if "notice" in line else "--persist-to sftp://me@h/x"
    assert cured.split()[1] in vars(come_to(f"s.py data {cured}", here)[0]).values()


def test_the_cure_for_a_density_without_a_compressor_can_be_followed(here: Path) -> None:
    with pytest.raises(ConfigError, match="add --gradient threshold-v16"):
        come_to("s.py data --density 0.01", here)
    assert come_to("s.py data --density 0.01 --gradient threshold-v16", here)[0].gradient == "threshold-v16"


def test_a_folder_in_the_scripts_place_is_told_to_come_second(here: Path) -> None:
    (here / "data").mkdir()
    with pytest.raises(ConfigError, match=r"write bench_cifar10\.py data"):
        come_to("data", here)


class TestResume:
    """Going on with an old run."""

    @pytest.fixture
    def old(self, here: Path) -> Path:
        config, _ = come_to("s.py data -g 2 --batch_size 16 --epochs 5 --keep 0.5 --out old", here)
        Path(config.out).mkdir()
        config.save()
        return here

    def test_everything_not_typed_is_as_it_was(self, old: Path) -> None:
        config, _ = come_to("--resume old --epochs 9", old)
        assert (config.epochs, config.keep, config.batch_size, config.processes) == (9, 0.5, 16, 2)
        assert config.resume
        assert config.out == str(old / "old")

    @pytest.mark.parametrize(("ranks", "batch_size"), [(1, 32), (4, 8)])
    def test_another_number_of_ranks_shares_the_global_batch(self, ranks: int, batch_size: int, old: Path) -> None:
        assert come_to(f"--resume old -g {ranks}", old)[0].batch_size == batch_size

    def test_a_batch_size_that_was_typed_stands(self, old: Path) -> None:
        assert come_to("--resume old -g 1 --batch_size 7", old)[0].batch_size == 7

    def test_a_number_of_ranks_that_does_not_divide_the_batch_is_refused(self, old: Path) -> None:
        with pytest.raises(ConfigError, match="divides the run's global batch of 32"):
            come_to("--resume old -g 5", old)

    def test_without_a_name_it_is_the_latest_run(self, old: Path) -> None:
        (old / "runs").mkdir()
        (old / "old").rename(old / "runs" / "r")
        assert come_to("--resume", old)[0].out == str(old / "runs" / "r")

    def test_out_names_it_too(self, old: Path) -> None:
        assert come_to("--out old --resume", old)[0].keep == 0.5

    @pytest.mark.parametrize(
        ("before", "after"),
        [
            ("redis://me:pw@10.0.0.7/2", "redis://me@10.0.0.7:6379/2"),
            ("redis://:pw@10.0.0.7", "redis://10.0.0.7:6379"),
            ("local://?capacity=8GiB", "local://?capacity=8GiB"),
            ("none", "none"),
        ],
    )
    def test_the_cache_is_the_old_one_without_its_password(self, before: str, after: str, here: Path) -> None:
        config, _ = come_to(f"s.py data --out old --cache {before}", here)
        Path(config.out).mkdir()
        config.save()
        assert come_to("--resume old", here)[1] == after

    def test_a_damaged_plan_is_refused(self, old: Path) -> None:
        (old / "old" / "run.json").write_text("{")
        with pytest.raises(ConfigError, match=r"run\.json"):
            come_to("--resume old", old)


class TestMachines:
    """Several machines."""

    LINE = "s.py data -n 2 --cache redis://h --master_port 9"

    def test_each_has_a_run_directory_of_its_own(self, here: Path) -> None:
        assert come_to(f"{self.LINE} --out d -nr 0", here)[0].out == str(here / "d")
        assert come_to(f"{self.LINE} --out d -nr 1", here)[0].out == str(here / "d" / "node1")
        assert Path(come_to(f"{self.LINE} -nr 1", here)[0].out).name == "node1"

    def test_each_resumes_its_own(self, here: Path) -> None:
        for number in (0, 1):
            config, _ = come_to(f"{self.LINE} --out runs/r -nr {number}", here)
            Path(config.out).mkdir(parents=True)
            config.save()
        assert come_to("--resume -n 2 -nr 1", here)[0].out == str(here / "runs" / "r" / "node1")
        assert come_to("--resume", here)[0].out == str(here / "runs" / "r")

    def test_the_port_is_kept_and_on_one_machine_any_will_do(self, here: Path) -> None:
        assert come_to(f"{self.LINE} --out d -nr 0", here)[0].master_port == 9
        assert come_to("s.py data", here)[0].master_port == 0
