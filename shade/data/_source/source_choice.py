"""Chooses the source of a data set's samples: its files, the source that it brings, or its items.

torch's `Subset` and `ConcatDataset` are looked through (`selection`): samples that they choose of files or shards are
read and cached as if nothing was around these.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, IterableDataset

from shade.data._decode.jpeg import decode_rgb
from shade.data._origin.remote_image_folder import RemoteImageFolder
from shade.data._origin.url_origin import Entry, is_url
from shade.data._source import item_codec
from shade.data._source.joined_source import JoinedSource
from shade.data._source.selection import Selection, selection_of
from shade.data._source.source import FileSource, ItemSource, SampleSource
from shade.data._transforms.recognise import parameters_of
from shade.errors import ConfigError


def source_of(
    dataset: Any,
    encode: Callable[[Any], bytes] | None,
    decode: Callable[[Any], Any] | None,
    *,
    version: str | None = None,
    skips_missing: bool = False,
    is_cached: bool = True,
) -> SampleSource:
    """Chooses the source for a data set.

    Args:
        dataset: Any map-style data set.
        encode: The user's item → bytes, or None.
        decode: The user's bytes → item, or None. Alone (without ``encode``) it decodes file contents.
        version: The user's word for the content of items, in their fingerprint.
        skips_missing: Whether a file that is not there is a bad sample, not an error.
        is_cached: Whether items go into a cache, so that they must be encoded.

    Returns:
        What the data set's ``sample_source()`` returns, if it has one; a `FileSource` for ImageFolder-like data sets,
        local or remote; else an `ItemSource`.

    Raises:
        ConfigError: The data set is not map-style.
        DataError: It is empty, or a file cannot be read.
    """
    _check_map_style(dataset)
    own = own_source_of(dataset, encode, decode)
    if own is not None:
        return own
    files = file_source_of(dataset, encode, decode, skips_missing=skips_missing)
    if files is not None:
        return files
    return ItemSource(dataset, encode or item_codec.encode, decode or item_codec.decode, version, is_cached=is_cached)


def own_source_of(
    dataset: Any, encode: Callable[[Any], bytes] | None, decode: Callable[[Any], Any] | None
) -> SampleSource | None:
    """Returns the source that a data set brings, or that of the data sets inside torch's wrappers; None if one of them
    brings none, or the user's codec takes its items."""
    if encode is not None or decode is not None:
        return None
    if hasattr(type(dataset), "sample_source"):
        return dataset.sample_source()  # type: ignore[no-any-return]
    chosen = selection_of(dataset)
    if not len(chosen.leaf_N) or not all(hasattr(type(leaf), "sample_source") for leaf in chosen.leaves):
        return None
    sources = [leaf.sample_source() for leaf in chosen.leaves]
    return JoinedSource(sources, chosen) if len({source.cached_format for source in sources}) == 1 else None


class SampleFiles:
    """The files that `ShadeDataset` reads itself, for data sets like ImageFolder, whose transforms it runs, too."""

    def __init__(self, selection: Selection, decode: Callable[[bytes], Any]) -> None:
        self._selection, self.decode = selection, decode
        self._known = [list(leaf.samples) for leaf in selection.leaves]

    def samples(self) -> list[tuple[str, Any]]:
        """Returns the path or URL and the target of each sample."""
        chosen = self._selection
        if len(chosen.leaves) == 1 and np.array_equal(chosen.index_N, np.arange(len(self._known[0]))):
            return self._known[0]
        places = zip(chosen.leaf_N.tolist(), chosen.index_N.tolist(), strict=True)
        return [self._known[leaf][index] for leaf, index in places]

    def entries(self) -> list[Entry]:
        """Returns the server's description of each file of a `RemoteImageFolder`."""
        places = zip(self._selection.leaf_N.tolist(), self._selection.index_N.tolist(), strict=True)
        return [self._selection.leaves[leaf].entries[index] for leaf, index in places]

    def changed(self) -> list[tuple[str, Any]] | None:
        """Returns the samples if they are others than at the last call, else None."""
        # Lists are compared by their elements' addresses first, 2 ms for a million of them.
        if all(leaf.samples == known for leaf, known in zip(self._selection.leaves, self._known, strict=True)):
            return None
        self._known = [list(leaf.samples) for leaf in self._selection.leaves]
        return self.samples()

    @property
    def first(self) -> Any:
        """Returns the data set that has the first sample."""
        return self._selection.leaves[0]

    def own(self, name: str) -> Any:
        """Returns the ``transform`` or ``target_transform`` of the data sets; raises ConfigError if they differ."""
        found, *others = [getattr(leaf, name, None) for leaf in self._selection.leaves]
        for other in others:
            if not _is_same(found, other):
                raise ConfigError.of(
                    f"one {name} in all data sets of the ConcatDataset",
                    f"{other} beside {found}",
                    f"assign it to the ShadeDataset, where it is for all samples: ShadeDataset(…, {name}=…)",
                )
        return found


