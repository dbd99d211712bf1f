"""A stand-in of the Hugging Face Hub's HTTP interface: repositories with commits, buckets, and a server for files.

As the Hub does, it redirects the reader of a large file (LFS) to a signed URL on another server, which refuses it after
so many uses; small files it sends itself. It counts what it is asked for, and fails as told.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pytest

TOKEN = "hf_of_the_test"
_KINDS = r"(?:datasets|models|spaces|buckets)"
_INFO = re.compile(rf"/api/({_KINDS})/([^/]+/[^/]+)(?:/revision/([^/]+))?")
_TREE = re.compile(r"/api/(datasets|models|spaces)/([^/]+/[^/]+)/tree/([^/]+)(?:/(.*))?")
_PATHS = re.compile(r"/api/(datasets|models|spaces)/([^/]+/[^/]+)/paths-info/([^/]+)")
_BUCKET_TREE = re.compile(r"/api/(buckets)/([^/]+/[^/]+)/tree()(?:/(.*))?")
_RESOLVE = re.compile(r"/(?:(datasets|spaces)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_BUCKET_RESOLVE = re.compile(r"/(buckets)/([^/]+/[^/]+)/resolve()/(.+)")


@dataclass
class Repository:
    """Files by path, at each commit."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    is_private: bool = False

    def commit(self, files: Mapping[str, bytes], ref: str = "main") -> str:
        """Sets what a branch has, and returns the commit."""
        sha = hashlib.sha1(repr((sorted(files.items()), len(self.commits))).encode()).hexdigest()
        self.commits[sha], self.refs[ref] = dict(files), sha
        return sha


