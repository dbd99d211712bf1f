"""Every fenced block of the documentation runs as it stands, and prints what the page shows.

`tests/support/pages.py` says how a page is read. What a page needs is started here and takes the place of the address
that the page names: ``redis://10.0.0.1:6379``, ``/mnt/nfs/train`` and so on. ``SHADE_REFRESH_PAGES=1`` writes what was
printed into the pages (``scripts/docs refresh``).
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from shade.checkpoint._buffer.shared_memory_folder import own_folder
from shade.store._servers.local_cluster import LocalCluster
from shade.store._servers.server import LocalServer
from tests.support.exits import ending_of, without_closing
from tests.support.pages import ROOT, PageRunner, blocks_of, check_only, page_options, pages

MOST_SKIPPED = 20
SKIP_REASONS = ("needs ", "shows ")
TRAINING = """
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import ToTensor
from shade import ShadeDataset, ShadeSampler

torch.manual_seed(0)
epochs, tf, device = 3, ToTensor(), "cpu"
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
"""
LOADER = """
images = ImageFolder("/mnt/nfs/train")
dataset = ShadeDataset(images, cache="local://", working_set_fraction=0.2, transform=tf)
sampler = ShadeSampler(dataset, batch_size=20, seed=0)
loader = DataLoader(dataset, batch_size=20, sampler=sampler)
"""
PREAMBLES = {"training": TRAINING, "loader": TRAINING + LOADER}
"""What a page says that the reader has already: a model and an optimizer, or a loop's loader too."""


def make_images(folder: Path, num_samples: int = 200) -> Path:
    """An image folder of two classes."""
    generator = np.random.default_rng(0)
    for number in range(num_samples):
        path = folder / ("cat", "dog")[number % 2] / f"{number:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path, quality=90)
    return folder


def run_id(text: str) -> bool:
    """Whether that is the id of a run in the pages; each test gets its own."""
    return text in ("my-run", 'run="resnet"')


@pytest.fixture
def addresses(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[str], dict[str, str]]]:
    """Gives the real addresses for what a page needs."""
    servers: list[LocalServer | LocalCluster] = []
    run = f"docs-{secrets.token_hex(4)}"

    def get(needs: str) -> dict[str, str]:
        found = {"my-run": run, 'run="resnet"': f'run="{run}"'}
        for need in filter(None, needs.split(",")):
            if need == "redis":
                (tmp_path / "redis").mkdir()
                server = LocalServer(directory=tmp_path / "redis")
                servers.append(server)
                server.start()
                found["redis://10.0.0.1:6379"] = str(server.url.reveal())
            elif need == "cluster":
                cluster = LocalCluster(3)
                servers.append(cluster)
                cluster.start()
                found["redis+cluster://10.0.0.1:7000"] = cluster.url.reveal()
            elif need == "images":
                found["/mnt/nfs/train"] = str(make_images(tmp_path / "nfs" / "train"))
            elif need == "storage":
                found["/mnt/nfs/checkpoints"] = str(tmp_path / "nfs" / "checkpoints")
            elif need == "clone":
                found["benchmarks/"] = f"{ROOT}/benchmarks/"
            else:
                assert need in PREAMBLES, need
        return found

    yield get
    for server in servers:
        server.stop()
    for folder in own_folder("").glob(f"{run}*"):
        shutil.rmtree(folder, ignore_errors=True)


def is_slow(path: Path) -> bool:
    return "slow" in page_options(path.read_text(encoding="utf-8"))


def cases() -> list[Any]:
    """A case for each page that has a block."""
    found = []
    for path in pages():
        if blocks_of(path.read_text(encoding="utf-8")):
            marks = [pytest.mark.slow, pytest.mark.timeout(900)] if is_slow(path) else []
            found.append(pytest.param(path, id=str(path.relative_to(ROOT)), marks=marks))
    return found


def needs_of(path: Path) -> tuple[str, str]:
    """Returns what a page needs, and the Python that runs before it; skips the test where a package is missing."""
    options = page_options(path.read_text(encoding="utf-8"))
    for package in filter(None, options.get("packages", "").split(",")):
        pytest.importorskip(package)
    needs = options.get("needs", "")
    preamble = "".join(text for name, text in PREAMBLES.items() if name in needs.split(","))
    return needs, preamble


