"""The recipes for Slurm and Kubernetes, as far as they can be tried without a cluster manager.

Slurm's part is played by two small stand-ins (`srun`, `scontrol`) over the hosts of a testbed: the script, the cache,
the launcher and the training are the real ones. The manifests are checked against Kubernetes' own schema where the
package `kubernetes-validate` is installed, and against what the launcher takes, always."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shade.launch import resolve
from tests.support.launching import ROOT, environment, make_images, rows

pytestmark = pytest.mark.multiprocess

TESTBED = ROOT / "scripts" / "testbed"
SLURM = ROOT / "scripts" / "slurm.sbatch"
MANIFESTS = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
NOT_HERE = 3
HOSTS = 3
SCONTROL = '#!/bin/sh\nfor n in 1 2 3; do echo "10.77.0.$n"; done\n'
SRUN = """#!/bin/bash
shift  # --kill-on-bad-exit=1
pids=
for n in 0 1 2; do
    SLURM_NODEID=$n "$PYTHON" "$TESTBED" exec "$n" -- "$@" & pids="$pids $!"
done
status=0
for pid in $pids; do wait $pid || status=1; done
exit $status
"""


# ------------------------------------------------------------------------------------------------ Slurm


@pytest.mark.multiprocess
def test_the_batch_script_is_one_and_says_what_it_does() -> None:
    assert subprocess.run(["bash", "-n", str(SLURM)], check=False).returncode == 0
    told = subprocess.run(["bash", str(SLURM), "--help"], capture_output=True, text=True, check=True).stdout
    assert "sbatch --nodes=4" in told
    assert "#SBATCH" not in told


@pytest.mark.multiprocess
def test_two_machines_make_no_cluster(tmp_path: Path) -> None:
    fake = environment(SLURM_JOB_NUM_NODES="2", SLURM_NODEID="0", SLURM_JOB_ID="7", SHADE_MASTER="127.0.0.1")
    words = ["bash", str(SLURM), "--on-a-machine", "bench_cifar10.py", "data"]
    told = subprocess.run(words, env=fake, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (told.returncode, told.stderr.count("\n")) == (2, 1)
    assert "SHADE_CACHE" in told.stderr


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a batch script on three machines."""
    name = f"slurm{os.getpid()}"
    bed = [sys.executable, str(TESTBED)]
    up = [*bed, "up", "--name", name, "--hosts", str(HOSTS), "--rate", "1gbit"]
    made = subprocess.run(up, capture_output=True, text=True, check=False)
    if made.returncode == NOT_HERE:
        pytest.skip(made.stderr.strip())
    assert made.returncode == 0, made.stderr
    for tool, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tmp_path / tool).write_text(text)
        (tmp_path / tool).chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    slurm = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": str(HOSTS), "SLURM_JOB_NODELIST": "machine[1-3]"}
    ours = {"SHADE_PYTHON": sys.executable, "SHADE_CACHE_MEMORY": "64MiB", "TMPDIR": str(tmp_path)}
    place = {"PATH": path, "PYTHON": sys.executable, "TESTBED": str(TESTBED), "SHADE_TESTBED": name}
    yield environment() | slurm | ours | place
    subprocess.run([*bed, "down", "--name", name], check=False, capture_output=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_trains_on_all_its_machines_through_a_cache_of_its_own(slurm: dict[str, str], tmp_path: Path) -> None:
    data = make_images(tmp_path / "data")
    words = f"bench_cifar10.py {data} -g 1 -wss 0.4 --network cnn --epochs 2 --batch_size 4 --workers 0"
    command = ["bash", str(SLURM), *shlex.split(words)]
    told = subprocess.run(command, env=slurm, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    found = rows(tmp_path / "runs" / "slurm-4711")
    assert sorted({row["rank"] for row in found}) == [0, 1, 2]
    assert sum(row["hits"] for row in found) > 0
    assert sum(row["store_errors"] for row in found) == 0
    assert not list(tmp_path.glob("shade-4711-*")), "the cache is gone with the job"


# ------------------------------------------------------------------------------------------------ Kubernetes


def documents() -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return [document for path in MANIFESTS for document in yaml.safe_load_all(path.read_text())]


def test_manifests_fit_the_schema() -> None:
    validator = pytest.importorskip("kubernetes_validate")
    for document in documents():
        validator.validate(document, validator.latest_version(), strict=True)


def containers(kind: str, name: str) -> list[dict[str, Any]]:
    (found,) = [each for each in documents() if each["kind"] == kind and each["metadata"]["name"] == name]
    return list(found["spec"]["template"]["spec"]["containers"])


def test_what_refers_to_something_refers_to_what_there_is() -> None:
    there = {(each["kind"], each["metadata"]["name"]) for each in documents()}
    for each in documents():
        spec = each.get("spec", {})
        if each["kind"] == "Service":
            labels = [
                d["spec"]["template"]["metadata"]["labels"] for d in documents() if "template" in d.get("spec", {})
            ]
            assert spec["selector"] in labels
        if each["kind"] == "StatefulSet":
            assert ("Service", spec["serviceName"]) in there
            assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
        pod = spec.get("template", {}).get("spec", {})
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        volumes |= {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", [])}
        for container in pod.get("containers", []):
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes


@pytest.mark.multiprocess
def test_the_launcher_takes_what_the_manifest_gives_it() -> None:
    (container,) = containers("Job", "shade-train")
    script = container["command"][-1]
    line = script.partition("exec shade run")[2].replace("\\\n", " ")
    shell = f"JOB_COMPLETION_INDEX=2; resume=; CACHE={shlex.quote(container['env'][0]['value'])}; printf '%s\\n' {line}"
    words = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True).stdout.splitlines()
    given = resolve.parse([word for word in words if word])
    assert (given.nodes, given.nr, given.master_address) == (3, 2, "shade-train-0.shade-train")
    assert given.cache.count("shade-cache-") == 3


@pytest.mark.multiprocess
def test_the_nodes_of_the_manifest_are_caches(tmp_path: Path) -> None:
    """Every line of its redis.conf is one that the server takes, and those that make a cache are all there."""
    from shade.cli.doctor import _WANTED, _WANTED_OF_NODES
    from shade.store._servers.local_cluster import free_ports
    from shade.store._servers.server import LocalServer

    (text,) = [each["data"]["redis.conf"] for each in documents() if each["kind"] == "ConfigMap"]
    settings = dict(line.split(" ", 1) for line in text.splitlines()) | {"port": str(free_ports(1)[0])}
    settings |= {"dir": str(tmp_path), "client-output-buffer-limit": "normal 256mb 64mb 10"}
    with LocalServer(directory=tmp_path, settings=settings) as server:
        for name, (value, _) in (_WANTED | _WANTED_OF_NODES).items():
            reply = server.ask("CONFIG", "GET", name)
            assert isinstance(reply, list)
            assert reply[1] == value.encode(), name
