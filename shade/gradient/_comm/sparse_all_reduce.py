"""Runs the sparse all-reduce of one step: counts, payloads, one vote. It succeeds on all ranks or on none.

1. *Counts.* Every rank sends a few int64 fields: its step, the samples of its gradient, whether the gradient is
   finite, the lengths of its payloads, which parameters have a gradient. All ranks see the same fields, so they draw
   the same conclusion: a NaN, another step or another version on any rank ends the step on all of them, before a
   payload is sent.
2. *Payloads*, one message a bucket, padded to the longest, merged in the order of the ranks.
3. *Vote.* A payload may arrive damaged at one rank only. So all ranks send whether theirs were whole, and apply the
   merged step only if all were. That costs one round trip a step; without it replicas could diverge.

One case remains: a rank that is lost during the vote may leave some ranks with all votes and others without, one step
apart. All of them fail in this step or the next; an `ElasticEngine` compares steps first and catches up.

The merge is the mean weighted by samples, as training on one machine would use. All ranks hold the same bits, on any
processor.

Legend: D bucket · K kept · W world · P peers · N fields · B buckets.
"""

from __future__ import annotations

import math
import time
from collections.abc import Container, Sequence

import numpy as np
import numpy.typing as npt

from shade.errors import ConfigError, GradientError, NonFiniteGradientError, PayloadError
from shade.gradient._comm.message import MessageHeader, pack, unpack
from shade.gradient._comm.step import GradientStep
from shade.gradient._comm.topology import Topology
from shade.gradient._comm.transport import Octets, PendingGather
from shade.gradient._compress.compressor import Sparse
from shade.gradient._compress.quantiser import QUANTISERS, Quantiser
from shade.gradient._kernels.build import build
from shade.types import Decision, Indices

PROTOCOL = 0x5348_4144_4500_0004
"""The first field of every count: name and version of this protocol."""
FINE, NON_FINITE, FAILED = 0, 1, 2
_FIXED = 10
_BITS = 63
"""Parameters whose use fits into one int64 of a count."""


