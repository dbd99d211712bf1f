#!/bin/sh
# huggingface_hub 2.4.0: `HfFileSystem` that was told once that a repository does not exist says so for good, also when
# the repository is there, and also from a new `HfFileSystem` of the same thread.
#
# Guess: a failed look-up is asked again, or a new object asks again; at the least after the repository was made, or
# after a login, for which the Hub says the same "not found" before.
# Seen: FileNotFoundError from memory, without a request, until `invalidate_cache()`. fsspec hands out the same object to
# who asks for a new one.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q huggingface_hub==2.4.0 2>/dev/null
HF_HOME="$folder/home" "$folder/venv/bin/python" - <<'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from huggingface_hub import HfFileSystem

is_there, requests = False, []


class Hub(BaseHTTPRequestHandler):
    def do_GET(self):
        requests.append(self.path)
        content = b"{}"
        if is_there:
            content = json.dumps({"id": "org/name", "sha": "0" * 40, "siblings": [], "private": False}).encode()
        self.send_response(200 if is_there else 404)
        if not is_there:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
threading.Thread(target=server.serve_forever, daemon=True).start()


def asked(file_system):
    before = len(requests)
    try:
        found = file_system.resolve_path("datasets/org/name").repo_id
    except FileNotFoundError as error:
        found = type(error).__name__
    return found, len(requests) - before


def opened():
    return HfFileSystem(endpoint=f"http://127.0.0.1:{server.server_port}", token=False)


first = asked(opened())
is_there = True
again = asked(opened())
opened().invalidate_cache()
after = asked(opened())
print("repository missing:", *first, "requests")
print("repository there:", *again, "requests")
print("after invalidate_cache():", *after, "requests")
assert first[0] == "FileNotFoundError" and first[1] > 0, "it has changed"
assert again == ("FileNotFoundError", 0), "it has changed"
assert after[0] == "org/name", "it has changed"
PY
