"""Shared memory in huge pages: aligned, shared with its file, of the same content before and after, whoever writes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shade.checkpoint._buffer.shared_memory_tier import HUGE_BYTES, make_huge, make_resident, map_aligned

LENGTH = 3 * HUGE_BYTES
MAPS = Path("/proc/self/smaps")
SHARED = Path("/dev/shm")
"""Files that are memory; a folder on a disk has no huge pages."""


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    folder = SHARED if SHARED.is_dir() else tmp_path
    path = folder / f"shade-test-{os.getpid()}"
    made = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    path.unlink()
    os.posix_fallocate(made, 0, LENGTH)
    yield made
    os.close(made)


def mapping_of(address: int) -> dict[str, int]:
    """What the system says of the mapping that begins at an address, in KiB; nothing where there is none."""
    found: dict[str, int] = {}
    is_wanted = False
    for line in MAPS.read_text().splitlines():
        key, _, value = line.partition(":")
        if "-" in line.split()[0]:
            is_wanted = line.startswith(f"{address:x}-")
        elif is_wanted and value.strip().endswith(" kB"):
            found[key] = int(value.split()[0])
    return found


def test_a_mapping_begins_where_a_huge_page_does_and_is_the_file(descriptor: int) -> None:
    memory = map_aligned(descriptor, LENGTH)
    assert memory.data_ptr() % HUGE_BYTES == 0
    assert memory.shape == (LENGTH,)
    memory[-1] = 7
    assert os.pread(descriptor, 2, LENGTH - 1) == b"\x07"
    os.pwrite(descriptor, b"\x05", 0)
    assert memory[0] == 5


@pytest.mark.skipif(not MAPS.exists(), reason="the system does not tell what is mapped")
def test_a_mapping_lives_as_long_as_its_last_view(descriptor: int) -> None:
    memory = map_aligned(descriptor, LENGTH)
    address, view = memory.data_ptr(), memory[HUGE_BYTES:]
    del memory
    assert mapping_of(address)["Size"] == LENGTH // 1024
    view.fill_(3)
    del view
    assert mapping_of(address) == {}


def test_what_cannot_be_mapped_is_an_error() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        map_aligned(2**30, LENGTH)


def test_content_is_the_same_when_pages_have_become_huge(descriptor: int) -> None:
    memory = map_aligned(descriptor, LENGTH)
    os.pwrite(descriptor, b"there before", HUGE_BYTES)
    make_resident(memory)
    content = torch.randint(0, 256, (LENGTH,), dtype=torch.uint8)
    content[HUGE_BYTES : HUGE_BYTES + 12] = memory[HUGE_BYTES : HUGE_BYTES + 12]
    memory.copy_(content)
    assert make_huge(memory)
    assert torch.equal(memory, content)
    assert os.pread(descriptor, 12, HUGE_BYTES) == b"there before"
    assert torch.equal(map_aligned(descriptor, LENGTH), content)
    if not MAPS.exists():
        return
    huge = mapping_of(memory.data_ptr())["ShmemPmdMapped"]
    if huge == 0:
        pytest.skip("this system puts no pages together")
    assert huge == LENGTH // 1024


def test_a_writer_is_not_disturbed(descriptor: int) -> None:
    memory = map_aligned(descriptor, LENGTH)
    make_resident(memory)
    rounds, is_over = 0, threading.Event()

    def write() -> None:
        nonlocal rounds
        while not is_over.is_set():
            memory.add_(1)
            rounds += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(20):
            make_huge(memory)
    finally:
        is_over.set()
        writer.join()
    assert rounds > 0
    assert bool((memory == rounds % 256).all())


@pytest.mark.skipif(not MAPS.exists(), reason="the system does not tell what is mapped")
def test_nothing_is_put_together_when_it_is_not_worth_it_any_more(descriptor: int) -> None:
    memory = map_aligned(descriptor, LENGTH)
    make_resident(memory)
    make_huge(memory, lambda: False)
    assert mapping_of(memory.data_ptr())["ShmemPmdMapped"] == 0
