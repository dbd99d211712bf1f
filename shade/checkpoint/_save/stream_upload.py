"""Uploads a shard while it is still being copied: each chunk is sent as soon as it is copied and hashed.

A tier gets everything at once but one thing: the manifest lists the digests of all chunks, and the last digest is known
only when the last chunk has been sent. So the tier gets an `OpenManifest`, which knows each chunk's length, and which
has bytes for a reader that has taken all chunks; that is when tiers ask for them.

Uploading early risks nothing. If the copy turns out to be torn, there is no manifest to agree on, and what was uploaded
has no record and is discarded (`_commit.protocol`). The price: the shared-memory tier has the snapshot after the first
tier and not before it, since its record needs the digests too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace

from typing_extensions import override

from shade.checkpoint._buffer.stream_hash import StreamHash
from shade.checkpoint._format.manifest import ChunkEntry, Manifest
from shade.checkpoint._pacing.batching import Batching
from shade.checkpoint._save.packing import PackedShard
from shade.errors import CheckpointError

_NO_DIGEST = "0" * 32


class OpenManifest(Manifest):
    """A manifest of chunks that are still being copied: their lengths are right, their digests are to come."""

    def close(self, digests: list[str]) -> Manifest:
        """Returns the manifest with all digests in it; from now on this one has the same bytes."""
        chunks = tuple(ChunkEntry(chunk.num_bytes, each) for chunk, each in zip(self.chunks, digests, strict=True))
        fields = {name: value for name, value in vars(self).items() if name in Manifest.__dataclass_fields__}
        closed = Manifest(**{**fields, "chunks": chunks})
        vars(self)["closed"] = closed
        return closed

    @override
    def to_bytes(self) -> bytes:
        closed: Manifest | None = vars(self).get("closed")
        if closed is None:
            raise CheckpointError.of("all chunks to be taken before the manifest", self.step, "put the chunks first")
        return closed.to_bytes()


class StreamUpload:
    """The upload of one rank's shard.

    Args:
        draft: The manifest, without chunks.
        data: The buffer, as long as the shard.
        stream_hash: Knows which chunks are copied, and hashes them.
        copied: Resolved when everything is copied and nothing is torn.
    """

    def __init__(self, draft: Manifest, data: memoryview, stream_hash: StreamHash, copied: Future[None]) -> None:
        self._data, self._stream_hash, self._copied = data, stream_hash, copied
        self._chunks = stream_hash.chunks
        self._digests: list[str] = []
        entries = tuple(ChunkEntry(len(chunk), _NO_DIGEST) for chunk in self._chunks)
        self.manifest = OpenManifest(**vars(replace(draft, chunks=entries)))
        """Stored with the chunks."""
        self.place: str | None = None
        """Where the uploaded chunks wait for their record; None: the tier has not taken them."""
        self.refusal: CheckpointError | None = None
        """Why the tier has not taken them."""

    def place_or_raise(self) -> str:
        """Returns the place, or raises the refusal."""
        if self.place is None:
            raise self.refusal or CheckpointError("nothing was uploaded")
        return self.place

    def chunks(self) -> Iterator[memoryview]:
        """Yields the chunks in order, each when it is copied; raises a CheckpointError if the copy fails."""
        for number, chunk in enumerate(self._chunks):
            self._wait_for(number)
            yield chunk
        self._close()

    def batches(self, batching: Batching) -> Iterator[memoryview]:
        """Yields the same bytes, several chunks at once, and measures each write."""
        begin, end = 0, 0
        wanted = batching.batch_bytes(len(self._data), self.manifest.chunk_bytes)
        for number, chunk in enumerate(self._chunks):
            begun = time.perf_counter()
            self._wait_for(number)
            batching.made(time.perf_counter() - begun)
            end += len(chunk)
            if end - begin < wanted and number < len(self._chunks) - 1:
                continue
            begun = time.perf_counter()
            yield self._data[begin:end]  # the consumer writes this batch before it asks for the next one
            batching.wrote(end - begin, time.perf_counter() - begun)
            begin, wanted = end, batching.batch_bytes(len(self._data), self.manifest.chunk_bytes)
        self._close()

    def packed(self) -> PackedShard:
        """Waits for the end of the copy, and returns the shard as if it had been packed as a whole."""
        self._copied.result()
        for number in range(len(self._chunks)):
            self._wait_for(number)
        return PackedShard(self._close(), self._chunks)

    def _wait_for(self, number: int) -> None:
        """Returns when a chunk is copied and hashed."""
        if number < len(self._digests):
            return
        digest = self._stream_hash.wait(number)
        if digest is None:
            error = self._copied.exception()
            raise CheckpointError(f"chunk {number} of step {self.manifest.step} was not copied: {error}") from error
        self._digests.append(digest)

    def _close(self) -> Manifest:
        return self.manifest.close(self._digests)
