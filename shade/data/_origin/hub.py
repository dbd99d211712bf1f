"""Hugging Face's Hub: ``hf://`` URLs of repositories, each at one commit, and of buckets.

The Hub's own client takes URLs apart, logs in and lists. It does not read: it would look a file up for each object, and
read 5 MiB behind each range. `HubReads` makes one request for an object or range. The Hub answers the first one for a
file with a signed URL elsewhere, which is remembered, and asked for again when it has expired.

Invariant: a repository is read at a commit; no URL with a branch or tag reaches `HubReads`.
"""

from __future__ import annotations

import errno
import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

import fsspec
from fsspec.asyn import sync

from shade.errors import shown_url, without_login

_AT_COMMIT: Final = re.compile(r"hf://((?:(?:datasets|spaces|kernels)/)?[^/@]+/[^/@]+)@([0-9a-f]{40,64})(?:/(.*)|$)")
_BUCKET: Final = re.compile(r"hf://(buckets/[^/@]+/[^/@]+)/(.+)")
_CLIENT: Final = {"trust_env": True, "auto_decompress": False, "requote_redirect_url": False}
"""For aiohttp: a signed URL is asked for letter by letter, and bytes come as they are stored."""
_MOST_PLACES: Final = 4096
_PASSING: Final = (408, 425, 429)
_RESET: Final = re.compile(r";\s*t=(\d+)")


def is_hub(url: str) -> bool:
    """Returns whether a URL is one of the Hub."""
    return url.startswith("hf://")


def is_at_commit(url: str) -> bool:
    """Returns whether a URL names a commit of the Hub, whose files do not change."""
    return _AT_COMMIT.match(url) is not None


def parted_at_commit(url: str) -> tuple[str, str | None]:
    """Returns a URL without the commit of the Hub that it names, and the commit."""
    found = _AT_COMMIT.match(url)
    return (url, None) if found is None else (f"hf://{found[1]}/{found[3]}", found[2])


def commits_of(urls: Iterable[str]) -> str:
    """Returns the repositories among URLs, each at its commit."""
    return " ".join(sorted({f"hf://{m[1]}@{m[2]}" for m in map(_AT_COMMIT.match, urls) if m is not None}))


def revision_of(fixed: Iterable[str], content: str) -> str | None:
    """Returns what a run's state keeps of repositories at a commit, tables at a version, and what they hold; None if
    there are none."""
    names = " ".join(sorted({*fixed} - {""}))
    return f"{names}, content {content}" if names else None


def commit_roots(urls: Iterable[str], file_system: Any) -> dict[str, str]:
    """Returns the roots of repositories as URLs name them, such as ``hf://datasets/org/name@main``, each with the root
    at its present commit; raises ImportError where the library knows no buckets."""
    hub, roots = importlib.import_module("huggingface_hub"), dict[str, str]()
    # It keeps that there is no such repository, also after a login.
    file_system.invalidate_cache()
    for url in (each.rstrip("/") for each in urls if is_hub(each) and not is_at_commit(each)):
        if url.startswith("hf://buckets/"):
            if not hasattr(importlib.import_module("huggingface_hub.hf_file_system"), "HfFileSystemResolvedBucketPath"):
                raise ImportError(f"huggingface_hub {hub.__version__}, and not 1.6 or newer")
            continue
        place = file_system.resolve_path(url)
        root = url.removesuffix(place.path_in_repo).rstrip("/")
        if root not in roots:
            api = hub.HfApi(endpoint=file_system.endpoint, token=file_system.token)
            sha = api.repo_info(place.repo_id, repo_type=place.repo_type, revision=place.revision).sha
            kind = "" if place.repo_type == "model" else f"{place.repo_type}s/"
            roots[root] = f"hf://{kind}{place.repo_id}@{sha}"
    return roots


def moved(url: str, roots: Mapping[str, str]) -> str:
    """Returns a URL below another root, if it lies below one of these."""
    root = next((each for each in roots if url == each or url.startswith(f"{each}/")), "")
    return roots.get(root, "") + url[len(root) :]


