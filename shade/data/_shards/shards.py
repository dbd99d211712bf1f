"""Shards: a map-style data set over shards, read where they lie.

Nothing is converted, and every sample has an index. So the draw, importance, exact resume and dealing to any number of
ranks are those of any other data set. Price: in a globally random order each sample of a batch costs a request.
`shade.data._shards.blocks` pays that once, with room on a local disk (decision 0041).

Invariant: a sample is what its format's own reader makes of it, or there is an error that names the shard.
"""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash
from torch.utils.data import Dataset
from typing_extensions import override

from shade.cache.entry import FORMAT_ITEM
from shade.data._origin.hub import revision_of
from shade.data._origin.origin import FileOrigin, Origin
from shade.data._origin.url_origin import UrlOrigin, is_url
from shade.data._shards.blocks import Block, BlockTier, ReadAhead, memory_tier
from shade.data._shards.index import (
    FORMATS,
    ShardFormat,
    ShardIndex,
    describe_shards,
    listed_shards,
    suffix_of,
)
from shade.data._shards.pieces import Piece, PieceReader, PiecesRead
from shade.data._source.source import CountOrigin, NearSource, checked_index, not_counted
from shade.errors import BadSampleError, ConfigError, DataError, shown_place
from shade.store.disk import disk_url
from shade.types import ClosedByWith, Order

_BLOCKS_AT_ONCE: Final = 8
_PROBES: Final = 16
_PROBED_PIECES: Final = 4
_PROBED_ROWS: Final = 1000
"""Rows of each of those pieces."""


