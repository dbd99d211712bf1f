"""Uploads a shard while it is still being copied: each chunk leaves as soon as it is copied, hashed and encoded.

The last digest is known only when the last chunk has been sent, so the tier gets an `OpenManifest`. If the copy turns
out to be torn, what was uploaded has no record and is discarded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Final

from typing_extensions import override

from shade.checkpoint._buffer.stream_hash import StreamHash
from shade.checkpoint._format.manifest import ChunkEntry, Manifest
from shade.checkpoint._pacing.batching import Batching
from shade.checkpoint._pacing.prefetch import Prefetch
from shade.checkpoint._save.packing import PackedShard
from shade.errors import CheckpointError
from shade.types import Bytes

AHEAD_CHUNKS: Final = 2
"""Chunks that are encoded and not written yet."""
_NO_DIGEST: Final = "0" * 32

PackChunk = Callable[[memoryview, int, str], tuple[Bytes, ChunkEntry]]
"""Takes a chunk, its number and its digest; returns its stored form and entry."""


class OpenManifest(Manifest):
    """A manifest of chunks that are still being copied: each is at most as long as it says, the digests are to come."""

    def close(self, chunks: tuple[ChunkEntry, ...]) -> Manifest:
        """Returns the manifest with these chunks in it; from now on this one has the same bytes and length."""
        fields = {name: value for name, value in vars(self).items() if name in Manifest.__dataclass_fields__}
        closed = Manifest(**{**fields, "chunks": chunks})
        vars(self)["closed"] = closed
        return closed

    @property
    def _closed(self) -> Manifest | None:
        closed: Manifest | None = vars(self).get("closed")
        return closed

    @property
    @override
    def stored_bytes(self) -> int:
        return super().stored_bytes if self._closed is None else self._closed.stored_bytes

    @override
    def to_bytes(self) -> bytes:
        if self._closed is None:
            raise CheckpointError.of("all chunks to be taken before the manifest", self.step, "put the chunks first")
        return self._closed.to_bytes()


class StreamUpload:
    """The upload of one rank's shard.

    Args:
        draft: The manifest, without chunks.
        data: The buffer, as long as the shard.
        stream_hash: Knows which chunks are copied, and hashes them.
        copied: Resolved when everything is copied and nothing is torn.
        pack: Encodes a chunk.
    """

    def __init__(
        self, draft: Manifest, data: memoryview, stream_hash: StreamHash, copied: Future[None], pack: PackChunk
    ) -> None:
        self._data, self._stream_hash, self._copied, self._pack = data, stream_hash, copied, pack
        self._chunks = stream_hash.chunks
        self._entries: list[ChunkEntry] = []
        """The entries of the chunks that are packed so far."""
        entries = tuple(ChunkEntry(len(chunk), _NO_DIGEST) for chunk in self._chunks)
        self.manifest = OpenManifest(**vars(replace(draft, chunks=entries)))
        """Stored with the chunks."""
        self.location: str | None = None
        """Where the uploaded chunks wait for their record; None: the tier has not taken them."""
        self.refusal: CheckpointError | None = None
        """Why the tier has not taken them."""

    def location_or_raise(self) -> str:
        """Returns the location, or raises the refusal."""
        if self.location is None:
            raise self.refusal or CheckpointError("nothing was uploaded")
        return self.location

    def chunks(self) -> Generator[Bytes, None, None]:
        """Yields the chunks in stored form and in order, each when it is copied; raises a CheckpointError if the copy
        fails. Close it before `packed` if not all chunks are taken."""
        with Prefetch(self._rest(), AHEAD_CHUNKS if self._is_encoded else 0) as chunks:
            yield from chunks
        self._close()

    def batches(self, batching: Batching) -> Generator[Bytes, None, None]:
        """Yields the same bytes, several chunks at once, and measures each write; without a codec only."""
        begin, end = 0, 0
        wanted = batching.batch_bytes(len(self._data), self.manifest.chunk_bytes)
        for number, chunk in enumerate(self._chunks):
            begun = time.perf_counter()
            self._next()
            batching.made(time.perf_counter() - begun)
            end += len(chunk)
            if end - begin < wanted and number < len(self._chunks) - 1:
                continue
            begun = time.perf_counter()
            # The consumer writes this batch before it asks for the next one, so this measures the write.
            yield self._data[begin:end]
            batching.wrote(end - begin, time.perf_counter() - begun)
            begin, wanted = end, batching.batch_bytes(len(self._data), self.manifest.chunk_bytes)
        self._close()

    def packed(self) -> PackedShard:
        """Waits for the end of the copy, and returns the shard as if it had been packed as a whole; after a codec
        without its chunks, which have gone."""
        self._copied.result()
        for _ in self._rest():
            pass
        return PackedShard(self._close(), () if self._is_encoded else self._chunks)

    @property
    def _is_encoded(self) -> bool:
        return self.manifest.codec != "none"

    def _rest(self) -> Iterator[Bytes]:
        while len(self._entries) < len(self._chunks):
            yield self._next()

    def _next(self) -> Bytes:
        number = len(self._entries)
        digest = self._stream_hash.wait(number)
        if digest is None:
            error = self._copied.exception()
            raise CheckpointError(f"chunk {number} of step {self.manifest.step} was not copied: {error}") from error
        stored, entry = self._pack(self._chunks[number], number, digest)
        self._entries.append(entry)
        return stored

    def _close(self) -> Manifest:
        return self.manifest.close(tuple(self._entries))
