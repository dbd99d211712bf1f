"""One Redis node on each of several hosts: the same command on all of them makes a cluster, which grows and returns.

The hosts are network namespaces (`scripts/testbed`); where a machine cannot make them the tests are skipped. What needs
no second host is asked of this machine alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shade.errors import ConfigError, StoreUnavailableError
from shade.store._servers import cluster_bootstrap, service
from shade.store._servers.local_cluster import free_ports

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).resolve().parents[2]
TESTBED = ROOT / "scripts" / "testbed"
NOT_HERE = 3
GUARD_SECONDS = 120
SHADE = "import sys; from shade.cli import main; sys.exit(main())"
LOOK = """
import sys
from shade.store import SampleKeys, open_store
with open_store(sys.argv[1], timeout_seconds=2) as store:
    names = SampleKeys("hosts").many(range(300))
    if sys.argv[2] == "write":
        assert all(store.set_many({name: name.encode() for name in names}))
    found = store.get_many(names)
    assert all(value in (None, name.encode()) for name, value in zip(names, found))
    shares = sorted(node.num_keys for node in store.stats().nodes if node.role == "primary")
    print(sum(value is not None for value in found), *shares)
"""


class Hosts:
    """A testbed of its own name, and the command `shade` on its hosts."""

    def __init__(self, folder: Path) -> None:
        self.name = f"hosts{os.getpid()}"
        self._folder = folder
        self._environment = os.environ | {"PYTHONPATH": str(ROOT), "SHADE_REDIS_PASSWORD": "a b"}

    def testbed(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(TESTBED), words[0], "--name", self.name, *words[1:]]
        return subprocess.run(command, capture_output=True, text=True, timeout=GUARD_SECONDS, check=False)

    def start(self, host: int, *words: str) -> subprocess.Popen[str]:
        """A Python program on a host, in the background."""
        command = [sys.executable, str(TESTBED), "exec", "--name", self.name, str(host), "--", sys.executable, *words]
        return subprocess.Popen(
            command, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def cache(self, host: int, verb: str, *words: str) -> subprocess.Popen[str]:
        return self.start(host, "-c", SHADE, "cache", verb, "--dir", str(self._folder / str(host)), *words)

    def look(self, host: int, url: str, verb: str = "read") -> list[int]:
        """Keys found, then keys by node, as a host sees them."""
        return [int(word) for word in done(self.start(host, "-c", LOOK, url, verb)).split()]


def done(process: subprocess.Popen[str]) -> str:
    out, complaint = process.communicate(timeout=GUARD_SECONDS)
    assert process.returncode == 0, complaint
    return out.strip()


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Hosts]:
    bed = Hosts(tmp_path)
    made = bed.testbed("up", "--hosts", "4", "--rate", "1gbit")
    if made.returncode == NOT_HERE:
        pytest.skip(made.stderr.strip())
    assert made.returncode == 0, made.stderr
    yield bed
    bed.testbed("down")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_three_hosts_make_a_cluster_a_fourth_joins_and_one_comes_back(bed: Hosts) -> None:
    first = ["--join", "10.77.0.1:7000"]
    machines = [bed.cache(host, "up", *first, "--nodes", "3", "--memory", "64MiB") for host in (2, 0, 1)]
    urls = {done(machine).partition("?")[0] for machine in machines}
    assert urls == {"redis+cluster://10.77.0.1:7000,10.77.0.2:7000,10.77.0.3:7000"}
    (url,) = urls
    assert bed.look(1, url, "write")[0] == 300
    assert bed.look(0, url) == [300, *[100] * 3]

    assert done(bed.cache(3, "up", *first, "--memory", "64MiB")).count("10.77.0.4:7000") == 1
    total, *shares = bed.look(2, url)
    assert total == 300
    assert len(shares) == 4
    assert max(shares) - min(shares) <= 20

    (record,) = service.status(bed._folder / "1")[1]
    os.kill(record.process_id, 9)
    total, *shares = bed.look(0, url)
    assert total == 300 - 300 // 4
    assert len(shares) == 3
    done(bed.cache(1, "up", *first, "--nodes", "3", "--memory", "64MiB"))
    total, *shares = bed.look(0, url, "write")
    assert (total, len(shares)) == (300, 4), "it is who it was, and empty"
    for host in range(4):
        assert done(bed.cache(host, "down")) == "1 server ended"


def test_a_server_that_others_can_reach_wants_a_password(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="SHADE_REDIS_PASSWORD"):
        cluster_bootstrap.join_cluster(tmp_path, ("127.0.0.1", 7000), nodes=3)
    assert list(tmp_path.iterdir()) == []


def test_a_seed_without_a_number_has_nothing_to_join(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with pytest.raises(ConfigError, match="pass --nodes"):
        cluster_bootstrap.join_cluster(tmp_path, ("127.0.0.1", port), password="secret")
    assert not (tmp_path / "servers.json").exists()


def test_those_who_wait_in_vain_leave_nothing_running(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with pytest.raises(StoreUnavailableError, match="3 nodes have met"):
        cluster_bootstrap.join_cluster(tmp_path, ("127.0.0.1", port), nodes=3, password="secret", wait_seconds=0.5)
    assert not (tmp_path / "servers.json").exists()


@pytest.mark.parametrize("nodes", [0, 1, 2])
def test_shapes_that_are_no_cluster(tmp_path: Path, nodes: int) -> None:
    with pytest.raises(ConfigError):
        cluster_bootstrap.join_cluster(tmp_path, ("127.0.0.1", 7000), nodes=nodes, password="secret")


def test_a_host_that_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--join"):
        cluster_bootstrap.join_cluster(tmp_path, ("no-such-host.invalid", 7000), nodes=3, password="secret")