class SparseAllReduce:
    """Exchanges one step's encoded buckets with the peers and merges them. For one thread."""

    def __init__(self, topology: Topology, sizes: Sequence[int], quantisers: Sequence[str]) -> None:
        self._topology, self._sizes, self._quantiser_names = topology, tuple(sizes), tuple(quantisers)
        self._quantisers: dict[str, Quantiser] = {name: QUANTISERS.get(name)() for name in set(quantisers)}

    def pack(self, work: GradientStep, number: int, sparse: Sparse) -> Octets:
        """Encodes the chosen elements of this rank's part of a bucket."""
        proposal = work.proposal
        header = MessageHeader(
            generation=self._topology.world.generation,
            step=work.step,
            bucket=number,
            size=sparse.size,
            count=sparse.count,
            weight=float(work.num_samples),
            quantiser=self._quantiser_names[number],
            is_finite=True,
            density_proposal=proposal.density if proposal else 0.0,
            effective_step=proposal.effective_step if proposal else 0,
        )
        return pack(header, sparse, self._quantisers[self._quantiser_names[number]])

    def count(self, work: GradientStep, numbers: Sequence[int]) -> tuple[list[float], list[list[int]]]:
        """Phase 1, for some buckets of the step.

        Args:
            work: The step; receives rank 0's proposal, all notices, and which parameters any rank uses.
            numbers: The buckets, the same on every rank.

        Returns:
            The weight of each peer, and for each bucket the length of each peer's payload.

        Raises:
            NonFiniteGradientError: A rank's gradient is not finite; the message names the rank.
            PayloadError: A rank is in another step, generation or version.
            GradientError: A rank failed before it could send; the message has its error.
        """
        all_WN = self._topology.gather_fields(self._fields(work, numbers))
        self._check_same_step(all_WN, work, numbers)
        status_W = all_WN[:, 4]
        if (status_W == FAILED).any():
            raise self._failure(work, status_W == FAILED)
        if (status_W == NON_FINITE).any():
            ranks = np.flatnonzero(status_W == NON_FINITE).tolist()
            raise NonFiniteGradientError(
                f"expected finite gradients in step {work.step}, got NaN or infinity on rank "
                f"{', '.join(map(str, ranks))}; no rank applied it: lower the learning rate, clip, or pass a GradScaler"
            )
        if all_WN[0, 6]:
            work.decision = self._decision(all_WN[0], len(numbers))
        work.notices = tuple(all_WN[:, _FIXED - 1].tolist())
        samples_W = all_WN[:, 5]
        words = np.bitwise_or.reduce(all_WN[samples_W > 0, _FIXED + len(numbers) + self._topology.world.world_size :])
        for number in numbers if work.sizes else ():
            own, words = np.split(words, [-(-work.sizes[number] // _BITS)])
            places = _places(own.tolist(), work.sizes[number])
            work.used[number] = None if len(places) == work.sizes[number] else places
        peers, place = self._topology.peers, self._topology.peers[self._topology.place].index(self._topology.world.rank)
        weights_P = [float(samples_W[list(ranks)].sum()) for ranks in peers]
        lengths = [[int(all_WN[ranks[place], _FIXED + each]) for ranks in peers] for each in range(len(numbers))]
        return weights_P, lengths

    def exchange(
        self, work: GradientStep, numbers: Sequence[int], weights_P: Sequence[float], lengths: Sequence[Sequence[int]]
    ) -> list[Sparse]:
        """Phase 2, for the same buckets: starts all gathers, and merges each bucket when it arrives.

        A damaged payload is recorded in ``work.damage``, and its bucket is returned empty; the others continue.
        """
        places = zip(numbers, lengths, strict=True)
        # All gathers start at once, so the link is busy while a received payload is checked and merged.
        pending = [self._topology.exchange(work.payloads[number], lengths_P) for number, lengths_P in places]
        return [self._merge(work, *each, weights_P) for each in zip(numbers, pending, strict=True)]

    def vote(self, work: GradientStep, norm: float) -> float:
        """Phase 3; returns rank 0's norm. Raises `PayloadError` on all ranks if one received a damaged payload,
        `GradientError` if one refused the step after its counts.
        """
        norm_bits = int(np.float64(norm).view(np.int64))
        fields_WN = self._topology.gather_fields(
            np.array([PROTOCOL, work.step, len(work.damage), len(work.trouble), norm_bits], dtype=np.int64)
        )
        if fields_WN[:, 3].any():
            raise self._failure(work, fields_WN[:, 3] > 0)
        bad = np.flatnonzero((fields_WN[:, :2] != fields_WN[0, :2]).any(axis=1) | (fields_WN[:, 2] > 0))
        if len(bad):
            cause = f" ({work.damage[0]})" if work.damage else ""
            raise PayloadError(
                f"expected whole payloads in step {work.step}, got a damaged one on rank "
                f"{', '.join(map(str, bad.tolist()))}{cause}; no rank applied it; the residuals keep what was sent"
            )
        # All ranks must clip by the same norm, and a sum's last bit depends on the processor.
        return float(fields_WN[0, 4:].view(np.float64)[0])

    def _failure(self, work: GradientStep, failed_W: npt.NDArray[np.bool_]) -> Exception:
        """Returns the error of a step that failed on some ranks: this rank's own refusal, or another's. Collective."""
        # All ranks know from the fields that the step failed, so all come here.
        own = work.own_failure
        causes = self._topology.world.gather_messages("" if own is None else f"{type(own).__name__}: {own}")
        if isinstance(own, ConfigError):
            return own
        rank = int(np.flatnonzero(failed_W)[0])
        return GradientError(f"step {work.step} failed on rank {rank}, so no rank applied it: {causes[rank]}")

    def _fields(self, work: GradientStep, numbers: Sequence[int]) -> Indices:
        topology, proposal = self._topology, work.proposal
        is_bad = [isinstance(error, NonFiniteGradientError) for error in work.trouble]
        status = FINE if not is_bad else NON_FINITE if all(is_bad) else FAILED
        fields = [PROTOCOL, topology.world.generation, work.step, numbers[0], status, work.num_samples]
        if proposal is not None:
            density_bits = int(np.float64(proposal.density).view(np.int64))
            fields += [1, density_bits, proposal.effective_step]
        else:
            fields += [0, 0, 0]
        fields.append(work.notice)
        fields += [len(work.payloads[number]) if status == FINE else 0 for number in numbers]
        sizes = list(proposal.batch_sizes) if proposal is not None else []
        fields += (sizes or [-1] * topology.world.world_size)[: topology.world.world_size]
        for number in numbers if work.sizes else ():
            fields += _words(work.own_used[number], work.sizes[number])
        return np.array(fields, dtype=np.int64)

    def _check_same_step(self, all_WN: Indices, work: GradientStep, numbers: Sequence[int]) -> None:
        names = ("protocol", "generation", "step", "bucket")
        ours = (PROTOCOL, self._topology.world.generation, work.step, numbers[0])
        for column, name in enumerate(names):
            values_W = all_WN[:, column]
            if (values_W != values_W[0]).any():
                raise PayloadError(
                    f"expected all ranks in the same {name}, got {values_W.tolist()} by rank; "
                    "run the same version and the same number of steps on every rank"
                )
        if tuple(all_WN[0, :4].tolist()) != ours:
            raise PayloadError(f"expected {dict(zip(names, ours, strict=True))}, got {all_WN[0, :4].tolist()}")

    def _decision(self, fields_N: Indices, num_buckets: int) -> Decision:
        first = _FIXED + num_buckets
        sizes = tuple(fields_N[first : first + self._topology.world.world_size].tolist())
        density = float(fields_N[7:8].view(np.float64)[0])
        return Decision(
            density=min(1.0, density) if math.isfinite(density) and density > 0 else 1.0,
            batch_sizes=sizes if min(sizes) >= 0 else (),
            effective_step=int(fields_N[8]),
            reason="rank 0 proposed it",
        )

    def _merge(self, work: GradientStep, number: int, arrive: PendingGather, weights_P: Sequence[float]) -> Sparse:
        payloads = arrive()
        started = time.perf_counter()
        size = self._part_size(number)
        try:
            merged = merge([self._unpack(payload, work, number, size) for payload in payloads], weights_P)
        except Exception as error:  # noqa: BLE001 - the vote reports any error to all ranks
            work.damage.append(error)
            merged = Sparse.empty(size)
        work.costs.compress_seconds += time.perf_counter() - started
        return self._topology.assemble(merged, self._sizes[number])

    def _unpack(self, payload: Octets, work: GradientStep, number: int, size: int) -> Sparse:
        """Decodes one peer's payload and checks that it belongs to this step and bucket."""
        header, sparse = unpack(payload)
        got = (header.generation, header.step, header.bucket, header.size)
        expected = (self._topology.world.generation, work.step, number, size)
        if got != expected:
            raise PayloadError.of(
                f"a payload of generation, step, bucket and size {expected}", got, "run the same version everywhere"
            )
        return sparse

    def _part_size(self, number: int) -> int:
        part = self._topology.part(self._sizes[number])
        return int(part.stop - part.start)


def _words(places: Container[int], size: int) -> list[int]:
    """Returns a set of places below ``size`` as bits."""
    return [
        sum(1 << place - first for place in range(first, min(first + _BITS, size)) if place in places)
        for first in range(0, size, _BITS)
    ]


def _places(words: Sequence[int], size: int) -> set[int]:
    return {place for place in range(size) if words[place // _BITS] >> place % _BITS & 1}


def merge(parts: Sequence[Sparse], weights: Sequence[float]) -> Sparse:
    """Returns the weighted mean of all ranks' parts; an element that a rank did not choose counts as zero there.

    Args:
        parts: One for each rank, in rank order, of one bucket.
        weights: Samples of each rank, ≥ 0, at least one > 0.

    Returns:
        Every index of any part; the arrays may be those of a single part.

    Raises:
        ConfigError: There are no parts, another number of weights, or weights without a mean.
        PayloadError: The parts are of different buckets.
    """
    if not parts or len(parts) != len(weights):
        raise ConfigError.of("as many weights as parts, at least one", (len(parts), len(weights)), "one for each rank")
    total = math.fsum(weights)
    if not (math.isfinite(total) and total > 0 and min(weights) >= 0):
        raise ConfigError.of("finite weights ≥ 0, at least one > 0", list(weights), "a rank without samples weighs 0")
    sizes = [part.size for part in parts]
    if len(set(sizes)) != 1:
        raise PayloadError.of("parts of one bucket", sizes, "give every rank the same model and bucket size")
    if len(parts) == 1:
        return parts[0]
    # Float addition depends on its order, so the order is part of the result: every rank adds in rank order, starting
    # from zero, without fusing a product into a sum.
    indices = np.concatenate([part.indices_K for part in parts])
    values = np.concatenate([part.values_K for part in parts])
    ends_W = np.cumsum([part.count for part in parts], dtype=np.int64)
    shares_W = (np.asarray(weights, dtype=np.float64) / total).astype(np.float32)
    merged, sums = np.empty_like(indices), np.empty_like(values)
    count = build("index_loops").merge_parts(indices, values, ends_W, shares_W, sizes[0], merged, sums)
    return Sparse(merged[:count], sums[:count], sizes[0])
