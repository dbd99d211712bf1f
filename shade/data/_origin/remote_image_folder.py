"""torchvision's ImageFolder behind a URL that fsspec reaches.

The same layout (a folder a class), the same order and numbers of classes and samples, the same items. Alone it works
like any map-style data set, one slow read an item; in a `ShadeDataset` its files are read in parallel and cached.
Price: listing a bucket takes one request a thousand files, a web server's pages one a file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchvision.datasets.folder import IMG_EXTENSIONS

from shade.data._decode.jpeg import decode_rgb
from shade.data._origin.hub import moved
from shade.data._origin.url_origin import Entry, UrlOrigin, at_commits, list_files
from shade.errors import DataError


class RemoteImageFolder:
    """Images below a URL, a folder a class.

    Args:
        url: Such as ``s3://bucket/train``, ``https://host/train`` or ``hf://datasets/org/name@main/train``, which is
            read at the commit that the branch has now.
        transform: Applied to the image.
        target_transform: Applied to the class's number.
        options: For fsspec, such as ``{"anon": True}``; logins belong into the environment.

    Raises:
        ConfigError: fsspec knows no such scheme, or its library is not installed.
        DataError: There are no images, or the server does not report their lengths.
    """

    def __init__(
        self,
        url: str,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        *,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.origin, self.transform, self.target_transform = UrlOrigin(options), transform, target_transform
        self.root = moved(url.rstrip("/"), at_commits([url], self.origin.options))
        """The URL; of a repository of the Hub, that at the commit that is read."""
        # The list has each file's length and version, so a cache around this data set knows how much space it needs,
        # and never takes one state of the data set for another.
        files = list_files(self.root, self.origin.options)
        images = [each for each in files if each.url.lower().endswith(IMG_EXTENSIONS)]
        placed = sorted(((_class_of(self.root, each.url), each) for each in images), key=_order)
        if not placed:
            raise DataError.of("images in class folders", url, f"files end in {', '.join(IMG_EXTENSIONS)}")
        self.classes = sorted({name for name, _ in placed})
        """Names of the classes, in the order of their numbers."""
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}
        """Number of each class."""
        self.samples = [(entry.url, self.class_to_idx[name]) for name, entry in placed]
        """(URL, class) by sample index."""
        self.entries: list[Entry] = [entry for _, entry in placed]
        """The server's description of each file."""
        self.targets = [number for _, number in self.samples]
        """Class by sample index."""

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        address, target = self.samples[index]
        (content,) = self.origin.read_many([address])
        if isinstance(content, OSError):
            raise content
        image: Any = decode_rgb(content)
        if self.transform is not None:
            image = self.transform(image)
        return image, target if self.target_transform is None else self.target_transform(target)


def _order(placed: tuple[str, Entry]) -> tuple[str, str, str]:
    """Returns ImageFolder's sort key: a folder's own files come before those of folders in it."""
    name, entry = placed
    folder, _, file = entry.url.rpartition("/")
    return name, folder, file


def _class_of(root: str, url: str) -> str:
    """Returns the folder right below the root; raises DataError for a file that is in none."""
    inner = url.partition(root.partition("://")[2])[2].lstrip("/")
    name, slash, _ = inner.partition("/")
    if not slash:
        raise DataError.of("images in class folders", url, "move it into a folder that is named like its class")
    return name
