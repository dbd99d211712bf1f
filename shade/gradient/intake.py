"""Takes gradients out of ``p.grad`` as the backward pass completes them, and lays them into the step that is open.

Taken without a copy: ``p.grad`` is None afterwards, and the next backward pass cannot write into what is still being
sent. A parameter that takes part twice in a backward pass is one parameter, and is taken when both parts are added up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from shade.errors import ConfigError
from shade.gradient.lane import Lane
from shade.gradient.scaling import ScaleKeeper
from shade.gradient.work import StepWork


class Intake:
    """The hooks on all parameters of an engine, until `close`.

    Args:
        lanes: The buckets.
        param_groups: Of the optimizer, with parameters that are frozen.
        scale: What gradients have to be multiplied with.
    """

    def __init__(self, lanes: Sequence[Lane], param_groups: Sequence[Mapping[str, Any]], scale: ScaleKeeper) -> None:
        self._lanes, self._scale = lanes, scale
        self._places = {
            parameter: (number, position)
            for number, lane in enumerate(lanes)
            for position, parameter in enumerate(lane.bucket.parameters)
        }
        trained = [each for entry in param_groups for each in entry["params"]]
        self._frozen = [each for each in trained if each not in self._places]
        self._is_accumulating = False
        self.work: StepWork | None = None
        """The step that is open."""
        take: Any = self._take
        self._hooks: list[Any] = [each.register_post_accumulate_grad_hook(take) for each in self._places]  # type: ignore[no-untyped-call]

    @property
    def is_empty(self) -> bool:
        """Whether the open step has no gradient yet, taken or to be taken."""
        is_untouched = self.work is None or self.work.is_untouched
        return is_untouched and all(parameter.grad is None for parameter in self._places)

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Leaves gradients where they are meanwhile; they add up there."""
        before, self._is_accumulating = self._is_accumulating, True
        try:
            yield
        finally:
            self._is_accumulating = before

    def seal(self, work: StepWork) -> None:
        """Ends a step's backward pass: what has come no gradient yet comes without one.

        Args:
            work: The step.

        Raises:
            ConfigError: A parameter that was frozen has a gradient.
        """
        if any(parameter.grad is not None for parameter in self._frozen):
            raise ConfigError.of("frozen parameters to stay frozen", "a gradient", "make a new engine to train them")
        for parameter, (number, position) in self._places.items():
            if not work.has(number, position):
                work.put(number, position, parameter.grad)
                parameter.grad = None

    def close(self) -> None:
        """Takes the hooks off. Safe to call twice."""
        for hook in self._hooks:
            hook.remove()

    def _take(self, parameter: Tensor) -> None:
        """Hook: a parameter's gradient is complete."""
        if self._is_accumulating or self.work is None:
            return
        number, position = self._places[parameter]  # type: ignore[index]
        work = self.work
        if work.has(number, position):
            name = self._lanes[number].bucket.names[position]
            cure = "put all but the last into `with engine.accumulate():`, or call engine.step() after each"
            raise ConfigError.of("one backward pass per step", f"a second gradient of {name!r}", cure)
        if work.is_untouched:
            work.scale = self._scale.unscale
        gradient, parameter.grad = parameter.grad, None
        work.put(number, position, gradient)
