"""Bad input ends in one line that says expected, got and the cure, with exit code 2, and nothing written.

Each case goes through the launcher's own `main`. What only a rank can see costs real ranks; those come last.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torchvision.datasets import ImageFolder

from shade import ShadeDataset, ShadeSampler
from shade.config import RunConfig
from shade.launch.run import main
from shade.store._servers.local_cluster import free_ports
from shade.store._servers.server import LocalServer
from tests.support.launching import STREAM, make_images, rows, run, truncate

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a data set."""
    for name in ("SHADE_CACHE", "SHADE_REDIS_PASSWORD", "SHADE_REDIS_USERNAME"):
        monkeypatch.delenv(name, raising=False)
    make_images(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def snapshot(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def refused(here: Path, line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Runs a command line that must be refused; its one line."""
    before = snapshot(here)
    size = "" if "--batch_size" in line else "--batch_size 8"
    code = main(f"{STREAM} {line} {size}".split())
    told = capsys.readouterr()
    assert (code, told.out, told.err.count("\n")) == (2, "", 1), told
    assert snapshot(here) == before
    return told.err


def empty(here: Path) -> None:
    shutil.rmtree(here / "data")
    (here / "data").mkdir()


def no_folder(here: Path) -> None:
    shutil.rmtree(here / "data")


def empty_class(here: Path) -> None:
    (here / "data" / "class9").mkdir()


def truncated_first(here: Path) -> None:
    truncate(here / "data" / "class1" / "000.png")


def text_for_an_image(here: Path) -> None:
    (here / "data" / "class1" / "000.jpg").write_text("this is no image")


def nothing(here: Path) -> None:
    del here


def a_run(here: Path) -> None:
    (here / "out").mkdir()
    (here / "out" / "run.json").write_text("{}")


def a_file(here: Path) -> None:
    (here / "out").touch()


@pytest.mark.parametrize(
    ("spoil", "line", "expected", "got"),
    [
        (no_folder, "data", "a folder with one sub-folder per class", "data'"),
        (empty, "data", "one sub-folder per class", "'none'"),
        (empty_class, "data", "at least one image", "'none'"),
        (truncated_first, "data", "a readable image", "class1/000.png"),
        (text_for_an_image, "data", "an image", "class1/000.jpg"),
        (truncated_first, "data --val_paths data", "a readable image", "class1/000.png"),
        (nothing, "data --val_paths gone", "a folder with one sub-folder per class", "gone'"),
        (nothing, "data -wss 0", "-wss in (0, 1]", "0.0"),
        (nothing, "data -wss 1.5", "-wss in (0, 1]", "1.5"),
        (nothing, "data -rep 0.5", "", "0.5"),
        (nothing, "data --keep 0", "", "0.0"),
        (nothing, "data --keep 1.5", "", "1.5"),
        (nothing, "data --keep 0.5 --sampling uniform", "options that --sampling uniform takes", "keep"),
        (nothing, "data --batch_size 49", "of at most 48", "49"),
        (nothing, "data --batch_size 25 -g 2", "of at most 48", "25 × 2"),
        (nothing, "data -n 2 -nr 2 --cache none", "-nr below -n 2", "2"),
        (nothing, "data --policy lur", "no cache policy", "lur"),
        (nothing, "data --policy belady", "a --policy for a run", "belady"),
        (nothing, "data --policy plan --sampling pads", "a --policy that can do without", "plan"),
        (nothing, "data --sampling paads", "did you mean 'pads'", "paads"),
        (nothing, "data --cache redsi://h", "did you mean 'redis'", "redsi"),
        (nothing, "data --cache redis://127.0.0.1:1", "expected the cache", "redis://127.0.0.1:1 to answer"),
        (nothing, "data --cache memory:// --workers 2", "a cache that ranks and workers share", "memory://"),
        (nothing, "data --disk tier", "the bytes that may lie there", "tier"),
        (nothing, "data --disk tier?capacity=1GB&x=1", "an option of disk://", "x"),
        (nothing, "data --disk disk://tier?capacity=1GB", "an absolute path of a folder", "disk://tier"),
        (a_file, "data --disk out/tier?capacity=1GB --out fine", "a --disk that can be written", "not a directory"),
        (nothing, "data --checkpoint local://", "there when the run is gone", "local://"),
        (nothing, "data --checkpoint redis://127.0.0.1:1", "expected the snapshot store", "127.0.0.1:1 to answer"),
        (nothing, "data --checkpoint redsi://h", "did you mean 'redis'", "redsi"),
        (nothing, "data --persist-to /proc/nothing/here", "could not write to --persist-to", "/proc/nothing/here"),
        (a_file, "data --persist-to out/deeper --out fine", "could not write to --persist-to", "out"),
        (nothing, "data --persist-to deep/deeper --checkpoint-every 0", "a number of steps, a time", "0"),
        (nothing, "data --persist-to deep/deeper --checkpoint-keep best", "last=N", "best"),
        (nothing, "data --checkpoint_strategy overlp", "did you mean 'overlap'", "overlp"),
        (
            nothing,
            "data --persist-to deep/deeper --cache redis://127.0.0.1:1",
            "expected the cache",
            "127.0.0.1:1 to answer",
        ),
        (nothing, "data --resume", "a run to resume", "runs"),
        (nothing, "data --resume gone", "a run to resume", "gone"),
        (a_run, "data --out out", "an --out without a run in it", "out"),
        (a_file, "data --out out", "an --out that can be written", "is not a directory"),
        (a_file, "data --out out/deeper", "an --out that can be written", "is not a directory"),
        (nothing, "data --out /proc/nothing/here", "an --out that can be written", "/proc/nothing/here"),
    ],
)
def test_it_is_refused(
    spoil: Callable[[Path], None], line: str, expected: str, got: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(here)
    told = refused(here, line, capsys)
    assert expected in told
    assert got in told
    assert "; " in told, "no cure"


def test_a_taken_port(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        told = refused(here, f"data --master_port {taken.getsockname()[1]}", capsys)
    assert "a free --master_port" in told


@pytest.mark.parametrize("trace", ["has-snapshots", "metrics.jsonl"])
def test_a_checkpoint_that_is_not_there_any_more(here: Path, trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = here / "out"
    out.mkdir()
    RunConfig(out=str(out), script=str(STREAM), train_paths=(str(here / "data"),), batch_size=8).save()
    (out / trace).write_text("{}\n")
    assert "a checkpoint to resume from" in refused(here, "--resume out", capsys)


@pytest.fixture
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """A server that wants a password."""
    with LocalServer(directory=tmp_path_factory.mktemp("s"), password="right") as server:
        yield server


@pytest.mark.multiprocess
@pytest.mark.parametrize("login", ["", ":wr0ng@", "me:wr0ng@"])
def test_a_wrong_password_is_refused_and_not_repeated(
    login: str, here: Path, guarded: LocalServer, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refused(here, f"data --cache unix://{login}{guarded.socket_path}", capsys)
    assert "expected an answer from" in told
    assert "correct the user, the password" in told
    assert "wr0ng" not in told


def test_cache_nodes_of_a_single_server_and_its_cure(
    here: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    (port,) = free_ports(1)
    line = f"data --host_ip 127.0.0.1 --port_num {port}"
    with LocalServer(directory=tmp_path_factory.mktemp("s"), settings={"port": str(port)}):
        assert "single server: write redis:// (beside --host_ip: -cn 1)" in refused(here, f"{line} -cn 4", capsys)
        assert main(f"{STREAM} {line} -cn 1 --batch_size 8 --dry-run".split()) == 0


@pytest.mark.multiprocess
def test_a_dry_run_shows_the_plan_without_the_password_and_starts_nothing(
    here: Path, guarded: LocalServer, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(here)
    line = f"{STREAM} data --batch_size 8 --dry-run --cache unix://:right@{guarded.socket_path}"
    assert main(line.split()) == 0
    told = capsys.readouterr()
    assert "right" not in told.out + told.err
    assert f"unix://:***@{guarded.socket_path}" in told.out
    assert "torch.distributed.run" in told.out
    assert "48 images in 4 classes, 8×8 pixels" in told.out
    assert snapshot(here) == before


@pytest.mark.slow
def test_an_unknown_network_is_refused_by_the_rank_and_leaves_nothing(here: Path) -> None:
    before = snapshot(here)
    told = run("bench_cifar10.py", "data", "--network", "resnt18", "--batch_size", "8", "--workers", "0", cwd=here)
    assert (told.returncode, told.stdout, told.stderr.count("\n")) == (2, "", 2), told
    assert "no network named 'resnt18' (did you mean 'resnet18'?); known: " in told.stderr
    assert snapshot(here) == before


@pytest.fixture(scope="module")
def rotten(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A data set with one truncated image that rank 1 of 2 meets at the third step of the first epoch."""
    root = make_images(tmp_path_factory.mktemp("rotten"))
    folder = ImageFolder(str(root))
    sampler = ShadeSampler(ShadeDataset(folder, cache=None), batch_size=8, seed=0)
    victim = Path(folder.samples[int(sampler.order_of(0)[2 * 8 + 5])][0])
    sampler.close()
    if victim.name == "000.png":  # the launcher itself would see the first image of a class
        victim = victim.with_name("011.png")
    return root, truncate(victim)


@pytest.mark.slow
def test_a_truncated_image_deep_in_the_data_stops_the_run_with_its_path(
    rotten: tuple[Path, Path], tmp_path: Path
) -> None:
    root, victim = rotten
    words = (root, "-g", "2", "--batch_size", "4", "--workers", "1", "--network", "cnn", "--out", "out")
    told = run("bench_cifar10.py", *words, cwd=tmp_path)
    assert (told.returncode, told.stderr.count("\n")) == (2, 2), told
    assert str(victim) in told.stderr
    assert "--on-bad-sample skip" in told.stderr
    assert "failure-1" in " ".join(snapshot(tmp_path)) or not (tmp_path / "out").exists()


@pytest.mark.slow
def test_or_it_is_skipped_counted_and_the_run_ends_well(rotten: tuple[Path, Path], tmp_path: Path) -> None:
    root, _ = rotten
    words = (root, "--batch_size", "8", "--workers", "1", "--network", "cnn", "--on-bad-sample", "skip")
    told = run("bench_cifar10.py", *words, "--out", "out", cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    assert sum(row["bad_samples"] for row in rows(tmp_path / "out")) == 1
    assert "1 samples could not be read or decoded" in told.stdout
