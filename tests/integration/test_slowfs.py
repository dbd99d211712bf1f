"""Slow storage is as slow as asked, for all who use it together, counts exactly, and goes away without a trace.

The mounts are real; where a machine cannot mount or compile, the tests that need it are skipped and say why. Times are
compared with times of the same run. A mount that hangs would hang whoever reads it, so each has a guard that kills its
server after GUARD_SECONDS, upon which the kernel gives the readers errors.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).resolve().parents[2]
SLOWFS = ROOT / "scripts" / "slowfs"
GUARD_SECONDS = 60
NOT_HERE = 3
READER = """
import sys, time
with open(sys.argv[1], "rb", buffering=0) as file:
    print("ready", flush=True)
    sys.stdin.readline()
    num_bytes, started = 0, time.perf_counter()
    while block := file.read(1 << 16):
        num_bytes += len(block)
    print(num_bytes, time.perf_counter() - started)
"""


def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A call of the script that is expected to come back by itself."""
    words = [sys.executable, str(SLOWFS), *map(str, arguments)]
    return subprocess.run(
        words, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=False
    )


class Slow:
    """A folder, and the mount that shows it slowly."""

    def __init__(self, source: Path, mountpoint: Path, *options: str) -> None:
        self.source, self.mountpoint = source, mountpoint
        self.process = subprocess.Popen(
            [sys.executable, str(SLOWFS), str(source), str(mountpoint), *options],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.guard = threading.Timer(GUARD_SECONDS, self.process.kill)
        self.guard.start()
        assert self.process.stdout is not None
        self.greeting = self.process.stdout.readline()
        if not self.greeting:
            _, complaint = self.end()
            if self.process.returncode == NOT_HERE:
                pytest.skip(complaint.strip())
            pytest.fail(complaint)

    def counts(self) -> dict[str, int]:
        return dict(json.loads((self.mountpoint / ".slowfs-stats").read_text()))

    def servers(self) -> list[int]:
        """The compiled program's process id."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in children.split()]

    def end(self, signal_number: int = signal.SIGTERM) -> tuple[str, str]:
        """Sends the signal; what was printed last, and the complaints."""
        try:
            if self.process.poll() is None:
                self.process.send_signal(signal_number)
            return self.process.communicate(timeout=20)
        finally:
            self.process.kill()
            self.guard.cancel()
            self.guard.join()
            self.process.communicate()


def is_mounted(mountpoint: Path) -> bool:
    listed = str(mountpoint).replace(" ", r"\040")
    return f" {listed} " in Path("/proc/self/mountinfo").read_text()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files of many sizes, a folder in a folder, links."""
    folder = tmp_path / "source"
    (folder / "train" / "a b").mkdir(parents=True)
    for index, size in enumerate((0, 1, 4095, 4096, 30_000, 2**20 + 1)):
        (folder / "train" / f"{index}.bin").write_bytes(os.urandom(size))
    (folder / "train" / "a b" / "é").write_bytes(b"inner")
    (folder / "to_file").symlink_to(folder / "train" / "4.bin")
    (folder / "to_folder").symlink_to("train")
    return folder


@pytest.fixture
def slow(folder: Path, tmp_path: Path) -> Iterator[Callable[..., Slow]]:
    """Mounts the folder with the options given; all mounts end with the test, however it ends."""
    started: list[Slow] = []

    def start(*options: str) -> Slow:
        mountpoint = tmp_path / f"slow {len(started)}"
        mountpoint.mkdir()
        started.append(Slow(folder, mountpoint, *options))
        return started[-1]

    yield start
    left = []
    for mount in started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            mount.end()
        if is_mounted(mount.mountpoint):
            left.append(mount.mountpoint)
            command = "umount" if os.geteuid() == 0 else "fusermount3"
            flags = ("-l",) if os.geteuid() == 0 else ("-u", "-z")
            subprocess.run([command, *flags, str(mount.mountpoint)], check=False)
    assert not left


def seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def read_once(path: Path) -> bytes:
    """Open, one read that is large enough, close."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 1 << 20)
    finally:
        os.close(file)


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every path below, with the content of files."""
    paths = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}


