"""Synchronises every H steps, for links that are too slow even for a hundredth of every step.

::

    optimizer = torch.optim.AdamW(model.parameters())          # any; each rank's own
    with DiLoCo(model, every=100) as outer:
        for images, labels in loader:
            loss(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            outer.step()                                       # every 100th synchronises

Each rank takes H steps of its own from common weights, the *anchor*. The distance, anchor - weights, is treated as a
gradient: averaged over the ranks by samples, and applied to the anchor by an outer optimizer. With rate 1 and no
momentum that is the mean of all ranks' weights (`LocalSGD`); with Nesterov's momentum it is DiLoCo.

Cost: two more copies of the weights on the host (anchor and momentum), one more for error feedback. Sent whole, an
element is 5 bytes. Ranks differ between synchronisations: evaluate and save after one (call `synchronise`).

Invariant: after a synchronisation all ranks hold the same weights, bit for bit.

Legend: D bucket.

References:
    Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019. Douillard et al., "DiLoCo", 2023.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shade.errors import ConfigError, StateMismatchError
from shade.gradient._comm.sparse_all_reduce import SparseAllReduce
from shade.gradient._comm.step import GradientStep
from shade.gradient._comm.topology import FlatTopology
from shade.gradient._comm.transport import Transport
from shade.gradient._compress.bucket import BUCKET_BYTES, plan_buckets
from shade.gradient._compress.compressor import Key, Sparse
from shade.gradient._engine.bucket_state import EngineState, make_bucket_states
from shade.gradient._engine.replica import average_buffers, broadcast_weights, check_all_known, check_same_setup
from shade.rank_group import TIMEOUT_SECONDS


class DiLoCo:
    """Averages the ranks' distances after H steps, and steps the common weights. The constructor is collective.

    Args:
        model: Any module; all ranks start with rank 0's parameters and buffers. Trainable ones are synchronised.
        every: H, inner steps between two synchronisations, ≥ 1.
        lr: Rate of the outer step, > 0.
        momentum: Nesterov's, of the outer step, 0 ≤ momentum < 1.
        density: Kept fraction of the distance; 1: all.
        compressor: Name in `shade.gradient.COMPRESSORS`.
        quantiser: Name in `shade.gradient.QUANTISERS`.
        group: The ranks that train together; None: all.
        timeout_seconds: Longest silence of a rank; must exceed the difference of two ranks' times for H steps.
        bucket_bytes: The largest size of a bucket that holds more than one parameter.
        seed: For the compressors' random choices; the same on every rank.

    Raises:
        ConfigError: An argument is out of range, or differs between ranks; raised on all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int,
        lr: float = 0.7,
        momentum: float = 0.9,
        density: float = 1.0,
        compressor: str = "threshold-v",
        quantiser: str = "none",
        group: dist.ProcessGroup | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        bucket_bytes: int = BUCKET_BYTES,
        seed: int = 0,
    ) -> None:
        self.num_samples = 1
        """Weight of this rank: samples since the last synchronisation."""
        self.step_count = 0
        """Inner steps."""
        self._model, self._every, self._lr, self._momentum = model, every, lr, momentum
        self._density, self._seed = density, seed
        names, buckets = {parameter: name for name, parameter in model.named_parameters()}, []
        refusal: Exception | None = None
        try:
            _check_arguments(every, lr, momentum, density)
            buckets = plan_buckets([{"params": list(names)}], names, bucket_bytes)
        except Exception as error:  # noqa: BLE001 - raised once the others know it, or they would wait for this rank
            refusal = error
        self._known = {parameter for bucket in buckets for parameter in bucket.parameters}
        world = Transport(group, timeout_seconds=timeout_seconds)
        settings = {"every, lr, momentum": [every, lr, momentum], "density": density, "seed": seed}
        settings["compressor, quantiser"] = [compressor, quantiser]
        check_same_setup(world, model, buckets, settings, refusal)
        broadcast_weights(world, model, buckets)
        self._topology = FlatTopology(world)
        self._bucket_states = make_bucket_states(self._topology, buckets, compressor, quantiser)
        self._all_reduce = SparseAllReduce(
            self._topology, [each.size for each in buckets], [each.quantiser for each in self._bucket_states]
        )
        self._states = EngineState(self._topology, self._bucket_states)
        self._anchors: list[Tensor] = [bucket.weights_D.clone() for bucket in buckets]
        self._velocities: list[Tensor] = [torch.zeros_like(anchor_D) for anchor_D in self._anchors]

    def step(self) -> bool:
        """Counts an inner step, and synchronises after every H of them. Call it after each optimizer step, on every
        rank.

        Returns:
            Whether it synchronised.

        Raises:
            GradientError: As by `synchronise`.
        """
        self.step_count += 1
        if self.step_count % self._every:
            return False
        self.synchronise()
        return True

    def synchronise(self) -> None:
        """Makes all ranks' weights the same, now. Collective.

        Raises:
            ConfigError: The model has other trainable parameters than at the start, or converted ones.
            NonFiniteGradientError: A rank's weights hold NaN or infinity. All ranks keep their own.
            PayloadError: Ranks are not in the same step, or a payload arrived damaged. All ranks keep their own.
            PeerLostError: A rank is gone or silent.
        """
        merged = self._average()
        for bucket_state, anchor_D, velocity_D, each in zip(
            self._bucket_states, self._anchors, self._velocities, merged, strict=True
        ):
            distance_D = torch.from_numpy(each.dense())
            if self._momentum:
                velocity_D.mul_(self._momentum).add_(distance_D)
                distance_D.add_(velocity_D, alpha=self._momentum)
            anchor_D.sub_(distance_D, alpha=self._lr)
            bucket_state.bucket.weights_D.copy_(anchor_D)
            bucket_state.bucket.publish()
        average_buffers(self._topology.world, self._model)

    def state_dict(self) -> dict[str, Any]:
        """Returns anchor, momentum and residuals; save the inner optimizer and the weights separately."""
        return {
            **self._states.state_dict(None),
            "step": self.step_count,
            "anchors": list(self._anchors),
            "velocities": list(self._velocities),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads this rank's `state_dict`; load the model and the inner optimizer separately.

        Args:
            state: Of the same model.

        Raises:
            StateMismatchError: It does not fit; nothing was changed.
        """
        sizes = [len(anchor_D) for anchor_D in self._anchors]
        for name in ("anchors", "velocities"):
            got = [torch.as_tensor(each).numel() for each in state[name]]
            if got != sizes:
                raise StateMismatchError.of(f"{name} of {sizes} elements", got, "build the model as it was")
        self._states.load_state_dicts([state])
        self.step_count = int(state["step"])
        for mine, theirs in ((self._anchors, state["anchors"]), (self._velocities, state["velocities"])):
            for own_D, loaded_D in zip(mine, theirs, strict=True):
                own_D.copy_(torch.as_tensor(loaded_D))

    def close(self) -> None:
        """Frees the group. Safe to call twice."""
        self._topology.close()

    def __enter__(self) -> DiLoCo:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _average(self) -> list[Sparse]:
        numbers = list(range(len(self._bucket_states)))
        work = GradientStep(self.step_count, [], self._density, self.num_samples)
        try:
            check_all_known(self._model, self._known, "make a new one after parameters were added or replaced")
        except ConfigError as refusal:
            work.trouble.append(refusal)
        for number, (bucket_state, anchor_D) in enumerate(zip(self._bucket_states, self._anchors, strict=True)):
            try:
                # The inner optimizer is any, and may have bound parameters to other memory.
                bucket_state.bucket.rebind()
                bucket_state.bucket.refresh()
                density = 1.0 if bucket_state.bucket.is_dense else self._density
                key = Key(self._seed, self.step_count, number)
                work.chosen[number] = bucket_state.feedback.compress(
                    anchor_D - bucket_state.bucket.weights_D, density, key
                )
                work.payloads[number] = self._all_reduce.pack(work, number, work.chosen[number])
            except Exception as error:  # noqa: BLE001 - the counts report it to all ranks
                work.trouble.append(error)
        try:
            weights_P, lengths = self._all_reduce.count(work, numbers)
            merged = self._all_reduce.exchange(work, numbers, weights_P, lengths)
            self._all_reduce.vote(work, 0.0)
        except Exception as error:
            for number in work.chosen:
                # Every rank keeps its own weights: the next synchronisation measures the whole distance anew.
                self._bucket_states[number].feedback.undo()
            work.add_cause(error)
            raise
        return merged


def _check_arguments(every: int, lr: float, momentum: float, density: float) -> None:
    for expected, got, is_right in (
        ("every ≥ 1 step", every, every >= 1),
        ("an outer lr > 0", lr, lr > 0),
        ("an outer momentum in [0, 1)", momentum, 0 <= momentum < 1),
        ("a density in (0, 1]", density, 0 < density <= 1),
    ):
        if not is_right:
            raise ConfigError.of(expected, got, "every=100, lr=0.7, momentum=0.9, density=1 are usual")


class LocalSGD(DiLoCo):
    """Averages all ranks' weights every H steps.

    Args:
        model: As in `DiLoCo`.
        every: H.
        **settings: The others of `DiLoCo`, without ``lr`` and ``momentum``.
    """

    def __init__(self, model: nn.Module, *, every: int, **settings: Any) -> None:
        super().__init__(model, every=every, lr=1.0, momentum=0.0, **settings)
