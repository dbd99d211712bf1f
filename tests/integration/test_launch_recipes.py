"""The recipes for Slurm, Kubernetes, Kubeflow and SkyPilot, as far as they can be tried without a cluster manager.

Slurm's part is played by two small stand-ins (`srun`, `scontrol`) over the hosts of a testbed: the script, the cache,
the launcher and the training are the real ones. The manifests are checked against Kubernetes' own schema where the
package `kubernetes-validate` is installed, Kubeflow's against the models of `kubeflow-trainer-api`, SkyPilot's by its
own parser; and all against what the launcher takes, always."""

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
KUBEFLOW = ROOT / "deploy" / "kubeflow" / "train.yaml"
SKYPILOT = ROOT / "deploy" / "skypilot" / "train.yaml"
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


def given_to_the_launcher(script: str, **variables: str) -> Any:
    """Returns the parsed flags of the script's `shade run`, with these variables of the shell."""
    line = script.partition("shade run")[2].replace("\\\n", " ")
    command = ["sh", "-c", f"printf '%s\\n' {line}"]
    told = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=True)
    return resolve.parse([word for word in told.stdout.splitlines() if word])


@pytest.mark.multiprocess
def test_the_launcher_takes_what_the_manifest_gives_it() -> None:
    (container,) = containers("Job", "shade-train")
    cache = container["env"][0]["value"]
    given = given_to_the_launcher(container["command"][-1], JOB_COMPLETION_INDEX="2", CACHE=cache)
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


# ------------------------------------------------------------------------------------------------ Kubeflow, SkyPilot


def kubeflow() -> tuple[dict[str, Any], dict[str, Any]]:
    runtime, job = pytest.importorskip("yaml").safe_load_all(KUBEFLOW.read_text())
    return runtime, job


def test_the_training_runtime_and_its_job_fit_the_schema() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    for document in kubeflow():
        model = getattr(models, f"TrainerV1alpha1{document['kind']}")
        assert model.from_dict(document).to_dict() == document, "a field that the schema does not know is left out"


def test_the_pods_of_the_training_runtime_fit_the_schema_of_kubernetes() -> None:
    validator = pytest.importorskip("kubernetes_validate")
    runtime, job = kubeflow()
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    template = replicated["template"]
    (container,) = template["spec"]["template"]["spec"]["containers"]
    container |= {name: job["spec"]["trainer"][name] for name in ("image", "command", "env")}
    document = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}, "spec": template["spec"]}
    validator.validate(document, validator.latest_version(), strict=True)


def test_the_train_job_refers_to_what_there_is() -> None:
    runtime, job = kubeflow()
    reference = job["spec"]["runtimeRef"]
    assert (reference["kind"], reference["name"]) == (runtime["kind"], runtime["metadata"]["name"])
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    pod = replicated["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert replicated["name"] == container["name"] == "node", "Trainer puts the command into the container of this name"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert runtime["spec"]["mlPolicy"]["numNodes"] == job["spec"]["trainer"]["numNodes"]


@pytest.mark.multiprocess
def test_the_launcher_takes_what_the_train_job_gives_it() -> None:
    trainer = kubeflow()[1]["spec"]["trainer"]
    pod = {"PET_NNODES": "3", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "node-0-0.shade", "PET_MASTER_PORT": "29400"}
    given = given_to_the_launcher(trainer["command"][-1], CACHE=trainer["env"][0]["value"], **pod)
    assert (given.nodes, given.nr, given.master_address, given.master_port) == (3, 2, "node-0-0.shade", 29400)
    assert given.cache.count("shade-cache-") == 3


@pytest.mark.filterwarnings("ignore")
def test_skypilot_parses_the_task() -> None:
    sky = pytest.importorskip("sky")
    config = pytest.importorskip("yaml").safe_load(SKYPILOT.read_text())
    task = sky.Task.from_yaml_config(config, secrets_overrides=[("SHADE_REDIS_PASSWORD", "a")])
    assert task.num_nodes == 3, "a cluster of Redis takes three machines"
    assert list(task.secrets) == ["SHADE_REDIS_PASSWORD"]
    assert all(resources.use_spot for resources in task.resources)
    assert set(task.storage_mounts) == {"/data", "/runs"}


@pytest.mark.multiprocess
def test_the_launcher_takes_what_the_task_gives_it() -> None:
    script = pytest.importorskip("yaml").safe_load(SKYPILOT.read_text())["run"]
    assert subprocess.run(["bash", "-n", "-c", script], check=False).returncode == 0
    given = given_to_the_launcher(
        script, SKYPILOT_NUM_NODES="3", SKYPILOT_NODE_RANK="1", first="10.0.0.1", cache="redis+cluster://10.0.0.1:7000"
    )
    assert (given.nodes, given.nr, given.master_address) == (3, 1, "10.0.0.1")
    assert given.persist_to == "s3://my-runs/snapshots"
