"""The app state, which is all attached objects: how their state is captured and how it is loaded.

Any object with ``state_dict`` and ``load_state_dict`` may be attached. Modules and optimizers are treated specially:
state that data-parallel ranks hold alike is saved once, each rank a share of it; state that only an optimizer's step
changes may be copied while the training runs. All else is each rank's own and is copied at once. Loading checks first
and changes afterwards: a snapshot that does not fit leaves everything as it was, on every rank if it does not fit on
one. Names are those of the model without wrappers (DistributedDataParallel, DataParallel, `torch.compile`).
"""

from __future__ import annotations

import copy
import inspect
import logging
import random
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import xxhash
from torch.nn.parameter import UninitializedTensorMixin

from shade.checkpoint._capture.flatten import escape, flatten, part_of, tensors_in, unflatten
from shade.checkpoint._capture.layout import TensorSpec, bytes_of
from shade.checkpoint._capture.stateful_loader import StatefulLoader
from shade.errors import ConfigError, ShadeError, StateMismatchError
from shade.types import Parted, Resumed, Stateful

logger = logging.getLogger("shade.checkpoint")

Agree = Callable[[Exception | None], None]
_WORD_BYTES: Final = 8
_SAMPLES: Final = 64
"""Most words of a tensor that are compared between ranks."""
_SHAPED = frozenset(
    {
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "exp_inf",
        "momentum_buffer",
        "square_avg",
        "grad_avg",
        "acc_delta",
        "sum",
    }
)
"""State that PyTorch's optimizers keep in the shape of each parameter; LBFGS and Adafactor keep other shapes too."""


