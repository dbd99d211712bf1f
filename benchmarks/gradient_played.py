"""An accelerator played on a machine without one: forward and backward take their time, but no processor.

Where the model computes on the processor, whatever else a method computes there is time that training loses. Where it
computes on an accelerator, the processor stands idle, and the same work may be hidden. So a few steps are trained for
real, on this rank's core, and remembered: how long forward and backward took, and every gradient. From then on a step
sleeps that long instead, and its gradients appear one after the other, back layers first, at the pace at which
autograd would have made them. All else is real: the gradients are written to memory, hooks fire, the optimizer steps.

What it leaves out: an accelerator's gradients have to come to the host first (a copy that takes no processor), and
its weights have to go back. What it cannot have: a course of the loss; gradients do not follow the weights.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from gradient_tasks import Task
from torch import Tensor, nn

WATCHED, REMEMBERED = 8, 3
"""Steps that are timed where the time is not given, and how many gradients are played in turns."""


class Played(Task):
    """A task whose model is played. Its weights are the real model's, untouched so far.

    Args:
        task: The real one.
        rank: Whose samples.
        world_size: Ranks.
        batch_size: Of a rank.
        seconds: Of forward and backward; None: as long as they took here, just now.
    """

    def __init__(self, task: Task, rank: int, world_size: int, batch_size: int, seconds: float | None) -> None:
        super().__init__(task.seed, task.device)
        self.recipe = task.recipe
        batches = task.batches(rank, world_size, batch_size)
        state = {name: tensor.clone() for name, tensor in task.model.state_dict().items()}
        _compute(task, next(batches), False)  # compiles, and warms caches up
        watched = REMEMBERED if seconds else WATCHED
        steps = [_compute(task, next(batches), number < REMEMBERED) for number in range(watched)]
        task.model.load_state_dict(state)
        forward_seconds, backward_seconds = (statistics.median(step[part] for step in steps) for part in range(2))
        gradients = [step[2] for step in steps[:REMEMBERED]]
        self.seconds = seconds or forward_seconds + backward_seconds
        share = forward_seconds / (forward_seconds + backward_seconds)
        self.model = PlayedModel(task.model, share * self.seconds, (1 - share) * self.seconds, gradients)

    def batches(self, rank: int, world_size: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Nothing to look at: what comes out is remembered."""
        while True:
            yield torch.zeros(()), torch.zeros(())

    def held_out(self, num_samples: int) -> Iterator[tuple[Tensor, Tensor]]:
        """There is none."""
        raise SystemExit("train_gradient: expected --eval-samples 0 with --played, whose weights learn nothing")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """What the model gives is its loss."""
        return outputs


class PlayedModel(nn.Module):
    """The parameters of a model, and its gradients from memory.

    Args:
        model: Whose parameters.
        forward_seconds: That forward takes.
        backward_seconds: That backward takes.
        gradients: By step and parameter; played in turns.
    """

    def __init__(
        self, model: nn.Module, forward_seconds: float, backward_seconds: float, gradients: list[list[Tensor]]
    ) -> None:
        super().__init__()
        self.model = model
        self._forward_seconds, self._backward_seconds = forward_seconds, backward_seconds
        self._gradients, self._step = gradients, 0

    def forward(self, _inputs: Tensor) -> Tensor:
        """Waits as long as forward took; backward will."""
        begun = time.perf_counter()
        gradients = self._gradients[self._step % len(self._gradients)]
        self._step += 1
        pace = _Pace(self._backward_seconds / len(gradients))
        outputs = torch.zeros((), requires_grad=True)
        for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
            outputs = _Appear.apply(outputs, parameter, gradient, pace)  # type: ignore[no-untyped-call]
        time.sleep(max(0.0, begun + self._forward_seconds - time.perf_counter()))
        return outputs


class _Pace:
    """When the next gradient is due: every so many seconds since the first, so that delays do not add up."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._due = seconds, 0.0

    def wait(self) -> None:
        self._due = (self._due or time.perf_counter()) + self._seconds
        time.sleep(max(0.0, self._due - time.perf_counter()))


class _Appear(torch.autograd.Function):
    """Hands a value on; in backward, waits for its turn and gives its parameter a gradient."""

    @staticmethod
    def forward(context: Any, outputs: Tensor, _parameter: Tensor, gradient: Tensor, pace: _Pace) -> Tensor:
        context.gradient, context.pace = gradient, pace
        return outputs.clone()

    @staticmethod
    def backward(context: Any, *above: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        context.pace.wait()
        return above[0], context.gradient.clone(), None, None


def _compute(task: Task, batch: tuple[Tensor, Tensor], is_remembered: bool) -> tuple[float, float, list[Tensor]]:
    """Seconds of forward and of backward, and the gradients, if they are to be remembered."""
    begun = time.perf_counter()
    loss = task.loss(task.model(batch[0]), batch[1])
    turned = time.perf_counter()
    loss.backward()
    done = time.perf_counter()
    found = [torch.zeros_like(each) if each.grad is None else each.grad for each in task.model.parameters()]
    task.model.zero_grad()
    return turned - begun, done - turned, found if is_remembered else []
