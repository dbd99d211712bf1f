"""The app state, which is all attached objects: how their state is captured and how it is loaded.

Any object with ``state_dict`` and ``load_state_dict`` may be attached. Modules and optimizers are treated specially:
state that data-parallel ranks hold alike is saved once, each rank a share of it; state that only an optimizer's step
changes may be copied while the training runs. All else is each rank's own and is copied at once. Loading checks first
and changes afterwards: a snapshot that does not fit leaves everything as it was, on every rank if it does not fit on
one. Names are those of the model without wrappers (DistributedDataParallel, DataParallel, `torch.compile`).
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import random
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import xxhash

from shade.checkpoint._capture.flatten import escape, flatten, has_dtensors, part_of, parts_in, tensors_in, unflatten
from shade.checkpoint._capture.layout import TensorSpec, bytes_of
from shade.checkpoint._capture.module_state import (
    check_module,
    has_pre_hooks,
    is_lazy,
    is_torchs,
    loads_all_plainly,
    own_ways,
    renamed,
    untaken,
    unwrapped,
    way_back_of,
)
from shade.checkpoint._capture.sharding import SavedDTensor, fitted, is_dtensor, placed, region_for
from shade.checkpoint._capture.stateful_loader import StatefulLoader
from shade.errors import ConfigError, ShadeError, StateMismatchError
from shade.types import Parted, Resumed, Stateful, StepCounting

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
        self._counting: list[StepCounting] = []

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
        self._counting += [
            target for target in taken.values() if isinstance(target, StepCounting) and target not in self._counting
        ]

    def count_step(self) -> None:
        """Tells the attached objects that count them that a step of training is done."""
        for target in self._counting:
            target.count_step()

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
    def epoch(self) -> int | None:
        """Returns the epoch of the first attached object that counts epochs, or whose sampler does, if any."""
        # A model may have an attribute of that name, which no restore sets.
        others = (each for each in self._objects.values() if not isinstance(each, _TRAINED))
        counting = [each for target in others for each in (target, getattr(target, "sampler", None))]
        counting.sort(key=lambda each: not hasattr(each, "set_epoch"))
        counts = (getattr(each, "epoch", None) for each in counting)
        return next((count for count in counts if isinstance(count, int)), None)

    def capture(self, rank: int, world_size: int) -> CapturedState:
        """Captures the state of all attached objects, without copying a tensor.

        A part that cannot be saved raises a ConfigError that names its path.
        """
        # The generators last: a loader may draw a seed when it is asked for its state.
        names = sorted(self._objects, key=lambda name: name == "random")
        state = {name: self._objects[name].state_dict() for name in names}
        # A parameter may have several names, and any other state of a module may change in a forward pass.
        params = {
            f"{escape(name)}/{escape(key)}": id(param)
            for name, module in self.modules.items()
            for key, param in module.named_parameters(remove_duplicate=False)
        }
        first: dict[int, str] = {}
        same = {path: first.setdefault(number, path) for path, number in params.items()}
        optimizers = tuple(f"{escape(name)}/" for name in self.optimizers)
        # Over a mesh of some ranks, as of a pipeline's stage, others may have something else under the same name.
        apart = tuple(f"{escape(name)}/" for name, each in self._objects.items() if _is_on_some(each, world_size))

        def is_trained(path: str) -> bool:
            return path.startswith(optimizers) or _PARTS.split(path)[0] in params

        def is_own(path: str) -> bool:
            return not (self._replicated and is_trained(path)) or path.startswith(apart)

        tree, tensors = flatten(state, rank=rank, is_own=None if world_size == 1 else is_own, same=same)
        steady = frozenset(name for name in tensors if is_trained(name.partition("@")[0]))
        if self._num_torn:
            held = {id(param) for each in self.optimizers.values() for param in _params_of(each)}
            steady = frozenset(name for name in steady if name.startswith(optimizers) or params.get(name) in held)
        return CapturedState(tree, tensors, steady if self._num_torn < _MOST_TORN else frozenset())

    def note_torn(self) -> None:
        """Learns that a steady tensor changed during its copy.

        From now on, what no attached optimizer holds is copied at once (an average of the weights, say, that a forward
        pass moves); after another time, all is.
        """
        self._num_torn += 1

    def forgettable(self, tree: Any, rank: int) -> Set[str]:
        """Returns the names of the tensors of a tree, and of those that a rank saved of its DTensors, whose memory may
        be reused once they are loaded: those that nothing but `torch.nn.Module.load_state_dict` itself gets, which
        copies them. Other objects may keep what they are given.
        """
        modules = self.modules
        copying = {
            (name, f"{prefix}.{key}" if prefix else key)
            for name, module in modules.items()
            if is_torchs(module, "load_state_dict")
            for prefix, part in module.named_modules(remove_duplicate=False)
            if is_torchs(part, "_load_from_state_dict") and not has_pre_hooks(part)
            for key in (*part._parameters, *part._buffers)
        }
        copied, kept = set[str](), set[str]()
        for name, node in zip(*part_of(tree, None)["dict"], strict=True):
            if name not in modules or "module_state" not in node:
                kept |= tensors_in(node) | parts_in(node, rank)
                continue
            for key, value in zip(*node["module_state"][:2], strict=True):
                to = copied if isinstance(key, str) and (name, key) in copying else kept
                to |= tensors_in(value) | parts_in(value, rank)
        return copied - kept

    def needed(
        self, tree: Any, tensors: Mapping[str, torch.Tensor], only: Collection[str] | None
    ) -> dict[str, range | None]:
        """Returns which parts of the DTensors of ``only`` these objects (None: all) this rank needs, by name, and the
        rows of each (None: all). Of ``tensors``, those parts need not be read yet."""
        found: dict[str, range | None] = {}

        def note(saved: SavedDTensor, own: Any, path: str) -> SavedDTensor:
            # What does not fit is found again when it is loaded, and said on all ranks.
            with contextlib.suppress(ShadeError):
                for name, rows in saved.needed(region_for(saved, own, path)[0]):
                    found[name] = _both(rows, found[name]) if name in found else rows
            return saved

        if has_dtensors(tree):
            state = unflatten(part_of(tree, only), tensors)
            for name in state.keys() & self._objects.keys():
                with contextlib.suppress(*_UNFIT):
                    own, saved = _in_place_of(state[name], self._objects[name])
                    fitted(saved, own, name, note)
        return found

    def left_out(self, tree: Any, attached: Collection[str]) -> list[str]:
        """Returns the names in a tree that nothing attached on any rank takes."""
        return sorted(str(name) for name in part_of(tree, None)["dict"][0] if name not in attached)

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
                self._check(name, state, is_split=has_dtensors(part_of(tree, [name])))
            parted = [name for name in names if isinstance(self._objects[name], Parted)] if trees else []
            states = [unflatten(part_of(each, parted), tensors) for each in trees] if parted else []
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

    def _check(self, name: str, state: dict[str, Any], *, is_split: bool) -> None:
        """Raises a StateMismatchError if one object's state does not fit; makes it what this rank's object takes."""
        target = self._objects[name]
        # What an object keeps and multiplies lies where `_separate` says.
        is_aligned = is_split and not _is_copied_or_elementwise(target)

        def take(saved: SavedDTensor, own: Any, path: str) -> Any:
            return placed(saved, own, path, is_aligned=is_aligned)

        try:
            if isinstance(target, torch.optim.Optimizer):
                _check_groups(name, target, state[name])
            if is_split or isinstance(target, _TRAINED):
                own, state[name] = _in_place_of(state[name], target)
                if is_split or _are_split(own):
                    state[name] = fitted(state[name], own, name, take)
            if isinstance(target, torch.nn.Module):
                check_module(name, own, state[name], own_ways(target))
            elif isinstance(target, torch.optim.Optimizer):
                _check_shapes(name, target, state[name])
            elif isinstance(target, StatefulLoader):
                target.check(name, state[name])
        except _UNFIT as error:
            raise refused(name, error) from error

    def _separate(self, trees: Sequence[Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the tensors; copies those that an object keeps and multiplies, to where PyTorch would allocate them.

        A matrix product or dot product of the same numbers differs in its last bits with their place in memory. Modules
        copy what they load, and most of PyTorch's optimizers use each number by itself.
        """
        exact = [name for name, target in self._objects.items() if not _is_copied_or_elementwise(target)]
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
        return way_back_of(target)
    own = target.state_dict()
    own = own if kind_of(target) is torch.optim.Optimizer else copy.deepcopy(own)
    return lambda: _load(target, own)


