"""The name of a data set's content: what it holds in memory, and sizes and times of the files that it names.

Reading all items would be an epoch of slow storage, so `ContentDigest` takes what is known without reading one.
"""

from __future__ import annotations

import marshal
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
import xxhash

from shade.data._source import item_codec
from shade.errors import DataError

STAT_THREADS = 32
_PROBES = 32


def size_and_time(path: str, *, skips_missing: bool) -> tuple[int, int]:
    """Returns a file's bytes and its time in nanoseconds; 0 and -1 for a missing one with ``skips_missing``, which
    raises DataError otherwise."""
    try:
        status = os.stat(path)
    except OSError as error:
        if skips_missing:
            return 0, -1
        raise DataError.of("a readable file", path, f"{error.strerror}: restore it or scan the folder again") from error
    return status.st_size, status.st_mtime_ns


def has_fingerprint(dataset: Any) -> bool:
    """Returns whether a data set names its own content, as those of Hugging Face do."""
    return isinstance(getattr(dataset, "_fingerprint", None), str)


def kind_of(dataset: Any) -> str:
    """Returns a data set's type and length. Raises DataError if there are no samples."""
    if len(dataset) == 0:
        raise DataError.of("at least one sample", 0, "check how the data set is made")
    return f"{type(dataset).__module__}.{type(dataset).__qualname__}:{len(dataset)}"


def content_digest(dataset: Any, version: str | None) -> str:
    """Returns the name of a data set's content as far as it is known without reading items; a ``version`` takes the
    place of the content. Raises DataError if there are no samples."""
    return f"{kind_of(dataset)} {ContentDigest(dataset).hexdigest() if version is None else version}"


class ContentDigest:
    """Digests what a data set, or one inside it (`Subset`, `ConcatDataset`, one's own wrapper), holds in memory."""

    def __init__(self, dataset: Any) -> None:
        self._digest = xxhash.xxh3_64()
        self._seen: dict[int, Any] = {}
        self._add(dataset, [""])

    def hexdigest(self) -> str:
        """Returns the digest."""
        return self._digest.hexdigest()

    def _update(self, text: str) -> None:
        self._digest.update(text.encode(errors="surrogateescape"))

    def _add(self, value: Any, folders: list[str]) -> None:
        if id(value) in self._seen:
            return
        # Holds the value, because an id may be used again.
        self._seen[id(value)] = value
        opened = getattr(value, "filename", None)  # of h5py, zipfile, numpy.memmap
        if has_fingerprint(value):
            self._update(value._fingerprint)
        elif isinstance(opened, (str, os.PathLike)) and os.path.isfile(opened):
            self._update(str(size_and_time(os.fspath(opened), skips_missing=True)))
        elif isinstance(value, torch.Tensor):
            if item_codec.is_dense(value) and not value.is_quantized:
                self._update(f"{value.dtype} {tuple(value.shape)}")
                self._digest.update(item_codec.element_bytes(value).data)
        elif isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
            self._update(f"{value.dtype} {value.shape}")
            self._digest.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        # Of numbers and strings those in containers alone: an attribute like `rank` differs where the content does not.
        elif isinstance(value, (list, tuple, dict)):
            self._add_container(value, folders)
        elif hasattr(value, "to_numpy"):  # a table of pandas or polars
            self._add(np.asarray(value.to_numpy()).tolist(), folders)
        elif isinstance(value, np.ndarray):
            self._add(value.tolist(), folders)
        elif hasattr(type(value), "__getitem__") and hasattr(value, "__dict__"):
            self._add_attributes(vars(value))

    def _add_container(self, value: Any, folders: list[str]) -> None:
        parts = list(value.items()) if isinstance(value, dict) else list(value)
        try:
            # Version 0 of the format holds no reference counts.
            self._digest.update(marshal.dumps(parts, 0))
        except ValueError:
            for part in parts:
                self._update(str(part) if isinstance(part, (str, int, float, os.PathLike)) else ":")
                self._add(part, folders)
        self._add_files(parts, folders)

    def _add_attributes(self, attributes: dict[str, Any]) -> None:
        paths = [str(value) for value in attributes.values() if isinstance(value, (str, os.PathLike))]
        self._add_files(paths, [""])
        folders = ["", *(path for path in paths if os.path.isdir(path))]
        for name, value in sorted(attributes.items()):
            self._update(name)
            self._add(value, folders)

    def _add_files(self, parts: list[Any], folders: list[str]) -> None:
        """Adds the files that a list of paths, or of tuples with a path in one place, names."""
        first = parts[0] if parts else None
        for place in range(len(first) if isinstance(first, (list, tuple)) else 1):
            rows = [part[place : place + 1] if isinstance(part, (list, tuple)) else (part,) for part in parts]
            names = [row[0] for row in rows if row and isinstance(row[0], (str, os.PathLike))]
            for folder in folders if names else ():
                if any(os.path.isfile(os.path.join(folder, name)) for name in names[:_PROBES]):
                    paths = [os.path.join(folder, name) for name in names]
                    with ThreadPoolExecutor(STAT_THREADS) as pool:
                        stats = pool.map(partial(size_and_time, skips_missing=True), paths, chunksize=256)
                    self._digest.update(np.array(list(stats), dtype=np.int64).tobytes())
                    break


def innermost_transform(dataset: Any) -> Any:
    """Returns the transform of a data set, or of the data set inside it (`Subset`, nested); None if there is none."""
    while dataset is not None:
        found = getattr(dataset, "transform", None)
        hf_format = getattr(dataset, "format", None)  # of Hugging Face: set_transform makes it "custom"
        if found is None and isinstance(hf_format, dict) and hf_format.get("type") == "custom":
            found = hf_format
        if found is not None:
            return found
        dataset = getattr(dataset, "dataset", None)
    return None


def fingerprints_in(dataset: Any) -> list[str]:
    """Returns the fingerprints of the Hugging Face data sets in a data set; setting a format in place changes them."""
    fingerprints, inside = list[str](), [dataset]
    while inside:
        found = inside.pop()
        if has_fingerprint(found):
            fingerprints.append(found._fingerprint)
        else:
            inner = getattr(found, "datasets", None) or [getattr(found, "dataset", None)]
            inside += [each for each in inner if each is not None] if isinstance(inner, (list, tuple)) else []
    return fingerprints
