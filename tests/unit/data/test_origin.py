"""FileOrigin: order, errors in their place, threads only when reading means waiting, and none after the end."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from shade.data._origin import origin as origin_module
from shade.data._origin.origin import PARALLEL_SECONDS, FileOrigin, FileOrRange


class Slow(FileOrigin):
    """Storage with a latency; remembers who read."""

    def __init__(self, seconds: float = 0.01) -> None:
        super().__init__()
        self.seconds, self.readers, self.at_once, self.most = seconds, set[str](), 0, 0
        self.lock = threading.Lock()

    def _read_first(self, paths: Sequence[FileOrRange], sizes: Sequence[int]) -> list[bytes | OSError]:
        with self.lock:
            self.at_once += 1
            self.most = max(self.most, self.at_once)
            self.readers.add(threading.current_thread().name)
        time.sleep(self.seconds)
        contents = super()._read_first(paths[:1], sizes[:1])
        self._mean_seconds = max(self._mean_seconds, self.seconds)
        with self.lock:
            self.at_once -= 1
        return contents


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    made = [tmp_path / f"{number}" for number in range(40)]
    for number, path in enumerate(made):
        path.write_bytes(b"%d" % number * 1000)
    return [str(path) for path in made]


def test_contents_come_in_order_and_errors_in_their_place(paths: list[str]) -> None:
    os.unlink(paths[3])
    for origin in (FileOrigin(), Slow()):
        for _ in range(2):
            contents = origin.read_many(paths)
            assert isinstance(contents[3], FileNotFoundError)
            assert [c for c in contents if isinstance(c, bytes)] == [b"%d" % n * 1000 for n in range(40) if n != 3]
        origin.close()


@pytest.mark.parametrize(("seconds", "in_threads"), [(PARALLEL_SECONDS / 10, False), (2 * PARALLEL_SECONDS, True)])
def test_only_an_origin_that_waits_is_read_by_threads(
    paths: list[str], seconds: float, in_threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_files(
        paths: list[str], room_S: object, mean: float, decay: float, slow: float
    ) -> tuple[list[bytes], float]:
        return [Path(paths[0]).read_bytes()], decay * mean + (1 - decay) * seconds

    monkeypatch.setattr(origin_module, "read_files", read_files)  # a busy machine takes longer
    before = set(threading.enumerate())
    origin = FileOrigin()
    for _ in range(5):
        assert origin.read_many(paths) == [b"%d" % number * 1000 for number in range(len(paths))]
    started = {thread for thread in threading.enumerate() if thread.name.startswith("shade-origin")} - before
    assert bool(started) == in_threads
    origin.close()


def test_a_slow_origins_latency_is_paid_in_parallel(paths: list[str]) -> None:
    origin = Slow()
    origin.read_many(paths[:1])
    origin.read_many(paths)
    assert 1 < origin.most <= origin.num_threads
    origin.close()
    origin.close()
    assert not any(thread.name.startswith("shade-origin") for thread in threading.enumerate())
    assert origin.read_many(paths[:2]) == [b"0" * 1000, b"1" * 1000], "and starts again"
    origin.close()


def test_pickles_without_its_threads(paths: list[str]) -> None:
    origin = FileOrigin(num_threads=3)
    origin.read_many(paths)
    copy = pickle.loads(pickle.dumps(origin))
    assert copy.num_threads == 3
    assert copy.read_many(paths[:1]) == [b"0" * 1000]


def test_a_forked_child_starts_threads_of_its_own(paths: list[str]) -> None:
    origin = Slow()
    origin.read_many(paths[:1])
    origin.read_many(paths[:4])
    child = os.fork()
    if child == 0:
        good = origin.read_many(paths[:4]) == [b"%d" % n * 1000 for n in range(4)]
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    origin.close()


def test_the_first_slow_read_of_a_batch_sends_the_rest_to_threads(paths: list[str]) -> None:
    origin = Slow()
    assert origin.read_many(paths) == [b"%d" % number * 1000 for number in range(len(paths))]
    assert origin.most > 1
    assert origin.readers > {threading.current_thread().name}
    origin.close()