class Hub:
    """The state of both servers."""

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.lock = threading.Lock()
        self.asked: Counter[str] = Counter()
        """Requests by kind: info, tree, resolve, data."""
        self.bytes_sent = 0
        self.signed: dict[str, int] = {}
        """Uses that are left of each signed URL."""
        self.uses, self.page, self.lfs_bytes = 1 << 30, 1000, 100
        self.failures: list[tuple[str, int, dict[str, str]]] = []
        """Kinds of the next requests to fail, with status and headers."""
        self.url = self.files_url = ""

    def repository(self, name: str, kind: str = "datasets") -> Repository:
        return self.repositories.setdefault((kind, name), Repository())


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def _send(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
            with self.hub.lock:
                self.hub.bytes_sent += len(content)

    def _send_file(self, content: bytes, **headers: str) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted is None:
            return self._send(200, content, **headers)
        first, last = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
        if first >= len(content):
            return self._send(416)
        return self._send(
            206, content[first : last + 1], Content_Range=f"bytes {first}-{last}/{len(content)}", **headers
        )

    def _count(self, kind: str) -> bool:
        """Counts a request, and returns whether it has been refused."""
        with self.hub.lock:
            self.hub.asked[kind] += 1
            number = next((n for n, each in enumerate(self.hub.failures) if each[0] == kind), None)
            failure = None if number is None else self.hub.failures.pop(number)
        if failure is not None:
            self._send(failure[1], **failure[2])
        return failure is not None


class _HubHandler(_Handler):
    def do_POST(self) -> None:
        found = _PATHS.fullmatch(urlsplit(self.path).path)
        text = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        if found is None or self._count("paths"):
            return None if found else self._send(404)
        files = self._files(*found.groups())
        if files is None:
            return None
        paths = json.loads(text)["paths"] if text.startswith("{") else parse_qs(text).get("paths", [])
        said = [{"type": "file", "path": path, "size": len(files[1][path])} for path in paths if path in files[1]]
        said = [each | self._identity(found[1], files[1][each["path"]]) for each in said]
        return self._send(200, json.dumps(said).encode(), Content_Type="application/json")

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        if (found := _INFO.fullmatch(parts.path)) is not None:
            return self._info(*found.groups())
        if (found := _TREE.fullmatch(parts.path) or _BUCKET_TREE.fullmatch(parts.path)) is not None:
            return self._tree(parse_qs(parts.query), *found.groups())
        if (found := _RESOLVE.fullmatch(parts.path) or _BUCKET_RESOLVE.fullmatch(parts.path)) is not None:
            return self._resolve(*found.groups())
        return self._send(404)

    do_HEAD = do_GET

    def _files(self, kind: str, name: str, revision: str | None) -> tuple[str, dict[str, bytes]] | None:
        """Returns the commit and its files; None after an answer that there are none."""
        repository = self.hub.repositories.get((kind, name))
        is_known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repository is None or (repository.is_private and not is_known):
            self._send(404 if is_known else 401, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
            return None
        sha = unquote(revision or "main")
        sha = repository.refs.get(sha, sha)
        if sha not in repository.commits:
            self._send(404, X_Error_Code="RevisionNotFound", X_Error_Message="Invalid rev id")
            return None
        return sha, repository.commits[sha]

    def _info(self, kind: str, name: str, revision: str | None) -> None:
        if self._count("info"):
            return
        found = self._files(kind, name, revision)
        if found is None:
            return
        said = {"id": name, "sha": found[0], "siblings": [{"rfilename": path} for path in found[1]], "tags": []}
        if kind == "buckets":
            said |= {"private": False, "createdAt": "2026-01-01T00:00:00.000Z", "size": 1, "totalFiles": 1}
        self._send(200, json.dumps(said).encode(), Content_Type="application/json")

    def _tree(self, query: dict[str, list[str]], kind: str, name: str, revision: str, folder: str | None) -> None:
        if self._count("tree"):
            return
        found = self._files(kind, name, revision)
        if found is None:
            return
        folder = unquote(folder or "").rstrip("/")
        is_deep = query.get("recursive", ["false"])[0].lower() == "true"
        start, listed = int(query.get("cursor", ["0"])[0]), dict[str, dict[str, Any]]()
        for path, content in sorted(found[1].items()):
            if folder and not path.startswith(folder + "/"):
                continue
            inner = path[len(folder) + 1 :] if folder else path
            for place in [at for at, letter in enumerate(inner) if letter == "/"]:
                above = path[: len(path) - len(inner) + place]
                if kind != "buckets" or not is_deep:
                    listed.setdefault(above, {"type": "directory", "path": above, "oid": "0" * 40, "size": 0})
                if not is_deep:
                    break
            if is_deep or "/" not in inner:
                listed[path] = {"type": "file", "path": path, "size": len(content), **self._identity(kind, content)}
        if not listed and folder:
            return self._send(404, X_Error_Code="EntryNotFound", X_Error_Message="no such path")
        headers = {"Content_Type": "application/json"}
        if start + self.hub.page < len(listed):
            path = self.path.partition("?")[0]
            query["cursor"] = [str(start + self.hub.page)]
            rest = "&".join(f"{key}={quote(value[0])}" for key, value in query.items())
            headers["Link"] = f'<{self.hub.url}{path}?{rest}>; rel="next"'
        return self._send(200, json.dumps([*listed.values()][start : start + self.hub.page]).encode(), **headers)

    def _identity(self, kind: str, content: bytes) -> dict[str, Any]:
        sha256 = hashlib.sha256(content).hexdigest()
        if kind == "buckets":
            return {"xetHash": sha256, "mtime": "2026-01-01T00:00:00.000Z", "uploadedAt": "2026-01-01T00:00:00.000Z"}
        if len(content) < self.hub.lfs_bytes:
            return {"oid": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()}
        pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize %d\n"
        pointer %= sha256.encode(), len(content)
        oid = hashlib.sha1(b"blob %d\0" % len(pointer) + pointer).hexdigest()
        lfs = {"oid": sha256, "size": len(content), "pointerSize": len(pointer)}
        return {"oid": oid, "lfs": lfs, "xetHash": sha256}

    def _resolve(self, kind: str | None, name: str, revision: str, path: str) -> None:
        if self._count("resolve"):
            return None
        found = self._files(kind or "models", name, revision)
        if found is None:
            return None
        content = found[1].get(unquote(path))
        if content is None:
            return self._send(404, X_Error_Code="EntryNotFound", X_Error_Message="Entry not found")
        headers = {"X_Repo_Commit": found[0], "X_Linked_Size": str(len(content))}
        if kind != "buckets" and len(content) < self.hub.lfs_bytes:
            return self._send_file(content, ETag='"of git"', **headers)
        with self.hub.lock:
            # The letters are those that a client must not write in another way.
            place = f"/{kind or 'models'}/{name}/{found[0]}/{path}?X-Sig=n{len(self.hub.signed)}%2F~a%27b"
            self.hub.signed[place] = self.hub.uses
        headers |= {"X_Xet_Hash": hashlib.sha256(content).hexdigest()}
        return self._send(302, Location=self.hub.files_url + place, **headers)


class _FilesHandler(_Handler):
    def do_GET(self) -> None:
        if self._count("data"):
            return None
        with self.hub.lock:
            left = self.hub.signed.get(self.path, 0)
            self.hub.signed[self.path] = left - 1
        if left <= 0 or "Authorization" in self.headers:
            return self._send(403, b"<Error><Code>AccessDenied</Code></Error>")
        kind, owner, name, sha, path = unquote(urlsplit(self.path).path).lstrip("/").split("/", 4)
        return self._send_file(self.hub.repositories[kind, f"{owner}/{name}"].commits[sha][path])

    do_HEAD = do_GET


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


@contextlib.contextmanager
def serving_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub until the end of the block, for this process and those that it starts."""
    hub = Hub()
    servers = [
        _Server(("127.0.0.1", 0), type("Handler", (kind,), {"hub": hub})) for kind in (_HubHandler, _FilesHandler)
    ]
    hub.url, hub.files_url = (f"http://127.0.0.1:{server.server_address[1]}" for server in servers)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    threads = [threading.Thread(target=server.serve_forever, args=(0.01,)) for server in servers]
    for thread in threads:
        thread.start()
    yield hub
    for server, thread in zip(servers, threads, strict=True):
        server.shutdown()
        server.server_close()
        thread.join()
