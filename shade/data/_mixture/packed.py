"""PackedDataset: token data sets whose documents are laid into full sequences.

An index is no number: it is what a sequence consists of, which a `MixtureSampler` yields. So reading needs no state.

Invariant: a sequence is the same, whatever reads its documents.

Legend: S sources · N documents of one · L length of a sequence.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch.utils.data import Dataset

from shade.data._source.probe_worker import in_probe_worker
from shade.errors import ConfigError
from shade.sampling.packing import PackedSequence
from shade.types import Indices

NO_LABEL = -100
"""The label that `torch.nn.functional.cross_entropy` ignores."""
_READ_AT_ONCE = 256
"""Documents that are read together to learn their lengths."""


class _Arrays:
    """A source whose documents lie end to end in one array, which may be mapped from a file."""

    def __init__(self, name: str, tokens: Any, offsets: Any) -> None:
        tokens, offset_N = (tokens if isinstance(tokens, np.ndarray) else np.asarray(tokens)), np.asarray(offsets)
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
            raise ConfigError.of(
                f"a 1-D array of integers as the tokens of {name!r}",
                f"{tokens.dtype} of shape {tokens.shape}",
                "put all documents end to end, np.concatenate(documents)",
            )
        is_ascending = offset_N.ndim == 1 and len(offset_N) > 1 and bool((np.diff(offset_N) >= 0).all())
        if not is_ascending or int(offset_N[0]) < 0 or int(offset_N[-1]) > len(tokens):
            raise ConfigError.of(
                f"ascending offsets of {name!r} within its {len(tokens)} tokens, one more than documents",
                f"{len(np.atleast_1d(offset_N))} from {offset_N.flat[0] if offset_N.size else None} "
                f"to {offset_N.flat[-1] if offset_N.size else None}",
                "write offsets = np.concatenate([[0], np.cumsum(lengths)])",
            )
        self._tokens, self._offset_N = tokens, offset_N.astype(np.int64)
        self.length_N = np.diff(self._offset_N)

    def read_many(self, ranges: Sequence[tuple[int, int, int]]) -> list[Indices]:
        begins = [int(self._offset_N[document]) for document, _, _ in ranges]
        return [
            np.asarray(self._tokens[begin + start : begin + stop]).astype(np.int64)
            for begin, (_, start, stop) in zip(begins, ranges, strict=True)
        ]

    def __getstate__(self) -> dict[str, Any]:
        # A mapped array is named by its file, or each worker would get a copy of it.
        state, tokens = self.__dict__.copy(), self._tokens
        if isinstance(tokens, np.memmap) and isinstance(tokens.base, mmap.mmap) and tokens.filename is not None:
            state["_tokens"] = (str(tokens.filename), tokens.dtype, tokens.offset, tokens.shape)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if isinstance(state["_tokens"], tuple):
            file, dtype, offset, shape = state["_tokens"]
            state["_tokens"] = np.memmap(file, dtype, "r", offset, shape)
        self.__dict__.update(state)


class _Items:
    """A source whose items are documents. Those of a `ShadeDataset` come from its cache, many in one round."""

    def __init__(self, name: str, dataset: Any) -> None:
        self._name, self._dataset = name, dataset
        # A ShadeDataset is recognised by its method, because the layers forbid the import.
        self.cached = dataset if hasattr(dataset, "check_forecast") else None
        self.length_N = in_probe_worker(self._lengths, dataset)

    def _lengths(self) -> Indices:
        count, step = len(self._dataset), _READ_AT_ONCE
        parts = (self._items(range(first, min(first + step, count))) for first in range(0, count, step))
        return np.array([len(item) for part in parts for item in part], dtype=np.int64)

    def read_many(self, ranges: Sequence[tuple[int, int, int]]) -> list[Indices]:
        documents = list(dict.fromkeys(document for document, _, _ in ranges))
        items = dict(zip(documents, self._items(documents), strict=True))
        for document, item in items.items():
            if len(item) != self.length_N[document]:
                raise ConfigError.of(
                    f"document {document} of {self._name!r} with {self.length_N[document]} tokens, as when the "
                    "PackedDataset was made",
                    len(item),
                    "documents must stay the same: put random steps after the packing",
                )
        return [items[document][start:stop] for document, start, stop in ranges]

    def _items(self, documents: Sequence[int]) -> list[Indices]:
        if self.cached is None:
            together = getattr(self._dataset, "__getitems__", None)
            items = together(list(documents)) if together else [self._dataset[document] for document in documents]
        else:
            items = [self._without_index(*found) for found in self.cached.__getitems__(list(documents))]
        return list(map(self._tokens, documents, items))

    def _without_index(self, *found: Any) -> Any:
        if len(found) != 2:
            got = f"{len(found) - 1} parts at {found[-1]}"
            cure = "wrap a data set whose item is its token ids alone in the ShadeDataset"
            raise ConfigError.of(f"1-D integer tensors as the items of {self._name!r}", got, cure)
        return found[0]

    def _tokens(self, document: int, item: Any) -> Indices:
        try:
            item = torch.as_tensor(item)
        except (TypeError, ValueError, RuntimeError) as error:
            got, cure = (
                f"{type(item).__name__} at {document}",
                "wrap the data set so that an item is its token ids alone",
            )
            if isinstance(item, Mapping) and item:
                got = f"a dict of {', '.join(map(str, item))} at {document}"
                name = "input_ids" if "input_ids" in item else next(iter(item))
                cure = f"name the column: dataset[{name!r}] of Hugging Face; or {cure}"
            raise ConfigError.of(f"1-D integer tensors as the items of {self._name!r}", got, cure) from error
        # Torch takes an empty list for one of floats.
        item = item.to(torch.int64) if item.shape == (0,) else item
        if item.ndim != 1 or item.is_floating_point() or item.is_complex() or item.dtype == torch.bool:
            raise ConfigError.of(
                f"1-D integer tensors as the items of {self._name!r}",
                f"{item.dtype} of shape {tuple(item.shape)} at {document}",
                "wrap the data set so that an item is its token ids alone",
            )
        tokens: Indices = item.to(torch.int64).numpy()
        return tokens


class PackedDataset(Dataset[dict[str, torch.Tensor]]):
    """Joins token data sets; a `MixtureSampler` says what a sequence consists of.

    An item is a dict of tensors of shape (L,): ``tokens``, ``labels``, ``positions``, ``documents`` and ``sources``. A
    label is the next token of the same document, −100 where there is none. ``positions`` count from 0 in each document,
    and in the unfilled end. ``documents`` numbers the documents of the sequence from 0, −1 in the unfilled end.
    ``sources`` says which source a label is from, −1 where there is no label.

    Args:
        sources: By name: a pair (tokens, offsets) of arrays, or a map-style data set whose items are 1-D integer
            tensors, each of which is read once now. A `ShadeDataset` of such a data set reads through its cache.
        length: L, in tokens.

    Raises:
        ConfigError: No source, a source without a token, or one of another form; ``length`` below 2.
    """

    def __init__(self, sources: Mapping[str, Any], length: int) -> None:
        if length < 2:
            raise ConfigError.of("length ≥ 2 tokens", length, "give the context length of the model")
        if not sources:
            raise ConfigError.of("a source at least", "none", 'write PackedDataset({"web": (tokens, offsets)}, …)')
        self.length = length
        self.names = tuple(sources)
        self._sources = [
            _Arrays(name, *source) if isinstance(source, tuple) and len(source) == 2 else _Items(name, source)
            for name, source in sources.items()
        ]
        self.length_S = [source.length_N for source in self._sources]
        for name, length_N in zip(self.names, self.length_S, strict=True):
            if not length_N.sum():
                raise ConfigError.of(f"a token at least in source {name!r}", "none", "leave the source out")
        self.digest = xxhash.xxh3_64_hexdigest((repr(self.names) + "".join(map(_digest, self.length_S))).encode())
        """Hash of the names and of all documents' lengths."""

    def __len__(self) -> int:
        """Returns how many full sequences all tokens are."""
        return int(sum(int(length_N.sum()) for length_N in self.length_S)) // self.length

    def __getitem__(self, packed: PackedSequence) -> dict[str, torch.Tensor]:
        """Reads one sequence.

        Args:
            packed: As a `MixtureSampler` of this data set yields it.

        Returns:
            Tensors (L,): ``tokens``, ``labels`` and ``positions`` int64, ``documents`` and ``sources`` int32.

        Raises:
            ConfigError: A number; a document that has another length by now.
        """
        return self.__getitems__([packed])[0]

    def __getitems__(self, batch: Sequence[PackedSequence]) -> list[dict[str, torch.Tensor]]:
        """Reads the sequences of a batch, as `__getitem__` does; each source is asked once for all of its documents."""
        wanted_S: list[list[tuple[int, int, int]]] = [[] for _ in self._sources]
        for packed in batch:
            if not isinstance(packed, PackedSequence):
                raise ConfigError.of(
                    "a sequence of a MixtureSampler",
                    f"{type(packed).__name__} {packed!r}",
                    "write DataLoader(data, batch_size=…, sampler=MixtureSampler(data, …)); to cache documents, give "
                    "PackedDataset a ShadeDataset of each source",
                )
            for source, document, start, stop in packed.pieces:
                # One token more, if the document has it: the label of the last.
                last = min(stop + 1, int(self.length_S[source][document]))
                wanted_S[source].append((document, start, last))
        # Where a source is a ShadeDataset, one round to its cache and one to its origin serve the batch.
        read_S = [
            iter(source.read_many(wanted) if wanted else ())
            for source, wanted in zip(self._sources, wanted_S, strict=True)
        ]
        return [self._laid_out(packed, read_S) for packed in batch]

    def _laid_out(self, packed: PackedSequence, read_S: Sequence[Iterator[Indices]]) -> dict[str, torch.Tensor]:
        tokens_L, labels_L = np.zeros(self.length, np.int64), np.full(self.length, NO_LABEL, np.int64)
        positions_L = np.arange(self.length)
        documents_L, sources_L = np.full(self.length, -1, np.int32), np.full(self.length, -1, np.int32)
        end = 0
        for number, (source, _, start, stop) in enumerate(packed.pieces):
            at, end = slice(end, end + stop - start), end + stop - start
            read = next(read_S[source])
            tokens_L[at] = read[: stop - start]
            labels_L[at.start : at.start + len(read) - 1] = read[1:]
            positions_L[at] = np.arange(stop - start)
            documents_L[at] = number
            sources_L[at.start : at.start + len(read) - 1] = source
        positions_L[end:] = np.arange(self.length - end)
        arrays: dict[str, npt.NDArray[Any]] = {"tokens": tokens_L, "labels": labels_L, "positions": positions_L}
        arrays |= {"documents": documents_L, "sources": sources_L}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def stats(self) -> dict[str, float]:
        """Returns the numbers of `ShadeDataset.stats`, over all sources that are read through a cache; a sample is a
        document. Empty if none is."""
        cached = [source.cached for source in self._sources if isinstance(source, _Items) and source.cached is not None]
        found = [counts for counts in (dataset.stats() for dataset in cached) if counts]
        stats = {name: sum(each.get(name, 0.0) for each in found) for name in found[0]} if found else {}
        for prefix in ("", "epoch_") if stats else ():
            stats[f"{prefix}hit_ratio"] = stats[f"{prefix}hits"] / max(1.0, stats[f"{prefix}samples"])
        return stats


def _digest(length_N: npt.NDArray[np.int64]) -> str:
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(length_N, dtype="<i8").tobytes())


def cu_seqlens(positions: torch.Tensor) -> torch.Tensor:
    """Returns where documents begin in a batch that is laid end to end, as kernels for sequences of different lengths
    take it; the unfilled end of a sequence counts as a document.

    Args:
        positions: (B, L) or (L,), as a `PackedDataset` gives them.

    Returns:
        int32 (number of documents + 1,), from 0 to B·L, on the same device.
    """
    flat = positions.reshape(-1)
    starts = torch.nonzero(flat == 0).reshape(-1)
    return torch.cat([starts, starts.new_tensor([len(flat)])]).to(torch.int32)