@pytest.mark.multiprocess
@pytest.mark.redis
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 with torch 2.9 and later
@pytest.mark.parametrize("path", cases())
def test_a_page_does_what_it_shows(
    path: Path,
    addresses: Callable[[str], dict[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs, preamble = needs_of(path)
    real = addresses(needs)
    for address in real:
        assert run_id(address) or address in path.read_text() + preamble, f"{path.name} does not need {address}"
    folder = tmp_path / "page"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    refresh = bool(os.environ.get("SHADE_REFRESH_PAGES"))
    PageRunner(path, folder, real, preamble, refresh=refresh).run()


# ── a page as a script of its own ───────────────────────────────────────────────────────────────────────────────────

SCRIPT = """
from pathlib import Path
from tests.support.exits import without_closing
from tests.support.pages import PageRunner
def rewritten(text):
    return text if {closes} else without_closing(text)[0]
if __name__ == "__main__":
    page = PageRunner(Path({path!r}), Path({folder!r}), {addresses!r}, {preamble!r}, names=globals())
    page.run_as_script(rewritten, is_rank={is_rank})
"""
MEETING = """
import torch.distributed as dist
dist.init_process_group("gloo")
"""
"""Before what the page says that the reader has; `SHARING` comes after it, and its cache is a server."""
SHARING = "model = torch.nn.parallel.DistributedDataParallel(model)\n"


def closings(path: Path) -> list[str]:
    """Lines of a page that close something."""
    blocks = [each for each in blocks_of(path.read_text(encoding="utf-8")) if each.is_run and each.language == "python"]
    return [line for block in blocks for line in without_closing(block.text)[1]]


def scripts() -> list[Any]:
    """Each page that runs something, closing or not, and on two ranks if it trains in its own name space."""
    found = []
    for path in pages():
        text = path.read_text(encoding="utf-8")
        name = str(path.relative_to(ROOT))
        blocks = [each for each in blocks_of(text) if each.is_run]
        if blocks:
            options = page_options(text)
            ways = [(1, True)] * bool(closings(path)) + [(1, False)] * ("closes" not in options)
            trains = set(PREAMBLES) & set(options.get("needs", "").split(","))
            if trains and any(each.is_at_once for each in blocks) and "alone" not in options:
                ways.append((2, False))
            found += [
                pytest.param(path, *way, id=f"{name}-{way[0]}{'' if way[1] else '-closing nothing'}") for way in ways
            ]
    return found


@pytest.mark.multiprocess
@pytest.mark.redis
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("path", "ranks", "closes"), scripts())
def test_a_page_ends_and_leaves_nothing(
    path: Path, ranks: int, closes: bool, addresses: Callable[[str], dict[str, str]], tmp_path: Path
) -> None:
    needs, preamble = needs_of(path)
    command = [sys.executable]
    if ranks == 1:
        real = addresses(needs)
    else:
        preamble = MEETING + preamble + SHARING
        real = addresses(",".join({"redis", *needs.split(",")}))
        real["local://"] = real["redis://10.0.0.1:6379"]
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    folder = tmp_path / "page"
    folder.mkdir()
    script = folder / "page.py"
    script.write_text(
        SCRIPT.format(
            closes=closes, path=str(path), folder=str(folder), addresses=real, preamble=preamble, is_rank=ranks > 1
        )
    )
    ending_of([*command, script], folder).check()


def test_few_blocks_are_skipped_and_each_says_why() -> None:
    skipped = []
    for path in pages():
        for block in blocks_of(path.read_text(encoding="utf-8")):
            if "skip" in block.options:
                assert block.reason.startswith(SKIP_REASONS), f"{path.name}:{block.line} skips without a reason"
                skipped.append(f"{path.name}:{block.line}: {block.reason}")
    assert len(skipped) <= MOST_SKIPPED, skipped


def test_every_block_is_seen() -> None:
    """An indented or unclosed fence would be left out."""
    for path in pages():
        text = path.read_text(encoding="utf-8")
        assert text.count("```") == 2 * len(blocks_of(text)), path


@pytest.mark.multiprocess
@pytest.mark.slow
def test_the_scripts_of_the_tutorials_pass_a_type_checker(tmp_path: Path) -> None:
    for path in sorted((ROOT / "docs" / "tutorials").glob("*.md")):
        for block in blocks_of(path.read_text(encoding="utf-8")):
            if block.title.endswith(".py"):
                (tmp_path / f"{path.stem.replace('-', '_')}_{block.title}").write_text(block.text)
    command = [sys.executable, "-m", "mypy", "--config-file=", "--follow-imports=silent", "--ignore-missing-imports"]
    cache = ["--cache-dir", str(ROOT / ".mypy_cache" / "tutorials")]
    scripts = map(str, sorted(tmp_path.glob("*.py")))
    done = subprocess.run(
        [*command, *cache, *scripts], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout


# ── the runner finds what is wrong ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("page", "complaint"),
    [
        ("```python\nprint(6 * 7)\n```\n<!-- test: output -->\n```text\n43 apples\n```\n", "but printed was\n42"),
        ("```python\nraise ValueError('seven')\n```\n", "seven"),
        ("```console\n$ false\n```\n", "x.md:2: false"),
        ("```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n", ""),
    ],
)
@pytest.mark.multiprocess
def test_a_wrong_page_is_found(page: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "x.md").write_text(page)
    with pytest.raises((AssertionError, ValueError)) as caught:
        PageRunner(tmp_path / "x.md", tmp_path, {}).run()
    assert complaint in str(caught.value)


@pytest.mark.multiprocess
def test_files_commands_and_outputs_of_a_page_work_together(tmp_path: Path) -> None:
    page = tmp_path / "x.md"
    page.write_text(
        '```python title="a.py"\nimport sys\nprint("took", 1.5, sys.argv[1])\nprint("end")\n```\n\n'
        "```console\n$ python a.py \\\n    /mnt/nfs/train\ntook 2.25 /mnt/…\nend\n```\n"
    )
    PageRunner(page, tmp_path, {"/mnt/nfs/train": "/mnt/real"}).run()
    page.write_text(page.read_text().replace("took 2.25", "lasted 2.25"))
    with pytest.raises(AssertionError, match="lasted"):
        PageRunner(page, tmp_path, {}).run()
    PageRunner(page, tmp_path, {"/mnt/nfs/train": "/mnt/real"}, refresh=True).run()
    assert "took 1.5 /mnt/nfs/train\nend\n```" in page.read_text()


def test_a_block_that_is_not_run_is_parsed(tmp_path: Path) -> None:
    (block,) = blocks_of("<!-- test: skip reason=needs a GPU -->\n```python\nx = (\n```\n")
    assert block.reason == "needs a GPU"
    with pytest.raises(SyntaxError):
        check_only(block)