class RandomState:
    """The global random generators of this process: Python's, numpy's, torch's, and each CUDA device's.

    Saved and restored per rank, they make a resumed run draw the numbers that the undisturbed run would have drawn. A
    CUDA device is asked only if this process has used CUDA: asking would start it up, which costs hundreds of megabytes
    of its memory and makes a later fork impossible; and an unused device has no position to lose. Generators of your
    own (`torch.Generator`, `numpy.random.Generator`) are not known here: attach the object that holds them.
    """

    def state_dict(self) -> dict[str, Any]:
        """Returns the generators' states: numbers, strings, arrays and tensors, 10 KB and 16 bytes a CUDA device."""
        version, words, gauss = random.getstate()
        used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        devices = range(torch.cuda.device_count()) if used else ()
        return {
            "python": {"version": version, "words": np.array(words, dtype=np.uint32), "gauss": gauss},
            "numpy": np.random.get_state(legacy=False),
            "torch": torch.get_rng_state(),
            "cuda": [torch.cuda.get_rng_state(device) for device in devices],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the generators. With more CUDA devices than were saved, the others keep their state, and vice versa.

        A state of other generators, or of none, raises a StateMismatchError and changes nothing.
        """
        before = self.state_dict()
        try:
            _set_generators(state)
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, OverflowError) as error:
            _set_generators(before)
            raise StateMismatchError.of(
                "a state of random generators", str(error), "restore without 'random'"
            ) from error


def _set_generators(state: dict[str, Any]) -> None:
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"].clone())  # of a view, PyTorch would read from the storage's start
    for device, saved in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(saved.clone(), device)


@dataclass(frozen=True)
class CapturedState:
    """The app state at one moment, not copied yet."""

    tree: Any
    """The skeleton, as `flatten` returned it."""
    tensors: dict[str, torch.Tensor]
    """The live tensors, by name."""
    steady: frozenset[str]
    """Names of the tensors that only an optimizer's step changes."""

    def specs(self) -> dict[str, TensorSpec]:
        """Returns what a layout needs to know of the tensors."""
        return {name: TensorSpec.of(tensor) for name, tensor in self.tensors.items()}

    def replica(self, world_size: int, number: int) -> str:
        """Returns a digest of samples of every CPU tensor that all ranks should hold alike.

        Samples are enough to find a model that ranks train apart: few of its tensors stay alike. The samples of save
        ``number`` are others than those of the next, so that a difference in few rows is found later, if not now.
        """
        if world_size == 1:
            return ""
        total = xxhash.xxh3_128()
        for name, tensor in self.tensors.items():
            if "@" not in name and tensor.device.type == "cpu" and tensor.is_contiguous():
                content_N = bytes_of(tensor).numpy()
                word_W = content_N[: len(content_N) // _WORD_BYTES * _WORD_BYTES].view(np.uint64)
                step = -(-len(word_W) // _SAMPLES) or 1
                total.update(np.ascontiguousarray(word_W[number % step :: step]).data)
                total.update(content_N[-_WORD_BYTES:].data)
        return total.hexdigest()


class AppState:
    """The attached objects, by name.

    Args:
        replicated: Whether ranks hold the same parameters and optimizer state.
    """

    def __init__(self, replicated: bool) -> None:
        self._replicated = replicated
        self._num_torn = 0
        self._objects: dict[str, Stateful] = {"random": RandomState()}

    def attach(self, objects: Mapping[str, Any]) -> None:
        """Adds objects by name; raises a ConfigError, and adds none, if one has no state that a restore would take, or
        its name is taken."""
        taken: dict[str, Any] = {}
        for name, target in objects.items():
            if not isinstance(target, Stateful):
                cure = "give it state_dict() and load_state_dict()"
                raise ConfigError.of(f"{name!r} to have a state", type(target).__name__, cure)
            target = StatefulLoader(target) if StatefulLoader.fits(target) else unwrapped(target)
            known = self._objects.get(name, target)
            if known is not target and not (isinstance(known, StatefulLoader) and known == target):
                raise ConfigError.of("a name that is not attached yet", name, f"known: {', '.join(self._objects)}")
            check_state(name, target)
            taken[name] = target
        self._objects |= taken

    @property
    def modules(self) -> dict[str, torch.nn.Module]:
        """Returns the attached modules, by name."""
        return {name: target for name, target in self._objects.items() if isinstance(target, torch.nn.Module)}

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Returns the attached optimizers, by name."""
        return {name: target for name, target in self._objects.items() if isinstance(target, torch.optim.Optimizer)}

    @property
    def names(self) -> list[str]:
        """Returns the names of all attached objects."""
        return list(self._objects)

    @property
    def epoch(self) -> int:
        """Returns the epoch of the first attached object that counts epochs, or whose sampler does; 0 without one."""
        # A model may have an attribute of that name, which no restore sets.
        others = (each for each in self._objects.values() if not isinstance(each, _TRAINED))
        counting = [each for target in others for each in (target, getattr(target, "sampler", None))]
        counting.sort(key=lambda each: not hasattr(each, "set_epoch"))
        counts = (getattr(each, "epoch", None) for each in counting)
        return next((count for count in counts if isinstance(count, int)), 0)

    def capture(self, rank: int, world_size: int) -> CapturedState:
        """Captures the state of all attached objects, without copying a tensor.

        A part that cannot be saved raises a ConfigError that names its path.
        """
        # A parameter may have several names, and any other state of a module may change in a forward pass.
        params = {
            f"{escape(name)}/{escape(key)}": id(param)
            for name, module in self.modules.items()
            for key, param in module.named_parameters(remove_duplicate=False)
        }
        optimizers = tuple(f"{escape(name)}/" for name in self.optimizers)

        def is_trained(path: str) -> bool:
            return path.startswith(optimizers) or _PARTS.split(path)[0] in params

        # The generators last: a loader may draw a seed when it is asked for its state.
        names = sorted(self._objects, key=lambda name: name == "random")
        state = {name: self._objects[name].state_dict() for name in names}
        shared = self._replicated or world_size == 1
        tree, tensors = flatten(
            state, rank=rank, is_own=None if world_size == 1 else lambda path: not (shared and is_trained(path))
        )
        steady = frozenset(name for name in tensors if is_trained(name.partition("@")[0]))
        if self._num_torn:
            held = {id(param) for each in self.optimizers.values() for param in _params_of(each)}
            steady = frozenset(name for name in steady if name.startswith(optimizers) or params.get(name) in held)
        return CapturedState(tree, tensors, steady if self._num_torn < _MOST_TORN else frozenset())

    def note_torn(self) -> None:
        """Learns that a steady tensor changed during its copy. From now on, what no attached optimizer holds (an average
        of the weights, say, that a forward pass moves) is copied at once; after another time, all is."""
        self._num_torn += 1

    def forgettable(self, tree: Any) -> Set[str]:
        """Returns the names of a tree's tensors whose memory may be reused once they are loaded: those that nothing but
        `torch.nn.Module.load_state_dict` itself gets, which copies them. Other objects may keep what they are given.
        """
        modules = self.modules
        copying = {
            (name, f"{prefix}.{key}" if prefix else key)
            for name, module in modules.items()
            if is_torchs(module, "load_state_dict")
            for prefix, part in module.named_modules(remove_duplicate=False)
            if is_torchs(part, "_load_from_state_dict") and not part._load_state_dict_pre_hooks
            for key in (*part._parameters, *part._buffers)
        }
        copied, kept = set[str](), set[str]()
        for name, node in zip(*part_of(tree, None)["dict"], strict=True):
            if name not in modules or "module_state" not in node:
                kept |= tensors_in(node)
                continue
            for key, value in zip(*node["module_state"][:2], strict=True):
                (copied if isinstance(key, str) and (name, key) in copying else kept).update(tensors_in(value))
        return copied - kept

    def left_out(self, tree: Any) -> list[str]:
        """Returns the names in a tree that nothing attached takes."""
        return sorted(str(name) for name in part_of(tree, None)["dict"][0] if name not in self._objects)

    def load(
        self,
        tree: Any,
        tensors: Mapping[str, torch.Tensor],
        names: Collection[str],
        trees: Sequence[Any] = (),
        agree: Agree = lambda failure: None,
    ) -> None:
        """Loads the state of some attached objects.

        Args:
            tree: The skeleton of their state, perhaps with that of others.
            tensors: All tensors that the tree and ``trees`` name.
            names: Names of the objects.
            trees: Trees of all ranks that saved, for state that is shared out anew when ranks are fewer or more.
            agree: Called with what went wrong here or None, before anything is changed, and before models are. Has to
                raise if it went wrong on another rank.

        Raises:
            StateMismatchError: The state does not fit, here or on another rank; nothing was changed.
        """
        state: dict[str, Any] = {}
        parts: dict[str, list[Any]] = {}
        with agreed(agree):
            unknown = sorted(set(names) - self._objects.keys())
            if unknown:
                raise ConfigError.of(
                    f"names of what is attached ({', '.join(self._objects)})", unknown, "attach() it first"
                )
            tensors = self._separate([tree, *trees], tensors)
            state = unflatten(tree, tensors)
            missing = sorted(set(names) - state.keys())
            if missing:
                raise StateMismatchError(
                    f"expected a state for {', '.join(missing)}, got {', '.join(sorted(state))}; "
                    "restore(only=[...]) loads a part, attach() under the names that were saved loads the rest"
                )
            for name in names:
                self._check(name, state)
            parted = [name for name in names if isinstance(self._objects[name], Parted)] if trees else []
            states = [unflatten(each, tensors) for each in trees] if parted else []
            parts = {name: [each[name] for each in states if name in each] for name in parted}
        self._put(state, names, parts, agree)
        if "random" in names:
            _load(self._objects["random"], state["random"])  # again: a loader that was asked for its state has drawn
            # The undisturbed run drew its loader's seed when the epoch began: the one drawn by the rest does not count.
            generator = torch.get_rng_state()
            for name in names:
                target = self._objects[name]
                if isinstance(target, Resumed):
                    target.at_resume(lambda: torch.set_rng_state(generator))

    def _check(self, name: str, state: dict[str, Any]) -> None:
        """Raises a StateMismatchError if one object's state does not fit; gives a module's state its names."""
        target = self._objects[name]
        try:
            if isinstance(target, torch.nn.Module):
                own = target.state_dict()
                state[name] = renamed(own, state[name])
                check_module(name, own, state[name], own_ways(target))
            elif isinstance(target, torch.optim.Optimizer):
                _check_optimizer(name, target, state[name])
            elif isinstance(target, StatefulLoader):
                target.check(name, state[name])
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise refused(name, error) from error

    def _separate(self, trees: Sequence[Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the tensors; copies those that an object keeps and multiplies, to where PyTorch would allocate them.

        A matrix product or dot product of the same numbers differs in its last bits with their place in memory. Modules
        copy what they load, and most of PyTorch's optimizers use each number by itself.
        """
        exact = [
            name
            for name, target in self._objects.items()
            if not (kind_of(target) is torch.nn.Module or _is_elementwise(target))
        ]
        placed = {name for tree in trees for name in tensors_in(part_of(tree, exact))}
        return {
            name: tensor.clone() if name in placed and tensor.data_ptr() % _ALIGNED_BYTES else tensor
            for name, tensor in tensors.items()
        }

    def _put(
        self,
        state: Mapping[str, Any],
        names: Collection[str],
        parts: Mapping[str, Sequence[dict[str, Any]]],
        agree: Agree,
    ) -> None:
        """Loads what may still refuse first, and puts everything back if it does, here or on another rank."""
        kinds = {name: kind_of(self._objects[name]) for name in names}
        plain = [name for name in names if kinds[name] is torch.nn.Module]
        others = [name for name in names if name not in plain]
        others.sort(key=lambda name: kinds[name] is torch.optim.Optimizer)
        ways_back: dict[str, Callable[[], None]] = {}
        try:
            with agreed(agree):
                for name in others:
                    self._put_one(name, state[name], parts.get(name), ways_back)
            for name in plain:  # which fit, and need no copy of the model
                _load(self._objects[name], state[name])
        except Exception as error:
            _go_back(ways_back, error)
            raise

    def _put_one(
        self, name: str, state: Any, parts: Sequence[dict[str, Any]] | None, ways_back: dict[str, Callable[[], None]]
    ) -> None:
        """Adds the way back from loading one object, and loads it."""
        target = self._objects[name]
        try:
            ways_back[name] = way_back(target)
            groups = target.param_groups if isinstance(target, torch.optim.Optimizer) else []
            options = [set(group) for group in groups]
            if parts is not None and isinstance(target, Parted):
                target.load_state_dicts(parts)
            else:
                _load(target, state)
            if isinstance(target, torch.optim.Optimizer):
                _check_step(name, target, options)
        except ShadeError:
            raise
        except Exception as error:
            raise refused(name, error) from error


@contextmanager
def agreed(agree: Agree) -> Iterator[None]:
    """Reports to the other ranks, at the end, how it went here; an error is raised when they know."""
    try:
        yield
    except Exception as error:
        agree(error)
        raise
    agree(None)


def _go_back(ways_back: Mapping[str, Callable[[], None]], reason: Exception) -> None:
    """Takes all ways back; raises a StateMismatchError if an object refuses even the state that it had."""
    refused = []
    for name, put_back in ways_back.items():
        try:
            put_back()
        except Exception as error:  # noqa: BLE001  # the others are put back all the same
            refused.append(f"{name!r} does not take back the state that it had ({type(error).__name__}: {error})")
    if refused:
        raise StateMismatchError(f"{reason}; {'; '.join(refused)}: build it again before you use it") from reason


def way_back(target: Any) -> Callable[[], None]:
    """Returns what gives an object the state that it has now."""
    if isinstance(target, StatefulLoader):
        return target.way_back()
    if isinstance(target, torch.nn.Module) and not isinstance(target, torch.jit.ScriptModule):
        return _way_back_of_module(target)
    own = target.state_dict()
    own = own if kind_of(target) is torch.optim.Optimizer else copy.deepcopy(own)
    return lambda: _load(target, own)


def _way_back_of_module(module: torch.nn.Module) -> Callable[[], None]:
    # Not by its state: some modules do not take what they write.
    parts = [(part, dict(vars(part))) for part in module.modules()]
    holders = [each for _, attributes in parts for each in attributes.values() if isinstance(each, dict | list | set)]
    contents = [copy.copy(each) for each in holders]
    extra = [(part, copy.deepcopy(part.get_extra_state())) for part, _ in parts if _has_extra_state(part)]
    tensors = [(each, each.detach().clone()) for each in (*module.parameters(), *module.buffers()) if not is_lazy(each)]

    @torch.no_grad()
    def undo() -> None:
        for part, attributes in parts:
            vars(part).clear()
            vars(part).update(attributes)
        for holder, content in zip(holders, contents, strict=True):
            holder.clear()
            (holder.extend if isinstance(holder, list) else holder.update)(content)
        for tensor, saved in tensors:
            if tensor.shape == saved.shape:
                tensor.copy_(saved)
            else:
                tensor.data = saved
        for part, state in extra:
            part.set_extra_state(state)

    return undo


def _has_extra_state(part: torch.nn.Module) -> bool:
    return not is_torchs(part, "get_extra_state") and not is_torchs(part, "set_extra_state")


_ALIGNED_BYTES: Final = 64
"""Where PyTorch's allocator begins a tensor on the CPU."""


def _is_elementwise(target: object) -> bool:
    """Returns whether it is one of PyTorch's own optimizers, and none that makes products of its state."""
    is_own = kind_of(target) is torch.optim.Optimizer and is_torchs(target, "step")
    return is_own and not isinstance(target, torch.optim.LBFGS)


_CURE: Final = "build the model as it was saved; shade.checkpoint.load_weights(…, strict=False) takes what fits"
_TRAINED: Final = (torch.nn.Module, torch.optim.Optimizer)
_PARTS: Final = re.compile("/%[A-Za-z_]")
"""Matches where the name of a tensor ends and that of a part of it begins."""
_MOST_TORN: Final = 2
_WRAPPERS: Final = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module"})
"""Parts of a name that wrappers put there."""


def unwrapped(target: Any) -> Any:
    """Returns the module inside DistributedDataParallel, DataParallel and `torch.compile`; others as they are."""
    if isinstance(target, torch.nn.Module):
        inner = target._modules.get("_orig_mod")
        if isinstance(target, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            inner = target.module
        return target if inner is None else unwrapped(inner)
    return target


def plain_name(name: str) -> str:
    """Returns a parameter's name without what wrappers put there."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def renamed(own: Mapping[str, Any], saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a module's saved state under the names that the module has now.

    Args:
        own: The module's state.
        saved: What was saved.

    Returns:
        The saved state; names without a counterpart stay, as do all where it is not certain which belongs to which.
    """
    mine = {plain_name(name): name for name in own}
    if own.keys() == saved.keys() or len(mine) < len(own) or len({*map(plain_name, saved)}) < len(saved):
        return saved
    made = OrderedDict((mine.get(plain_name(name), name), value) for name, value in saved.items())
    # Versions of modules, by path. Of a wrapper and what it wraps, the longer path is what it wraps.
    versions = {plain_name(path): each for path, each in sorted(getattr(saved, "_metadata", {}).items())}
    paths = getattr(own, "_metadata", {})
    made._metadata = {path: versions[plain_name(path)] for path in paths if plain_name(path) in versions}  # type: ignore[attr-defined]
    return made


def own_ways(module: torch.nn.Module) -> tuple[str, ...] | None:
    """Returns the prefixes of the names that a module's parts load in ways of their own, which may give tensors other
    names and shapes; None if the module itself does."""
    if not is_torchs(module, "load_state_dict"):
        return None
    parts = module.named_modules(remove_duplicate=False)
    prefixes = tuple(f"{prefix}." for prefix, part in parts if not _loads_plainly(part))
    return None if "." in prefixes else prefixes


def _loads_plainly(part: torch.nn.Module) -> bool:
    """Whether a part of a module loads its own state as PyTorch's own do, and nothing else happens."""
    hooks = part._load_state_dict_pre_hooks or part._load_state_dict_post_hooks
    return not hooks and all(is_torchs(part, method) for method in ("_load_from_state_dict", "set_extra_state"))


def _untaken(module: torch.nn.Module, own: Mapping[str, Any]) -> list[str]:
    """Returns the names in a module's own state that its `load_state_dict` would refuse or miss."""
    ways = own_ways(module)
    if ways is None:
        return []
    taken = {key for key, _ in module.named_parameters(remove_duplicate=False)}
    for prefix, part in module.named_modules(remove_duplicate=False):
        kept = part._buffers.keys() - part._non_persistent_buffers_set
        taken |= {f"{prefix}.{key}" if prefix else key for key in kept if part._buffers[key] is not None}
    return sorted(key for key in own.keys() ^ taken if not key.startswith(ways))


def check_state(name: str, target: Any) -> None:
    """Raises a ConfigError if a module or an optimizer has a state that could not be saved, or not be restored."""
    if hasattr(target, "consolidate_state_dict"):
        raise ConfigError.of(
            f"{name!r} to have its whole state on every rank, or each rank's own",
            f"{type(target).__name__}, which collects it on one",
            "use the optimizer that it wraps, or shard with fully_shard and save with shade.checkpoint.dcp",
        )
    tensors = [*target.parameters(), *target.buffers()] if isinstance(target, torch.nn.Module) else []
    if isinstance(target, torch.optim.Optimizer) and not steppers(target):
        kind = type(target).__name__
        raise ConfigError.of(f"{name!r} to be an optimizer", f"{kind}, which has not called __init__", "attach another")
    if not isinstance(target, _TRAINED) or any(each.is_meta or is_lazy(each) for each in tensors):
        return
    try:
        own = target.state_dict()
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
        raise ConfigError.of(f"{name!r} to give its state", got, "mend that before it is attached") from error
    flatten({name: own})
    if isinstance(target, torch.nn.Module) and (names := _untaken(target, own)):
        logger.warning(
            "%r writes or lacks %s, which its load_state_dict does not take: restore_latest() will refuse the snapshot; "
            "load_weights(strict=False) takes the rest",
            *(name, ", ".join(names[:5])),
        )


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether a parameter or a buffer gets its shape from the first batch."""
    return isinstance(tensor, UninitializedTensorMixin)


def _params_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])


def check_module(
    name: str, own: Mapping[str, Any], saved: Mapping[str, Any], ways: tuple[str, ...] | None = ()
) -> None:
    """Raises StateMismatchError if a saved state does not fit a module, whose own state is given; ``ways`` are what
    `own_ways` returned: such parts find out themselves."""
    for key, tensor in own.items():
        if isinstance(tensor, torch.Tensor) and tensor.is_meta:
            raise StateMismatchError.of(f"memory for '{name}/{key}'", "meta", "call to_empty(device=...) first")
    if ways is None:
        return
    for said, keys in (("has no", own.keys() - saved.keys()), ("also has", saved.keys() - own.keys())):
        if listed := sorted(key for key in keys if not key.startswith(ways)):
            more = f" and {len(listed) - 5} more" if len(listed) > 5 else ""
            raise StateMismatchError(
                f"expected the parameters of this {name!r}, got a snapshot that {said} {', '.join(listed[:5])}{more}; "
                f"{_CURE}"
            )
    for key, tensor in own.items():
        if isinstance(tensor, torch.Tensor) and not key.startswith(ways):
            _check_tensor(f"{name}/{key}", tensor, saved[key])


def _check_tensor(name: str, own: torch.Tensor, saved: Any) -> None:
    if not isinstance(saved, torch.Tensor) or (own.shape, own.dtype) != (saved.shape, saved.dtype):
        got = f"{tuple(saved.shape)} {saved.dtype}" if isinstance(saved, torch.Tensor) else repr(saved)
        raise StateMismatchError(f"expected {name!r} of shape {tuple(own.shape)} {own.dtype}, got {got}; {_CURE}")


def steppers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Returns the optimizer, or those that it wraps, if it has not called the constructor that makes room for hooks."""
    if hasattr(optimizer, "_optimizer_step_pre_hooks"):
        return [optimizer]
    inner = [each for each in vars(optimizer).values() if isinstance(each, torch.optim.Optimizer)]
    return [each for wrapped in inner for each in steppers(wrapped)]


def is_torchs(target: object, method: str) -> bool:
    """Returns whether a method is PyTorch's own."""
    return str(getattr(type(target), method).__module__).startswith(("torch.nn.", "torch.optim.", "torch._dynamo."))


def kind_of(target: object) -> type:
    """Returns Module or Optimizer where loading does what PyTorch's own does; object for all that may do otherwise."""
    if isinstance(target, torch.optim.Optimizer):
        return torch.optim.Optimizer if is_torchs(target, "load_state_dict") else object
    if isinstance(target, torch.nn.Module) and own_ways(target) == ():
        own = target.state_dict()
        is_plain = all(type(each) in (torch.Tensor, torch.nn.Parameter) for each in own.values())
        return torch.nn.Module if is_plain and not _untaken(target, own) else object
    return object


def refused(name: str, error: Exception) -> StateMismatchError:
    return StateMismatchError(
        f"expected a state that {name!r} takes, got one that it refuses ({type(error).__name__}: {error}); "
        "build it as it was when it was saved, or restore(only=[...]) without it"
    )


def _load(target: Any, state: Any) -> None:
    """Loads a state; an optimizer's tensors keep the type that they were saved in, which PyTorch would convert."""
    target.load_state_dict(state)
    if isinstance(target, torch.optim.Optimizer) and kind_of(target) is torch.optim.Optimizer:
        params = [param for group in target.param_groups for param in group["params"]]
        for number, entry in state["state"].items():
            param = params[number] if isinstance(number, int) else number
            loaded = target.state[param]
            loaded.update({key: _as_saved(loaded[key], value) for key, value in entry.items() if key in loaded})


def _as_saved(loaded: Any, saved: Any) -> Any:
    """Returns a part of an optimizer's state in the saved type."""
    if isinstance(saved, dict):
        return {key: _as_saved(loaded[key], value) for key, value in saved.items()}
    if isinstance(saved, (list, tuple)) and type(saved) is type(loaded) and len(saved) == len(loaded):
        return type(saved)(_as_saved(one, other) for one, other in zip(loaded, saved, strict=True))
    if not isinstance(saved, torch.Tensor) or not isinstance(loaded, torch.Tensor):
        return loaded
    return loaded if loaded.dtype is saved.dtype else saved.to(loaded.device)


def _check_step(name: str, optimizer: torch.optim.Optimizer, options: Sequence[Collection[str]]) -> None:
    """Raises a StateMismatchError if the next step would miss an option, or a part of the state.

    One step of the same optimizer on a tensor of zeros finds which parts a step needs.
    """
    for group, known in zip(optimizer.param_groups, options, strict=True):
        missing = sorted(getattr(optimizer, "defaults", {}).keys() & known - group.keys())
        if missing:
            raise _other_optimizer(name, optimizer, f"without {', '.join(missing)}")
        states = [(param.dim(), optimizer.state[param]) for param in group["params"] if optimizer.state.get(param)]
        needed = {num_dims: _parts_of(optimizer, group, num_dims) for num_dims in {each[0] for each in states}}
        for num_dims, state in states:
            if lacking := sorted(needed[num_dims] - state.keys()):
                raise _other_optimizer(name, optimizer, f"with {', '.join(map(str, state))}, without {lacking[0]}")


def _parts_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], num_dims: int) -> set[str]:
    """Returns the names of what an optimizer keeps for a parameter; none where that cannot be found out."""
    if not _is_elementwise(optimizer):
        return set()
    stand_in = torch.zeros([2] * num_dims)
    stand_in.grad = torch.zeros_like(stand_in)
    probe = copy.copy(optimizer)
    probe.state = defaultdict(dict)
    probe.param_groups = [{**group, "params": [stand_in], "capturable": False, "fused": None}]
    try:
        with torch.no_grad():
            inspect.unwrap(type(probe).step)(probe)  # around it, PyTorch calls the script's hooks of every optimizer
    except Exception:  # noqa: BLE001  # one that needs another kind of gradient, or of tensor
        return set()
    return {key for key, value in probe.state[stand_in].items() if value is not None}


def _other_optimizer(name: str, optimizer: torch.optim.Optimizer, got: str) -> StateMismatchError:
    return StateMismatchError(
        f"expected a state of {type(optimizer).__name__} for {name!r}, got one {got}; "
        "use the optimizer that was saved, or restore(only=[...]) without it"
    )


def _check_optimizer(name: str, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    own = [len(group["params"]) for group in optimizer.param_groups]
    theirs = [len(group["params"]) for group in saved["param_groups"]]
    if own != theirs:
        raise StateMismatchError(
            f"expected {name!r} with parameter groups of {own}, got {theirs}; "
            "build the optimizer over the same parameters in the same groups"
        )
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, entry in saved["state"].items():
        for key, value in entry.items():
            is_alike = key in _SHAPED and isinstance(value, torch.Tensor)
            if is_alike and value.shape != params[number].shape:
                raise StateMismatchError(
                    f"expected '{name}/state/{number}/{key}' of shape {tuple(params[number].shape)}, got "
                    f"{tuple(value.shape)}; build the optimizer over the same parameters"
                )