_ALIGNED_BYTES: Final = 64
"""Where PyTorch's allocator begins a tensor on the CPU."""


def _is_copied_or_elementwise(target: object) -> bool:
    """Returns whether it copies the state that it loads, or uses each number of it by itself."""
    return kind_of(target) is torch.nn.Module or _is_elementwise(target)


def _is_elementwise(target: object) -> bool:
    """Returns whether it is one of PyTorch's own optimizers, and none that makes products of its state."""
    is_own = kind_of(target) is torch.optim.Optimizer and is_torchs(target, "step")
    return is_own and not isinstance(target, torch.optim.LBFGS)


_TRAINED: Final = (torch.nn.Module, torch.optim.Optimizer)
_UNFIT: Final = (KeyError, IndexError, TypeError, AttributeError)
"""What goes wrong where a state is none of its kind."""
_PARTS: Final = re.compile("/%[A-Za-z_]")
"""Matches where the name of a tensor ends and that of a part of it begins."""
_MOST_TORN: Final = 2


def check_state(name: str, target: Any) -> None:
    """Raises a ConfigError if a module or an optimizer has a state that could not be saved, or not be restored."""
    if hasattr(target, "consolidate_state_dict"):
        raise ConfigError.of(
            f"{name!r} to have its whole state on every rank, or each rank's own",
            f"{type(target).__name__}, which collects it on one",
            "use the optimizer that it wraps, or shard with fully_shard",
        )
    parts = target.modules() if isinstance(target, torch.nn.Module) else ()
    if any(type(part).__module__.startswith("torch.distributed.fsdp.fully_sharded") for part in parts):
        got = "FullyShardedDataParallel, whose optimizer has flat parts of them"
        raise ConfigError.of(f"parameters of {name!r} that keep their names and shapes", got, "shard with fully_shard")
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
    if isinstance(target, torch.nn.Module) and (names := untaken(target, own)):
        logger.warning(
            "%r writes or lacks %s, which its load_state_dict does not take: restore_latest() will refuse its "
            "snapshots, and load_weights(strict=False) takes the rest",
            *(name, ", ".join(names[:5])),
        )


