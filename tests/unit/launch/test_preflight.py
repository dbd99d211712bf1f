"""What the checks know that a run of the launcher does not show."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path

import pytest
from torchvision.datasets.folder import IMG_EXTENSIONS

from shade.config import RunConfig
from shade.errors import ConfigError, DataError
from shade.launch import preflight
from shade.launch.resolve import StoreURLs
from tests.support.launching import make_images

PLAN = RunConfig(out="unused", script="s.py", train_paths=("data",), master_port=0)


def test_images_are_what_image_folder_takes_for_images() -> None:
    assert preflight.EXTENSIONS == IMG_EXTENSIONS


def test_more_ranks_than_gpus_are_refused_and_without_gpus_any_number_will_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    preflight.check_ranks(dataclasses.replace(PLAN, processes=2))
    with pytest.raises(ConfigError, match="-g of at most 2"):
        preflight.check_ranks(dataclasses.replace(PLAN, processes=3))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    preflight.check_ranks(dataclasses.replace(PLAN, processes=16))


def test_an_unknown_interface_is_refused_with_those_there_are() -> None:
    (loopback, *_) = [name for _, name in socket.if_nameindex()]
    preflight.check_ranks(dataclasses.replace(PLAN, master_socket=loopback))
    with pytest.raises(ConfigError, match=f"among .*{loopback}"):
        preflight.check_ranks(dataclasses.replace(PLAN, master_socket="nosuch0"))


def test_a_taken_port_matters_on_machine_0_only() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        plan = dataclasses.replace(PLAN, nodes=2, master_port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="a free --master_port"):
            preflight.check_ranks(plan)
        preflight.check_ranks(dataclasses.replace(plan, node_rank=1))


def test_images_in_folders_of_folders_count(tmp_path: Path, images: Path) -> None:
    deep = tmp_path / "data" / "class0" / "more"
    deep.mkdir(parents=True)
    (next(images.glob("*.png"))).rename(deep / "a.PNG")
    (deep / "notes.txt").touch()
    assert preflight.check_folder(tmp_path / "data").num_images == 1


def test_the_plan_says_what_the_data_set_holds(tmp_path: Path) -> None:
    (tmp_path / "s.py").touch()
    make_images(tmp_path / "train", num_classes=3, per_class=5)
    make_images(tmp_path / "val", num_classes=3, per_class=1, size=16)
    plan = dataclasses.replace(PLAN, train_paths=(str(tmp_path / "train"),), val_paths=(str(tmp_path / "val"),))
    plan = dataclasses.replace(plan, out=str(tmp_path / "out"), batch_size=4)
    told = preflight.check(plan, StoreURLs("none"))
    assert told == "15 images in 3 classes, 8×8 pixels; validation: 3 images in 3 classes, 16×16 pixels"
    both = dataclasses.replace(plan, train_paths=plan.train_paths + plan.val_paths, val_paths=())
    assert preflight.check(both, StoreURLs("none")) == "18 images in 3 classes, 8×8 to 16×16 pixels"


def test_a_private_cache_without_a_server_is_refused_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "s.py").touch()
    make_images(tmp_path / "train", num_classes=2, per_class=4)
    plan = dataclasses.replace(PLAN, train_paths=(str(tmp_path / "train"),), out=str(tmp_path / "out"), batch_size=4)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"apt-get install redis-server.*shade\[server\]"):
        preflight.check(plan, StoreURLs("local://"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("other", ["val", "test", "Validation"])
def test_train_and_val_are_no_classes_and_the_cure_is_the_line_to_write(other: str, tmp_path: Path) -> None:
    for part in ("train", other):
        make_images(tmp_path / part, num_classes=2, per_class=1)
    with pytest.raises(DataError, match="rename the folders if these are your classes") as told:
        preflight.check_folder(tmp_path)
    train, flag, val = str(told.value).partition("pass ")[2].partition(",")[0].split()
    assert flag == "--val_paths"
    for path in (train, val):
        assert preflight.check_folder(Path(path)).num_classes == 2
    make_images(tmp_path / "bus", num_classes=1, per_class=1)
    assert preflight.check_folder(tmp_path).num_classes == 3, "vehicles, perhaps"


def test_a_folder_of_plain_files_is_told_how_to_be_arranged(images: Path) -> None:
    with pytest.raises(DataError, match="arrange it as ImageFolder"):
        preflight.check_folder(images)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder with an image."""
    from PIL import Image

    folder = tmp_path / "images"
    folder.mkdir()
    Image.new("RGB", (4, 4)).save(folder / "a.png")
    return folder