def _is_same(transform: Any, other: Any) -> bool:
    if transform is other or transform is None or other is None:
        return transform is other
    return bool(parameters_of([transform]) and parameters_of([transform]) == parameters_of([other]))


def files_of(
    dataset: Any, encode: Callable[[Any], bytes] | None, decode: Callable[[Any], Any] | None
) -> SampleFiles | None:
    """Returns the files of a data set like ImageFolder, or of several that torch's wrappers choose from; None for any
    other data set. Raises as `source_of`."""
    _check_map_style(dataset)
    if encode is not None or hasattr(type(dataset), "sample_source") or not len(dataset):
        return None
    chosen = selection_of(dataset)
    first, *others = chosen.leaves
    decode_file = _file_decoder(first, decode)
    if decode_file is None:
        return None
    for other in others:
        is_alike = _file_decoder(other, decode) is decode_file and type(other) is type(first)
        is_alike = is_alike and is_url(other.samples[0][0]) == is_url(first.samples[0][0])
        if type(first) is RemoteImageFolder:
            is_alike = is_alike and other.origin.options == first.origin.options
        names = ("transform", "target_transform")
        if not is_alike or not all(_is_same(getattr(first, n, None), getattr(other, n, None)) for n in names):
            return None
    return SampleFiles(chosen, decode_file)


def file_source_of(
    dataset: Any,
    encode: Callable[[Any], bytes] | None,
    decode: Callable[[Any], Any] | None,
    *,
    skips_missing: bool = False,
) -> FileSource | None:
    """Returns the source of the files of `files_of`; None if there are none. Raises as `source_of`."""
    files = files_of(dataset, encode, decode)
    if files is None:
        return None
    is_remote = type(files.first) is RemoteImageFolder
    entries, options = (files.entries(), files.first.origin.options) if is_remote else (None, None)
    return FileSource(
        files.samples(), files.decode, entries, options, skips_missing=skips_missing, changed=files.changed
    )


def _file_decoder(dataset: Any, decode: Callable[[Any], Any] | None) -> Callable[[bytes], Any] | None:
    samples = getattr(dataset, "samples", None)
    if type(dataset) is RemoteImageFolder:
        return decode or decode_rgb
    if isinstance(samples, list) and samples and isinstance(samples[0][0], str):
        return decode_rgb if decode is None and _reads_plain_images(dataset) else decode
    return None


def _check_map_style(dataset: Any) -> None:
    """Raises ConfigError, with what to pass instead, for what has no length or no samples by index."""
    kind, cure = type(dataset), "pass an object with __len__ and __getitem__"
    if isinstance(dataset, type):
        cure = f"make one: {dataset.__name__}(…)"
    elif isinstance(dataset, (str, bytes, os.PathLike)):
        cure = "open it first, such as with torchvision.datasets.ImageFolder(path), or RemoteImageFolder(url)"
    elif isinstance(dataset, DataLoader):
        cure = "pass the data set inside it (loader.dataset), and make the loader of ShadeDataset's result"
    # MosaicML's and LitData's streams have samples by index too.
    elif (isinstance(dataset, IterableDataset) and not _has_samples(kind)) or hasattr(dataset, "__next__"):
        cure = (
            "a stream has no samples by index: record it, Recorded(stream, disk=…), or train on it without ShadeDataset"
        )
    # A TensorDict is a mapping of which iteration gives samples, and which has no truth value.
    elif isinstance(dataset, Mapping) and len(dataset) and isinstance(next(iter(dataset)), (str, bytes, tuple)):
        cure = f"choose one of its parts, such as [{next(iter(dataset))!r}]"
    elif _has_samples(kind):
        return
    raise ConfigError.of("a map-style data set", f"{kind.__module__}.{kind.__qualname__}", cure)


def _has_samples(kind: type) -> bool:
    """Returns whether a class has a length and samples by index; torch's base class has an index that raises."""
    reads = getattr(kind, "__getitem__", None)
    return reads is not None and reads is not Dataset.__getitem__ and hasattr(kind, "__len__")


def _reads_plain_images(dataset: Any) -> bool:
    """Returns whether a sample is its file, decoded as torchvision does it."""
    from torchvision.datasets.folder import DatasetFolder, default_loader

    kind = type(dataset)
    own_way = getattr(kind, "__getitem__", None) is not DatasetFolder.__getitem__
    own_way |= getattr(kind, "__len__", None) is not DatasetFolder.__len__
    return not own_way and getattr(dataset, "loader", None) is default_loader and _pil_backend()


def _pil_backend() -> bool:
    import torchvision

    return bool(torchvision.get_image_backend() == "PIL")