def test_content_names_and_attributes_are_the_same(slow: Callable[..., Slow], folder: Path) -> None:
    mount = slow()
    assert tree(mount.mountpoint) == tree(folder)
    for path in ("train", "train/5.bin", "train/a b/é"):
        here, there = (folder / path).stat(), (mount.mountpoint / path).stat()
        fields = ("st_mode", "st_size", "st_mtime_ns", "st_ino", "st_nlink", "st_uid")
        assert [getattr(there, field) for field in fields] == [getattr(here, field) for field in fields]
    with open(mount.mountpoint / "train" / "5.bin", "rb") as file:
        file.seek(2**20 - 7)
        assert file.read(5) == (folder / "train" / "5.bin").read_bytes()[2**20 - 7 : 2**20 - 2]
    assert shutil.disk_usage(mount.mountpoint).total == shutil.disk_usage(folder).total
    with pytest.raises(FileNotFoundError):
        os.stat(mount.mountpoint / "absent")


def test_links_to_files_stay_within_the_slow_storage(slow: Callable[..., Slow], folder: Path) -> None:
    mount = slow()
    assert not (mount.mountpoint / "to_file").is_symlink()
    assert (mount.mountpoint / "to_file").read_bytes() == (folder / "train" / "4.bin").read_bytes()
    assert mount.counts()["num_opens"] == 1
    assert os.readlink(mount.mountpoint / "to_folder") == "train"
    (entry,) = [entry for entry in os.scandir(mount.mountpoint) if entry.name == "to_file"]
    assert entry.is_file(follow_symlinks=False)


def test_a_folder_of_many_files_is_listed_whole(slow: Callable[..., Slow], folder: Path) -> None:
    names = {f"{'x' * 40}{index}" for index in range(3000)}
    (folder / "many").mkdir()
    for name in names:
        (folder / "many" / name).touch()
    mount = slow()
    listed = os.listdir(mount.mountpoint / "many")
    assert len(listed) == len(names)
    assert set(listed) == names


def test_nothing_can_be_written(slow: Callable[..., Slow], folder: Path) -> None:
    mount = slow()
    for action in (
        lambda: (mount.mountpoint / "new").touch(),
        lambda: (mount.mountpoint / "train" / "1.bin").write_bytes(b"changed"),
        lambda: (mount.mountpoint / "train" / "1.bin").unlink(),
    ):
        with pytest.raises(OSError, match="Read-only file system"):
            action()


def test_a_writable_mount_does_what_the_folder_does(slow: Callable[..., Slow], folder: Path, tmp_path: Path) -> None:
    """The same steps there and in a plain folder: the same trees, and the same answers on the way."""
    mount, plain = slow("--writable"), tmp_path / "plain"
    shutil.copytree(folder, plain, symlinks=True)

    def steps(root: Path) -> list[object]:
        told: list[object] = []
        (root / "new" / "deep").mkdir(parents=True)
        file = root / "new" / "deep" / "file"
        file.write_bytes(bytes(range(256)) * 20_000)  # more than one request
        with open(file, "r+b", buffering=0) as opened:
            opened.seek(1_000_000)
            opened.write(b"changed")
            opened.truncate(2_000_000)
            os.fsync(opened)
            told.append(os.fstat(opened.fileno()).st_size)
        with open(file, "ab") as opened:
            opened.write(b"appended")
        os.replace(file, root / "train" / "1.bin")  # over what was looked up before
        told += [file.exists(), (root / "train" / "1.bin").stat().st_size]
        file.write_bytes(b"again, by a name that was renamed away")
        told.append(file.read_bytes())
        os.rename(root / "new", root / "renamed")  # a folder, with what is known below it
        told += [(root / "renamed" / "deep" / "file").read_bytes(), (root / "new").exists()]
        with open(root / "train" / "2.bin", "rb") as opened:  # removed while it is open
            (root / "train" / "2.bin").unlink()
            told.append(len(os.read(opened.fileno(), 10_000)))
        (root / "train" / "2.bin").write_bytes(b"another of that name")
        told.append((root / "train" / "2.bin").read_bytes())
        for action in (
            lambda: (root / "train").rmdir(),
            lambda: (root / "absent").unlink(),
            lambda: (root / "renamed").mkdir(),
            lambda: os.open(root / "train" / "1.bin", os.O_CREAT | os.O_EXCL),
            lambda: os.rename(root / "absent", root / "x"),
        ):
            try:
                action()
            except OSError as error:
                told.append(error.errno)
        directory = os.open(root / "train", os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)
        (root / "train" / "3.bin").chmod(0o600)
        os.utime(root / "train" / "3.bin", (1, 2))
        told += [(root / "train" / "3.bin").stat().st_mode, (root / "train" / "3.bin").stat().st_mtime]
        os.truncate(root / "train" / "4.bin", 10)
        (root / "train" / "a b" / "é").unlink()
        (root / "train" / "a b").rmdir()
        return told

    assert steps(mount.mountpoint) == steps(plain)
    trees = [tree(root) for root in (mount.mountpoint, folder, plain)]
    for found in trees:
        del found["to_file"]  # the plain folder's points into the source
    assert trees[0] == trees[1] == trees[2]


