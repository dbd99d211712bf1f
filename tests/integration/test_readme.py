"""The README's training loop, as it stands there: with other addresses, a smaller data set and a shorter interval."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shade.checkpoint._buffer.shared_memory_folder import own_folder
from shade.store._servers.server import LocalServer

pytestmark = [pytest.mark.multiprocess, pytest.mark.redis, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
EPOCHS, KILLED_AT, NUM_SAMPLES = 3, 6, 200  # 4 batches in the first epoch: killed in the second
SETUP = f"""
import os, sys, torch
from torchvision.transforms import Compose, RandomHorizontalFlip, ToTensor
killed_at = int(sys.argv[1])
torch.set_num_threads(1)
torch.manual_seed(0)
tf = Compose([RandomHorizontalFlip(), ToTensor()])
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.5), torch.nn.Linear(192, 2))
epochs, device = {EPOCHS}, "cpu"

class Noting(torch.optim.Adam):
    def step(self):
        if checkpointer.step_count == killed_at:
            checkpointer.wait_durable()
            os.kill(os.getpid(), 9)
        super().step()
        print(checkpointer.step_count, [p.double().sum().item().hex() for p in model.parameters()], flush=True)

optimizer = Noting(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LocalServer]:
    (tmp_path / "redis").mkdir()
    with LocalServer(directory=tmp_path / "redis") as started:
        yield started


@pytest.fixture
def images(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    for number in range(NUM_SAMPLES):
        path = tmp_path / "train" / str(number % 2) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)
    return tmp_path / "train"


def snippet(first_line: str) -> str:
    blocks: list[str] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (found,) = [block for block in blocks if block.lstrip().startswith(first_line)]
    return found


def script(addresses: dict[str, str], loader: Callable[[str], str]) -> str:
    """Returns both snippets as one program: the first one's forward and backward pass stand at the second's dots."""
    before, _, loop = snippet("import torch.nn.functional").partition("for epoch in range(epochs):")
    body = loop.partition("for images, labels, indices in loader:\n")[2].partition("        optimizer.step()")[0]
    indented = "".join(f"    {line}\n" for line in body.splitlines()).strip()
    whole = SETUP + loader(before) + snippet("from shade import Checkpointer").replace("...", indented, 1)
    for address, other in addresses.items():
        assert address in whole
        whole = whole.replace(address, other)
    return whole


def steps_of(program: str, killed_at: int) -> dict[str, str]:
    """Runs the program; returns the parameters after each step."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", program, str(killed_at)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == (0 if killed_at < 0 else -9), done.stderr
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())  # type: ignore[misc]


def as_it_stands(text: str) -> str:
    return text


def with_shade_loader(text: str) -> str:
    return (
        text.replace("num_workers=4", "num_workers=1")
        .replace("torch.utils.data import Data", "shade import Shade")
        .replace("= DataLoader", "= ShadeLoader")
    )


@pytest.mark.parametrize("loader", [as_it_stands, with_shade_loader])
def test_a_run_that_was_killed_ends_with_the_same_parameters(
    loader: Callable[[str], str], server: LocalServer, images: Path, tmp_path: Path, run: str
) -> None:
    def addresses(kind: str) -> dict[str, str]:
        url = str(server.url.reveal())
        return {
            "redis+cluster://10.0.0.1:7000": url,
            "redis://10.0.0.1:6379": url,
            "/mnt/nfs/train": str(images),
            "/mnt/nfs/checkpoints": str(tmp_path / kind),
            'run="resnet"': f'run="{run}-{kind}"',
            'every="30s"': "every=1",
        }

    undisturbed = steps_of(script(addresses("undisturbed"), loader), -1)
    killed = script(addresses("killed"), loader)
    first = steps_of(killed, KILLED_AT)
    shutil.rmtree(own_folder(f"{run}-killed"), ignore_errors=True)  # the machine is gone as well
    second = steps_of(killed, -1)
    assert len(undisturbed) > KILLED_AT
    assert str(KILLED_AT) in second
    assert "0" not in second
    assert first | second == undisturbed
