"""Every flag, in both spellings, in any place; the command lines that the original's README gives."""

from __future__ import annotations

import pytest

from shade.launch import resolve
from shade.launch.resolve import parse

ORIGINAL_CLUSTER = (
    "bench_cifar10.py /mnt/nfs/cifar10/train/ -master_address 10.0.0.1 -master_socket eno1 -n 4 -g 2 -nr 0 --epochs 5 "
    "--network resnet18 --batch_size 64 --val_paths /mnt/nfs/cifar10/test/ --cache_training_data --nodedist -rep 3.0 "
    "-wss 0.2 --host_ip 10.0.0.7 --port_num 7000 -cn 4"
)
ORIGINAL_SINGLE = (
    "bench_cifar10.py /mnt/nfs/cifar10/train/ -master_address 10.0.0.1 -master_socket eno1 -n 1 -g 1 -nr 0 --epochs 5 "
    "--network resnet18 --batch_size 64 --val_paths /mnt/nfs/cifar10/test/ --cache_training_data -rep 3.0 "
    "-wss 0.2 --host_ip 10.0.0.7 --port_num 6379 -cn 1"
)
BOTH_SPELLINGS = [
    ("master_address", "10.0.0.1", ["-master_address", "--master_address", "--master-address"]),
    ("master_socket", "eno1", ["-master_socket", "--master_socket", "--master-socket"]),
    ("master_port", 99, ["-master_port", "--master_port", "--master-port"]),
    ("nodes", 4, ["-n", "--nodes"]),
    ("gpus", 2, ["-g", "--gpus"]),
    ("nr", 3, ["-nr", "--nr"]),
    ("epochs", 5, ["--epochs", "-epochs"]),
    ("network", "vgg16", ["--network", "-network"]),
    ("batch_size", 64, ["--batch_size", "-batch_size", "--batch-size"]),
    ("val_paths", ["v"], ["--val_paths", "-val_paths", "--val-paths"]),
    ("replication_factor", 3.0, ["-rep", "--replication_factor", "--replication-factor"]),
    ("working_set_size", 0.2, ["-wss", "--working_set_size", "--working-set-size"]),
    ("host_ip", "10.0.0.7", ["--host_ip", "-host_ip", "--host-ip"]),
    ("port_num", "7000", ["--port_num", "-port_num", "--port-num"]),
    ("cache_nodes", 4, ["-cn", "--cache_nodes", "--cache-nodes"]),
    ("on_bad_sample", "skip", ["--on-bad-sample", "--on_bad_sample"]),
    ("sampling", "pads", ["--sampling"]),
    ("cache", "none", ["--cache"]),
    ("disk", "/nvme/shade?capacity=1GB", ["--disk"]),
    ("policy", "lru", ["--policy"]),
    ("workers", 0, ["--workers"]),
    ("seed", 7, ["--seed"]),
    ("keep", 0.5, ["--keep"]),
    ("steps", 9, ["--steps"]),
    ("out", "d", ["--out"]),
    ("resume", "d", ["--resume"]),
    ("checkpoint", "redis://h", ["--checkpoint"]),
    ("persist_to", "d", ["--persist-to"]),
    ("checkpoint_every", "2%", ["--checkpoint-every", "--checkpoint_every"]),
    ("checkpoint_keep", "last=3,best=val_loss", ["--checkpoint-keep", "--checkpoint_keep"]),
    ("checkpoint_strategy", "copy", ["--checkpoint-strategy", "--checkpoint_strategy"]),
    ("notice", "/run/notice", ["--notice"]),
    ("gradient", "topk", ["--gradient"]),
    ("density", 0.05, ["--density"]),
    ("staleness", 1, ["--staleness"]),
    ("profile", "profile.json", ["--profile"]),
    ("restarts", 3, ["--restarts"]),
    ("min_nodes", 2, ["--min_nodes", "-min_nodes", "--min-nodes"]),
    ("metrics_port", 9464, ["--metrics-port", "--metrics_port"]),
    ("track", "otlp,mlflow", ["--track"]),
]
SWITCHES = [
    ("cache_training_data", ["--cache_training_data", "-cache_training_data", "--cache-training-data"]),
    ("nodedist", ["--nodedist", "-nodedist"]),
    ("dry_run", ["--dry-run", "--dry_run"]),
    ("controller", ["--controller"]),
]