def test_direct_writes_land_and_all_writes_are_counted(slow: Callable[..., Slow], folder: Path) -> None:
    mount = slow("--writable")
    with mmap.mmap(-1, 3 << 20) as content:
        content[:] = os.urandom(3 << 20)
        file = os.open(mount.mountpoint / "direct", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        try:
            assert os.write(file, content) == 3 << 20
            os.fsync(file)
        finally:
            os.close(file)
        assert (folder / "direct").read_bytes() == content[:]
    counts = mount.counts()
    assert counts["written_bytes"] == 3 << 20
    assert 3 <= counts["num_writes"] <= 6
    assert (counts["num_opens"], counts["read_bytes"]) == (1, 0)
    with open(mount.mountpoint / "small", "wb", buffering=0) as small:
        small.write(b"12345")
    assert mount.counts()["written_bytes"] == (3 << 20) + 5


def test_the_counts_cannot_be_written(slow: Callable[..., Slow]) -> None:
    stats = slow("--writable").mountpoint / ".slowfs-stats"
    for action in (stats.unlink, lambda: os.truncate(stats, 0), lambda: stats.rename(stats.parent / "x")):
        with pytest.raises(OSError, match="not permitted"):
            action()
    assert json.loads(stats.read_text())["num_writes"] == 0


def test_readers_and_writers_share_the_bandwidth(slow: Callable[..., Slow], folder: Path) -> None:
    (folder / "large").write_bytes(bytes(1_000_000))
    mount = slow("--writable", "--bandwidth", "10MB/s")

    def write() -> None:
        (mount.mountpoint / "new").write_bytes(bytes(1_000_000))

    alone = min(seconds(write), seconds(lambda: (mount.mountpoint / "large").read_bytes()))
    assert alone >= 1_000_000 / 10_000_000
    with ThreadPoolExecutor(2) as pool:
        both = seconds(
            lambda: [job.result() for job in (pool.submit(write), pool.submit((mount.mountpoint / "large").read_bytes))]
        )
    assert both >= 2_000_000 / 10_000_000


def test_opens_reads_and_bytes_are_counted_exactly_again_and_again(slow: Callable[..., Slow], folder: Path) -> None:
    mount = slow()
    start = mount.counts()
    assert (start["num_opens"], start["num_reads"], start["read_bytes"]) == (0, 0, 0)
    for round_ in range(1, 4):  # the second and third round show that nothing is cached
        for index, size in enumerate((0, 1, 4095, 4096, 30_000)):
            assert len(read_once(mount.mountpoint / "train" / f"{index}.bin")) == size
        counts = mount.counts()
        assert (counts["num_opens"], counts["num_reads"]) == (5 * round_, 5 * round_)
        assert counts["read_bytes"] == 38_192 * round_
    with open(mount.mountpoint / "train" / "4.bin", "rb", buffering=0) as file:
        for _ in range(3):  # nor is it within one open
            file.seek(0)
            assert len(file.read(30_000)) == 30_000
    counts = mount.counts()
    assert (counts["num_opens"], counts["num_reads"], counts["read_bytes"]) == (16, 18, 38_192 * 3 + 90_000)


def test_the_counts_are_for_those_who_ask(slow: Callable[..., Slow]) -> None:
    mount = slow()
    assert ".slowfs-stats" not in os.listdir(mount.mountpoint)
    with open(mount.mountpoint / ".slowfs-stats") as snapshot:
        read_once(mount.mountpoint / "train" / "1.bin")
        assert json.loads(snapshot.read())["num_opens"] == 0
    assert mount.counts()["num_opens"] == 1


def test_files_can_be_mapped(slow: Callable[..., Slow], folder: Path) -> None:
    mount = slow()
    content = (folder / "train" / "5.bin").read_bytes()
    kinds = [mmap.MAP_PRIVATE, mmap.MAP_SHARED] if mount.counts()["shared_mmap"] else [mmap.MAP_PRIVATE]
    with open(mount.mountpoint / "train" / "5.bin", "rb") as file:
        for kind in kinds:
            before = mount.counts()["read_bytes"]
            with mmap.mmap(file.fileno(), 0, flags=kind, prot=mmap.PROT_READ) as mapped:
                assert mapped[:] == content
            assert mount.counts()["read_bytes"] - before >= len(content)  # a new mapping starts cold


def test_latencies_of_parallel_opens_overlap(slow: Callable[..., Slow], folder: Path) -> None:
    for index in range(32):
        (folder / f"{index}").write_bytes(bytes(100))
    mount = slow("--open-latency", "20ms")
    paths = [mount.mountpoint / f"{index}" for index in range(32)]
    single = min(seconds(lambda: read_once(paths[0])) for _ in range(5))
    assert single >= 0.020
    with ThreadPoolExecutor(16) as pool:
        parallel = min(seconds(lambda: list(pool.map(read_once, paths))) for _ in range(3))
    assert 2 * 0.020 <= parallel <= 5 * single, (single, parallel)  # 2 in theory, 32 if they queued
    assert mount.counts()["num_opens"] == 5 + 3 * 32


def test_two_processes_share_the_bandwidth(slow: Callable[..., Slow], folder: Path) -> None:
    (folder / "large").write_bytes(bytes(2_000_000))
    mount = slow("--bandwidth", "10MB/s")

    def readers(count: int) -> list[float]:
        """How long each of so many took, in seconds, shortest first; they begin together."""
        words = [sys.executable, "-c", READER, str(mount.mountpoint / "large")]
        pipe = subprocess.PIPE
        processes = [subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) for _ in range(count)]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        told = [process.communicate(timeout=GUARD_SECONDS)[0].split() for process in processes]
        assert [int(number) for number, _ in told] == [2_000_000] * count
        return sorted(float(taken) for _, taken in told)

    (alone,) = readers(1)
    assert alone >= 2_000_000 / 10_000_000
    first, last = readers(2)
    assert last >= 2 * 2_000_000 / 10_000_000 * 0.98  # the other may have begun a little earlier
    assert last / alone <= 2.6
    assert last / first <= 1.5, "one of them starved"
    assert mount.counts()["read_bytes"] == 6_000_000


