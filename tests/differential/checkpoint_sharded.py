"""The parts of a checkpoint script that saves and restores through torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from shade.checkpoint._capture.app_state import RandomState
from shade.checkpoint.dcp import ShadeReader, ShadeWriter
from tests.differential.checkpoint_training import Script, Training

SAVERS = ("dcp", "dcp async", "dcp staged")
"""How a script saves: at once, behind the training, or so with a stager that keeps its memory."""


def train_and_save(
    script: Script, places: dict[str, Any], training: Training, passed: Callable[[str, int], None]
) -> None:
    """Trains until the script ends it; passes on each loss, and the newest step that is committed by then."""
    stager = DefaultStager(StagingOptions(False, True, False, False)) if script.saver == "dcp staged" else None
    group = None if script.saver == "dcp" else dist.new_group(backend="gloo")
    committed, pending = 0, None
    with ShadeWriter(**places, keep=script.keep, codec=script.codec or "none") as writer:
        while training.done < script.end_step:
            loss, step = training.step(), training.done
            if script.every and step % script.every == 0:
                if pending is not None:  # saves run one at a time
                    pending.result()
                state, options = _state(training), {"storage_writer": writer, "checkpoint_id": str(step)}
                if group is None:
                    dcp.save(state, **options)
                    committed = step
                else:
                    staged = {} if stager is None else {"async_stager": stager}
                    response: Any = dcp.async_save(state, process_group=group, **options, **staged)
                    pending = getattr(response, "upload_completion", response)
                    if script.waits == "committed":
                        pending.result()
                        committed = step
            passed(loss, committed)
        if script.end == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if pending is not None:
            pending.result()


def steps_in(places: dict[str, Any]) -> list[int]:
    """Returns the steps that a script has saved, oldest first."""
    with ShadeReader(**places) as reader:
        return sorted(reader.steps())


def restore(places: dict[str, Any], training: Training, step: int) -> None:
    """Loads a step."""
    state = _state(training)
    with ShadeReader(**places) as reader:
        dcp.load(state, storage_reader=reader, checkpoint_id=str(step))
    loaded = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    set_state_dict(training.model, training.optimizer, **loaded)
    RandomState().load_state_dict(state[f"random-{dist.get_rank()}"])
    training.done = state["step"]


def _state(training: Training) -> dict[str, Any]:
    model, optimizer = get_state_dict(training.model, training.optimizer)
    own = {name: each for name, each in training.attached.items() if name not in ("model", "optimizer")}
    own["random"] = RandomState().state_dict()
    named = {f"{name}-{dist.get_rank()}": each for name, each in own.items()}
    return {"model": model, "optimizer": optimizer, "step": training.done} | named
