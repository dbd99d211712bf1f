"""BatchBuffers: memory is used again when its batch is gone, and never before."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shade.data._loader.batch_parts import BatchBuffers, on_device

SHAPE = (4, 3, 8, 8)


def test_memory_is_used_again_once_it_is_free() -> None:
    buffers = BatchBuffers(2, pinned=False)
    first = buffers.take(SHAPE, torch.float32)
    assert first.shape == SHAPE
    assert first.is_contiguous()
    place = first.data_ptr()
    del first
    assert buffers.take(SHAPE, torch.float32).data_ptr() == place
    assert buffers.take((2, 3, 8, 8), torch.uint8).data_ptr() == place, "a smaller batch fits into it"


def test_a_reference_to_any_part_of_a_batch_keeps_it() -> None:
    buffers = BatchBuffers(8, pinned=False)
    views = {
        "row": lambda batch: batch[1],
        "numpy": lambda batch: batch.numpy()[2:],
        "transposed": lambda batch: batch.permute(0, 2, 3, 1),
        "detached": lambda batch: batch.detach(),
        "storage": lambda batch: batch.untyped_storage(),
    }
    for name, view in views.items():
        held = view(buffers.take(SHAPE, torch.float32).fill_(1.0))
        gc.collect()
        others = [buffers.take(SHAPE, torch.float32).fill_(2.0) for _ in range(4)]
        values = torch.tensor(held.tolist(), dtype=torch.uint8) if name == "storage" else torch.as_tensor(held)
        assert not bool((values == 2.0).all()), name
        del others, held


def test_living_batches_never_share_memory() -> None:
    buffers = BatchBuffers(4, pinned=False)
    alive = [buffers.take(SHAPE, torch.float32).fill_(float(number)) for number in range(9)]
    assert all(bool((batch == number).all()) for number, batch in enumerate(alive))
    assert len({batch.data_ptr() for batch in alive}) == 9


def test_only_so_many_blocks_are_kept() -> None:
    buffers = BatchBuffers(2, pinned=False)
    alive = [buffers.take(SHAPE, torch.float32) for _ in range(6)]
    del alive
    gc.collect()
    buffers._collect()
    assert len(buffers._free) == 2
    assert not buffers._lent


def test_no_line_of_python_runs_when_a_batch_dies() -> None:
    """A signal that is waiting would be raised in it, and what is raised there is lost."""
    buffers, calls = BatchBuffers(2, pinned=False), []
    batch = buffers.take(SHAPE, torch.float32)

    def note(frame: Any, event: str, argument: object) -> None:
        calls.append((event, frame.f_code.co_name))

    sys.setprofile(note)
    del batch
    sys.setprofile(None)
    assert [call for call in calls if call[0] == "call"] == []
    buffers._collect()
    assert len(buffers._free) == 1, "and it has died"


def test_threads_may_take_and_drop_at_once() -> None:
    buffers = BatchBuffers(4, pinned=False)
    wrong = []

    def use(number: int) -> None:
        for _ in range(300):
            batch = buffers.take(SHAPE, torch.float32).fill_(float(number))
            if not bool((batch == number).all()):
                wrong.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_batch_outlives_its_drawer() -> None:
    buffers = BatchBuffers(4, pinned=False)
    batch = buffers.take(SHAPE, torch.float32).fill_(3.0)
    del buffers
    gc.collect()
    assert bool((batch == 3.0).all())


def test_a_batch_is_copied_to_a_gpu_while_training_is_at_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Played on the meta device: its streams and events are names."""
    done: list[Any] = []

    class Played(str):
        type = "cuda"

    class Stream:
        def record_event(self) -> int:
            done.append("copied")
            return len(done)

        def wait_event(self, event: int) -> None:
            done.append(("trains after", event))

    @contextlib.contextmanager
    def entering(what: Any) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "device", entering)
    monkeypatch.setattr(torch.cuda, "stream", entering)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: done.append(tuple(tensor.shape)))
    batches = [[torch.ones(size, 2), torch.arange(size), "rest"] for size in (3, 4)]
    found = list(on_device(batches, Played("meta")))  # type: ignore[arg-type]
    assert [[images.device.type, len(indices), rest] for images, indices, rest in found] == [
        ["meta", 3, "rest"],
        ["meta", 4, "rest"],
    ]
    assert done == ["copied", "copied", ("trains after", 1), (3, 2), (3,), ("trains after", 2), (4, 2), (4,)]