def _both(one: range | None, other: range | None) -> range | None:
    """Returns the rows from the first of either to the last; None: all."""
    if one is None or other is None:
        return None
    return range(min(one.start, other.start), max(one.stop, other.stop))


def _in_place_of(saved: Any, target: Any) -> tuple[Any, Any]:
    """Returns what an object has in the place of its saved state, and that under the names that it has now."""
    if isinstance(target, torch.optim.Optimizer) and all(isinstance(key, int) for key in saved["state"]):
        # A state that does not exist before the first step is split as its parameter is.
        return {"state": dict(enumerate(_params_of(target)))}, saved
    own = target.state_dict()
    return own, renamed(own, saved) if isinstance(target, torch.nn.Module) else saved


def _are_split(own: Mapping[Any, Any]) -> bool:
    """Returns whether a value, or a value's of an optimizer's state, is a DTensor."""
    values = (each for value in own.values() for each in (value.values() if isinstance(value, dict) else (value,)))
    return any(type(each) not in (torch.Tensor, torch.nn.Parameter) and is_dtensor(each) for each in values)


def _is_on_some(target: object, world_size: int) -> bool:
    """Returns whether a parameter of a module or an optimizer is a DTensor over fewer ranks than there are."""
    if isinstance(target, torch.optim.Optimizer):
        params = _params_of(target)
    else:
        params = target.parameters() if isinstance(target, torch.nn.Module) else iter(())
    split = (param for param in params if type(param) is not torch.nn.Parameter and is_dtensor(param))
    return any(param.device_mesh.size() < world_size for param in split)


def _params_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])


def steppers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Returns the optimizer, or those that it wraps, if it has not called the constructor that makes room for hooks."""
    if hasattr(optimizer, "_optimizer_step_pre_hooks"):
        return [optimizer]
    inner = [each for each in vars(optimizer).values() if isinstance(each, torch.optim.Optimizer)]
    return [each for wrapped in inner for each in steppers(wrapped)]


def kind_of(target: object) -> type:
    """Returns Module or Optimizer where loading does what PyTorch's own does; object for all that may do otherwise."""
    if isinstance(target, torch.optim.Optimizer):
        return torch.optim.Optimizer if is_torchs(target, "load_state_dict") else object
    return torch.nn.Module if isinstance(target, torch.nn.Module) and loads_all_plainly(target) else object


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


def _check_groups(name: str, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    own = [len(group["params"]) for group in optimizer.param_groups]
    theirs = [len(group["params"]) for group in saved["param_groups"]]
    if own != theirs:
        raise StateMismatchError(
            f"expected {name!r} with parameter groups of {own}, got {theirs}; "
            "build the optimizer over the same parameters in the same groups"
        )


def _check_shapes(name: str, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    params = list(_params_of(optimizer))
    for number, entry in saved["state"].items():
        for key, value in entry.items():
            is_alike = key in _SHAPED and isinstance(value, torch.Tensor)
            if is_alike and value.shape != params[number].shape:
                raise StateMismatchError(
                    f"expected '{name}/state/{number}/{key}' of shape {tuple(params[number].shape)}, got "
                    f"{tuple(value.shape)}; build the optimizer over the same parameters"
                )
