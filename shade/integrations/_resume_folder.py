"""The folder that the Trainer of transformers resumes from: its state, and an index of a file without weights."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from transformers import Trainer
from transformers.trainer_callback import ExportableState
from transformers.utils import WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from shade.errors import ConfigError


def check_saved(trainer: Trainer) -> None:
    """Raises a ConfigError if what a trainer trains cannot be saved and resumed."""
    version = trainer.accelerator.state.fsdp_plugin.fsdp_version if trainer.is_fsdp_enabled else 0
    for is_so, got, cure in (
        (trainer.is_deepspeed_enabled, "DeepSpeed", "let the Trainer save it"),
        (trainer.model_init, "model_init=", "pass the model that it makes"),
        (version == 1, "FSDP1", 'fsdp_config={"version": 2}'),
        (version and is_peft_model(trainer.model), "adapters of PEFT under FSDP2", "leave fsdp= out, for DDP"),
    ):
        if is_so:
            raise ConfigError.of("a model= in one process, or under DDP or FSDP2", got, cure)


def exported_state(trainer: Trainer) -> str:
    """Returns a trainer's state as it writes it itself: history, best metric, states of callbacks."""
    states: dict[str, Any] = {}
    for each in (*trainer.callback_handler.callbacks, trainer.control):
        if isinstance(each, ExportableState):
            states.setdefault(type(each).__name__, []).append(each.state())
    states = {name: found[0] if len(found) == 1 else found for name, found in states.items()}
    return json.dumps(dataclasses.asdict(dataclasses.replace(trainer.state, stateful_callbacks=states)))


def write_folder(folder: Path, state: str, model: torch.nn.Module) -> None:
    """Writes what the Trainer reads: a state that was exported, and nothing that changes the model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trainer_state.json").write_text(state)
    if is_peft_model(model):  # of which it reads no index
        torch.save(model.state_dict(), folder / WEIGHTS_NAME)
    else:
        index = {"weight_map": dict.fromkeys(model.state_dict(), "none.bin")}
        (folder / WEIGHTS_INDEX_NAME).write_text(json.dumps(index))
        torch.save({}, folder / "none.bin")