def infos_of(urls: Sequence[str], file_system: Any) -> Callable[[str], Mapping[str, Any]]:
    """Returns what gives fsspec's ``info`` of files, after listing their folders."""
    found = dict[str, Mapping[str, Any]]()
    for folder in dict.fromkeys(url.rpartition("/")[0] for url in urls):
        try:
            listed = file_system.ls(folder, detail=True, refresh=not is_at_commit(folder))
        except FileNotFoundError:
            continue
        found |= {file_system.unstrip_protocol(info["name"]): info for info in listed}

    def info_of(url: str) -> Mapping[str, Any]:
        if url not in found:
            raise FileNotFoundError(errno.ENOENT, "no such file", shown_url(url))
        return found[url]

    return info_of


class HubRefusedError(OSError):
    """The Hub, or the server that it names, refused a request; `status` and `headers` say how."""

    def __init__(self, words: str, status: int, headers: Mapping[str, str]) -> None:
        super().__init__(words)
        self.status, self.headers = status, headers


class HubReads:
    """Reads files and ranges of them, in fsspec's thread; belongs to one process.

    Args:
        options: ``endpoint`` and ``token``; each is looked for where the Hub's client does if it is not given.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        endpoint = options.get("endpoint") or importlib.import_module("huggingface_hub.constants").ENDPOINT
        self._endpoint, self._token = endpoint.rstrip("/"), options.get("token")
        self._headers_of = importlib.import_module("huggingface_hub.utils").build_hf_headers
        self._url = importlib.import_module("yarl").URL
        self._web = fsspec.filesystem("http", client_kwargs=_CLIENT)
        self._places = dict[str, Any]()

    def read(self, url: str, start: int | None, stop: int | None) -> bytes:
        """Returns a file, or the range of it up to ``stop``, None for its end."""
        content: bytes = sync(self._web.loop, self._read, url, start, stop)
        return content

    async def _read(self, url: str, start: int | None, stop: int | None) -> bytes:
        wanted = {"Accept-Encoding": "identity"}
        if start is not None or stop is not None:
            wanted["Range"] = f"bytes={start or 0}-{'' if stop is None else stop - 1}"
        session, place = await self._web.set_session(), self._places.get(url)
        if place is not None:
            async with session.get(place, headers=wanted) as answer:
                if answer.status < 400:
                    return bytes(await answer.read())
                if answer.status >= 500 or answer.status in _PASSING:
                    raise _refused(url, answer, is_signed=True)
            # It has expired. Another read may have brought a new one.
            if self._places.get(url) is place:
                del self._places[url]
        # A token that was replaced since the last read is found here.
        login = self._headers_of(token=self._token)
        async with session.get(self._address(url), headers=login | wanted) as answer:
            is_signed = not str(answer.url).startswith(f"{self._endpoint}/")
            if answer.status >= 400:
                raise _refused(url, answer, is_signed=is_signed)
            if is_signed:
                self._places[url] = answer.url
                if len(self._places) > _MOST_PLACES:
                    del self._places[next(iter(self._places))]
            return bytes(await answer.read())

    def _address(self, url: str) -> Any:
        found = _AT_COMMIT.match(url)
        if found is not None:
            place = f"{found[1]}/resolve/{found[2]}/{quote(found[3])}"
        else:
            found = _BUCKET.match(url)
            assert found is not None, "a URL of a repository is read at a commit"
            place = f"{found[1]}/resolve/{quote(found[2])}"
        return self._url(f"{self._endpoint}/{place}", encoded=True)


def _refused(url: str, answer: Any, *, is_signed: bool) -> OSError:
    """Returns the error of an answer, which does not show a signed URL, because that is a login."""
    status, place = answer.status, shown_url(url)
    said = without_login(answer.headers.get("X-Error-Message") or answer.reason or "", url)
    if status == 404 and not is_signed:
        return FileNotFoundError(errno.ENOENT, said, place)
    if status in (401, 403) and not is_signed:
        cure = "log in: hf auth login, or HF_TOKEN"
        return PermissionError(errno.EACCES, f"the Hub answers {status} ({said}); {cure}", place)
    # The Hub says so when its window of counted requests ends.
    reset = _RESET.search(answer.headers.get("RateLimit") or "") if status == 429 else None
    pause = answer.headers.get("Retry-After") or (reset[1] if reset else "0")
    who = "the server of files" if is_signed else "the Hub"
    return HubRefusedError(f"{who} answers {status} ({said}) to {place}", status, {"Retry-After": pause})
