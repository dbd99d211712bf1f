"""A shard that leaves while it is still being copied: each chunk is handed on as soon as it has arrived and is hashed.

What a tier is given is complete but for one thing: the manifest lists the digests of all chunks, and the last of them
is known when the last chunk has gone. So the manifest is an `OpenManifest` meanwhile: it says how long each chunk is,
and its bytes are there for whoever has taken all chunks, which is when tiers ask for them.

Nothing is risked by sending early. A copy may still turn out to be torn; then there is no manifest to agree on, what
was put has no record, and is thrown away (`_commit.protocol`). Price: own memory learns of the snapshot after
the tier, not before, since its record needs the digests too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace

from shade.checkpoint._buffer.stream_hash import StreamHash
from shade.checkpoint._format.manifest import ChunkEntry, Manifest
from shade.checkpoint._pacing.batching import Batching
from shade.checkpoint._save.packing import PackedShard
from shade.errors import CheckpointError

_NO_DIGEST = "0" * 32


class OpenManifest(Manifest):
    """A manifest whose chunks are still on their way: lengths are right, digests are to come."""

    def close(self, digests: list[str]) -> Manifest:
        """The manifest with all digests in it; from now on this one has the same bytes."""
        chunks = tuple(ChunkEntry(chunk.num_bytes, each) for chunk, each in zip(self.chunks, digests, strict=True))
        fields = {name: value for name, value in vars(self).items() if name in Manifest.__dataclass_fields__}
        closed = Manifest(**{**fields, "chunks": chunks})
        vars(self)["closed"] = closed
        return closed

    def to_bytes(self) -> bytes:
        """As `Manifest.to_bytes`.

        Returns:
            The closed manifest's.

        Raises:
            CheckpointError: Not all chunks have been taken.
        """
        closed: Manifest | None = vars(self).get("closed")
        if closed is None:
            raise CheckpointError.of("all chunks to be taken before the manifest", self.step, "put the chunks first")
        return closed.to_bytes()


class StreamUpload:
    """One rank's shard on its way.

    Args:
        draft: The manifest, without chunks.
        data: The buffer, as long as the shard.
        arrivals: Tells which of its chunks are there, and hashes them.
        copied: Resolved when all is copied and nothing is torn.
    """

    def __init__(self, draft: Manifest, data: memoryview, arrivals: StreamHash, copied: Future[None]) -> None:
        self._data, self._arrivals, self._copied = data, arrivals, copied
        self._plain = arrivals.chunks
        self._digests: list[str] = []
        entries = tuple(ChunkEntry(len(chunk), _NO_DIGEST) for chunk in self._plain)
        self.manifest = OpenManifest(**vars(replace(draft, chunks=entries)))
        """To be stored with the chunks."""

    def chunks(self) -> Iterator[memoryview]:
        """The chunks in order, each when it is there.

        Yields:
            Views of the buffer.

        Raises:
            CheckpointError: The copy has failed.
        """
        for number, chunk in enumerate(self._plain):
            self._take(number)
            yield chunk
        self._close()

    def batches(self, batching: Batching) -> Iterator[memoryview]:
        """The same bytes, several chunks at once, and measured: who takes the next one has written the one before.

        Args:
            batching: Says how many.

        Yields:
            Views of the buffer.

        Raises:
            CheckpointError: The copy has failed.
        """
        begin, end = 0, 0
        wanted = batching.batch_bytes(len(self._data), self.manifest.chunk_bytes)
        for number, chunk in enumerate(self._plain):
            begun = time.perf_counter()
            self._take(number)
            batching.made(time.perf_counter() - begun)
            end += len(chunk)
            if end - begin < wanted and number < len(self._plain) - 1:
                continue
            begun = time.perf_counter()
            yield self._data[begin:end]
            batching.wrote(end - begin, time.perf_counter() - begun)
            begin, wanted = end, batching.batch_bytes(len(self._data), self.manifest.chunk_bytes)
        self._close()

    def packed(self) -> PackedShard:
        """What was sent, as if it had been packed as a whole. Waits for the end of the copy.

        Returns:
            The shard.

        Raises:
            CheckpointError: The copy has failed.
        """
        self._copied.result()
        for number in range(len(self._plain)):
            self._take(number)
        return PackedShard(self._close(), self._plain)

    def _take(self, number: int) -> None:
        """Returns when a chunk is there and hashed."""
        if number < len(self._digests):
            return
        digest = self._arrivals.wait(number)
        if digest is None:
            error = self._copied.exception()
            raise CheckpointError(f"chunk {number} of step {self.manifest.step} was not copied: {error}") from error
        self._digests.append(digest)

    def _close(self) -> Manifest:
        return self.manifest.close(self._digests)
