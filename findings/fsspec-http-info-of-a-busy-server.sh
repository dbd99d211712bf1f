#!/bin/sh
# fsspec 2026.9.0 with aiohttp 3.14.5: `info` of an http:// file raises FileNotFoundError when the server is busy (503)
# or asks to come later (429), as it does for a file that is missing (404).
#
# Guess: only 404 means that a file is not there; a busy server raises an error that says so.
# Seen: FileNotFoundError for 404, 429 and 503 alike; the status is in the error's cause. `cat_file` of the same URL
# raises aiohttp's ClientResponseError for 429 and 503. So "not found" must not be taken for "absent": a loader that
# skips missing files would leave out whatever a busy server does not serve in time.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q fsspec==2026.9.0 aiohttp==3.14.5 2>/dev/null
"$folder/venv/bin/python" - <<'PY'
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import fsspec


class Server(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(int(self.path[1:]))
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
http = fsspec.filesystem("http")
seen = {}
for status in (404, 429, 503):
    url = f"http://127.0.0.1:{server.server_port}/{status}"
    for name, call in (("info", http.info), ("cat_file", http.cat_file)):
        try:
            call(url)
            seen[status, name] = "no error"
        except Exception as error:
            seen[status, name] = f"{type(error).__name__}, cause {type(error.__cause__).__name__}"
for key, words in seen.items():
    print(*key, words)
assert all(seen[status, "info"].startswith("FileNotFoundError") for status in (404, 429, 503)), "it has changed"
assert all(seen[status, "cat_file"].startswith("ClientResponseError") for status in (429, 503)), "it has changed"
PY
