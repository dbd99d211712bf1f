"""Packs parameters into flat buckets: one array to compress, one message to send, one step to apply.

A network has hundreds of tensors, most of them small; a message each would cost a round trip each.

float32 parameters on the CPU lie in their bucket's memory: a sparse step changes them in place, without a copy. All
others (on a device, or of another type) have float32 *master weights* in the bucket. The step changes the master
weights, and `Bucket.publish` copies the changed elements to the parameters. What a script changes in place between two
steps (``p.data.clamp_()``) `Bucket.take_changes` copies to the master weights.

Invariant: after `publish`, every parameter equals its part of `Bucket.weights_D`, rounded to its own type.

Legend: D bucket · K kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shade.errors import ConfigError
from shade.types import Floats

BUCKET_BYTES = 16 << 20
"""Large enough to hide a message's latency, small enough for the stages of several buckets to overlap."""
SHORT = 2048
"""Parameters with fewer elements, and those with one dimension, are always sent whole."""


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Bucket:
    """Some parameters of one optimizer group as one flat float32 array on the CPU. The constructor rebinds their
    memory.

    Args:
        parameters: Floating point, of one device and type, without duplicates.
        group: The index of their group in ``optimizer.param_groups``.
        names: Their names, for messages; empty: numbers.
        is_dense: Whether the bucket is always sent whole.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        *,
        group: int = 0,
        names: Sequence[str] = (),
        is_dense: bool = False,
    ) -> None:
        self.parameters = tuple(parameters)
        self.names = tuple(names) or tuple(str(number) for number in range(len(self.parameters)))
        self.group = group
        self.is_dense = is_dense
        # A thread lays gradients out while the script may bind a parameter to another shape, which `rebind` refuses.
        self._shapes = [parameter.shape for parameter in self.parameters]
        sizes = [shape.numel() for shape in self._shapes]
        self.starts: tuple[int, ...] = tuple(int(start) for start in np.cumsum([0, *sizes[:-1]]))
        """The offset of each parameter in the bucket."""
        self.size = sum(sizes)
        """D."""
        # Strides are kept, so that ``channels_last`` survives.
        self._layouts = [_layout(parameter) for parameter in self.parameters]
        first = self.parameters[0]
        self.device, self.dtype = first.device, first.dtype
        self.is_master = first.device.type != "cpu" or first.dtype != torch.float32
        """Whether the weights here are a copy of the parameters, not their memory."""
        self.weights_D = torch.empty(self.size, dtype=torch.float32)
        """The weights that steps change; on the CPU."""
        self._remote_D = torch.empty(self.size, dtype=self.dtype, device=self.device) if self.is_master else None
        self._published: Tensor | int | None = None
        """A checksum of the parameters as they were published, on their device; None: unknown."""
        home_D = self.weights_D if self._remote_D is None else self._remote_D
        # A storage of its own, a part of the bucket's, so that ``torch.save`` of a layer writes that layer.
        self._homes = [_with_own_storage(view) for view in self.views(home_D)]
        """The memory of each parameter."""
        self._bindings = [_binding(home) for home in self._homes]
        self.rebind()

    def views(self, flat_D: Tensor, places: range | None = None) -> list[Tensor]:
        """Returns each parameter's part of a flat array, in its own shape and strides; ``places``: of these neighbours,
        with the first of which the array begins; None: of all."""
        places = range(len(self.parameters)) if places is None else places
        offset = flat_D.storage_offset() - self.starts[places.start]
        return [
            flat_D.as_strided(self._shapes[place], self._layouts[place], offset + self.starts[place])
            for place in places
        ]

    def part(self, places: range) -> slice:
        """Returns where the parameters at these places, neighbours, lie in the bucket."""
        return slice(self.starts[places.start], self.starts[places[-1]] + self._shapes[places[-1]].numel())

    def rebind(self) -> None:
        """Moves parameters that other code has bound to other memory back into the bucket, with their new values.

        Raises:
            ConfigError: One has another shape, type or device now.
        """
        # ``p.data = …``, `vector_to_parameters` and ``model.to(memory_format=…)`` bind a parameter to other memory: a
        # step would miss it. So would it miss a transposed view of the same memory, whose strides differ.
        moved = [
            place
            for place, (parameter, binding) in enumerate(zip(self.parameters, self._bindings, strict=True))
            if _binding(parameter) != binding
        ]
        for place in moved:
            now, home = self.parameters[place], self._homes[place]
            if (now.shape, now.dtype, now.device) != (home.shape, home.dtype, home.device):
                expected = f"{self.names[place]!r} as at the start: {home.dtype} {tuple(home.shape)} on {home.device}"
                got = f"{now.dtype} {tuple(now.shape)} on {now.device}"
                raise ConfigError.of(expected, got, "convert the model first, then make the optimizer and the engine")
        with torch.no_grad():
            for place in moved:
                self._homes[place].copy_(self.parameters[place].detach().clone())
                self.parameters[place].data = self._homes[place]
                if self._remote_D is not None:
                    part = self.part(range(place, place + 1))
                    self.weights_D[part].copy_(self._remote_D[part])
                    self._published = None

    def take_changes(self) -> None:
        """Copies what a script has changed in the parameters' memory since `publish` to the master weights."""
        if self._remote_D is None or (self._published is not None and bool(self._published == self._checksum())):
            return
        now_D = self._remote_D.to("cpu")
        # Where the parameter is its master weight, rounded, the script changed nothing: the exact value stays.
        torch.where(now_D == self.weights_D.to(self.dtype), self.weights_D, now_D.float(), out=self.weights_D)

    def _checksum(self) -> Tensor | int:
        assert self._remote_D is not None
        if self.device.type == "cpu":
            return xxhash.xxh3_64_intdigest(self._remote_D.view(torch.uint8).numpy().data)
        return self._remote_D.view(_INTEGERS[self.dtype.itemsize]).sum(dtype=torch.int64)

    def gather(self, gradients: Sequence[Tensor | None], out_D: Tensor, scale: float = 1.0) -> None:
        """Copies gradients, of any type and device, into float32 (D,), times ``scale``; a missing one is zero."""
        with torch.no_grad():
            for gradient, view in zip(gradients, self.views(out_D), strict=True):
                if gradient is None:
                    view.zero_()
                else:
                    view.copy_(gradient.to_dense() if gradient.layout is not torch.strided else gradient)
            if scale != 1.0:
                out_D.mul_(scale)

    def publish(self, indices_K: npt.NDArray[np.uint32] | None = None) -> None:
        """Copies changed master weights (None: all) to their parameters. Does nothing where parameters are views."""
        if self._remote_D is None:
            return
        with torch.no_grad():
            if indices_K is None or 4 * len(indices_K) > self.size:
                self._remote_D.copy_(self.weights_D)
            else:
                places_K = torch.from_numpy(indices_K.astype(np.int64))
                values_K = self.weights_D[places_K].to(self.dtype)
                self._remote_D.index_copy_(0, places_K.to(self.device), values_K.to(self.device))
            self._published = self._checksum()

    def refresh(self) -> None:
        """Copies the parameters to the master weights, after other code has changed the parameters (a loaded state)."""
        if self._remote_D is not None:
            self.weights_D.copy_(self._remote_D)
            self._published = self._checksum()

    def array(self) -> Floats:
        """Returns the weights as a numpy array of the same memory."""
        array_D: Floats = self.weights_D.numpy()
        return array_D