class Shards(Dataset[Any], ClosedByWith):
    """Samples in shards, read where they lie: WebDataset's tars, zips, Parquet, Arrow, MDS, LMDB, Lance.

    A sample is the value of one column, a tuple of several, or a dict of all. A column of an archive is an extension,
    such as ``jpg``, or ``seg.png``; pictures come as RGB images, ``cls`` as an int, ``json``, ``txt`` and ``npy``
    decoded, all else as bytes. A column of a table is what ``to_pylist`` of pyarrow returns.

    Args:
        shards: A path, URL or folder, or several. ``*`` is any text, ``{000..127}`` numbers.
        columns: A column's name, several, or None for all.
        decode: By column, what makes the value of the raw one (bytes, of an archive), in place of the default.
        index: The folder where the place of each sample is kept; ``~/.cache/shade/shards`` if None.
        disk: A folder of this machine's disk and the bytes that may lie there, such as
            ``"/nvme/shade?capacity=500GiB"``: blocks of 8 MiB are read as a whole, and their samples kept there.
        options: For fsspec, such as ``{"anon": True}``.
        format: Finds the samples in shards of another kind, such as clips in videos; None: the shards' names say it.

    Raises:
        ConfigError: An unknown kind of file, a library that is not installed, or a format without a repr of its own.
        DataError: No shards, a missing column, a shard that is truncated or is not what its index says.
    """

    def __init__(
        self,
        shards: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        columns: str | Sequence[str] | None = None,
        *,
        decode: Mapping[str, Callable[[Any], Any]] | None = None,
        index: str | os.PathLike[str] | None = None,
        disk: str | os.PathLike[str] | None = None,
        options: Mapping[str, Any] | None = None,
        format: ShardFormat | None = None,
    ) -> None:
        url = None if disk is None else disk_url(disk)
        names = listed_shards(shards, options or {}, FORMATS if format is None else format.suffixes)
        urls = list(names)
        self._format = FORMATS.get(suffix_of(urls))() if format is None else _named(format)
        self._format.require()
        self._single = isinstance(columns, str)
        self._columns = [columns] if isinstance(columns, str) else None if columns is None else list(columns)
        self._decode = dict(decode or {})
        self._origin: Origin = UrlOrigin(options) if is_url(urls[0]) else FileOrigin()
        entries = describe_shards(names, options or {}, self._format)
        self._index = ShardIndex(entries, self._format, _folder_of(index), self._origin, options)
        if not len(self._index):
            raise DataError.of("at least one sample", 0, f"look into {shown_place(urls[0])}")
        self._index.check_columns({*(self._columns or ()), *self._decode})
        # The name by which `shade.data._source.content` knows the content, as that of a Hugging Face data set.
        chosen = self._columns and sorted(self._columns)
        self._fingerprint = xxhash.xxh3_64_hexdigest(f"{self._index.fingerprint} {chosen}".encode())
        self.revision = revision_of((entry.fixed_name for entry in entries), self._fingerprint)  # for the sampler
        self._pieces = PieceReader(self._index, self._format, self._origin, self._columns)
        self._counting = threading.Lock()  # counts of several threads that read ahead
        self.first_sample_D: npt.NDArray[np.int64]
        """(D,) the first sample of each block, ascending, from 0."""
        self._block_list, self.first_sample_D = self._index.blocks()
        self._ahead: ReadAhead | None = None
        self._window: BlockTier | None = None
        self._count: CountOrigin = not_counted
        name = f"{self._fingerprint}-blocks"
        self._blocks = None if url is None else BlockTier(url, name, len(self), self._mean_bytes())

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in self.__dict__.items() if name != "_counting"}
        return kept | {"_count": not_counted, "_block_list": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"_counting": threading.Lock()}

    def _mean_bytes(self) -> float:
        """Returns the estimated bytes of a sample."""
        # Of an archive the whole piece, so that the probes find a place where their blocks are kept.
        return float(self.probe()[0].mean() if self._format.keeps_rows else self._index.length_N().mean())

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Returns the samples of a batch, whose neighbours are read together.

        Args:
            indices: Sample indices; negative ones count from the end.

        Returns:
            The samples, in order.

        Raises:
            IndexError: There is no such sample.
            DataError: A shard is not what its index says.
            BadSampleError: A sample cannot be read or decoded, or lacks a column.
        """
        indices = [checked_index(index, len(self)) for index in indices]
        near = self.read_near(indices)
        absent = [index for index in indices if index not in near]
        near |= zip(absent, self.read(absent, not_counted), strict=True)
        return [self.item(index, near[index]) for index in indices]

    def __repr__(self) -> str:
        """Returns the kind and number of shards, and the columns."""
        names = "all" if self._columns is None else ", ".join(self._columns)
        kind = type(self._format).__name__.removesuffix("Format")
        return f"Shards({len(self._index.entries)} × {kind}, num_samples={len(self)}, columns={names})"

    @property
    def fingerprint(self) -> str:
        """Returns a name of the content: of the shards' names, sizes and versions, and the columns."""
        return self._fingerprint

    def name_of(self, index: int) -> str:
        """Returns a sample's place: its number in its shard, and the shard."""
        shard, _, _ = self._index.place_of(index)
        row = index - self._index.first_samples[shard]
        return f"sample {row} of {shown_place(self._index.entries[shard].url)}"

    def sample_source(self) -> ShardSource:
        """Returns the source that `ShadeDataset` reads."""
        return ShardSource(self)

    def item(self, index: int, payload: Any) -> Any:
        """Returns the sample that a payload of `read` holds; raises BadSampleError."""
        try:
            if isinstance(payload, Exception):
                raise payload
            row = self._format.row(self._index.scans[self._index.place_of(index)[0]], payload, self._columns)
            for name in row if self._columns is None else self._columns:
                if name not in row:
                    raise KeyError(f"it has no {name!r}, only {', '.join(row)}")
                decode = self._decode.get(name) or self._format.decoder(name)
                if decode is not None:
                    row[name] = decode(row[name])
        except Exception as error:
            words = error.args[0] if isinstance(error, KeyError) and error.args else error
            raise BadSampleError(
                f"expected {self.name_of(index)} to be readable, got {type(error).__name__}: {words}; "
                "mend the shard, or pass on_bad_sample='skip'"
            ) from error
        if self._columns is None:
            return row
        return row[self._columns[0]] if self._single else tuple(row[name] for name in self._columns)

    def plan_window(self, window: int, owner: str, count: CountOrigin | None = None) -> None:
        """Takes the place for an order in which the samples of a block are within a window: what the disk does not keep
        lies in this machine's memory until it is used.

        Args:
            window: Over how many places the samples of a block are spread.
            owner: Names the job, whose processes on this machine share that memory.
            count: Gets the number of requests and of bytes that are read ahead.

        Raises:
            ConfigError: The machine has no room for the window.
        """
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
        if self._window is not None:
            self._window.close()
            self._window = None
        first = self._index.entries[0].url
        if not is_url(first) and self._format.opened(first, self._index.scans[0]) is not None:
            return
        num_bytes = sum(entry.num_bytes for entry in self._index.entries)
        ahead = ReadAhead(
            self.first_sample_D, num_bytes / len(self._block_list), self._bring_ahead, self._drop_from_window
        )
        if self._blocks is None or not self._blocks.keeps_all:
            num_held = window + 2 * ahead.ahead_blocks * -(-len(self) // len(self._block_list))
            name = f"{self._fingerprint}-window"
            self._window = memory_tier(name, owner, min(num_held, len(self)), self._mean_bytes())
        self._ahead, self._count = ahead, count or not_counted

    def begin_pass(self, order_K: Order, start: int) -> None:
        """Takes the order of all ranks, and the place in it where a pass begins."""
        if self._ahead is not None:
            self._ahead.begin(order_K, start)

    def reach(self, handed_out: int, used: int) -> None:
        """Says up to which place samples are handed out, and up to which they are used by every rank."""
        if self._ahead is not None:
            self._ahead.reach(handed_out, used)

    def _bring_ahead(self, number: int) -> tuple[bool, bool]:
        """Reads a block, unless it is here; returns whether it had to, and whether the disk has it now."""
        block = self._block_list[number]
        tier = self._blocks if self._blocks is not None and self._blocks.keeps(block) else self._window
        if tier is None:
            raise LookupError("the disk does not take it")
        first, last = self._samples_of(number)
        tier.wait(block, takes=True)
        try:
            ends = {first, last - 1}
            for each in (self._blocks, self._window):
                if each is not None and len(each.look_up(list(ends))) == len(ends):
                    return False, each is self._blocks
            self._bring([block], set(), self._count_ahead, tier)
        finally:
            tier.release(block)
        return True, self._window is None

    def _count_ahead(self, num_requests: int, num_bytes: int) -> None:
        with self._counting:
            self._count(num_requests, num_bytes)

    def _drop_from_window(self, number: int) -> None:
        """Removes a block's samples from the window's memory."""
        if self._window is not None:
            # Another rank may bring it now.
            self._window.wait(self._block_list[number])
            self._window.remove(range(*self._samples_of(number)))

    def _samples_of(self, number: int) -> tuple[int, int]:
        """Returns where the samples of a block begin and end."""
        return int(self.first_sample_D[number]), int([*self.first_sample_D[number + 1 : number + 2], len(self)][0])

    def read_near(self, indices: Sequence[int]) -> dict[int, Any]:
        """Returns the payloads that this machine's disk had before this pass."""
        # Those of blocks that came in it count as reads of the origin.
        if self._blocks is None:
            return {}
        ahead = self._ahead
        if ahead is not None:
            came = set(ahead.wait(indices)[1])
            indices = [each for each in indices if each not in came]
        return self._blocks.look_up(indices)

    def _read_ahead(self, indices: Sequence[int]) -> dict[int, Any]:
        """Returns the payloads of blocks that were read ahead, after those that are on their way have come."""
        ahead = self._ahead
        if ahead is None:
            return {}
        here, came = ahead.wait(indices)
        wanted = here + came
        found = {} if self._window is None else self._window.look_up(wanted)
        if self._blocks is not None:
            found |= self._blocks.look_up([index for index in wanted if index not in found])
        return found

    def read(self, indices: Sequence[int], count: CountOrigin) -> list[Any]:
        """Reads payloads from the shards.

        Args:
            indices: Sample indices, in [0, N).
            count: Gets the number of requests and of bytes.

        Returns:
            Payloads in order, with an OSError in place of one that could not be read.

        Raises:
            DataError: A shard is not what its index says.
        """
        found = self._read_ahead(indices)
        place = {index: self._index.place_of(index) for index in indices if index not in found}
        if self._blocks is not None:
            wanted = collections.defaultdict[Block, list[int]](list)
            for index, (shard, piece, _) in place.items():
                wanted[self._index.block_of(shard, piece)].append(index)
            found |= self._read_blocks({b: each for b, each in wanted.items() if self._blocks.keeps(b)}, count)
        rows = collections.defaultdict[Piece, dict[int, int]](dict)
        for index, (shard, piece, row) in place.items():
            if index not in found:
                rows[shard, piece][row] = index
        for piece_of, payloads in self._pieces.read({piece: list(each) for piece, each in rows.items()}, count):
            found |= zip(rows[piece_of].values(), payloads, strict=True)
        return [found[index] for index in indices]

    def _read_blocks(self, wanted: Mapping[Block, list[int]], count: CountOrigin) -> dict[int, Any]:
        """Reads whole blocks, keeps their samples on the disk, and returns those that are wanted."""
        assert self._blocks is not None
        mine = [block for block in sorted(wanted) if self._blocks.take(block)]
        try:
            # Another process may have brought a block before its lock was taken.
            found = self._blocks.look_up([index for block in mine for index in wanted[block]])
            absent = [block for block in mine if any(index not in found for index in wanted[block])]
            found |= self._bring(absent, {i for block in absent for i in wanted[block]}, count, self._blocks)
        finally:
            for block in mine:
                self._blocks.release(block)
        busy = wanted.keys() - set(mine)
        for block in busy:
            self._blocks.wait(block)
        return found | self._blocks.look_up([index for block in busy for index in wanted[block]])

    def _bring(self, blocks: Sequence[Block], wanted: set[int], count: CountOrigin, tier: BlockTier) -> dict[int, Any]:
        """Reads blocks, keeps the samples of each in a tier, and returns those that are wanted."""
        found = dict[int, Any]()
        waiting = list(reversed(blocks))
        under_way: collections.deque[tuple[Block, dict[Piece, None], Future[PiecesRead]]] = collections.deque()
        with ThreadPoolExecutor(_BLOCKS_AT_ONCE) as pool:
            while waiting or under_way:
                while waiting and len(under_way) < _BLOCKS_AT_ONCE:
                    block = waiting.pop()
                    pieces = {(block[0], piece): None for piece in self._index.pieces_of(block)}
                    under_way.append((block, pieces, pool.submit(self._pieces.ranges, pieces)))
                block, pieces, future = under_way.popleft()
                samples = dict[int, bytes]()
                for (shard, piece), payloads in self._pieces.made(pieces, future.result(), count):
                    first = self._index.first_sample(shard, piece)
                    good = ((row, each) for row, each in enumerate(payloads) if not isinstance(each, OSError))
                    samples |= {first + row: each for row, each in good}
                left = tier.keep(samples) if samples else {}
                if left and self._window is not None and tier is not self._window:
                    self._window.keep(left)
                found |= {index: each for index, each in samples.items() if index in wanted}
                # At once, because other processes wait for it.
                tier.release(block)
        return found

    def probe(self) -> tuple[npt.NDArray[np.int64], int, int]:
        """Reads a few samples; returns the estimated bytes of each sample's payload, as int64 (N,), and the requests
        and bytes that this took. Raises DataError if none can be read."""
        counts = [0, 0]

        def count(num_reads: int, num_bytes: int) -> None:
            counts[0] += num_reads
            counts[1] += num_bytes

        scans = self._index.scans
        if self._format.keeps_rows:
            places = [(shard, piece) for shard, scan in enumerate(scans) for piece in range(len(scan.start_P))]
            chosen = {places[int(at)] for at in np.linspace(0, len(places) - 1, min(_PROBED_PIECES, len(places)))}
            pieces = self._pieces.read(dict.fromkeys(sorted(chosen)), count)
            found = [each for _, payloads in pieces for each in _some(payloads)]
            size_N = np.full(len(self), max(_lengths(found)), dtype=np.int64)
        else:
            # An archive's payload lacks headers and columns that were not chosen; that of a key and a value has more.
            length_N = self._index.length_N()
            probes = sorted({int(at) for at in np.linspace(0, len(self) - 1, min(_PROBES, len(self)))})
            payload_at = self.read_near(probes)
            piece_of = {self._index.place_of(probe)[:2]: probe for probe in probes if probe not in payload_at}
            for piece, (payload,) in self._pieces.read(dict.fromkeys(piece_of), count):
                payload_at[piece_of[piece]] = payload
            payload_P = _lengths([payload_at[probe] for probe in probes])
            part = float((payload_P / np.maximum(length_N[probes], 1)).max())
            more = int((payload_P - length_N[probes]).max())
            size_N = np.ceil(length_N * min(1.0, part)).astype(np.int64) + max(0, more)
        return size_N, *counts  # type: ignore[return-value]

    def close(self) -> None:
        """Ends the threads and closes the disk. Safe to call twice."""
        # It refers back to this object.
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close()
        self._origin.close()
        for tier in (self._blocks, self._window):
            if tier is not None:
                tier.close()


class ShardSource(NearSource):
    """`Shards` as `ShadeDataset` reads them. A sample that the disk has counts as a disk hit."""

    cached_format = FORMAT_ITEM
    has_pictures = compares_hits = is_random = has_encoded_items = False
    target_N = None

    def __init__(self, shards: Shards) -> None:
        self.shards, self.fingerprint, self.revision = shards, shards.fingerprint, shards.revision
        self.payload_bytes_N, self.num_probes, self.probe_bytes = shards.probe()

    @override
    def read_near(self, indices: list[int]) -> dict[int, Any]:
        return self.shards.read_near(indices)

    @override
    def read_many(self, indices: list[int], count: CountOrigin) -> list[Any]:
        return self.shards.read(indices, count)

    @override
    def decode(self, index: int, payload: Any) -> tuple[Any, ...]:
        item = self.shards.item(index, payload)
        return item if isinstance(item, tuple) else (item,)

    @override
    def name_of(self, index: int) -> str:
        return self.shards.name_of(index)

    @override
    def close(self) -> None:
        self.shards.close()


def _some(payloads: Sequence[Any]) -> list[Any]:
    """Returns the payloads of some rows of a piece, from its first to its last."""
    return [payloads[int(row)] for row in np.linspace(0, len(payloads) - 1, min(_PROBED_ROWS, len(payloads)))]


def _lengths(payloads: Sequence[Any]) -> npt.NDArray[np.int64]:
    """Returns the lengths of payloads, 0 for one that could not be read; raises DataError if none could."""
    errors = [each for each in payloads if isinstance(each, Exception)]
    if len(errors) == len(payloads):
        cure = f"all of {len(errors)} probed are not; check the shards and the login"
        raise DataError.of("a readable sample", f"{type(errors[0]).__name__}: {errors[0]}", cure) from errors[0]
    return np.array([0 if isinstance(each, Exception) else len(each) for each in payloads], dtype=np.int64)


def _folder_of(index: str | os.PathLike[str] | None) -> str:
    if index is not None:
        return os.path.expanduser(index)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(base, "shade", "shards")


def _named(shard_format: ShardFormat) -> ShardFormat:
    """Returns a user's format; raises ConfigError if its repr, which names its index, differs between processes."""
    if f"{id(shard_format):x}" in repr(shard_format):
        raise ConfigError.of(
            "a format whose repr says its arguments, because that names the index",
            repr(shard_format),
            "make the class a dataclass, or write its __repr__",
        )
    return shard_format
