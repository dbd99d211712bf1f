"""A shard that leaves while it is copied: chunks in order, each when it is there; a manifest when all have gone."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from shade.checkpoint._buffer.stream_hash import StreamHash
from shade.checkpoint._format.digest import digest_of
from shade.checkpoint._format.manifest import ChunkEntry, Manifest, TensorEntry
from shade.checkpoint._pacing.batching import Batching
from shade.checkpoint._save import packing
from shade.checkpoint._save.packing import Packer
from shade.checkpoint._save.stream_upload import StreamUpload
from shade.errors import CheckpointError, TornSnapshotError
from shade.types import Bytes

CHUNK, LENGTH = 1000, 3700


class Shard:
    """Bytes that are copied when the test says so."""

    def __init__(self, length: int = LENGTH, packer: Packer | None = None) -> None:
        self.content = random.Random(0).randbytes(length // 2) + bytes(length - length // 2)
        self.packer = packer or Packer("run", 0, 1, "none")
        self.packed: list[int] = []
        """Numbers of the packed chunks."""
        data = memoryview(bytearray(self.content))
        self.stream_hash, self.copied = StreamHash(data, CHUNK), Future[None]()
        tensors = {"x": TensorEntry("U8", (length,), 0, length)}
        draft = Manifest(
            "run", 7, 0, 1, self.packer.codec, length, tensors, (), None, CHUNK, version=self.packer.version
        )
        self.upload = StreamUpload(draft, data, self.stream_hash, self.copied, self.pack)

    def pack(self, chunk: memoryview, number: int, plain: str) -> tuple[Bytes, ChunkEntry]:
        self.packed.append(number)
        return self.packer.pack_chunk(chunk, 1, number, plain)

    def packed_whole(self) -> tuple[Manifest, list[bytes]]:
        """The same shard, packed after its copy."""
        packed = self.packer.pack(
            7, torch.frombuffer(bytearray(self.content), dtype=torch.uint8), LENGTH, self.upload.manifest.tensors, None
        )
        return packed.manifest, [bytes(chunk) for chunk in packed.chunks]

    def arrive(self, *ranges: tuple[int, int]) -> None:
        for start, stop in ranges:
            self.stream_hash.add(start, stop)

    def finish(self) -> None:
        self.copied.set_result(None)
        self.stream_hash.end()


def test_each_chunk_goes_when_it_is_there_and_not_before() -> None:
    shard = Shard()
    gone: list[bytes] = []
    sending = threading.Thread(target=lambda: gone.extend(map(bytes, shard.upload.chunks())))
    sending.start()
    shard.arrive((1500, 3700), (0, 400))
    sending.join(0.05)
    assert gone == []
    shard.arrive((400, 1500))
    sending.join(10)
    assert b"".join(gone) == shard.content
    assert [len(each) for each in gone] == [1000, 1000, 1000, 700]


def test_the_manifest_is_there_when_all_chunks_have_gone() -> None:
    shard = Shard()
    shard.arrive((0, LENGTH))
    manifest = shard.upload.manifest
    assert manifest.stored_bytes == LENGTH
    assert len(manifest.chunks) == 4
    chunks = shard.upload.chunks()
    next(chunks)
    with pytest.raises(CheckpointError, match="all chunks to be taken before the manifest"):
        manifest.to_bytes()
    assert len(list(chunks)) == 3
    shard.finish()
    packed = shard.upload.packed()
    assert manifest.to_bytes() == packed.manifest.to_bytes()
    assert type(packed.manifest) is Manifest
    assert Manifest.parse(manifest.to_bytes(), packed.manifest.digest) == packed.manifest
    expected = [digest_of(shard.content[start : start + CHUNK]) for start in range(0, LENGTH, CHUNK)]
    assert [chunk.digest for chunk in packed.manifest.chunks] == expected


def test_what_nobody_took_is_hashed_in_the_end() -> None:
    shard = Shard()
    shard.arrive((0, LENGTH))
    next(iter(shard.upload.chunks()))  # and then the tier failed
    shard.finish()
    packed = shard.upload.packed()
    assert b"".join(packed.chunks) == shard.content
    assert packed.manifest.chunks[3].digest == digest_of(shard.content[3000:])


@pytest.mark.parametrize("way", [lambda one: one.chunks(), lambda one: one.batches(Batching())])
def test_a_copy_that_fails_ends_the_chunks(way: Callable[[StreamUpload], Any]) -> None:
    shard = Shard()
    shard.arrive((0, 1200))
    shard.copied.set_exception(TornSnapshotError("'x' moved"))
    shard.stream_hash.end()
    with pytest.raises(CheckpointError, match="chunk 1 of step 7 was not copied: 'x' moved"):
        list(way(shard.upload))
    with pytest.raises(TornSnapshotError):
        shard.upload.packed()


def test_batches_are_the_same_bytes_in_fewer_pieces() -> None:
    shard, batching = Shard(), Batching()
    shard.arrive((0, LENGTH))
    gone = list(shard.upload.batches(batching))
    assert [len(each) for each in gone] == [1000, 2000, 700], "one chunk, then two, then what is left"
    assert b"".join(gone) == shard.content
    shard.finish()
    assert shard.upload.manifest.to_bytes() == shard.upload.packed().manifest.to_bytes()


def zstd(**more: Any) -> Packer:
    return Packer("run", 0, 1, "zstd", **more)


def slow(num_bytes: int) -> float:
    return num_bytes / 1e3


@pytest.mark.parametrize("settings", [{}, {"compress": "if-faster", "time_write": slow}])
def test_with_a_codec_it_is_the_shard_that_packing_the_whole_gives(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "CHUNK_BYTES", CHUNK)
    shard = Shard(packer=zstd(**settings))
    shard.arrive((0, LENGTH))
    shard.finish()
    gone = [bytes(chunk) for chunk in shard.upload.chunks()]
    manifest, chunks = shard.packed_whole()
    assert gone == chunks
    assert shard.upload.packed().manifest == manifest
    assert shard.upload.manifest.to_bytes() == manifest.to_bytes()
    assert shard.upload.manifest.stored_bytes == sum(map(len, gone)) < LENGTH
    assert Manifest.parse(manifest.to_bytes(), manifest.digest) == manifest


def test_with_a_codec_chunks_are_packed_while_one_is_written() -> None:
    shard = Shard(packer=zstd())
    shard.arrive((0, LENGTH))
    with contextlib.closing(shard.upload.chunks()) as chunks:
        next(chunks)
        deadline = time.monotonic() + 10
        while len(shard.packed) < 2 and time.monotonic() < deadline:
            time.sleep(0.001)
    assert shard.packed[:2] == [0, 1], "the second is packed while the first is in our hands"


def test_with_a_codec_what_nobody_took_is_packed_once() -> None:
    shard = Shard(packer=zstd())
    shard.arrive((0, LENGTH))
    shard.finish()
    with contextlib.closing(shard.upload.chunks()) as chunks:
        next(chunks)  # and then the tier failed
    packed = shard.upload.packed()
    assert shard.packed == [0, 1, 2, 3]
    assert (len(packed.manifest.chunks), list(packed.chunks)) == (4, [])


def test_with_a_codec_a_copy_that_fails_ends_the_chunks() -> None:
    shard = Shard(packer=zstd())
    shard.arrive((0, 1200))
    shard.copied.set_exception(TornSnapshotError("'x' moved"))
    shard.stream_hash.end()
    with pytest.raises(CheckpointError, match="chunk 1 of step 7 was not copied: 'x' moved"):
        list(shard.upload.chunks())


def test_a_shard_of_nothing() -> None:
    for way in (StreamUpload.chunks, lambda one: one.batches(Batching())):
        shard = Shard(0)
        assert list(way(shard.upload)) == []
        assert shard.upload.manifest.to_bytes()


class Event:
    """A copy on a device, as far as it is waited for."""

    def __init__(self, happened: list[str], name: str) -> None:
        self._happened, self._name = happened, name

    def synchronize(self) -> None:
        self._happened.append(self._name)


def test_copies_that_are_under_way_on_a_device_are_waited_for_one_by_one() -> None:
    stream_hash, happened = StreamHash(memoryview(bytes(3000)), CHUNK), list[str]()
    stream_hash.add(0, 500)
    stream_hash.add(500, 1500, Event(happened, "first"))  # type: ignore[arg-type]
    stream_hash.add(1500, 3000, Event(happened, "second"))  # type: ignore[arg-type]
    assert stream_hash.wait(0)
    assert happened == ["first"]
    assert stream_hash.wait(2)
    assert happened == ["first", "second"]


def test_what_never_comes_is_told_apart_from_what_is_there() -> None:
    stream_hash = StreamHash(memoryview(bytes(3000)), CHUNK)
    stream_hash.add(1000, 2000)
    stream_hash.end()
    assert [stream_hash.wait(number) for number in range(3)] == [None, digest_of(bytes(CHUNK)), None]
    content = random.Random(0).randbytes(2500)
    assert StreamHash.of_all(memoryview(content)).wait(0) == digest_of(content)


def test_what_was_hashed_on_the_way_is_not_hashed_again() -> None:
    stream_hash = StreamHash(memoryview(bytes(3000)), CHUNK)
    stream_hash.hashed(1, "as set")
    stream_hash.add(0, 3000)
    assert [stream_hash.wait(number) for number in range(2)] == [digest_of(bytes(CHUNK)), "as set"]


def test_pieces_end_where_chunks_do() -> None:
    stream_hash = StreamHash(memoryview(bytes(LENGTH)), CHUNK)
    assert list(stream_hash.pieces(300, 2100)) == [(300, 1000), (1000, 2000), (2000, 2100)]
    assert list(stream_hash.pieces(1000, 2000)) == [(1000, 2000)]
    assert list(stream_hash.pieces(5, 5)) == []