def plan_buckets(
    param_groups: Sequence[Mapping[str, Any]],
    names: Mapping[torch.nn.Parameter, str] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    short: int = SHORT,
) -> list[Bucket]:
    """Packs an optimizer's trainable parameters into buckets, front layers first, and rebinds their memory.

    Parameters of different groups, devices or types never share a bucket.

    Args:
        param_groups: As in ``optimizer.param_groups``.
        names: The parameters' names, for messages.
        bucket_bytes: The largest size of a bucket that holds more than one parameter.
        short: Parameters with fewer elements, or with one dimension, are always sent whole.

    Returns:
        The buckets, in the order of the first parameter of each.

    Raises:
        ConfigError: No parameter is trainable, or one is not real floating point.
    """
    if bucket_bytes < 1:
        raise ConfigError.of("bucket_bytes ≥ 1", bucket_bytes, "16 << 20 suits most links")
    known = names or {}
    packs: list[tuple[int, int, bool, list[torch.nn.Parameter]]] = []
    open_packs: dict[Any, int] = {}
    position = 0
    for group, entry in enumerate(param_groups):
        for parameter in entry["params"]:
            position += 1
            if not parameter.requires_grad or not parameter.numel():
                continue
            _check(parameter, known.get(parameter, str(position - 1)))
            # Biases and norms are a thousandth of the bytes, and dropped elements hurt most there: they are sent whole.
            is_short = parameter.ndim < 2 or parameter.numel() < short
            kind = (group, parameter.device, parameter.dtype, is_short)
            pack = packs[open_packs[kind]][3] if kind in open_packs else []
            held_bytes = 4 * sum(each.numel() for each in pack)
            if not pack or held_bytes + 4 * parameter.numel() > bucket_bytes:
                pack = []
                open_packs[kind] = len(packs)
                packs.append((position, group, is_short, pack))
            pack.append(parameter)
    if not packs:
        raise ConfigError.of("an optimizer with trainable parameters", "none", "set requires_grad before it is made")
    return [
        Bucket(pack, group=group, names=[known.get(each, "?") for each in pack], is_dense=is_short)
        for _, group, is_short, pack in sorted(packs, key=lambda entry: entry[0])
    ]


def _check(parameter: torch.nn.Parameter, name: str) -> None:
    is_flat = getattr(parameter, "_is_flat_param", False)  # of FullyShardedDataParallel
    if is_flat or is_traceable_wrapper_subclass(parameter):
        got = "FlatParameter" if is_flat else type(parameter).__name__
        cure = "leave out FSDP and DTensor, or train without shade.gradient: they exchange by themselves"
        raise ConfigError.of(f"parameters that hold their own values, {name!r} too", got, cure)
    if not parameter.is_floating_point() or parameter.layout is not torch.strided:
        got = f"{parameter.dtype} {parameter.layout}"
        raise ConfigError.of(f"dense real floating-point parameters, {name!r} too", got, "freeze it, or split it")
    if parameter.numel() >= 2**32:
        raise ConfigError.of(f"parameters below 2**32 elements, {name!r} too", parameter.numel(), "split it")


def _binding(tensor: Tensor) -> tuple[int, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.stride()


def _with_own_storage(view: Tensor) -> Tensor:
    """Returns a tensor of the same memory whose storage ends where the view does."""
    start = view.storage_offset() * view.element_size()
    storage = view.untyped_storage()[start : start + view.numel() * view.element_size()]
    return view.new_empty(0).set_(storage, 0, view.shape, view.stride())


def _layout(parameter: Tensor) -> tuple[int, ...]:
    """Returns the parameter's strides if it fills its memory without gaps or overlaps, else contiguous strides."""
    expected = 1
    for stride, length in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if length != 1 and stride != expected:
            return torch.empty(parameter.shape, device="meta").stride()
        expected *= length
    return parameter.stride()
