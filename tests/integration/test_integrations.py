"""The adapters: a script of each framework, in which three lines are ours, outlives SIGKILL.

What it says after it was killed, again and again, is what it says undisturbed, and what it says without our lines:
every loss, and the weights. The scripts are `tests/support/programs/script_*.py`. Where a package is missing, its tests
skip.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Script:
    """A script that the tests run."""

    needs: tuple[str, ...]
    ours: dict[str, str]
    """How each line that is ours begins → the lines that stand there without us."""
    kills: tuple[int, ...]
    """Steps after which it is killed, one in each life."""
    ranks: tuple[int, ...] = (1, 2)
    is_like_plain: bool = True
    """Whether it trains on the same samples without our lines."""
    kinds: dict[str, dict[str, str]] = field(default_factory=dict)
    """What else it trains on two ranks: how lines begin → the lines that stand there instead."""


def changed(text: str, lines: dict[str, str]) -> str:
    """Returns a script with other lines."""
    found = text.splitlines()
    for begin, instead in lines.items():
        (number,) = (number for number, line in enumerate(found) if line.startswith(begin))
        found[number] = instead
    return "\n".join(found) + "\n"


# Accelerate splits models on accelerators alone, so we say to it that this is one.
ACCELERATE_SPLIT = """
from accelerate import DistributedType, FullyShardedDataParallelPlugin
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
accelerator.state.distributed_type = DistributedType.FSDP
sizes = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 10}
accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **sizes)
"""
TRAINER_SPLIT = """
from accelerate import DistributedType, FullyShardedDataParallelPlugin


class Trainer(Trainer):
    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.state.distributed_type = DistributedType.FSDP
        self.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
        self.is_fsdp_enabled = True


options |= {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["BertLayer"], "state_dict_type": "%s"}}
args = TrainingArguments(output_dir=sys.argv[1], use_cpu=True, num_train_epochs=2, disable_tqdm=True, **options)
"""
TRAINER_ADAPTERS = """
from peft import LoraConfig, get_peft_model
model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"]))
args = TrainingArguments(output_dir=sys.argv[1], use_cpu=True, num_train_epochs=2, disable_tqdm=True, **options)
"""
LIGHTNING_SPLIT = {
    "model = Classifier()": """
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard


class Split(Classifier):
    def configure_model(self):
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


