"""Joins data, checkpoints and gradients for a training run.

`session` is the part of a training script that is the same in every script; `record` writes down what happened.
"""

from shade.train.record import TRACE_FILE
from shade.train.session import TrainSession

__all__ = ["TRACE_FILE", "TrainSession"]
