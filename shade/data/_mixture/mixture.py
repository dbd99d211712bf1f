"""MixtureSampler: draws token data sets in given shares, packed into full sequences.

The sampler yields what a sequence consists of (`shade.sampling.packing.PackedSequence`), not a number.

A *round* is a fixed number of sequences of all ranks. Its sequences are packed when it begins, on every rank alike, and
dealt to the ranks by position, as an epoch is: step t is G sequences, of which rank r takes the r-th piece. Weights
change between rounds only, from the losses of the round before, which all ranks report. So the stream depends on seed,
weights and losses, and on no number of ranks, no worker and no interruption.

Invariant: the tokens of step t are the same for all numbers of ranks whose global batch is the same.

Legend: S sources · B batch of one rank · G global batch · L length of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from shade.data._mixture.packed import PackedDataset
from shade.data._sampler.place import Pass, Place, SamplerIterator, check_place
from shade.data._sampler.settings import check_world
from shade.data._sampler.usage import UsageWarnings
from shade.errors import ConfigError, refused_as
from shade.importance import ScoreMerger
from shade.rank_group import check_alike, current_group, ranks_of
from shade.sampling import num_steps, rank_slice
from shade.sampling.packing import PackedSequence, SequencePacker, adapted, shares_of
from shade.types import ClosedByWith, Floats, Indices

_POINT = 1 << 20
"""Losses are counted in units of its inverse …"""
_LARGEST = float(1 << 20)
"""… and up to this."""


@dataclass(frozen=True)
class MixtureReceipt:
    """One round, in numbers that can be checked; the dicts are by source."""

    round: int
    wanted: dict[str, float]
    """Share of the tokens by the weights of the round."""
    measured: dict[str, float]
    """Share of the tokens of all rounds since the start of the run, this one included, that the sequences hold."""
    tokens: dict[str, int]
    """Tokens in the sequences of this round."""
    filled: float
    """Share of the round's positions that hold a token."""
    passes: dict[str, int]
    """Complete passes over each source."""
    losses: dict[str, float] | None = None
    """Mean loss of a token over all ranks; None while the round lasts, and nan where none was reported."""


class _SourceLosses:
    """Adds up the losses of all ranks by source, in whole numbers: a `shade.importance.merge.ReportTable`."""

    def __init__(self, num_sources: int) -> None:
        self.total_S, self.count_S = np.zeros((2, num_sources), np.int64)

    def update(self, index_B: Indices, loss_B: Floats) -> None:
        """Takes in one report of each rank: S sums, then S counts."""
        del loss_B
        total_S, count_S = index_B.reshape(-1, 2, len(self.total_S)).sum(axis=0)
        self.total_S += total_S
        self.count_S += count_S

    def update_in_order(self, index_B: Indices, loss_B: Floats, sizes: Sequence[int]) -> None:
        """Takes in several reports; the order does not matter."""
        del sizes
        self.update(index_B, loss_B)

    def means(self) -> list[float]:
        """Returns the mean loss of a token of each source; nan where none was counted."""
        return [
            int(total) / int(count) / _POINT if count else float("nan")
            for total, count in zip(self.total_S, self.count_S, strict=True)
        ]