model = Split()
""",
    "quiet = ": "quiet = {'logger': False, 'enable_progress_bar': False, 'strategy': ModelParallelStrategy()}",
    "if trainer.is_global_zero:": "weights = [each.full_tensor().double().sum().item() for each in model.parameters()]",
    "    print(": "if trainer.is_global_zero:\n    print(f'weights 0 {weights}')",
}


SCRIPTS = {
    "transformers": Script(
        ("transformers", "accelerate", "datasets"),
        {
            "from shade.integrations.transformers import": "",
            "saver = ShadeTrainerCallback(": "",
            "trainer.train(": "trainer.train()",
        },
        (5, 11, 14, 22),
        kinds={
            "split": {"args = ": TRAINER_SPLIT % "FULL_STATE_DICT"},
            "split and saved so": {"args = ": TRAINER_SPLIT % "SHARDED_STATE_DICT"},
            "adapters": {"args = ": TRAINER_ADAPTERS},
        },
    ),
    "lightning": Script(
        ("lightning",),
        {
            "from shade.integrations.lightning import": "from torch.utils.data import DataLoader",
            "callbacks = ": "callbacks = [saver]",
            "cached = ": "cached = DataLoader(data, batch_size=8, shuffle=True)",
        },
        (5, 10, 15, 20),
        is_like_plain=False,
        kinds={"split": LIGHTNING_SPLIT},
    ),
    "accelerate": Script(
        ("accelerate",),
        {
            "from shade.integrations.accelerate import": "",
            "loader = AccelerateLoader(": "",
            "for epoch in range(": "for epoch in range(2):",
        },
        (5, 11, 14, 22),
        kinds={"split": {"accelerator = Accelerator(": ACCELERATE_SPLIT}},
    ),
    "torchdata": Script(
        ("torchdata",),
        {
            "from shade.integrations.torchdata import": "from torchdata.stateful_dataloader import StatefulDataLoader",
            "loader = SampledDataLoader(": "loader = StatefulDataLoader(data, batch_size=8, shuffle=True)",
            "    loader.set_epoch(epoch)": "",
        },
        (4, 8, 13, 18),
        ranks=(1,),
        is_like_plain=False,
    ),
    "ray": Script(
        ("ray.train.torch",),
        {
            "from shade.integrations.ray import": "",
            "    loader = RayLoader(": "",
            # As Ray's pages say; our loader says the epoch itself.
            "    for _ in range(": "    for epoch in range(2):\n"
            "        getattr(loader.sampler, 'set_epoch', print)(epoch)",
        },
        (7, 14),
    ),
}


def said(script: Path, folder: Path, ranks: int, kill: int | None) -> list[str]:
    """Runs a script, which is killed after a step or ends; returns what it said."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    words = [] if "TorchTrainer" in script.read_text() else words  # Ray starts the ranks
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"RANKS": str(ranks)} | ({} if kill is None else {"KILL": str(kill)})
    folder.mkdir(exist_ok=True)
    ended = subprocess.run(
        [sys.executable, *words, str(script), str(folder)],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    statuses = (0,) if kill is None else (1, -signal.SIGKILL)  # 1: of what has started the one that was killed
    assert ended.returncode in statuses, ended.stderr[-5000:]
    # Ranks may print into each other's lines; what is compared comes from one.
    return [line for line in ended.stdout.splitlines() if line.split(" ")[0] in ("loss", "eval_loss", "weights")]


def ways() -> list[Any]:
    ways = [(name, ranks, "whole") for name, script in SCRIPTS.items() for ranks in script.ranks]
    ways += [(name, 2, kind) for name, script in SCRIPTS.items() for kind in script.kinds]
    return [pytest.param(*way, id="-".join(map(str, way))) for way in ways]


@pytest.mark.parametrize(("name", "ranks", "kind"), ways())
def test_three_lines_outlive_kills(name: str, ranks: int, kind: str, tmp_path: Path) -> None:
    ours, script = SCRIPTS[name], tmp_path / "script.py"
    for package in (*ours.needs, *(("peft",) if kind == "adapters" else ())):
        pytest.importorskip(package, exc_type=ImportError)
    text = (ROOT / "tests" / "support" / "programs" / f"script_{name}.py").read_text()
    text = changed(text, ours.kinds.get(kind, {}))
    assert len(ours.ours) == 3
    plain = changed(text, ours.ours)
    assert "import shade" not in plain
    assert "from shade" not in plain
    script.write_text(text)
    whole = said(script, tmp_path / "whole", ranks, None)
    script.write_text(plain)
    assert not ours.is_like_plain or said(script, tmp_path / "plain", ranks, None) == whole, "our lines change nothing"
    script.write_text(text)
    kills = [each // ranks for each in ours.kills[ranks - 1 :: ranks]]
    num_steps = max(step_of(line) for line in whole)
    for kill in kills:
        lived = said(script, tmp_path / "killed", ranks, kill)
        assert lived == whole[(begin := whole.index(lived[0])) : begin + len(lived)]
        assert step_of(lived[-1]) == kill < num_steps
    rest = said(script, tmp_path / "killed", ranks, None)
    assert rest == whole[-len(rest) :]
    assert 1 < step_of(rest[0]) <= kills[-1] + 1, "it has continued"


def test_lightning_splits_a_model_over_more_ranks_and_loads_what_it_saved_itself(tmp_path: Path) -> None:
    pytest.importorskip("lightning", exc_type=ImportError)
    script, folder = tmp_path / "script.py", tmp_path / "saved"
    program = (ROOT / "tests" / "support" / "programs" / "script_lightning.py").read_text()
    text = changed(program, LIGHTNING_SPLIT)
    script.write_text(changed(text, {"callbacks = ": "callbacks = [saver]"}))
    begun = said(script, folder, 2, 8)
    assert (folder / "last.ckpt").is_dir()
    script.write_text(text)
    rest = said(script, folder, 2, None)
    assert step_of(rest[0]) == 7 <= step_of(begun[-1]) < step_of(rest[-2])
    assert (folder / "last.ckpt").is_file()
    script.write_text(text.replace("batch_size=8", "batch_size=4"))
    assert said(script, folder, 4, None) == rest[-1:], "weights alone: it was at the end"


def step_of(line: str) -> int:
    return int(line.split(" ")[1])
