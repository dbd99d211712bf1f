"""Draws documents from several sources in given shares of the tokens, and packs them into sequences of one length.

The documents come in one global order, before ranks are dealt anything: the stream is a function of (seed, shares,
lengths), and the unit that ranks share is a packed sequence.

*Shares.* Each drawn token gives every source credit for its share, and costs its own source a whole token; the next
document comes from the source with the most credit. *Packing.* A window of drawn pieces waits. A sequence begins with
the oldest piece of the source with the most credit, and then takes the largest that fits, as long as one does (best
fit). Some 10 µs a document, on every rank. Invariants: each token of a source is used once a pass; two packers of one
state give the same sequences.

Legend: S sources · L length of a sequence.

References:
    Ding et al., "Fewer Truncations Improve Language Modeling", ICML 2024, for best fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shade.sampling.base import Purpose, generator
from shade.sampling.uniform import shuffled
from shade.types import Order

UNIT = 1 << 30
"""Sum of all shares."""
SLACK = 0.02
"""Share of a sequence that may stay empty, so that no document is cut."""

_SOURCES = 1 << 16


class TokenRange(NamedTuple):
    """Tokens ``start`` … ``stop`` of one document."""

    source: int
    document: int
    start: int
    stop: int


class PackedSequence(NamedTuple):
    """The pieces of one sequence: all that a worker needs to read it."""

    number: int
    """Its position in the stream."""
    pieces: tuple[TokenRange, ...]


class SequencePacker:
    """The global stream of packed sequences.

    Args:
        length_S: The lengths of each source's documents, in tokens.
        sequence_length: L.
        seed: The same on every rank.
        window: Pieces that wait.
    """

    def __init__(self, length_S: Sequence[npt.NDArray[np.int64]], sequence_length: int, seed: int, window: int) -> None:
        self._length_S, self._sequence_length, self._seed, self._window = length_S, sequence_length, seed, window
        self._at_S = [[0, 0, 0] for _ in length_S]  # pass, position in its order, tokens drawn of the document there
        self._credit_S = [0] * len(length_S)
        # Tokens in sequences have a credit of their own, because long pieces wait longer than short ones: without it a
        # source of long documents would lag behind by what waits of it.
        self._packed_credit_S = [0] * len(length_S)
        self._waiting: list[tuple[int, TokenRange]] = []  # the sequence before which it was drawn, and the piece
        self._number = 0
        self._order_S: dict[int, tuple[int, Order]] = {}

    @property
    def passes(self) -> list[int]:
        """Returns how many passes over each source are complete."""
        return [at[0] for at in self._at_S]

    def pack(self, share_S: Sequence[int], num_sequences: int) -> list[PackedSequence]:
        """Packs the next sequences.

        Args:
            share_S: Units of each source, which sum to `UNIT`.
            num_sequences: How many.

        Returns:
            The sequences, in order.
        """
        return [self._pack_one(share_S) for _ in range(num_sequences)]

    def _pack_one(self, share_S: Sequence[int]) -> PackedSequence:
        pieces: list[TokenRange] = []
        gap, slack = self._sequence_length, int(SLACK * self._sequence_length)
        while gap > 0:
            while len(self._waiting) < self._window:
                self._waiting.append((self._number, self._draw(share_S)))
            position = self._largest(gap) if pieces else self._first()
            if position is None and gap <= slack:
                break
            cut = position is None
            position = self._first() if position is None else position
            drawn, piece = self._waiting[position]
            if cut:
                self._waiting[position] = drawn, piece._replace(start=piece.start + gap)
                piece = piece._replace(stop=piece.start + gap)
            else:
                del self._waiting[position]
            pieces.append(piece)
            gap -= piece.stop - piece.start
            _pay(self._packed_credit_S, share_S, piece)
        self._number += 1
        return PackedSequence(self._number - 1, tuple(pieces))

    def _first(self) -> int:
        """Returns which piece comes first: one that has waited long, else the oldest of the source with most credit."""
        if self._number - self._waiting[0][0] >= self._window:
            return 0
        credit_S = self._packed_credit_S
        return max(
            range(len(self._waiting)), key=lambda position: (credit_S[self._waiting[position][1].source], -position)
        )

    def _largest(self, gap: int) -> int | None:
        """Returns the largest piece that fits, the oldest of them; None if none does."""
        sizes = [piece.stop - piece.start for _, piece in self._waiting]
        fitting = max((size for size in sizes if size <= gap), default=None)
        return None if fitting is None else sizes.index(fitting)

    def _draw(self, share_S: Sequence[int]) -> TokenRange:
        """Draws the next piece."""
        source = max((s for s, share in enumerate(share_S) if share), key=lambda s: (self._credit_S[s], -s))
        piece = self._next_of(source)
        _pay(self._credit_S, share_S, piece)
        return piece

    def _next_of(self, source: int) -> TokenRange:
        """Returns the source's next piece, which has a token at least."""
        at, length_N = self._at_S[source], self._length_S[source]
        while True:
            if at[1] == len(length_N):
                at[:] = [at[0] + 1, 0, 0]
            document = int(self._order(source, at[0])[at[1]])
            start = at[2]
            if start < length_N[document]:
                at[2] = min(start + self._sequence_length, int(length_N[document]))
                return TokenRange(source, document, start, at[2])
            at[1:] = [at[1] + 1, 0]

    def _order(self, source: int, number: int) -> Order:
        """Returns the order of one pass over a source."""
        known = self._order_S.get(source)
        if known is None or known[0] != number:
            random = generator(self._seed, number * _SOURCES + source, Purpose.MIXTURE)
            known = self._order_S[source] = number, shuffled(len(self._length_S[source]), random)
        return known[1]

    def state_dict(self) -> dict[str, Any]:
        """Returns where the stream is, as plain numbers: a few for each source and each piece that waits."""
        return {
            "number": self._number,
            "at": [list(at) for at in self._at_S],
            "credit": [list(self._credit_S), list(self._packed_credit_S)],
            "waiting": [[drawn, *piece] for drawn, piece in self._waiting],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to the position of a `state_dict`."""
        self._number = int(state["number"])
        self._at_S = [[int(each) for each in at] for at in state["at"]]
        self._credit_S, self._packed_credit_S = ([int(each) for each in credits] for credits in state["credit"])
        self._waiting = [(int(drawn), TokenRange(*(int(each) for each in piece))) for drawn, *piece in state["waiting"]]


def _pay(credit_S: list[int], share_S: Sequence[int], piece: TokenRange) -> None:
    """Gives every source credit for its share of a piece, and takes the piece from its own."""
    num_tokens = piece.stop - piece.start
    for source, share in enumerate(share_S):
        credit_S[source] += share * num_tokens
    credit_S[piece.source] -= UNIT * num_tokens


def shares_of(weight_S: Sequence[float]) -> list[int]:
    """Returns weights > 0 as units that sum to `UNIT`; the largest takes what rounding leaves."""
    total = sum(weight_S)
    share_S = [round(weight / total * UNIT) for weight in weight_S]
    share_S[share_S.index(max(share_S))] += UNIT - sum(share_S)
    return share_S


def adapted(weight_S: Sequence[float], loss_S: Sequence[float], power: float, floor: float) -> list[int]:
    """Returns the shares after a round: each weight times its source's mean loss to a power, and not below a floor.

    Args:
        weight_S: The given weights, > 0.
        loss_S: Mean loss of a token of each source, ≥ 0.
        power: 0 leaves the weights; 1 makes them proportional to the losses.
        floor: Least share of its given weight that a source keeps, in [0, 1].

    Returns:
        Units that sum to `UNIT`.
    """
    total = sum(weight_S)
    least_S = [floor * weight / total for weight in weight_S]
    wanted_S = [weight * loss**power for weight, loss in zip(weight_S, loss_S, strict=True)]
    if not sum(wanted_S) > 0:
        return shares_of(weight_S)
    low_S = [False] * len(least_S)
    while True:
        # Those at the floor take it; the others divide the rest.
        free = sum(wanted for wanted, low in zip(wanted_S, low_S, strict=True) if not low)
        rest = 1 - sum(least for least, low in zip(least_S, low_S, strict=True) if low)
        found_S = [
            least if low or not free else wanted / free * rest
            for least, wanted, low in zip(least_S, wanted_S, low_S, strict=True)
        ]
        below_S = [low or found < least for low, found, least in zip(low_S, found_S, least_S, strict=True)]
        if below_S == low_S:
            return shares_of(found_S)
        low_S = below_S