class MixtureSampler(Sampler[PackedSequence], ClosedByWith):
    """Yields this rank's sequences of one round after the other.

    Args:
        dataset: What the DataLoader reads.
        num_replicas: Ranks; from torch.distributed when None.
        rank: This rank; from torch.distributed when None.
        weights: Share of the tokens of each source, > 0; only ratios matter.
        batch_size: Sequences of one rank a step; the same number that the DataLoader gets.
        round_sequences: Sequences of all ranks in a round, a multiple of batch size × ranks.
        seed: The same on every rank.
        adapt: How far weights follow the losses: each is multiplied by its source's mean loss to this power. 0: not.
        floor: Least share of its given weight that a source keeps, in [0, 1].
        window: Documents that wait to be packed, ≥ 1.

    Raises:
        ConfigError: An argument out of range, or weights of other sources.
    """

    def __init__(
        self,
        dataset: PackedDataset,
        num_replicas: int | None = None,
        rank: int | None = None,
        *,
        weights: Mapping[str, float],
        batch_size: int,
        round_sequences: int,
        seed: int = 0,
        adapt: float = 0.0,
        floor: float = 0.5,
        window: int = 64,
    ) -> None:
        self.num_replicas, self.rank, distributed = ranks_of(num_replicas, rank, batch_size)
        self.batch_size, self.global_batch = batch_size, batch_size * self.num_replicas
        self._names = dataset.names
        self._settings: dict[str, Any] = {
            "sources": dataset.digest,
            "length": dataset.length,
            "weights": {name: float(weight) for name, weight in weights.items()},
            "global_batch": self.global_batch,
            "round_sequences": round_sequences,
            "seed": seed,
            "adapt": adapt,
            "floor": floor,
            "window": window,
        }
        self._check(distributed)
        if distributed:
            with closing(current_group("the sampler's arguments")) as group:
                check_alike(group, {"batch_size": batch_size} | self._settings)
        self._weight_S = [float(weights[name]) for name in self._names]
        self.num_steps = num_steps(round_sequences, self.global_batch)
        """Steps of a round."""
        self._packer = SequencePacker(dataset.length_S, dataset.length, seed, window)
        self._share_S = shares_of(self._weight_S)
        self._losses = _SourceLosses(len(self._names))
        self._loss_S = [float("nan")] * len(self._names)
        self._merger: ScoreMerger | None = None
        if self.num_replicas == 1 or distributed:
            self._merger = ScoreMerger(self._losses, 2 * len(self._names))
        self.place = Place(UsageWarnings(), batch_size, counts_all=True)
        """Where training is in the stream; its epoch is the round."""
        self.receipts: list[MixtureReceipt] = []
        """Receipts of the rounds that this process has begun."""
        self._emitted_S = np.zeros(len(self._names), np.int64)
        self._before = self._start()
        self._sequences: list[PackedSequence] = []

    def _check(self, distributed: bool) -> None:
        """Raises ConfigError for settings out of range."""
        weights, step = self._settings["weights"], self.global_batch
        if set(weights) != set(self._names):
            raise ConfigError.of(f"a weight for each of {list(self._names)}", list(weights), "name each source once")
        if not all(0 < weight < float("inf") for weight in weights.values()):
            raise ConfigError.of("weights > 0", weights, "leave a source that is not used out of the PackedDataset")
        for name, is_right, expected in (
            ("round_sequences", self._settings["round_sequences"] % step == 0, f"a multiple of {step} ≥ {step}"),
            ("round_sequences", self._settings["round_sequences"] >= step, f"a multiple of {step} ≥ {step}"),
            ("adapt", 0 <= self._settings["adapt"] < float("inf"), "a power ≥ 0"),
            ("floor", 0 <= self._settings["floor"] <= 1, "a share in [0, 1]"),
            ("window", self._settings["window"] >= 1, "a number ≥ 1"),
        ):
            if not is_right:
                cure = "steps are batch_size × ranks sequences" if "multiple" in expected else f"leave {name} out"
                raise ConfigError.of(f"{name}: {expected}", self._settings[name], cure)
        if distributed:
            check_world(self.num_replicas)
        if self._settings["adapt"] and self.num_replicas > 1 and not distributed:
            raise ConfigError.of(
                "torch.distributed to be initialised: ranks merge their losses through it",
                f"adapt={self._settings['adapt']} with num_replicas={self.num_replicas}",
                "call torch.distributed.init_process_group('gloo') first, or leave adapt out",
            )

    def report(self, sources: torch.Tensor, losses: torch.Tensor) -> None:
        """Reports the losses of one batch; once a step on every rank. Does not wait for the device or the network.

        Args:
            sources: Integer (B, L), as they came with the batch, on any device.
            losses: float (B, L), ≥ 0, one for each label, on the same device; detached here. Those without a label, and
                those that are not finite, do not count.

        Raises:
            ConfigError: Tensors of different shapes.
        """
        if sources.shape != losses.shape:
            raise ConfigError.of(
                "sources and losses of one shape (B, L)",
                (tuple(sources.shape), tuple(losses.shape)),
                "compute the losses with reduction='none', and report the sources of the same batch",
            )
        self.place.reported()
        if self._merger is None:
            return
        losses = losses.detach().double()
        counted = (sources >= 0) & torch.isfinite(losses)
        # Whole numbers, for which the order of additions does not matter.
        points = (torch.nan_to_num(losses).clamp(0.0, _LARGEST) * _POINT).round().to(torch.int64)
        masks = [counted & (sources == source) for source in range(len(self._names))]
        sums = [(points * mask).sum() for mask in masks] + [mask.sum() for mask in masks]
        report = torch.stack(sums)
        self._merger.report(report, torch.zeros(len(report), device=report.device))

    def count_step(self) -> None:
        """Says that a step of training is done, in a loop that does not report; a `Checkpointer` does."""
        self.place.count_step()

    @property
    def steps_done(self) -> int:
        """Returns the steps of the present round whose losses were reported; without a report, those whose batches the
        loop has got from its loader."""
        return self.place.steps_done

    def set_epoch(self, epoch: int) -> None:
        """Accepts the number of the round that comes next, for loops that set an epoch; rounds count themselves.

        Raises ConfigError for another number: a round follows from the one before it.
        """
        coming = self.round + (self.steps_done >= self.num_steps)
        if epoch != coming:
            raise ConfigError.of(
                f"round {coming}, which comes next", epoch, "leave set_epoch out: rounds count themselves"
            )

    def __len__(self) -> int:
        """Returns how many sequences this rank takes in the round, or in the rest of it."""
        return (self.num_steps - self.place.first_step % self.num_steps) * self.batch_size

    def __iter__(self) -> SamplerIterator:
        return SamplerIterator(self, self._begin_pass)

    def _begin_pass(self, is_placed: bool) -> tuple[int, Iterator[PackedSequence]]:
        """Begins a pass: the next round if the last is done, else the rest of it after what was reported."""
        if not is_placed:
            if self.steps_done >= self.num_steps:
                self._advance()
            else:
                self.place.skip_reported()
        if not self._sequences:
            self._begin_round()
        mine = self.place.begin(self.num_steps)
        return mine.first_step * self.batch_size, self._pass(mine, self._sequences)

    def _pass(self, mine: Pass, sequences: list[PackedSequence]) -> Iterator[PackedSequence]:
        """Yields this rank's part of the rest of the round."""
        for step in self.place.steps(mine):
            part = rank_slice(
                step,
                self.rank,
                num_drawn=len(sequences),
                global_batch=self.global_batch,
                world_size=self.num_replicas,
            )
            # Not numbers: so a worker needs the data set alone to read them, whatever the weights are by then.
            yield from sequences[part.start : part.stop]

    @property
    def round(self) -> int:
        """Returns the present round."""
        return self.place.epoch

    @property
    def epoch(self) -> int:
        """Returns the present round, by the name that loops and loaders use."""
        return self.place.epoch

    def _start(self) -> dict[str, Any]:
        """Returns where the stream is as a round begins."""
        return {"packer": self._packer.state_dict(), "emitted": self._emitted_S.tolist()}

    def _begin_round(self) -> None:
        """Packs the round's sequences, and writes its receipt."""
        self._sequences = self._packer.pack(self._share_S, self._settings["round_sequences"])
        token_S = np.zeros(len(self._names), np.int64)
        for packed in self._sequences:
            for piece in packed.pieces:
                token_S[piece.source] += piece.stop - piece.start
        self._emitted_S = self._emitted_S + token_S
        measured_S = self._emitted_S / self._emitted_S.sum()
        self.receipts.append(
            MixtureReceipt(
                round=self.round,
                wanted=self._by_name([share / sum(self._share_S) for share in self._share_S]),
                measured=self._by_name(measured_S.tolist()),
                tokens=self._by_name(token_S.tolist()),
                filled=int(token_S.sum()) / (len(self._sequences) * self._settings["length"]),
                passes=self._by_name(self._packer.passes),
            )
        )

    def _by_name(self, value_S: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self._names, value_S, strict=True))

    def _advance(self) -> None:
        """Turns to the next round, with the weights that follow from the losses of the present one."""
        if not self._sequences:
            self._begin_round()
        if self._merger is not None:
            self._merger.flush()
        mean_S = self._losses.means()
        adapt, floor = self._settings["adapt"], self._settings["floor"]
        if adapt and not self._losses.count_S.any():
            raise ConfigError.of(
                f"the losses of round {self.round}, which the weights of the next one follow",
                "no report",
                "call sampler.report(batch['sources'], losses) once a step, or leave adapt out",
            )
        if self.receipts:
            self.receipts[-1] = replace(self.receipts[-1], losses=self._by_name(mean_S))
        # A source without a token in this round keeps its last loss; without any, it counts as the mean of the others.
        self._loss_S = [new if new == new else old for new, old in zip(mean_S, self._loss_S, strict=True)]
        if adapt:
            known = [loss for loss in self._loss_S if loss == loss]
            filled_S = [loss if loss == loss else sum(known) / len(known) for loss in self._loss_S]
            self._share_S = adapted(self._weight_S, filled_S, adapt, floor)
        self._losses.total_S[:] = self._losses.count_S[:] = 0
        self.place.turn_to(self.round + 1)
        self._sequences, self._before = [], self._start()

    def state_dict(self) -> dict[str, Any]:
        """Returns all that decides the rest of the stream, as plain numbers.

        Call it between steps; one rank may call it alone.
        """
        if self._merger is not None and not self._merger.is_closed:
            self._merger.flush()
        # Where the stream was as the round began, and the steps of it that are done; the rest of the round follows.
        return {
            "settings": dict(self._settings),
            "round": self.round,
            **self.place.state_dict(),
            "before": self._before,
            "shares": list(self._share_S),
            "losses": list(self._loss_S),
            "totals": [self._losses.total_S.tolist(), self._losses.count_S.tolist()],
        }

    @refused_as(ConfigError, "what MixtureSampler.state_dict() returned", "pass that")
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a `state_dict`: the same sequences follow, on any number of ranks with the same global batch.

        Args:
            state: Of a sampler with the same settings, on sources with the same documents.

        Raises:
            ConfigError: The state belongs to other settings or other sources.
        """
        for name, mine in self._settings.items():
            theirs = state["settings"].get(name)
            if theirs != mine:
                cure = "resume with the sources of that run" if name == "sources" else "resume with the saved settings"
                raise ConfigError.of(f"{name}={theirs!r}, as in the saved run", mine, cure)
        check_place(state)
        if self._merger is not None:
            self._merger.flush()
        self._before = dict(state["before"])
        self._packer.load_state_dict(self._before["packer"])
        self._emitted_S = np.array(self._before["emitted"], np.int64)
        self.place.turn_to(int(state["round"]), int(state["steps_done"]))
        self._share_S = [int(share) for share in state["shares"]]
        self._loss_S = [float(loss) for loss in state["losses"]]
        self._losses.total_S[:], self._losses.count_S[:] = state["totals"]
        self._sequences = []

    def close(self) -> None:
        """Ends the thread that merges losses. Safe to call twice."""
        if self._merger is not None:
            self._merger.close()