@pytest.mark.parametrize(
    ("name", "value", "flag"), [(name, value, flag) for name, value, spelt in BOTH_SPELLINGS for flag in spelt]
)
def test_every_flag_is_known_in_every_spelling(name: str, value: object, flag: str) -> None:
    word = value[0] if isinstance(value, list) else str(value)
    assert vars(parse([flag, word])) == {name: value}


@pytest.mark.parametrize(("name", "flag"), [(name, flag) for name, spelt in SWITCHES for flag in spelt])
def test_every_switch_is_known_in_every_spelling(name: str, flag: str) -> None:
    assert vars(parse([flag])) == {name: True}


def test_no_flag_is_untested() -> None:
    tested = {flag for _, _, spelt in BOTH_SPELLINGS for flag in spelt} | {f for _, spelt in SWITCHES for f in spelt}
    known = {flag for action in resolve.parser()._actions for flag in action.option_strings}
    assert known - tested == {"-h", "--help"}


def test_nothing_typed_is_nothing_said() -> None:
    assert vars(parse([])) == {}


def test_the_originals_lines_parse_as_they_stand() -> None:
    cluster, single = vars(parse(ORIGINAL_CLUSTER.split())), vars(parse(ORIGINAL_SINGLE.split()))
    assert cluster == {
        "script": "bench_cifar10.py",
        "train_paths": ["/mnt/nfs/cifar10/train/"],
        "master_address": "10.0.0.1",
        "master_socket": "eno1",
        "nodes": 4,
        "gpus": 2,
        "nr": 0,
        "epochs": 5,
        "network": "resnet18",
        "batch_size": 64,
        "val_paths": ["/mnt/nfs/cifar10/test/"],
        "cache_training_data": True,
        "nodedist": True,
        "replication_factor": 3.0,
        "working_set_size": 0.2,
        "host_ip": "10.0.0.7",
        "port_num": "7000",
        "cache_nodes": 4,
    }
    changed = {"nodes": 1, "gpus": 1, "port_num": "6379", "cache_nodes": 1}
    assert single == {name: value for name, value in (cluster | changed).items() if name != "nodedist"}


@pytest.mark.parametrize(
    "line",
    [
        "s.py a b --epochs 3 --val_paths v w",
        "--epochs 3 s.py a b --val_paths v w",
        "--epochs 3 --val_paths v w s.py a b",
        "s.py --epochs 3 a b --val_paths v w",
        "s.py a --val_paths v w --epochs 3 b",
        "--val_paths v w --epochs 3 s.py a b",
        "--val_paths v w s.py a --epochs 3 b",
    ],
)
def test_paths_stand_anywhere(line: str) -> None:
    assert vars(parse(line.split())) == {
        "script": "s.py",
        "train_paths": ["a", "b"],
        "val_paths": ["v", "w"],
        "epochs": 3,
    }


@pytest.mark.parametrize("greedy", sorted(resolve._GREEDY))
def test_no_flag_swallows_the_script(greedy: str) -> None:
    typed = vars(parse([greedy, *(["v"] if "val" in greedy else []), "s.py", "a"]))
    assert (typed["script"], typed["train_paths"]) == ("s.py", ["a"])


def test_every_flag_that_takes_a_list_or_nothing_is_known_as_greedy() -> None:
    actions = [action for action in resolve.parser()._actions if action.nargs in ("?", "+", "*")]
    assert {flag for action in actions for flag in action.option_strings} == resolve._GREEDY


@pytest.mark.parametrize("line", ["--epochs three", "--epoch 3", "-x", "--on-bad-sample maybe"])
def test_a_flag_that_cannot_be_is_one_line(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(line.split(), "shade run")
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.count("\n") == 1
    assert error.startswith("shade run: ")
