"""Trains what a script of the gradient plane says on real ranks, with the engine, the hook or DDP alone."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shade.errors import ShadeError
from shade.gradient import GradientEngine, SparseState, sparse_hook
from shade.gradient import optim as ours
from shade.gradient._kernels.build import prepare
from tests.differential.gradient_faults import FAULTS
from tests.differential.gradient_script import Script, has_books
from tests.differential.gradient_training import CLIP_NORM, SPARSE, Training, saved_and_read, weights_of
from tests.support.gradient_ranks import digest

SILENCE_SECONDS = 20.0


class RankTraining(Training):
    """What the rank trainings share: one rank's batches, and the books on its gradients."""

    def __init__(self, script: Script, rank: int) -> None:
        super().__init__(script)
        self.rank = rank
        self.digests: list[str] = []
        self.scales: list[float] = []
        self.given: dict[str, Tensor] = {}
        """The sum of this rank's own gradients."""
        self.largest: dict[str, float] = {}
        self.arrived: dict[str, Tensor] = {}
        """The sum of what came of all ranks' gradients."""

    def build(self, seed: int) -> None:
        super().build(seed + (self.rank if self.script.own_start else 0))
        self.wrap()
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient, name=name: self.keep_books(self.given, name, gradient))

    def wrap(self) -> None:
        """Makes what exchanges the gradients."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends what `wrap` made."""

    def no_exchange(self) -> AbstractContextManager[Any]:
        """The context of passes that only add up."""
        raise NotImplementedError

    def keep_books(self, book: dict[str, Tensor], name: str, gradient: Tensor) -> None:
        """Adds a gradient up, unless its step is dropped on all ranks."""
        if has_books(self.script) and (not self.script.infinite or self.script.infinite[0] != self.step):
            unscaled = gradient.detach().double() / self.scaler.get_scale()
            book[name] = book.get(name, 0) + unscaled
            self.largest[name] = max(self.largest.get(name, 0.0), float(unscaled.abs().max()))

    def mass(self) -> dict[str, tuple[Any, Any, float]]:
        """By parameter: what left this rank, what arrived of all ranks, and the largest gradient."""
        residuals, found = self.residuals(), {}
        for name, given in self.given.items():
            left = given - residuals[name].double().view_as(given)
            found[name] = left.numpy(), self.arrived.get(name, 0 * given).numpy(), self.largest[name]
        return found

    def residuals(self) -> dict[str, Tensor]:
        """By parameter."""
        raise NotImplementedError

    def backward(self) -> None:
        for number in range(self.script.passes):
            if self.script.samples(self.rank, self.step):
                with self.no_exchange() if self.is_inside(number) else contextlib.nullcontext():
                    self.go_back(self.scaler.scale(self.loss(self.called, self.rank, number)), number)

    def update(self) -> None:
        self.exchange_and_step()
        self.digests.append(digest(self.model))
        self.scales.append(self.scaler.get_scale())

    def exchange_and_step(self) -> None:
        """What follows a backward pass."""
        raise NotImplementedError

    def compiled(self, model: nn.Module) -> Any:
        """What the script calls."""
        return torch.compile(model, backend="aot_eager") if self.script.compile else model

    def happens_resume(self) -> None:
        self.resume(is_late=False)

    def happens_resume_late(self) -> None:
        self.resume(is_late=True)

    def state(self) -> dict[str, Any]:
        """The state of the engine or the hook."""
        raise NotImplementedError

    def load_state(self, state: dict[str, Any]) -> None:
        """Loads it."""
        raise NotImplementedError

    def resume(self, is_late: bool) -> None:
        """Builds all anew from what was saved, before the exchange is made or after it."""
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "scaler": self.scaler}
        states = {name: part.state_dict() for name, part in parts.items() if part is not None}
        states = saved_and_read({**states, "exchange": self.state()})
        self.close()
        wrap, self.wrap = self.wrap, lambda: None  # type: ignore[method-assign]
        self.build(self.script.seed + 100)
        self.scaler = self.make_scaler()
        if is_late:
            wrap()
        for name in states.keys() - {"exchange"}:
            getattr(self, name).load_state_dict(states[name])
        if not is_late:
            wrap()
        self.wrap = wrap  # type: ignore[method-assign]
        self.load_state(states["exchange"])


class EngineTraining(RankTraining):
    """With a `GradientEngine`."""

    engine: GradientEngine | None = None

    def make_optimizer(self) -> Any:
        kind = SPARSE.get(self.script.optimizer, ours.SparseSGD)
        optimizer = kind(self.groups(), **self.settings())
        if isinstance(optimizer, ours.SparseOptimizer):
            apply = optimizer.apply

            def spy(bucket: Any, sparse: Any, used: Any = None) -> None:
                views = bucket.views(torch.from_numpy(sparse.dense()))
                for name, view in zip(bucket.names, views, strict=True):
                    self.arrived[name] = self.arrived.get(name, 0) + view.double()
                apply(bucket, sparse, used)

            if has_books(self.script):
                optimizer.apply = spy  # type: ignore[method-assign]
        return optimizer

    def wrap(self) -> None:
        script = self.script
        trained = nn.parallel.DistributedDataParallel(self.model) if script.wrapped else self.model
        self.called = self.compiled(trained)
        self.engine = GradientEngine(
            trained,
            self.optimizer,
            compressor=script.compressor,
            density=script.density,
            quantiser=script.quantiser,
            staleness=script.staleness,
            local_size=script.local_size,
            clip_norm=CLIP_NORM if script.clip == "own" else None,
            scaler=self.scaler if script.scaler else None,
            timeout_seconds=SILENCE_SECONDS,
            bucket_bytes=script.bucket_bytes,
            check_every=script.check_every,
        )

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()

    def no_exchange(self) -> AbstractContextManager[Any]:
        assert self.engine is not None
        return self.engine.accumulate()

    def backward(self) -> None:
        assert self.engine is not None
        if self.script.sizes in ("weighed", "ends"):
            self.engine.num_samples = self.script.samples(self.rank, self.step)
        super().backward()

    def exchange_and_step(self) -> None:
        assert self.engine is not None
        if self.script.clip in ("norm", "value"):
            self.clip(list(self.model.parameters()))
        if self.script.scaler == "script":
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.engine.step()

    def finish(self) -> None:
        assert self.engine is not None
        self.engine.finish()

    def state(self) -> dict[str, Any]:
        assert self.engine is not None
        return self.engine.state_dict()

    def load_state(self, state: dict[str, Any]) -> None:
        assert self.engine is not None
        self.engine.load_state_dict(state)

    def residuals(self) -> dict[str, Tensor]:
        assert self.engine is not None
        found = {}
        for bucket_state, state in zip(self.engine._bucket_states, self.engine.state_dict()["residuals"], strict=True):
            bucket = bucket_state.bucket
            found |= dict(zip(bucket.names, bucket.views(torch.as_tensor(state["residual"])), strict=True))
        return found


