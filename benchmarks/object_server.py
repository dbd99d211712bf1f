"""A folder as a bucket of an S3 server, as far away as you say: what `bench_loaders` reads objects from.

    python benchmarks/object_server.py FOLDER --latency-ms 30 --megabytes-per-second 50

Prints its URL, and serves until it is ended. It speaks what boto3, s3fs and plain HTTP need to read: GET, with a range,
HEAD, and lists of keys, which all fit into one answer. A request is answered after the latency; all answers together
get the bandwidth, each one when the line has carried those before it. Any bucket's name will do, and logins are not
looked at. ``GET /.stats`` counts objects opened, requests and bytes by the names of `scripts/slowfs`, never late.

moto, the S3 server of our tests, takes five times the CPU time for a request (decision 0051), and shares the cores with
the loaders.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from aiohttp import web

BUCKET = "loaders"
LIST = '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{}</ListBucketResult>'
ENTRY = (
    "<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>&quot;{size}&quot;</ETag>"
    "<Size>{size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
)


class ObjectServer:
    """Answers requests.

    Args:
        folder: Whose files are the objects; a key is a path in it.
        latency_seconds: Until an answer begins.
        bytes_per_second: Of all answers together.
    """

    def __init__(self, folder: Path, latency_seconds: float, bytes_per_second: float) -> None:
        self._folder, self._latency_seconds, self._bytes_per_second = (
            folder.resolve(),
            latency_seconds,
            bytes_per_second,
        )
        self._line_free = 0.0
        self._counts = {"num_opens": 0, "num_reads": 0, "read_bytes": 0}

    def app(self) -> web.Application:
        """Returns the server's routes."""
        app = web.Application()
        app.router.add_get("/.stats", self._stats)
        app.router.add_get("/{bucket}", self._list)
        app.router.add_get("/{bucket}/", self._list)
        app.router.add_get("/{bucket}/{key:.+}", self._get)
        return app

    async def _stats(self, _: web.Request) -> web.Response:
        return web.json_response(self._counts)

    async def _carry(self, num_bytes: int) -> None:
        """Waits until the line has carried an answer."""
        clock = asyncio.get_running_loop()
        begin = max(clock.time() + self._latency_seconds, self._line_free)
        self._line_free = begin + num_bytes / self._bytes_per_second
        self._counts["num_reads"] += 1
        self._counts["read_bytes"] += num_bytes
        await asyncio.sleep(self._line_free - clock.time())

    async def _get(self, request: web.Request) -> web.Response:
        path = (self._folder / request.match_info["key"]).resolve()
        if not path.is_relative_to(self._folder) or not path.is_file():
            await self._carry(0)
            return web.Response(status=404, body=b"<Error><Code>NoSuchKey</Code></Error>", content_type="text/xml")
        size = path.stat().st_size
        headers = {"ETag": f'"{size}"', "Accept-Ranges": "bytes", "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        if request.method == "HEAD":
            await self._carry(0)
            return web.Response(headers=headers | {"Content-Length": str(size)})
        begin, end, _ = request.http_range.indices(size)
        self._counts["num_opens"] += 1
        await self._carry(end - begin)
        with path.open("rb") as file:
            file.seek(begin)
            content = file.read(end - begin)
        if (begin, end) == (0, size) and "Range" not in request.headers:
            return web.Response(body=content, headers=headers)
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        return web.Response(status=206, body=content, headers=headers)

    async def _list(self, request: web.Request) -> web.Response:
        prefix, delimiter = request.query.get("prefix", ""), request.query.get("delimiter", "")
        entries, folders = [], set()
        for path in sorted(self._folder.rglob("*")):
            key = path.relative_to(self._folder).as_posix()
            if not path.is_file() or not key.startswith(prefix):
                continue
            inner, slash, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if slash:
                folders.add(prefix + inner + slash)
            else:
                entries.append(ENTRY.format(key=escape(key), size=path.stat().st_size))
        shared = [f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>" for each in sorted(folders)]
        count = f"<KeyCount>{len(entries) + len(shared)}</KeyCount><IsTruncated>false</IsTruncated>"
        body = LIST.format(f"<Prefix>{escape(prefix)}</Prefix>{count}{''.join(entries)}{''.join(shared)}")
        await self._carry(len(body))
        return web.Response(text=body, content_type="application/xml")


@contextlib.contextmanager
def object_server(folder: Path, latency_ms: float, megabytes_per_second: float) -> Iterator[str]:
    """Serves a folder from a process of its own; gives the server's URL."""
    words = [str(folder), "--latency-ms", str(latency_ms), "--megabytes-per-second", str(megabytes_per_second)]
    server = subprocess.Popen([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = json.loads(server.stdout.readline() or '""')
        if not url:
            raise RuntimeError("the object server did not start; its message is above")
        yield url
    finally:
        server.terminate()
        server.communicate(timeout=30)


def main() -> None:
    """Serves until it is ended."""
    parser = argparse.ArgumentParser(description="A folder as a bucket of an S3 server; see the top of the file.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--latency-ms", type=float, default=30.0)
    parser.add_argument("--megabytes-per-second", type=float, default=50.0)
    given = parser.parse_args()
    server = ObjectServer(given.folder, given.latency_ms / 1e3, given.megabytes_per_second * 1e6)
    asyncio.run(serve(server))


async def serve(server: ObjectServer) -> None:
    """Listens on a free port, and prints the URL."""
    runner: Any = web.AppRunner(server.app(), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    print(json.dumps(f"http://127.0.0.1:{port}"), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    main()
