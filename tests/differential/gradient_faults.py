"""Known faults of the gradient plane, planted again in a rank's process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import nn

from shade.gradient import GradientEngine
from shade.gradient._comm import sparse_all_reduce
from shade.gradient._compress.bucket import Bucket
from shade.gradient._compress.compressor import Sparse
from shade.gradient._compress.error_feedback import ErrorFeedback
from shade.gradient._engine import comm_hook, engine, gradient_hooks
from shade.gradient._engine.bucket_state import EngineState
from shade.gradient._engine.gradient_hooks import GradientHooks, LossScale
from shade.gradient._optim.base import SparseOptimizer

# ── those that were in the code ─────────────────────────────────────────────────────────────────────────────────────


def hook_sends_for_unused_parameters() -> AbstractContextManager[Any]:
    """What is picked for a parameter that nobody used leaves the residual, and DDP throws it away."""
    return patch.object(comm_hook, "_unused", lambda *_: [])


def scaled_gradients_are_applied_after_accumulate() -> AbstractContextManager[Any]:
    """The scale was read when a gradient moved early; none does if every pass stands inside `accumulate()`."""
    seal = GradientHooks.seal

    def put(self: GradientHooks, work: Any, number: int, position: int, parameter: Any) -> None:
        scale = self._scale.unscale if is_early[0] else 1.0
        work.scale = scale if work.is_untouched else work.scale
        work.put(number, position, gradient_hooks._gradient_of(parameter))

    is_early = [True]

    def sealed(self: GradientHooks, work: Any) -> None:
        is_early[0] = False
        try:
            seal(self, work)
        finally:
            is_early[0] = True

    stack = contextlib.ExitStack()
    stack.enter_context(patch.object(GradientHooks, "_put", put))
    stack.enter_context(patch.object(GradientHooks, "seal", sealed))
    return stack


def an_added_group_is_stepped_locally() -> AbstractContextManager[Any]:
    """`add_param_group` after the engine was made: each rank applied its own gradient."""
    return patch.object(GradientHooks, "check_all_known", lambda self: None)


def rebound_weights_are_left_behind() -> AbstractContextManager[Any]:
    """Steps went into memory that no parameter had any more."""
    rebind = Bucket.rebind

    def once(self: Bucket) -> None:
        if not hasattr(self, "_is_bound"):
            self._is_bound = True  # type: ignore[attr-defined]
            rebind(self)

    return patch.object(Bucket, "rebind", once)


def a_wrapped_model_is_accepted() -> AbstractContextManager[Any]:
    """Over DDP gradients were exchanged twice."""

    class Nothing:
        pass

    parallel = SimpleNamespace(DistributedDataParallel=Nothing)
    return patch.object(engine, "nn", SimpleNamespace(parallel=parallel, Module=nn.Module))


def clipping_between_does_nothing() -> AbstractContextManager[Any]:
    """Moved gradients were None, so `clip_grad_norm_` found none."""
    take = GradientHooks._take

    def taken(self: GradientHooks, parameter: Any) -> None:
        take(self, parameter)
        if not self._is_accumulating:
            parameter.grad = None

    return patch.object(GradientHooks, "_take", taken)


# ── others of their kind ────────────────────────────────────────────────────────────────────────────────────────────


def a_large_residual_is_dropped() -> AbstractContextManager[Any]:
    """Forgets what one bucket does not send."""
    compress = ErrorFeedback.compress

    def forgetful(self: ErrorFeedback, *given: Any) -> Sparse:
        chosen = compress(self, *given)
        if self.size > 10_000:
            self._residual_D[:] = 0
        return chosen

    return patch.object(ErrorFeedback, "compress", forgetful)


def the_mean_counts_one_rank_more() -> AbstractContextManager[Any]:
    """Off by one in averaging."""
    merge = sparse_all_reduce.merge

    def merged(parts: Any, weights: Any) -> Sparse:
        found = merge(parts, weights)
        share = np.float32(len(parts) / (len(parts) + 1))
        return Sparse(found.indices_K, found.values_K * share, found.size)

    return patch.object(sparse_all_reduce, "merge", merged)


def samples_do_not_weigh() -> AbstractContextManager[Any]:
    """All ranks count alike, whatever num_samples says."""
    merge = sparse_all_reduce.merge
    return patch.object(sparse_all_reduce, "merge", lambda parts, weights: merge(parts, [1.0] * len(parts)))


def every_bucket_is_stepped_as_the_first_group() -> AbstractContextManager[Any]:
    """Momentum, learning rate and decay of a wrong group."""
    init = Bucket.__init__
    return patch.object(Bucket, "__init__", lambda self, *given, **named: init(self, *given, **{**named, "group": 0}))


def residuals_are_lost_when_a_state_is_loaded() -> AbstractContextManager[Any]:
    """Error feedback begins anew."""
    load = EngineState.load_state_dicts

    def loaded(self: EngineState, states: Any) -> Any:
        late = load(self, states)
        for each in self._bucket_states:
            each.feedback.residual_D[:] = 0
        return late

    stack = contextlib.ExitStack()
    stack.enter_context(patch.object(EngineState, "load_state_dicts", loaded))
    stack.enter_context(patch.object(comm_hook.ResidualStore, "load_state_dict", lambda self, state: None))
    return stack


def the_late_gradient_is_lost_at_the_end() -> AbstractContextManager[Any]:
    """`finish` forgets what staleness 1 still has to apply."""
    finish = GradientEngine.finish

    def finished(self: GradientEngine) -> None:
        if self._late is not None:
            self._late.wait(engine.StepState.MERGED)
            self._late = None
        finish(self)

    return patch.object(GradientEngine, "finish", finished)


def master_weights_do_not_see_what_a_script_changes() -> AbstractContextManager[Any]:
    """After `load_state_dict` or a change in place the next step puts the old weights back."""
    stack = contextlib.ExitStack()
    stack.enter_context(patch.object(Bucket, "refresh", lambda self: None))
    stack.enter_context(patch.object(Bucket, "take_changes", lambda self: None))
    return stack


def accumulated_gradients_are_stepped_alone() -> AbstractContextManager[Any]:
    """Between accumulated passes p.grad is a rank's own sum, which `optimizer.step` took."""
    return patch.object(SparseOptimizer, "_check_gradients", lambda self: None)