class HookTraining(RankTraining):
    """With DDP, and `sparse_hook` unless the script is played for comparison."""

    state_: SparseState | None = None
    has_hook = True

    def wrap(self) -> None:
        script = self.script
        flags: dict[str, Any] = dict.fromkeys(script.ddp, True)
        self.ddp = nn.parallel.DistributedDataParallel(self.model, bucket_cap_mb=0.02, **flags)
        if self.has_hook:
            self.state_ = SparseState(
                self.ddp,
                compressor=script.compressor,
                density=script.density,
                quantiser=script.quantiser,
                scaler=self.scaler if script.scaler else None,
                timeout_seconds=SILENCE_SECONDS,
            )
            self.ddp.register_comm_hook(self.state_, sparse_hook)
        self.called = self.compiled(self.ddp)

    def close(self) -> None:
        if self.state_ is not None:
            self.state_.close()

    def around(self) -> AbstractContextManager[Any]:
        return self.ddp.join() if self.script.sizes == "ends" else contextlib.nullcontext()

    def is_over(self) -> bool:
        return not self.script.samples(self.rank, self.step)

    def no_exchange(self) -> AbstractContextManager[Any]:
        return self.ddp.no_sync()

    def backward(self) -> None:
        if self.state_ is not None and self.script.sizes == "weighed":
            self.state_.num_samples = self.script.samples(self.rank, self.step)
        super().backward()
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                self.keep_books(self.arrived, name, parameter.grad)

    def exchange_and_step(self) -> None:
        self.take_step()

    def finish(self) -> None:
        """Nothing is late."""

    def state(self) -> dict[str, Any]:
        return {} if self.state_ is None else self.state_.state_dict()

    def load_state(self, state: dict[str, Any]) -> None:
        if self.state_ is not None:
            self.state_.load_state_dict(state)

    def residuals(self) -> dict[str, Tensor]:
        assert self.state_ is not None
        kept = self.state_.state_dict()["kept"]
        return {name: each["residual"].clone() for name, each in kept.items()}


class DDPTraining(HookTraining):
    """With DDP alone."""

    has_hook = False


FACES: dict[str, type[RankTraining]] = {"engine": EngineTraining, "hook": HookTraining, "ddp": DDPTraining}


def train(script: Script, rank: int, face: str) -> dict[str, Any]:
    """Trains; what came of it, or of the attempt."""
    training = FACES[face](script, rank)
    found: dict[str, Any] = {"error": "", "is_named": False, "mass": {}, "repairs": 0}
    try:
        training.run()
        if has_books(script) and face != "ddp":
            found["mass"] = training.mass()
        if isinstance(training, EngineTraining) and training.engine is not None:
            found["repairs"] = training.engine._consistency.num_repairs
    except Exception as error:  # noqa: BLE001 - the judge decides what it means
        found |= {"error": f"{type(error).__name__}: {error}", "is_named": isinstance(error, ShadeError)}
        found["traceback"] = traceback.format_exc()
    with contextlib.suppress(Exception):
        training.close()
    if hasattr(training, "model"):
        found["weights"] = weights_of(training.model)
        found["digests"] = [*training.digests, digest(training.model)]
    return found | {"steps": training.step, "has_begun": bool(training.snapshots), "scales": training.scales}


def serve(rank: int, connection: Connection) -> None:
    """Trains what arrives, until nothing does."""
    torch.set_num_threads(1)
    import torch._dynamo as compiler  # DDP and checkpointing import it in the first step; it takes seconds

    prepare()
    group: tuple[int, str] = (0, "")
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        connection.send("ready")
        while True:
            script, face, fault, asked = connection.recv()
            if asked != group:
                if dist.is_initialized():
                    with contextlib.suppress(Exception):
                        dist.destroy_process_group()
                group = asked
                timeout = timedelta(seconds=SILENCE_SECONDS)
                dist.init_process_group(
                    "gloo", init_method=f"file://{asked[1]}", rank=rank, world_size=asked[0], timeout=timeout
                )
            if script.compile:
                compiler.reset()
            with planted(fault):
                found = train(script, rank, face)
            connection.send(found)


@contextlib.contextmanager
def planted(fault: str) -> Iterator[None]:
    """A known fault, for as long as the context lasts."""
    with FAULTS[fault]() if fault else contextlib.nullcontext():
        yield