def test_sixteen_readers_get_the_bandwidth_and_no_more(slow: Callable[..., Slow], folder: Path) -> None:
    for index in range(16):
        (folder / f"{index}").write_bytes(bytes(50_000))
    mount = slow("--bandwidth", "4MB/s", "--open-latency", "5ms")
    single = seconds(lambda: read_once(mount.mountpoint / "0"))
    with ThreadPoolExecutor(16) as pool:
        parallel = seconds(lambda: list(pool.map(lambda index: read_once(mount.mountpoint / str(index)), range(16))))
    assert parallel >= 16 * 50_000 / 4_000_000  # bytes queue …
    assert parallel <= 16 * single  # … and latencies do not


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_unmounts_and_writes_the_counts(
    slow: Callable[..., Slow], tmp_path: Path, signal_number: signal.Signals
) -> None:
    mount = slow("--stats", str(tmp_path / "stats.json"))
    (server,) = mount.servers()
    read_once(mount.mountpoint / "train" / "4.bin")
    printed, complaint = mount.end(signal_number)
    assert (mount.process.returncode, complaint) == (0, "")
    assert "unmounted" in printed
    assert not is_mounted(mount.mountpoint)
    assert os.listdir(mount.mountpoint) == []
    assert not Path(f"/proc/{server}").exists()
    final = json.loads((tmp_path / "stats.json").read_text())
    assert (final["num_opens"], final["num_reads"], final["read_bytes"]) == (1, 1, 30_000)