def momentum_moves_what_was_frozen() -> AbstractContextManager[Any]:
    """A parameter without a gradient on any rank went on by momentum and decay."""
    apply = SparseOptimizer.apply
    return patch.object(SparseOptimizer, "apply", lambda self, bucket, sparse, used=None: apply(self, bucket, sparse))


def int8_rounds_twice() -> AbstractContextManager[Any]:
    """What the hook holds back was taken out after rounding, so that neighbours got another scale."""
    compress = ErrorFeedback.compress

    def compressed(self: ErrorFeedback, gradient: Any, density: float, key: Any, held: Any = ()) -> Sparse:
        chosen = compress(self, gradient, density, key)
        kept = np.ones(chosen.count, dtype=bool)
        for part in held:
            kept &= (chosen.indices_K < part.start) | (chosen.indices_K >= part.stop)
        self._residual_D[chosen.indices_K[~kept]] += chosen.values_K[~kept]
        return Sparse(chosen.indices_K[kept], chosen.values_K[kept], chosen.size)

    return patch.object(ErrorFeedback, "compress", compressed)


def an_overflow_does_not_lower_the_scale() -> AbstractContextManager[Any]:
    """The scale stays as it is."""
    return patch.object(LossScale, "stepped", lambda self, is_good: None)


def buffers_are_not_averaged() -> AbstractContextManager[Any]:
    """Each rank evaluates with its own statistics."""
    return patch.object(engine, "average_buffers", lambda *_: None)


def weight_decay_is_forgotten() -> AbstractContextManager[Any]:
    """The sparse optimizers step without it."""
    apply = SparseOptimizer.apply

    def applied(self: SparseOptimizer, bucket: Any, sparse: Any, used: Any = None) -> None:
        group = self.param_groups[bucket.group]
        kept, group["weight_decay"] = group["weight_decay"], 0.0
        try:
            apply(self, bucket, sparse, used)
        finally:
            group["weight_decay"] = kept

    return patch.object(SparseOptimizer, "apply", applied)


def clipping_uses_the_own_norm() -> AbstractContextManager[Any]:
    """The norm is one of a bucket, not of all."""
    return patch.object(GradientEngine, "_apply", _with_norm_of_first(GradientEngine._apply))


def _with_norm_of_first(apply: Callable[..., None]) -> Callable[..., None]:
    def applied(self: GradientEngine, work: Any) -> None:
        work.norm = float(np.linalg.norm(work.merged[0].values_K)) if work.merged else work.norm
        apply(self, work)

    return applied


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    each.__name__.replace("_", " "): each
    for each in (
        hook_sends_for_unused_parameters,
        scaled_gradients_are_applied_after_accumulate,
        an_added_group_is_stepped_locally,
        rebound_weights_are_left_behind,
        a_wrapped_model_is_accepted,
        clipping_between_does_nothing,
        a_large_residual_is_dropped,
        the_mean_counts_one_rank_more,
        samples_do_not_weigh,
        every_bucket_is_stepped_as_the_first_group,
        residuals_are_lost_when_a_state_is_loaded,
        the_late_gradient_is_lost_at_the_end,
        master_weights_do_not_see_what_a_script_changes,
        accumulated_gradients_are_stepped_alone,
        momentum_moves_what_was_frozen,
        int8_rounds_twice,
        an_overflow_does_not_lower_the_scale,
        buffers_are_not_averaged,
        weight_decay_is_forgotten,
        clipping_uses_the_own_norm,
    )
}
