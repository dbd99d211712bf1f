"""A copy that several threads share: each byte once, whoever takes it, and the digests of what they have brought."""

from __future__ import annotations

import itertools
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from shade.checkpoint._buffer.stream_hash import StreamHash
from shade.checkpoint._buffer.tensor_copy import Copying
from shade.checkpoint._capture.layout import TensorSpec, lay_out
from shade.checkpoint._format.digest import digest_of

CHUNK = 2**16


def state() -> dict[str, torch.Tensor]:
    """Long, short, empty and not contiguous."""
    generator = torch.Generator().manual_seed(0)
    tensors = {f"{number:02}": torch.randn(number * 4999, generator=generator) for number in range(12)}
    return tensors | {"across": torch.randn(300, 200, generator=generator).t()}


class Counted(StreamHash):
    """Notes what has come, and what was hashed on the way."""

    def __init__(self, data: memoryview) -> None:
        super().__init__(data, CHUNK)
        self.came: list[tuple[int, int]] = []
        self.digests_set: dict[int, str] = {}

    def hashed(self, number: int, digest: str) -> None:
        self.digests_set[number] = digest
        super().hashed(number, digest)

    def add(self, start: int, stop: int, event: torch.cuda.Event | None = None) -> None:
        self.came.append((start, stop))
        super().add(start, stop, event)


@pytest.mark.parametrize("seed", range(5))
def test_threads_that_share_a_copy_take_each_byte_once(seed: int) -> None:
    live = state()
    layout = lay_out({name: TensorSpec.of(tensor) for name, tensor in live.items()}, 0, 1)
    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    stream_hash = Counted(memoryview(buffer.numpy().data))
    copying = Copying(live, layout.entries, buffer, frozenset(live), stream_hash)
    total = copying.num_bytes_left

    def share(number: int) -> int:
        draw, moved, mine = random.Random(100 * seed + number), 1, 0
        while moved:
            moved = copying.advance(draw.randrange(64, 2 * CHUNK))
            mine += moved
        return mine

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(share, range(4))) == total
    assert copying.names == []
    copying.finish()
    for name, entry in layout.entries.items():
        content = buffer[entry.start : entry.stop].view(torch.float32).view(live[name].shape)
        assert torch.equal(content, live[name]), name
    copied = sorted((start, stop) for start, stop in stream_hash.came if start < stop)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(copied))
    assert sum(stop - start for start, stop in copied) == total
    digests = [digest_of(chunk) for chunk in stream_hash.chunks]
    assert [stream_hash.wait(number) for number in range(len(digests))] == digests
    assert stream_hash.digests_set.items() <= dict(enumerate(digests)).items()


def begun() -> tuple[Copying, Counted]:
    """A copy, all of which can be hashed on the way."""
    live = {name: tensor.contiguous() for name, tensor in state().items()}
    layout = lay_out({name: TensorSpec.of(tensor) for name, tensor in live.items()}, 0, 1)
    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    stream_hash = Counted(memoryview(buffer.numpy().data))
    return Copying(live, layout.entries, buffer, frozenset(live), stream_hash), stream_hash


@pytest.mark.parametrize("reach", [CHUNK, CHUNK + 64, 5 * CHUNK])
def test_whoever_brings_a_whole_chunk_hashes_it(reach: int) -> None:
    copying, stream_hash = begun()
    while copying.advance(reach):
        pass
    assert stream_hash.digests_set == {number: digest_of(chunk) for number, chunk in enumerate(stream_hash.chunks)}


def test_what_was_copied_before_is_hashed_along() -> None:
    copying, stream_hash = begun()
    early = ["01", "05", "06", "11"]
    copying.settle(early)
    while copying.advance(CHUNK):
        pass
    digests = {number: digest_of(chunk) for number, chunk in enumerate(stream_hash.chunks)}
    assert [stream_hash.wait(number) for number in digests] == list(digests.values())
    assert stream_hash.digests_set.items() <= digests.items()
    of_both = [copying._entries[name].start // CHUNK for name in early]
    assert set(of_both) & set(stream_hash.digests_set), "a chunk with something early in it, and something late"


def test_whoever_brings_the_last_of_a_chunk_hashes_all_of_it() -> None:
    copying, stream_hash = begun()
    assert copying.advance(CHUNK // 2) == CHUNK // 2
    assert stream_hash.digests_set == {}
    assert copying.advance(CHUNK) == CHUNK // 2, "to the end of the chunk, so that the next is whole again"
    assert stream_hash.digests_set == {0: digest_of(stream_hash.chunks[0])}


def test_what_is_copied_by_the_tensor_is_left_to_whoever_waits() -> None:
    copying, stream_hash = begun()
    copying.finish()
    assert stream_hash.digests_set == {}
    assert stream_hash.wait(0) == digest_of(stream_hash.chunks[0])


def test_settling_what_is_on_the_host_does_not_wait_for_a_device() -> None:
    """A stream of copies waits for all that the training has queued on its device."""
    live = state()
    layout = lay_out({name: TensorSpec.of(tensor) for name, tensor in live.items()}, 0, 1)
    copying = Copying(live, layout.entries, torch.zeros(layout.num_bytes, dtype=torch.uint8))
    waited: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def synchronize(self) -> None:
            waited.append(self.name)

    places = {torch.device("cuda", 0): "GPU", torch.device("cpu"): "host"}  # the host plays a second device
    copying._streams = {place: Stream(name) for place, name in places.items()}  # type: ignore[misc]
    copying.settle(["01"])
    copying.finish()
    assert waited == ["host", "host"]
