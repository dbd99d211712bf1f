"""Labels that were made wrong on purpose come first in the list of samples worth a look: real digits, real training."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

from shade import ShadeDataset, ShadeSampler
from shade.cli import main
from shade.report.samples import write_quality
from shade.trajectory import LOSSES, LossRecorder, Samples
from tests.support.launching import ROOT, environment, run

pytestmark = pytest.mark.multiprocess

pytest.importorskip("sklearn")
LEAST_PRECISION, TOP_SHARE = 0.8, 0.05


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tenth of 1,437 labels is wrong, and listed."""
    folder = tmp_path_factory.mktemp("digits")
    command = [sys.executable, str(ROOT / "scripts" / "prepare_digits"), str(folder), "--flip-labels", "0.1"]
    subprocess.run(command, check=True, env=environment(), timeout=120, capture_output=True)
    return folder


def flipped(folder: Path) -> set[str]:
    """Names of the files under a wrong label."""
    return {line.split()[0] for line in (folder / "flipped.txt").read_text().splitlines()}


def precision(out: Path, folder: Path) -> float:
    """Of the top share of the list, how many labels are really wrong."""
    with (out / "quality.csv").open() as file:
        listed = [row["sample"] for row in csv.DictReader(file)]
    wrong = flipped(folder)
    top = listed[: round(TOP_SHARE * len(listed))]
    return float(np.mean([str(Path(name).relative_to(folder)) in wrong for name in top]))


@pytest.mark.parametrize("mode", [pytest.param("uniform", marks=pytest.mark.slow), "unbiased"])
def test_wrong_labels_come_first(digits: Path, mode: str, tmp_path: Path) -> None:
    """A plain network of two layers, six epochs; importance sampling sees the hard ones more often, and ranks them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(256, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def small(image: object) -> torch.Tensor:
        return torch.from_numpy(np.asarray(image)[::2, ::2, 0].astype(np.float32) / 255)

    dataset = ShadeDataset(ImageFolder(str(digits / "train")), cache=None, transform=small)
    sampler = ShadeSampler(dataset, batch_size=32, mode=mode)
    names = tuple(dataset.source.name_of(index) for index in range(len(dataset)))
    assert dataset.source.target_N is not None
    recorder = LossRecorder(tmp_path / LOSSES, lambda: Samples(names, tuple(dataset.source.target_N.tolist())))
    for epoch in range(6):
        sampler.set_epoch(epoch)
        for images, labels, indices in DataLoader(dataset, batch_size=32, sampler=sampler):
            losses_B = F.cross_entropy(model(images), labels, reduction="none")
            (losses_B * sampler.weights(indices)).mean().backward()
            sampler.report(indices, losses_B)
            optimizer.step()
            optimizer.zero_grad()
        loss_N = sampler.take_losses()
        assert loss_N is not None
        recorder.end_epoch(epoch, loss_N)
    told = write_quality(tmp_path)
    assert precision(tmp_path, digits) >= LEAST_PRECISION, told
    flagged = re.search(r"(\d+) likely mislabelled", told)
    assert flagged is not None
    assert 0.5 * len(flipped(digits)) < int(flagged[1]) < 2 * len(flipped(digits)), told
    sampler.close()
    dataset.close()


@pytest.mark.slow
def test_a_run_and_the_command_find_them(digits: Path, tmp_path: Path) -> None:
    """The whole way: the launcher on two ranks, the recorded losses, the command, the sheet, the page."""
    words = ("bench_cifar10.py", digits / "train", "--network", "cnn", "--epochs", "6", "--batch_size", "32")
    told = run(*words, "-g", "2", "--workers", "1", "-wss", "0.5", "--out", "out", cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    assert main(["quality", str(tmp_path / "out")]) == 0
    assert precision(tmp_path / "out", digits) >= LEAST_PRECISION
    assert (tmp_path / "out" / "quality.png").stat().st_size > 10_000
    assert main(["report", str(tmp_path / "out")]) == 0
    assert "data:image/png;base64," in (tmp_path / "out" / "report.html").read_text()
