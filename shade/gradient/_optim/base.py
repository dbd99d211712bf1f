"""SparseOptimizer: a torch.optim.Optimizer that takes the gradient of a few elements of a bucket, and works on those.

It computes the dense optimizer's result on that gradient with zeros everywhere else. In a dense optimizer, momentum and
weight decay also move elements whose gradient is zero. Here those elements move later, all skipped steps at once, in
closed form: when something in their line of 16 is touched, or when a sweep reaches them. The forward pass reads lagging
elements as they are; decision 0016 says what that costs and what it changes.

Coefficients (learning rate, momentum, betas, decay) enter the closed forms as they were at each skipped step, so any
scheduler works.

**Replicas.** `apply` and `flush` produce the same bits on every machine that calls them in the same order. A flush
rounds differently from no flush: call it on all ranks at the same step, or on none. `state_dict` changes nothing: what
lags is saved lagging, and continues bit for bit. After a `flush` the state has the format of PyTorch's optimizer of
that name, and either loads the state of the other.

Invariant: after `flush`, weights and moments are the dense optimizer's, to within float32's rounding.

Legend: D bucket · K kept · L lines of 16.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import Optimizer, ParamsT

from shade.errors import ConfigError, GradientError
from shade.gradient._compress.bucket import Bucket
from shade.gradient._compress.compressor import Sparse
from shade.gradient._compress.correction import AdamCorrection, Correction
from shade.gradient._kernels.build import build
from shade.gradient._optim.memory import BucketPart, OptimizerMemory

FLUSH_EVERY = 16
_FLUSH = "call flush() on every rank first, or keep the bucket size and flush_every"


def loops() -> Any:
    """Returns the compiled loops, `_kernels.step_loops`."""
    return build("step_loops")


class SparseOptimizer(Optimizer, ABC):
    """Base of the sparse optimizers; a subclass fills in `_new_memory`, `_step` and `_sweep`.

    Args:
        params: As for any optimizer.
        defaults: The settings of a parameter group that does not have its own.
        flush_every: Steps that an element may lag, ≥ 1; with 1, none lags after a step.

    Raises:
        ConfigError: A setting out of range, or a parameter that is not dense real floating point.
    """

    moments: ClassVar[tuple[str, ...]]
    """Names of the moments, as PyTorch's optimizer has them."""
    is_stepped_by_engine = False
    """Whether an engine exchanges the gradients, so that this rank's own are not to be applied."""

    def __init__(self, params: ParamsT, defaults: dict[str, Any], flush_every: int) -> None:
        if flush_every < 1:
            raise ConfigError.of("flush_every ≥ 1 step", flush_every, f"{FLUSH_EVERY} is the default")
        self.flush_every = flush_every
        self._memories: dict[Bucket, list[OptimizerMemory]] = {}
        """By bucket, what its parts have, in order; most buckets have one part."""
        self._lags: list[dict[str, Any]] = []
        """Loaded state of buckets that have not been seen yet."""
        self._lock = threading.Lock()
        super().__init__(params, defaults)

    # ── stepping ────────────────────────────────────────────────────────────────────────────────────────────────────

    def apply(self, bucket: Bucket, sparse: Sparse, used: Container[int] | None = None) -> None:
        """Takes one step of a bucket. Different buckets may be stepped by different threads.

        Args:
            bucket: Of parameters of one group; the same object at every step. Its `Bucket.weights_D` move.
            sparse: The gradient; may be empty.
            used: Places of the parameters that have a gradient; None: all. The others stay as they are.

        Raises:
            GradientError: The gradient has another bucket's size.
            ConfigError: The bucket cannot take over the state of an earlier one.
        """
        if sparse.size != bucket.size:
            raise GradientError.of(f"a gradient of {bucket.size} elements", sparse.size, "apply it to its own bucket")
        # Learning rate schedulers read it and warn without a step.
        self._opt_called = True
        bucket.rebind()
        bucket.take_changes()
        group = self.param_groups[bucket.group]
        if group["maximize"]:
            sparse = Sparse(sparse.indices_K, -sparse.values_K, sparse.size)
        is_sparse = True
        for memory in self._parts_by(bucket, used):
            if used is not None and memory.part.places.start not in used:
                continue
            memory.advance()
            if not self._step(memory, group, memory.part.cut(sparse)):
                is_sparse = False
                # One range in turn, so that no element lags further than ``flush_every`` steps.
                turn = (memory.step - 1) % self.flush_every
                start, stop = (memory.num_lines * each // self.flush_every for each in (turn, turn + 1))
                self._sweep(memory, start, stop)
        bucket.publish(sparse.indices_K if is_sparse else None)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step with the gradients in ``p.grad``, dense or ``torch.sparse``.

        A parameter in no bucket gets one of its own; without a gradient it is skipped, as in PyTorch.

        Args:
            closure: Computes loss and gradients again. An engine's applies what came, between the step's hooks.

        Returns:
            The closure's result.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for bucket in self._all_buckets():
            gradients = [parameter.grad for parameter in bucket.parameters]
            used = {place for place, gradient in enumerate(gradients) if gradient is not None}
            if used:
                self._check_gradients()
                array_D = np.empty(bucket.size, np.float32)
                bucket.gather(gradients, torch.from_numpy(array_D))
                indices_K = np.flatnonzero(array_D).astype(np.uint32)
                self.apply(bucket, Sparse(indices_K, array_D[indices_K], bucket.size), used)
        return loss

    def _check_gradients(self) -> None:
        """Refuses to step with gradients that an engine is to take first."""
        if self.is_stepped_by_engine:
            raise ConfigError.of("gradients to be left to the engine", "optimizer.step()", "call engine.step()")

    def flush(self) -> None:
        """Brings every element up to date. Call it on all ranks or none, before weights are evaluated or exported."""
        if not self.is_behind:
            return
        # Weights change as in a step, and a snapshot may still be copying them: its hook waits.
        for hook in list(self._optimizer_step_pre_hooks.values()):
            hook(self, (), {})
        for bucket, memories in self._memories.items():
            if any(memory.is_behind for memory in memories):
                bucket.rebind()
                bucket.take_changes()
                for memory in memories:
                    self._catch_up(memory)
                bucket.publish()

    @property
    def is_behind(self) -> bool:
        """True if `flush` would change anything."""
        return any(memory.is_behind for memories in self._memories.values() for memory in memories)

    def replica(self, bucket: Bucket) -> list[npt.NDArray[np.uint8]]:
        """Returns all bytes that have to be the same on every rank: weights, moments, lags, tables. Writable.

        Args:
            bucket: A bucket that `apply` has seen, or will see.

        Returns:
            Views of the bucket's own memory, empty ones left out; step counts last.
        """
        arrays: list[Any] = [bucket.array()]
        for memory in self._parts_of(bucket):
            memory.counted[0] = memory.step
            arrays += [*memory.moments.values(), memory.last_L, memory.history, memory.rows, memory.counted]
        return [array.reshape(-1).view(np.uint8) for array in arrays if array.size]

    def layout_of(self, bucket: Bucket) -> list[list[Any]]:
        """Returns each part's number of parameters and its moments' names, JSON-plain: a `replica` needs the same."""
        return [[len(memory.part.parameters), *memory.moments] for memory in self._parts_of(bucket)]

    def take_layout(self, bucket: Bucket, layout: Sequence[Sequence[Any]]) -> None:
        """Gives a bucket the parts and moments of `layout_of` on another rank, whose replica is to be taken over."""
        if self.layout_of(bucket) == [list(each) for each in layout]:
            return
        memories, start = [], 0
        for num_parameters, *names in layout:
            memory = self._new_memory(BucketPart(bucket, range(start, start + num_parameters)), 0)
            start += num_parameters
            for name in names:
                memory.add_moment(name)
            self._publish_state(memory)
            memories.append(memory)
        self._memories[bucket] = memories

    def take_replica(self, bucket: Bucket) -> None:
        """Continues from what was written to the views of `replica`."""
        for memory in self._parts_of(bucket):
            memory.go_to(int(memory.counted[0]))
        bucket.publish()

    def correction(self, group: Mapping[str, Any]) -> Correction | None:
        """Returns the correction that every rank applies to its own gradient before this optimizer sees it.

        Args:
            group: One of ``param_groups``.

        Returns:
            The correction, or None if there is none.
        """
        del group
        return None

    @abstractmethod
    def _new_memory(self, part: BucketPart, step: int) -> OptimizerMemory:
        """Hook: returns a memory without moments."""

    @abstractmethod
    def _step(self, memory: OptimizerMemory, group: Mapping[str, Any], sparse: Sparse) -> bool:
        """Hook: takes step ``memory.step``; returns whether only touched elements ever move."""

    @abstractmethod
    def _sweep(self, memory: OptimizerMemory, start: int, stop: int) -> None:
        """Hook: brings a range of lines up to date."""

    # ── buckets ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, as any optimizer does.

        Args:
            param_group: Parameters, and the settings that differ for them.

        Raises:
            ConfigError: A parameter that is not dense real floating point.
        """
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if not parameter.is_floating_point() or parameter.layout is not torch.strided:
                got, cure = f"{parameter.dtype} {parameter.layout}", "use an optimizer of torch.optim for it"
                raise ConfigError.of("dense real floating-point parameters", got, cure)

    def _all_buckets(self) -> list[Bucket]:
        buckets = list(self._memories)
        held = {each for bucket in buckets for each in bucket.parameters}
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.numel() and parameter not in held:
                    buckets.append(Bucket([parameter], group=number))
        return buckets

    def _parts_of(self, bucket: Bucket) -> list[OptimizerMemory]:
        """Returns the memories of a bucket's parts."""
        memories = self._memories.get(bucket)
        if memories is None:
            with self._lock:
                memories = self._memories[bucket] = self._adopt(bucket)
        return memories

    def _parts_by(self, bucket: Bucket, used: Container[int] | None) -> list[OptimizerMemory]:
        """Returns the memories after splitting parts of which only some parameters are ``used``."""
        memories = self._parts_of(bucket)
        # Parts with equal steps become one again where nothing lags: a run that resumes there does the same.
        joins = len(memories) > 1 and not any(memory.is_behind for memory in memories)
        if not joins and used is None:
            return memories
        with self._lock:
            if joins:
                memories = self._adopt(bucket)
            parts: list[OptimizerMemory] = []
            for memory in memories:
                runs = [memory.part.places] if used is None else _runs(memory.part.places, used.__contains__)
                if len(runs) > 1:
                    self._catch_up(memory)
                    parts += [self._memory_of(BucketPart(bucket, run)) for run in runs]
                else:
                    parts.append(memory)
            self._memories[bucket] = parts
        return parts

    def _adopt(self, bucket: Bucket) -> list[OptimizerMemory]:
        """Returns the memories of a new bucket, with the known state of its parameters."""
        for earlier, memories in list(self._memories.items()):
            if not set(bucket.parameters).isdisjoint(earlier.parameters):
                if any(memory.is_behind for memory in memories):
                    expected = "the buckets of before, or buckets that are up to date"
                    raise ConfigError.of(expected, "new buckets that lag", _FLUSH)
                del self._memories[earlier]
        numbers = {parameter: number for number, parameter in enumerate(self._numbered())}
        lagging = {number: place for place, lag in enumerate(self._lags) for number in lag["parameters"]}

        def steps_of(place: int) -> tuple[int, int | None]:
            parameter = bucket.parameters[place]
            lag = lagging.get(numbers[parameter]) if lagging else None
            return int(self.state.get(parameter, {}).get("step", 0)), lag

        runs = _runs(range(len(bucket.parameters)), steps_of)
        return [self._memory_of(BucketPart(bucket, run)) for run in runs]

    def _memory_of(self, part: BucketPart) -> OptimizerMemory:
        """Returns a new memory with the state of its parameters, which have taken equally many steps."""
        states = [self.state.get(parameter, {}) for parameter in part.parameters]
        memory = self._new_memory(part, int(states[0].get("step", 0)))
        for name in self.moments:
            known = [state.get(name) for state in states]
            if any(tensor is not None for tensor in known):
                memory.add_moment(name)
                with torch.no_grad():
                    for view, tensor in zip(memory.views(name), known, strict=True):
                        if tensor is not None:
                            view.copy_(tensor)
        self._take_lag(memory)
        self._publish_state(memory)
        return memory

    def _catch_up(self, memory: OptimizerMemory) -> None:
        if memory.is_behind:
            self._sweep(memory, 0, memory.num_lines)

    def _publish_state(self, memory: OptimizerMemory) -> None:
        # Where PyTorch's optimizers keep it, in the same memory.
        for parameter, parameter_step in zip(memory.part.parameters, memory.parameter_steps, strict=True):
            self.state[parameter] = {"step": parameter_step}
        for name in memory.moments:
            for parameter, view in zip(memory.part.parameters, memory.views(name), strict=True):
                self.state[parameter][name] = view

    # ── state ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as any optimizer does, and ``lags`` of buckets that are not up to date. Changes nothing."""
        state = super().state_dict()
        # PyTorch's optimizers know nothing of a parameter before its first step.
        state["state"] = {number: entry for number, entry in state["state"].items() if _has_stepped(entry)}
        lags = self._all_lags()
        return {**state, "lags": lags} if lags else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of this class, or of PyTorch's optimizer of that name. Moments stay float32 on the CPU.

        Args:
            state_dict: Its tensors are copied.

        Raises:
            ConfigError: A moment of another shape than its parameter.
        """
        # Without the tensors: PyTorch would cast them to their parameter's type and device.
        super().load_state_dict({**state_dict, "state": {}})
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        self._memories.clear()
        self.state.clear()
        parameters = self._numbered()
        for number, entry in state_dict["state"].items():
            parameter = parameters[number]
            kept = {name: entry[name] for name in ("step", *self.moments) if entry.get(name) is not None}
            for name in self.moments:
                if name in kept and kept[name].shape != parameter.shape:
                    expected = f"{name} of shape {tuple(parameter.shape)}"
                    raise ConfigError.of(expected, tuple(kept[name].shape), "load it into the model it was saved with")
            self.state[parameter] = {name: _copied(value) for name, value in kept.items()}
        self._lags = list(state_dict.get("lags", ()))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "flush_every": self.flush_every, "_lags": self._all_lags()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._lags = []
        super().__setstate__(state)
        self._memories, self._lock = {}, threading.Lock()

    def _numbered(self) -> list[Parameter]:
        # The order in which ``state_dict`` numbers them.
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _all_lags(self) -> list[dict[str, Any]]:
        numbers = {parameter: number for number, parameter in enumerate(self._numbered())}
        behind = [each for each in self._memories.values() if any(memory.is_behind for memory in each)]
        # All parts of a bucket that lags in one of them: a resumed run needs the same parts.
        lags = [
            {"parameters": [numbers[each] for each in memory.part.parameters], **memory.lag()}
            for memories in behind
            for memory in memories
        ]
        return lags + self._lags

    def _take_lag(self, memory: OptimizerMemory) -> None:
        parameters = self._numbered()
        for lag in list(self._lags):
            mine = [parameters[number] for number in lag["parameters"]]
            if set(mine).isdisjoint(memory.part.parameters):
                continue
            if mine != list(memory.part.parameters) or not memory.resume(lag):
                raise ConfigError.of("the buckets with which the state was saved", "other buckets", _FLUSH)
            self._lags.remove(lag)


def corrections_of(
    optimizer: SparseOptimizer, wanted: Correction | None, clip_norm: float | None
) -> list[Correction | None]:
    """Returns the correction of each of the optimizer's groups, applied before gradients are merged and clipped.

    Args:
        optimizer: May have corrections of its own.
        wanted: The script's choice; None takes the optimizer's.
        clip_norm: Largest norm of a merged gradient; None does not clip.

    Returns:
        One correction, or None, for each group.

    Raises:
        ConfigError: Both optimizer and correction keep momentum, or the merged gradient cannot be clipped.
    """
    own = [optimizer.correction(group) for group in optimizer.param_groups]
    if clip_norm is not None and not clip_norm > 0:
        raise ConfigError.of("a clip_norm > 0", clip_norm, "None clips nothing")
    if clip_norm is not None and any(isinstance(each, AdamCorrection) for each in (wanted, *own)):
        raise ConfigError.of("clip_norm None with Adam's correction", clip_norm, "its steps have one size already")
    if wanted is None:
        return own
    remembers = any(own) or len(optimizer.moments) != 1 or any(group["momentum"] for group in optimizer.param_groups)
    if remembers:
        got = f"{type(optimizer).__name__} with {wanted}"
        raise ConfigError.of("SparseSGD without momentum where a correction remembers", got, "leave one of them out")
    return [wanted] * len(own)


def plain_groups(param_groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns an optimizer's settings by group, without parameters and all that JSON cannot hold."""
    return [
        {name: value for name, value in group.items() if name != "params" and _is_plain(value)}
        for group in param_groups
    ]


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _has_stepped(entry: Mapping[str, Any]) -> bool:
    return len(entry) > 1 or bool(entry.get("step", 0))


def _runs(places: range, key: Callable[[int], Any]) -> list[range]:
    """Splits places into runs of equal keys."""
    starts = [place for place in places if place == places.start or key(place) != key(place - 1)]
    return [range(start, stop) for start, stop in pairwise([*starts, places.stop])]


def _copied(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().to("cpu", torch.float32, copy=True)
