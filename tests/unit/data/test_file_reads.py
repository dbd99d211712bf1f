"""read_files: contents and errors as Python reads them, seconds of storage alone, and a call that signals can end."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shade.data._origin.file_reads import read_files
from shade.data._origin.origin import FileOrigin

DECAY, SLOW = 0.9, 1e9


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    made = [tmp_path / f"ä {number}" for number in range(40)]
    for number, path in enumerate(made):
        path.write_bytes(os.urandom(number * 100))
    return [str(path) for path in made]


def room(num_bytes: int = 1 << 20) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.empty(num_bytes, dtype=np.uint8)


def plain(path: str) -> bytes | type[OSError]:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        return type(error)


def test_contents_and_errors_are_those_of_open(paths: list[str], tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    tried = [paths[3], str(tmp_path / "missing"), str(tmp_path), str(loop), f"{paths[1]}/file", "x" * 300, *paths]
    contents, _ = read_files(tried, room(), 0.0, DECAY, SLOW)
    assert [type(content) if isinstance(content, OSError) else content for content in contents] == list(
        map(plain, tried)
    )
    missing = contents[1]
    assert isinstance(missing, FileNotFoundError)
    assert missing.filename == tried[1]


def test_reading_ends_before_the_first_file_that_does_not_fit(paths: list[str]) -> None:
    contents, _ = read_files(paths[10:], room(1000 + 1100 + 1200), 0.0, DECAY, SLOW)
    assert contents == [Path(path).read_bytes() for path in paths[10:12]], "the third needs a byte more"
    assert read_files(paths[10:], room(1000), 0.0, DECAY, SLOW)[0] == []


def test_a_file_that_grew_is_read_whole(paths: list[str]) -> None:
    Path(paths[2]).write_bytes(grown := os.urandom(3 << 20))
    contents = FileOrigin().read_many(paths, [100 * number for number in range(len(paths))])
    assert contents[2] == grown
    assert contents[3:] == [Path(path).read_bytes() for path in paths[3:]]


def test_a_script_that_replaced_open_is_asked(paths: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As code does that reads a bucket through a path, and `SlowStorage`."""
    monkeypatch.setattr("builtins.open", lambda path, *_, **__: io.BytesIO(path.encode()))
    assert FileOrigin().read_many([*paths, "bucket/a"]) == [path.encode() for path in [*paths, "bucket/a"]]


def test_a_null_byte_names_no_other_file(paths: list[str]) -> None:
    with pytest.raises(ValueError, match="null byte"):
        read_files([paths[0], f"{paths[1]}\0.jpg"], room(), 0.0, DECAY, SLOW)


def test_no_descriptor_stays_open(paths: list[str]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for num_bytes in (1 << 20, 1000):
        read_files([*paths, "/missing", "/"], room(num_bytes), 0.0, DECAY, SLOW)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def busy_interpreter() -> Iterator[float]:
    """Another thread computes, and gives the interpreter away these seconds after another one asked for it."""
    before, ended = sys.getswitchinterval(), threading.Event()

    def compute() -> None:
        while not ended.is_set():
            pass

    sys.setswitchinterval(0.05)
    thread = threading.Thread(target=compute)
    thread.start()
    yield 0.05
    ended.set()
    thread.join()
    sys.setswitchinterval(before)


def test_waits_for_the_interpreter_are_not_waits_for_storage(paths: list[str], busy_interpreter: float) -> None:
    longest, means = 0.0, []
    while longest < busy_interpreter:
        begun = time.monotonic()
        plain(paths[0])  # waits for the interpreter as soon as the other thread runs
        longest = max(longest, time.monotonic() - begun)
        means.append(read_files(paths, room(), 0.0, DECAY, SLOW)[1])
    assert max(means) < busy_interpreter / 2


def slow_file(path: Path, seconds: float) -> threading.Thread:
    """Makes a file whose content comes late."""
    os.mkfifo(path)

    def write() -> None:
        time.sleep(seconds)
        path.write_bytes(b"late")

    thread = threading.Thread(target=write)
    thread.start()
    return thread


def test_the_first_slow_file_ends_the_call(paths: list[str], tmp_path: Path) -> None:
    writer = slow_file(tmp_path / "slow", 0.1)
    contents, mean = read_files([*paths[:2], str(tmp_path / "slow"), *paths[2:]], room(), 0.0, DECAY, 0.005)
    writer.join()
    assert contents[2:] == [b"late"]
    assert mean > (1 - DECAY) * 0.1 / 2


class Interrupted(Exception):
    """What the handler of a signal raises."""


def test_a_signal_ends_a_read_that_waits(tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise Interrupted

    os.mkfifo(tmp_path / "never")
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(Interrupted):
            FileOrigin().read_many([str(tmp_path / "never")])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
