"""Runs error feedback on an accelerator, in torch's operations, so that only picked elements cross to the host.

A bucket of 100 MB takes milliseconds to cross to the host, a hundredth of it next to nothing. The device has bandwidth
to spare, so the passes are not fused: add, score, compare, gather.

Methods, bookkeeping and state are those of `_compress.error_feedback.ErrorFeedback`, and each class loads the other's
state. The picked elements may differ from the CPU's, since the samples differ.

Cost: three synchronisations a bucket. Two float32 of the bucket's size on the device, four with momentum, six with
Adam.

Legend: D bucket · K kept · U units: elements, or lines of 16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shade.errors import ConfigError, StateMismatchError
from shade.gradient._compress.chunk_top_k import ChunkTopK
from shade.gradient._compress.compressor import Compressor, Key, Sparse, check_density, non_finite, wanted_count
from shade.gradient._compress.correction import STEPS, Correction, Tensors, read_array
from shade.gradient._compress.error_feedback import check_size
from shade.gradient._compress.quantiser import Quantiser
from shade.gradient._compress.random_k import RandomK, draw_places
from shade.gradient._compress.threshold import ThresholdCompressor
from shade.gradient._kernels.lines import CHUNK

_SAMPLED = 2**17
"""Units in the sample for a threshold; a smaller bucket is sampled whole."""


class DeviceErrorFeedback:
    """Adds, picks, rounds and keeps, on a device; the compressor says how to pick, its own loops are not used."""

    def __init__(
        self,
        size: int,
        compressor: Compressor,
        quantiser: Quantiser,
        device: torch.device,
        *,
        correction: Correction | None = None,
        decay: float = 1.0,
    ) -> None:
        if not is_known(compressor):
            cure = "compress on the host, or use a threshold"
            raise ConfigError.of("a compressor with a device version", type(compressor).__name__, cure)
        self.size, self.device, self.correction, self._decay = size, device, correction, decay
        self.compressor, self.quantiser = compressor, quantiser
        self._residual_D = torch.zeros(size, device=device)
        self._moments: Tensors = {}
        """What the correction remembers."""
        self._before: tuple[torch.Tensor, Tensors] | None = None

    @property
    def residual_D(self) -> torch.Tensor:
        """What is kept, float32 (D,), on the device."""
        return self._residual_D

    def compress(self, gradient_D: torch.Tensor, density: float, key: Key, held: Sequence[slice] = ()) -> Sparse:
        """Does what `ErrorFeedback.compress` does, with a gradient on the device; returns host memory."""
        check_density(density)
        if gradient_D.shape != (self.size,) or not gradient_D.is_floating_point():
            got = f"{gradient_D.dtype} {tuple(gradient_D.shape)}"
            raise ConfigError.of(f"a flat gradient of {self.size} elements", got, "flatten it into a bucket first")
        self._before = None
        added_D = gradient_D.detach().to(self.device, torch.float32)
        moments: Tensors = {}
        if self.correction is not None:
            added_D, moments = self.correction.correct(self._moments, added_D)
            # Momentum's new moment and the corrected gradient are one tensor.
            added_D = added_D.clone() if held else added_D
            for part in held:
                added_D[part] = 0
                for name in self.correction.names:
                    moments[name][part] = self._moments[name][part] if name in self._moments else 0
        rest_D = added_D.add(self._residual_D, alpha=self._decay)
        if self.size and not bool(torch.isfinite(rest_D).all()):
            raise non_finite()
        places_K = self._pick(rest_D, density, key)
        for part in held:
            places_K = places_K[(places_K < part.start) | (places_K >= part.stop)]
        values_K = rest_D[places_K].cpu()
        # Rounded on the host: the values cross anyway, and the bits are those of the CPU's quantiser.
        seen = self.quantiser.decode(self.quantiser.encode(values_K.numpy()), len(values_K))
        rest_D[places_K] = (values_K - torch.from_numpy(seen)).to(self.device)
        if self.correction is not None:
            self.correction.forget(moments, places_K)
        # The old residual stays until the step has happened; a non-finite gradient has changed nothing so far.
        self._before = self._residual_D, self._moments
        self._residual_D, self._moments = rest_D, moments
        # Half of the bytes cross as int32; the bits are those of uint32.
        return Sparse(places_K.to(torch.int32).cpu().numpy().view("uint32"), seen, self.size)

    def undo(self) -> None:
        """Does what `ErrorFeedback.undo` does."""
        if self._before is None:
            raise ConfigError.of("a compress() to undo", "none", "undo each compress() at most once")
        self._residual_D, self._moments = self._before
        self._before = None

    def absorb(self, sparse: Sparse) -> None:
        """Does what `ErrorFeedback.absorb` does."""
        check_size(sparse, self.size)
        places_K = torch.from_numpy(sparse.indices_K.astype("int64")).to(self.device)
        self._residual_D[places_K] += torch.from_numpy(sparse.values_K).to(self.device)
        self._before = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, on the device; see `ErrorFeedback.state_dict`."""
        return {"residual": self._residual_D, **self._moments}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a state from any device; see `ErrorFeedback.load_state_dict`."""
        residual_D, moments = self._read(state)
        self._residual_D, self._moments, self._before = residual_D, moments, None

    def merge_from(self, state: Mapping[str, Any]) -> None:
        """Does what `ErrorFeedback.merge_from` does."""
        residual_D, moments = self._read(state)
        self._residual_D, self._before = self._residual_D + residual_D, None
        if self.correction is not None:
            self._moments = self.correction.merged(self._moments, moments)

    def _read(self, state: Mapping[str, Any]) -> tuple[torch.Tensor, Tensors]:
        if "residual" not in state:
            raise StateMismatchError.of("a residual", sorted(state), "pass what state_dict() returned")
        moments = {} if self.correction is None else self.correction.read(state, self.size)
        residual_D = torch.from_numpy(read_array(state, "residual", self.size))
        return residual_D.to(self.device, copy=True), {
            name: each if name == STEPS else each.to(self.device, copy=True) for name, each in moments.items()
        }

    def _pick(self, sum_D: torch.Tensor, density: float, key: Key) -> torch.Tensor:
        """Returns the indices to send, int64 (K,), ascending."""
        if isinstance(self.compressor, ChunkTopK):
            return _largest_of_chunks(sum_D, density)
        if not isinstance(self.compressor, ThresholdCompressor):
            return torch.from_numpy(draw_places(self.size, density, key)).to(self.device)
        unit, tolerance = self.compressor.unit, self.compressor.tolerance
        score_U = _scores(sum_D, unit)
        wanted = wanted_count(len(score_U), density)
        units = _over_threshold(score_U, wanted, tolerance, key)
        if unit == 1:
            return units
        places = (units[:, None] * unit + torch.arange(unit, device=self.device)).reshape(-1)
        return places[places < self.size]


def is_known(compressor: Compressor) -> bool:
    """Returns whether the compressor has a device version."""
    return isinstance(compressor, (ThresholdCompressor, ChunkTopK, RandomK))


def _scores(sum_D: torch.Tensor, unit: int) -> torch.Tensor:
    """Returns magnitudes of elements, or energies of lines, scaled by the largest element."""
    if unit == 1 or not sum_D.numel():
        return sum_D.abs()
    filled = torch.nn.functional.pad(sum_D, (0, -len(sum_D) % unit)).view(-1, unit)
    largest = sum_D.abs().amax()
    return (filled / torch.where(largest > 0, largest, 1)).square().sum(dim=1)


def _largest_of_chunks(sum_D: torch.Tensor, density: float) -> torch.Tensor:
    """Returns what `ChunkTopK` picks, ascending."""
    chunks = torch.nn.functional.pad(sum_D.abs(), (0, -len(sum_D) % CHUNK)).view(-1, CHUNK)
    # A stable sort, because of equal ones the first is picked; so a place in the padding is never reached.
    places = chunks.sort(dim=1, descending=True, stable=True).indices
    ends = torch.arange(len(chunks) + 1, device=sum_D.device, dtype=torch.float64).mul_(CHUNK).clamp_(max=len(sum_D))
    is_picked = torch.arange(CHUNK, device=sum_D.device) < (ends * density).ceil_().diff()[:, None]
    places += torch.arange(0, chunks.numel(), CHUNK, device=sum_D.device)[:, None]
    picked = places[is_picked].sort().values
    return picked[sum_D[picked] != 0]


def _over_threshold(score_U: torch.Tensor, wanted: int, tolerance: float, key: Key) -> torch.Tensor:
    """Returns about the ``wanted`` largest units, none of them 0, ascending."""
    stride = max(1, len(score_U) // _SAMPLED)
    if stride > 1 and tolerance > 0:
        sample = score_U[key.draw(stride) :: stride]
        tail = min(max(1, round(len(sample) * wanted / len(score_U))), len(sample))
        threshold = torch.topk(sample, tail, sorted=False).values.amin()
        units = torch.nonzero((score_U >= threshold) & (score_U > 0)).view(-1)
        if len(units) > wanted * (1 + tolerance):
            # Too many: cut to the wanted number. Too few: picked again below, exactly.
            return units[torch.topk(score_U[units], wanted, sorted=False).indices.sort().values]
        if len(units) >= wanted * (1 - tolerance):
            return units
    units = torch.topk(score_U, wanted, sorted=False).indices.sort().values
    return units[score_U[units] > 0]