def test_a_signal_ends_it_while_a_reader_waits(slow: Callable[..., Slow]) -> None:
    mount = slow("--open-latency", "1000s")
    program = "import sys; print('ready', flush=True); open(sys.argv[1])"
    words = [sys.executable, "-c", program, str(mount.mountpoint / "train" / "4.bin")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as reader:
        try:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "ready\n"
            with pytest.raises(subprocess.TimeoutExpired):
                reader.wait(timeout=0.3)
            mount.end()
            assert not is_mounted(mount.mountpoint)
            assert reader.wait(timeout=20) == 1  # an exception, and no wait for ever
            assert "[Errno " in reader.communicate()[1]
        finally:
            reader.kill()


def test_a_signal_ends_it_while_a_file_is_open(slow: Callable[..., Slow]) -> None:
    mount = slow()
    with open(mount.mountpoint / "train" / "4.bin", "rb", buffering=0) as file:
        assert len(file.read(10)) == 10
        mount.end()
        assert not is_mounted(mount.mountpoint)
        with pytest.raises(OSError, match="not connected"):
            file.read(10)


def test_a_server_that_dies_is_unmounted(slow: Callable[..., Slow]) -> None:
    mount = slow()
    (server,) = mount.servers()
    os.kill(server, signal.SIGKILL)
    mount.process.wait(timeout=20)
    assert not is_mounted(mount.mountpoint)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can unmount without fusermount3")
def test_a_killed_script_leaves_nothing(slow: Callable[..., Slow]) -> None:
    mount = slow()
    (server,) = mount.servers()
    mount.process.kill()
    mount.process.wait(timeout=20)
    while Path(f"/proc/{server}").exists() and Path(f"/proc/{server}/stat").read_text().split()[2] != "Z":
        time.sleep(0.01)
    assert not is_mounted(mount.mountpoint)


def test_unmounted_by_someone_else_it_ends(slow: Callable[..., Slow]) -> None:
    mount = slow()
    if os.geteuid() == 0:
        subprocess.run(["umount", str(mount.mountpoint)], check=True)
    else:
        subprocess.run(["fusermount3", "-u", str(mount.mountpoint)], check=True)
    printed, complaint = mount.process.communicate(timeout=20)
    assert (mount.process.returncode, complaint) == (0, "")
    assert "unmounted" in printed


def test_help_teaches() -> None:
    told = run("--help")
    assert told.returncode == 0
    for word in ("--open-latency", "--bandwidth", "--writable", "--stats", ".slowfs-stats", "/dev/fuse", "fusermount3"):
        assert word in told.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("{source}/absent", "{empty}"), "expected a folder that exists"),
        (("{source}", "{empty}/absent"), "mkdir -p"),
        (("{source}", "{source}/train/1.bin"), "got a file"),
        (("{empty}", "{source}"), "expected an empty folder, got one with 3 entries"),
        (("{source}", "{source}/train/inner"), "inside SOURCE"),
        (("{source}", "{empty}", "--open-latency", "2"), "such as 2ms; got '2'"),
        (("{source}", "{empty}", "--open-latency", "-2ms"), "expected one argument"),
        (("{source}", "{empty}", "--bandwidth", "0MB/s"), "such as 100MB/s; got '0MB/s'"),
        (("{source}", "{empty}", "--bandwidth", "fast"), "such as 100MB/s; got 'fast'"),
        (("{source}", "{empty}", "--stats", "{empty}/absent/file"), "mkdir"),
        (("{source}",), "MOUNTPOINT"),
    ],
)
def test_a_mistake_is_one_line_with_its_cure(
    folder: Path, tmp_path: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    (tmp_path / "empty").mkdir()
    (folder / "train" / "inner").mkdir()
    told = run(*(word.format(source=folder, empty=tmp_path / "empty") for word in arguments))
    assert told.returncode == 2
    assert sentence in told.stderr
    assert told.stderr.startswith("slowfs: ")
    assert told.stderr.count("\n") == 1


def test_what_a_machine_lacks_is_one_line_with_its_cure(folder: Path, tmp_path: Path) -> None:
    """A clone that has nothing compiled yet, and a PATH with nothing on it."""
    (tmp_path / "empty").mkdir()
    for path in ("scripts/slowfs", "benchmarks/slowfs.c"):
        (tmp_path / "clone" / path).parent.mkdir(parents=True)
        shutil.copy(ROOT / path, tmp_path / "clone" / path)
    words = [sys.executable, str(tmp_path / "clone" / "scripts" / "slowfs"), str(folder), str(tmp_path / "empty")]

    def told(**environment: str) -> str:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == NOT_HERE
        assert done.stderr.count("\n") == 1
        return done.stderr

    complaint = told(PATH=str(tmp_path))
    if not os.path.exists("/dev/fuse"):
        assert "modprobe fuse" in complaint
    elif os.geteuid() != 0:
        assert "apt-get install fuse3" in complaint
    else:
        assert "apt-get install gcc" in complaint
        (tmp_path / "cc").write_text("#!/bin/sh\necho 'x.c:1: fatal error: linux/fuse.h: no such file' >&2\nexit 1\n")
        (tmp_path / "cc").chmod(0o755)
        complaint = told(PATH=str(tmp_path))
        assert "linux/fuse.h" in complaint
        assert "apt-get install libc6-dev linux-libc-dev" in complaint
    assert not is_mounted(tmp_path / "empty")


def test_the_program_compiles_without_a_warning(tmp_path: Path) -> None:
    compiler = next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if compiler is None:
        pytest.skip("no C compiler here")
    words = [compiler, "-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-pthread", "-o", str(tmp_path / "slowfs")]
    done = subprocess.run([*words, str(ROOT / "benchmarks" / "slowfs.c")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
