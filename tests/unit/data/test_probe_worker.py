"""What is learnt of a data set before training leaves it as it was, and is what a worker of DataLoader would see."""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from shade import ShadeDataset
from shade.data import MixtureSampler, PackedDataset
from shade.data._source import probe_worker
from shade.data._source.probe_worker import in_probe_worker

N = 300


class Archive(Dataset[Any]):
    """Opens its file at the first read; a read is a seek and a read, as tar and zip do it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: int | None = None

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        if self.file is None:
            self.file = os.open(self.path, os.O_RDONLY)
        os.lseek(self.file, 8 * index, os.SEEK_SET)
        return int(os.read(self.file, 8))


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    (tmp_path / "all").write_bytes(b"".join(b"%08d" % index for index in range(N)))
    return Archive(tmp_path / "all")


@pytest.mark.parametrize("options", [{}, {"prefix": float}, {"form": "auto", "transform": float}])
def test_a_data_set_that_opens_at_the_first_read_is_left_unopened(archive: Archive, options: dict[str, Any]) -> None:
    dataset = ShadeDataset(archive, cache="memory://", **options)
    assert archive.file is None
    assert dataset[7] == (7, 7)
    dataset.close()


def test_packed_lengths_leave_the_documents_unopened(archive: Archive) -> None:
    class Documents(Archive):
        def __getitem__(self, index: int) -> Any:
            return torch.full((1 + index % 3,), super().__getitem__(index))

    documents = Documents(archive.path)
    data = PackedDataset({"all": documents}, length=8)
    assert documents.file is None
    assert [int(length) for length in data.length_S[0][:4]] == [1, 2, 3, 1]
    sampler = MixtureSampler(data, weights={"all": 1}, batch_size=2, round_sequences=4)
    assert len(list(DataLoader(data, batch_size=2, sampler=sampler))) == 2


def test_it_runs_as_a_worker_and_nothing_changes_here() -> None:
    seen: list[int] = []

    def work() -> tuple[int, int, int]:
        seen.append(1)
        torch.manual_seed(9)
        info = get_worker_info()
        assert info is not None
        return os.getpid(), info.id, len(info.dataset)

    before = torch.get_rng_state()
    pid, number, length = in_probe_worker(work, [1, 2, 3])
    assert (pid != os.getpid(), number, length, seen) == (True, 0, 3, [])
    assert torch.equal(torch.get_rng_state(), before)


def test_what_fails_there_is_done_here_and_raises_here() -> None:
    here = os.getpid()

    def work() -> str:
        if os.getpid() != here:
            raise RuntimeError("not in a forked process")
        return "done"

    assert in_probe_worker(work, None) == "done"
    assert in_probe_worker(lambda: "ended" if os.getpid() == here else os._exit(3), None) == "ended"
    with pytest.raises(ZeroDivisionError):
        in_probe_worker(lambda: 1 // 0, None)


def test_files_that_are_open_already_keep_their_place(tmp_path: Path) -> None:
    (tmp_path / "all").write_bytes(bytes(range(256)) * 64)
    with open(tmp_path / "all", "rb", buffering=0) as file:
        assert file.read(10) == bytes(range(10))
        assert in_probe_worker(lambda: file.read(3), None) == bytes((10, 11, 12))
        assert file.read(3) == bytes((10, 11, 12))


def test_a_connection_is_used_in_this_process_alone() -> None:
    ours, peer = socket.socketpair()
    with ours, peer:

        def ask() -> bytes:
            ours.sendall(b"question")
            peer.settimeout(5)
            return peer.recv(8)

        assert in_probe_worker(ask, None) == b"question"
        peer.setblocking(False)
        with pytest.raises(BlockingIOError):
            peer.recv(1)


def test_a_process_that_waits_for_a_thread_that_is_not_there_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_worker, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(probe_worker, "_MOST_IDLE_SECONDS", 0.5)
    with ThreadPoolExecutor(1) as pool:
        # Its thread is idle, so that the forked copy starts no other.
        name = pool.submit(lambda: threading.current_thread().name).result()
        assert in_probe_worker(lambda: pool.submit(lambda: threading.current_thread().name).result(), None) == name
