"""What the Trainer of transformers reads when it resumes: a folder with its state and with weights.

A snapshot's weights are read in place, and not put together for the Trainer: an index names them in a file without any.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch
from accelerate.utils import is_peft_model
from torch.distributed.tensor import DTensor
from transformers import Trainer
from transformers.trainer_callback import ExportableState
from transformers.utils import WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from shade.errors import ConfigError


def check_splits(trainer: Trainer) -> bool:
    """Returns whether a trainer's model is split while it trains; raises a ConfigError if it cannot be saved."""
    plugin = trainer.accelerator.state.fsdp_plugin if trainer.is_fsdp_enabled else None
    is_split = plugin is not None or any(isinstance(each, DTensor) for each in trainer.model.parameters())
    expected = "a model= in one process, or under DDP or FSDP2"
    if trainer.is_deepspeed_enabled:
        raise ConfigError.of(expected, "DeepSpeed", "let the Trainer save it")
    if trainer.model_init:
        raise ConfigError.of(expected, "model_init=", "pass the model that it makes")
    if plugin is not None and plugin.fsdp_version != 2:
        raise ConfigError.of(expected, "FSDP1", 'fsdp_config={"version": 2}')
    if is_split and is_peft_model(trainer.model):
        raise ConfigError.of(expected, "PEFT's adapters in a model that is split", "leave fsdp= out, for DDP")
    return is_split


def exported_state(trainer: Trainer) -> str:
    """Returns a trainer's state as it writes it itself: history, best metric, states of callbacks."""
    states: dict[str, list[object]] = {}
    for each in (*trainer.callback_handler.callbacks, trainer.control):
        if isinstance(each, ExportableState):
            states.setdefault(type(each).__name__, []).append(each.state())
    merged = {name: found[0] if len(found) == 1 else found for name, found in states.items()}
    return json.dumps(dataclasses.asdict(dataclasses.replace(trainer.state, stateful_callbacks=merged)))


def write_folder(folder: Path, state: str, model: torch.nn.Module) -> None:
    """Writes what the Trainer reads: a state that was exported, and nothing that changes the model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trainer_state.json").write_text(state)
    weights, has_index = model.state_dict(), not is_peft_model(model)  # for PEFT's, it reads no index
    if has_index:
        index = {"weight_map": dict.fromkeys(weights, "none.bin")}
        (folder / WEIGHTS_INDEX_NAME).write_text(json.dumps(index))
    torch.save({} if has_index else weights, folder / ("none.bin" if has_index else WEIGHTS_NAME))
