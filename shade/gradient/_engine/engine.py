"""GradientEngine replaces ``optimizer.step()`` in a data-parallel loop whose link is slow.

::

    optimizer = SparseSGD(model.parameters(), lr=0.1, momentum=0.9)
    with GradientEngine(model, optimizer, density=0.01) as engine:
        for images, labels in loader:
            engine.num_samples = len(images)      # the weight of this rank's gradient
            loss(model(images), labels).backward()
            engine.step()                         # instead of optimizer.step() and zero_grad()
            scheduler.step()
        engine.finish()                           # before an evaluation, a snapshot by hand, the end

``p.grad`` cannot be read or changed between the backward pass and the end of the step, and is None afterwards. A script
that reads, changes or takes back its rank's own gradients goes backward inside `GradientEngine.accumulate`: those leave
at `GradientEngine.step`.

* **Staleness** 1: `step` applies the previous step's gradient, while this one's is exchanged behind the next forward
  and backward; the first step applies nothing, `finish` the last.
* Parameters that are **frozen** at construction keep rank 0's values; after one is unfrozen, make a new engine. A
  parameter without a gradient in a step counts as zero on this rank; other ranks' gradients count. Without one on any
  rank, it takes no step, as in PyTorch.
* **Errors** are raised by `step` and `finish` on every rank, with weights and residuals as before the step. Training
  may continue after `NonFiniteGradientError` and `PayloadError`. After `PeerLostError` the group is lost; only an
  `ElasticEngine` continues with the remaining ranks.

Invariant: all ranks hold the same weights, bit for bit, after every step. What each rank chose plus its residuals is
the sum of its gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shade.errors import ConfigError, NonFiniteGradientError, StateMismatchError, refused_as
from shade.gradient._comm.sparse_all_reduce import PROTOCOL
from shade.gradient._comm.step import GradientStep, StepState
from shade.gradient._comm.topology import FlatTopology, NodeTopology, Topology
from shade.gradient._comm.transport import Transport
from shade.gradient._compress.bucket import BUCKET_BYTES, plan_buckets
from shade.gradient._compress.compressor import Sparse
from shade.gradient._compress.correction import Correction
from shade.gradient._engine.bucket_state import EngineState, make_bucket_states
from shade.gradient._engine.consistency import EVERY, Consistency
from shade.gradient._engine.density import DensityPlan, WarmUp, check_decision, plain_decision, read_decision
from shade.gradient._engine.gradient_hooks import GradientHooks, LossScale, is_held
from shade.gradient._engine.meter import Meter
from shade.gradient._engine.pipeline import GradientPipeline
from shade.gradient._engine.replica import (
    average_buffers,
    broadcast_weights,
    check_all_known,
    check_none_refuses,
    check_same_setup,
)
from shade.gradient._optim.base import SparseOptimizer, corrections_of, plain_groups
from shade.rank_group import TIMEOUT_SECONDS
from shade.types import Decision, StepReport


class GradientEngine:
    """One rank's part in a data-parallel training. The constructor, `step` and `finish` are collective; a context
    manager.

    Args:
        model: Any module; all ranks start with rank 0's parameters and buffers.
        optimizer: One of `shade.gradient.optim` over its parameters.
        compressor: Name in `shade.gradient.COMPRESSORS`.
        density: Kept fraction of the gradient, or a `WarmUp` of it.
        quantiser: Name in `shade.gradient.QUANTISERS`.
        staleness: 0 or 1: steps by which an update may be late.
        local_size: Ranks in each node, for dense sums inside nodes; 1: no sums inside nodes.
        clip_norm: Largest norm of the merged gradient; None: no limit.
        correction: Applied to every rank's own gradient (`shade.gradient.correction`), for `SparseSGD` without
            momentum. `LocalAdamW` has its own.
        scaler: For mixed precision; the script calls only ``scaler.scale(loss)``, the engine does the rest.
        group: The ranks that train together; None: all.
        timeout_seconds: Longest silence of a rank in an exchange.
        bucket_bytes: The largest size of a bucket that holds more than one parameter.
        seed: For the compressors' random choices; the same on every rank.
        generation: Of the membership.
        check_every: Steps between two comparisons of all ranks' weights.

    Raises:
        ConfigError: An argument is out of range, or differs between ranks; raised on all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: SparseOptimizer,
        *,
        compressor: str = "threshold-v",
        density: float | WarmUp = 0.01,
        quantiser: str = "bf16",
        staleness: int = 0,
        local_size: int = 1,
        clip_norm: float | None = None,
        correction: Correction | None = None,
        scaler: torch.amp.GradScaler | None = None,
        group: dist.ProcessGroup | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        bucket_bytes: int = BUCKET_BYTES,
        seed: int = 0,
        generation: int = 0,
        check_every: int = EVERY,
    ) -> None:
        self._model, self._optimizer, self._staleness, self._clip_norm = model, optimizer, staleness, clip_norm
        self._seed, self._check_every = seed, check_every
        self._settings: dict[str, Any] = {
            "protocol": PROTOCOL,
            "compressor": compressor,
            "quantiser": quantiser,
            "staleness, local_size, seed, check_every": [staleness, local_size, seed, check_every],
            "optimizer, scaler": [type(optimizer).__name__, LossScale(scaler).skips],
        }
        self._group_settings: dict[str, Any]
        self._group_settings = {"group": group, "timeout_seconds": timeout_seconds, "generation": generation}
        refusal: Exception | None = None
        try:
            _check_arguments(model, optimizer, staleness)
            warm_up = density if isinstance(density, WarmUp) else WarmUp(density)
            corrections = corrections_of(optimizer, correction, clip_norm)
            names = {parameter: name for name, parameter in model.named_parameters()}
            self._buckets = plan_buckets(optimizer.param_groups, names, bucket_bytes)
            self._settings["density"] = [warm_up.density, warm_up.num_steps, warm_up.first_density]
            self._settings["clip_norm, corrections"] = [clip_norm, *map(repr, corrections)]
        except Exception as error:  # noqa: BLE001
            # Raised only once the others know it, or they would wait for this rank.
            refusal, self._buckets = error, []
        # The check has a group of its own, because the exchange thread may be using the first one.
        world, check_transport = self._connect("gradients"), self._connect("looks")
        self._synchronise(world, refusal)
        topology: Topology = FlatTopology(world) if local_size == 1 else NodeTopology(world, local_size)
        self._bucket_states = make_bucket_states(topology, self._buckets, compressor, quantiser, corrections)
        self._attach(topology, check_transport)
        self._plan, self._scale = DensityPlan(warm_up, staleness), LossScale(scaler)
        self._meter = Meter(world.rank, sum(each.feedback.size for each in self._bucket_states))
        self._gradient_hooks = GradientHooks(self._bucket_states, optimizer, self._scale)
        self._trained = [
            (module, name, parameter)
            for module in model.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.requires_grad
        ]
        """The places in which the model keeps its parameters."""
        self._is_closed = False
        self._proposal: Decision | None = None
        """For the step after the open one."""
        self._num_samples = 1
        self._late: GradientStep | None = None
        """The step whose result is still to be applied."""
        self._settled: GradientStep | None = None
        """The last step that has ended, in success or failure."""
        self._applied = (-1, 0.0)
        """The last applied step, and its norm."""
        self._stepped_at = time.perf_counter()
        """When the last step began to be applied; from then until the next step this rank works for itself."""
        self._open = self._begin(0)
        self._hook: Any = model.register_load_state_dict_post_hook(lambda *_: self._refresh())  # type: ignore[no-untyped-call]

    # ── the training loop ───────────────────────────────────────────────────────────────────────────────────────────

    @property
    def num_samples(self) -> int:
        """Samples that this rank's gradient is the mean of; its weight. Set it before the backward pass."""
        return self._num_samples

    @num_samples.setter
    def num_samples(self, value: int) -> None:
        if value < 0:
            raise ConfigError.of("num_samples ≥ 0", value, "0 gives this rank no weight")
        if not self._open.is_untouched:
            raise ConfigError.of("num_samples before the backward pass", "after it", "set it when the batch is drawn")
        self._num_samples = self._open.num_samples = value

    def accumulate(self) -> AbstractContextManager[None]:
        """Returns a context whose backward passes only add up; the last one of a step goes outside.

        Their gradients are summed in ``p.grad``, as usual in PyTorch: divide the loss by the number of passes for a
        mean. If the last one stands inside too, all leave at `step`, which then takes what the script has left or put
        there. They are this rank's own: a norm is not that of all ranks' mean, which ``clip_norm`` limits, and a
        scaler's are still scaled.
        """
        return self._gradient_hooks.accumulate()

    def step(self) -> None:
        """Ends this step's backward pass and applies the due gradient: this step's, or the previous one's.

        Raises:
            ConfigError: The script did something to parameters that this engine would not exchange. The step is
                dropped on all ranks, and the others raise `GradientError` with this message.
            NonFiniteGradientError: A rank's gradient holds NaN or infinity, and there is no scaler. The step is
                dropped.
            PayloadError: Ranks are not in the same step, or a payload arrived damaged. The residuals keep what was
                chosen.
            PeerLostError: A rank is gone or silent. The residuals keep what was chosen.
            GradientError: Another rank refused the step or failed; the message has its error.
        """
        self._check_open()
        work = self._open
        refusal = _refusal_of(self._check_parameters, lambda: self._gradient_hooks.check_none_taken_back(work))
        if refusal is not None:
            self._gradient_hooks.refuse(work, refusal)
            self._open = self._begin(work.step + 1)
            raise refusal
        work.costs.compute_seconds = time.perf_counter() - self._stepped_at
        self._stepped_at = time.perf_counter()
        self._gradient_hooks.seal(work)
        due, self._late = (work, None) if self._staleness == 0 else (self._late, work)
        # Schedulers check for a step of the optimizer, and with staleness 1 the first step applies none.
        self._optimizer._opt_called = True
        try:
            if due is not None:
                self._settle(due)
        finally:
            self._open = self._begin(work.step + 1)

    def finish(self) -> None:
        """Applies the last gradient, flushes lagging weights, averages buffers. Collective; raises as `step`."""
        self._check_open()
        check_none_refuses(self._check_transport, _refusal_of(self._check_between_steps, self._check_parameters))
        due, self._late = self._late, None
        if due is not None:
            self._settle(due)
        self._optimizer.flush()
        average_buffers(self._topology.world, self._model)

    # ── decisions and reports ───────────────────────────────────────────────────────────────────────────────────────

    def propose(self, decision: Decision) -> None:
        """Proposes a density and batch sizes for all ranks; they take effect at the same step on every rank.

        Args:
            decision: Takes effect at its ``effective_step``, or at the first later step that all ranks can reach.

        Raises:
            ConfigError: This is not rank 0, or a value is out of range.
        """
        check_decision(decision, self._topology.world.rank, self._topology.world.world_size)
        if self._open.is_untouched:
            self._open.proposal, self._proposal = decision, None
        else:
            # The open step's counts may have left: the proposal travels with the next step.
            self._proposal = decision

    @property
    def batch_size(self) -> int | None:
        """The samples that rank 0 decided for this rank in the coming step; None: no decision."""
        decision = self._plan.at(self._open.step)
        return decision.batch_sizes[self._topology.world.rank] if decision and decision.batch_sizes else None

    @property
    def density(self) -> float:
        """Kept fraction in the coming step."""
        return self._open.density

    @property
    def step_count(self) -> int:
        """Steps taken; with staleness 1 the last one is applied by the next, or by `finish`."""
        return self._open.step

    def report(self) -> StepReport | None:
        """Returns the cost of the last ended step on this rank; None before the first."""
        return self._meter.latest

    @property
    def counts(self) -> dict[str, float]:
        """Totals of this process by name, the ``gradient_…`` counters of the metrics."""
        return dict(self._meter.totals)

    # ── state ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's residuals, late gradient and plan, between two steps. The model holds the weights."""
        self._check_between_steps()
        if self._late is not None:
            self._late.wait(StepState.MERGED)
        self._pipeline.reclaim()
        proposal = self._proposal or self._open.proposal
        return {
            **self._states.state_dict(self._late),
            "proposal": None if proposal is None else plain_decision(proposal),
            "step": self._open.step,
            "plan": self._plan.state_dict(),
            "scaling": self._scale.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads this rank's `state_dict`. From another rank's (a rank that joins) it takes all but the residuals.

        Args:
            state: Of an engine over the same model.

        Raises:
            StateMismatchError: It does not fit; nothing was changed.
        """
        self.load_state_dicts([state])

    @refused_as(StateMismatchError, "what GradientEngine.state_dict() returned", "pass that")
    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Loads the states of all ranks of a world that may have had another size.

        Args:
            states: Of all previous ranks, in any order; the same on every rank.

        Raises:
            StateMismatchError: They do not fit; nothing was changed.
        """
        self._check_between_steps()
        if not states:
            raise StateMismatchError.of("at least one state", "none", "pass what state_dict() returned")
        late = self._states.load_state_dicts(states)
        self._plan.load_state_dict(states[0]["plan"], self._topology.world.world_size)
        self._scale.load_state_dict(states[0]["scaling"])
        proposal = states[0]["proposal"] if self._topology.world.rank == 0 else None
        self._proposal = None if proposal is None else read_decision(proposal)
        self._open.abandon()
        self._late = late
        self._open = self._begin(int(states[0]["step"]))
        self._refresh()

    def close(self) -> None:
        """Ends the threads and frees the group; drops a step in progress. Safe to call twice."""
        if not self._is_closed:
            self._is_closed = True
            self._hook.remove()
            self._gradient_hooks.close()
            self._detach()

    def __repr__(self) -> str:
        world, num_parameters = self._topology.world, sum(bucket.size for bucket in self._buckets)
        shown = [
            f"{num_parameters:,} parameters in {len(self._buckets)} buckets",
            f"{self._settings['compressor']} at density {self.density:g}",
            f"quantiser {self._settings['quantiser']}",
            f"staleness {self._staleness}",
            f"rank {world.rank} of {world.world_size}",
            f"step {self.step_count}",
            f"{self._meter.totals['gradient_bytes_sent'] / 1e6:,.1f} MB sent",
            *(["closed"] if self._is_closed else []),
        ]
        return f"<{type(self).__name__} of {', '.join(shown)}>"

    def __enter__(self) -> GradientEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ── private ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _connect(self, purpose: str) -> Transport:
        """Makes a group for one purpose. Collective."""
        # torch.distributed distinguishes groups by their order.
        del purpose
        return Transport(**self._group_settings)

    def _synchronise(self, world: Transport, refusal: Exception | None = None) -> None:
        """Gives this rank the same model, settings and weights as the group. Collective; raises a rank's refusal."""
        settings = self._settings | ({} if refusal else _optimizer_settings(self._optimizer))
        check_same_setup(world, self._model, self._buckets, settings, refusal)
        broadcast_weights(world, self._model, self._buckets)

    def _attach(self, topology: Topology, check_transport: Transport) -> None:
        """Builds what depends on the members of the group."""
        self._topology, self._check_transport = topology, check_transport
        self._consistency = Consistency(check_transport, self._optimizer, self._buckets, every=self._check_every)
        self._states = EngineState(topology, self._bucket_states)
        self._pipeline = GradientPipeline(topology, self._bucket_states, self._seed, is_late=self._staleness == 1)

    def _detach(self) -> None:
        """Closes what depends on the members of the group; drops a step in progress."""
        self._open.abandon()
        self._pipeline.close()
        self._topology.close()
        self._check_transport.close()

    def _begin(self, step: int) -> GradientStep:
        sizes = [len(each.bucket.parameters) for each in self._bucket_states]
        proposal, self._proposal = self._proposal, None
        work = GradientStep(step, sizes, self._plan.density(step), self._num_samples, self._late, proposal)
        self._pipeline.submit(work)
        self._gradient_hooks.work = work
        return work

    def _refresh(self) -> None:
        for bucket_state in self._bucket_states:
            bucket_state.bucket.refresh()

    def _settle(self, work: GradientStep) -> None:
        """Waits for a step's end and applies it, or raises its error on all ranks."""
        started = time.perf_counter()
        work.wait(StepState.MERGED)
        self._settled, self._stepped_at = work, time.perf_counter()
        work.costs.wait_seconds = self._stepped_at - started
        is_overflow = isinstance(work.error, NonFiniteGradientError) and self._scale.skips
        outcome = "steps" if work.error is None else "skipped_steps" if is_overflow else "failed_steps"
        self._meter.add(work, outcome)
        if work.error is not None and not is_overflow:
            # The newest proposal travels again; if the failed step has delivered it, that does no harm.
            self._proposal = self._proposal or self._open.proposal or work.proposal
            raise work.error
        self._scale.stepped(work.error is None)
        if work.decision is not None:
            self._plan.adopt(work.decision, work.step)
        if work.error is None:
            self._apply(work)
            self._consistency.after_step(work.step + 1)

    def _apply(self, work: GradientStep) -> None:
        """Applies the sparse step, on the training thread: no other place changes weights."""
        # The norm is rank 0's: a sum's last bit depends on the processor (decision 0017).
        factor = min(1.0, self._clip_norm / work.norm) if self._clip_norm and work.norm else 1.0

        def apply_merged() -> None:
            for bucket_state, merged, used in zip(self._bucket_states, work.merged, work.used, strict=False):
                scaled = merged if factor == 1.0 else Sparse(merged.indices_K, merged.values_K * factor, merged.size)
                self._optimizer.apply(bucket_state.bucket, scaled, used)

        # Within it, because hooks before and after a step expect the weights of before and after.
        self._optimizer.step(apply_merged)
        self._applied = work.step, work.norm

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigError.of("an open engine", "a closed one", "make a new one")

    def _check_parameters(self) -> None:
        """Takes in parameters that were bound to other memory; refuses what this engine would not exchange."""
        for module, name, parameter in self._trained:
            if module._parameters.get(name) is not parameter:
                cure = (
                    "replace them (load_state_dict with assign=True does) before the optimizer and the engine are made"
                )
                check_all_known(self._model, {each for *_, each in self._trained}, cure)
                break
        self._gradient_hooks.check_all_known()
        for bucket in self._buckets:
            bucket.rebind()

    def _check_between_steps(self) -> None:
        self._check_open()
        if not self._gradient_hooks.is_empty:
            raise ConfigError.of("to be between two steps", "gradients of a step", "call engine.step() first")


def _optimizer_settings(optimizer: SparseOptimizer) -> dict[str, Any]:
    return {
        "flush_every of the optimizer": optimizer.flush_every,
        **{f"optimizer group {number}": each for number, each in enumerate(plain_groups(optimizer.param_groups))},
    }


def _check_arguments(model: nn.Module, optimizer: SparseOptimizer, staleness: int) -> None:
    if staleness not in (0, 1):
        raise ConfigError.of("staleness 0 or 1", staleness, "more than one step late needs another algorithm")
    if not isinstance(optimizer, SparseOptimizer):
        cure = "use SparseSGD or LocalAdamW, or keep yours and register shade.sparse_hook with DDP"
        raise ConfigError.of("an optimizer of shade.gradient.optim", type(optimizer).__name__, cure)
    expected = "a model that nothing else exchanges gradients of"
    if any(isinstance(each, nn.parallel.DistributedDataParallel) for each in model.modules()):
        cure = "give the engine ddp.module, or keep DDP and register shade.sparse_hook with it"
        raise ConfigError.of(expected, "DistributedDataParallel", cure)
    if is_held(each for group in optimizer.param_groups for each in group["params"]):
        raise ConfigError.of(expected, "parameters of another engine", "close() that one first")


def _refusal_of(*checks: Callable[[], None]) -> ConfigError | None:
    try:
        for check in checks:
            check()
    except ConfigError as refusal:
        return refusal
    return None
