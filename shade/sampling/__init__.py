"""Which samples an epoch uses, in which order, and what each gradient weighs. Arithmetic on arrays: no torch, no I/O.

Read `base` first (what a mode is), then `unbiased` (the default) and its `receipt`, `uniform` (the control), `pads`
(SHADE as published, repaired), `dealing` (which rank takes what), `window` (an order in which neighbours stay near each
other), `large` (sets of more than 2**24 samples) and `packing` (documents of several sources in sequences of one
length).
"""

from shade.sampling.base import MODES, Draw, Purpose, Receipt, SamplingMode, Scores, Targets, Validation, generator
from shade.sampling.dealing import num_steps, rank_order, rank_positions, rank_slice
from shade.sampling.packing import PackedSequence, SequencePacker, adapted, shares_of
from shade.sampling.pads import PadsMode
from shade.sampling.receipt import measure
from shade.sampling.unbiased import UnbiasedMode
from shade.sampling.uniform import UniformMode
from shade.sampling.window import block_uses, windowed

__all__ = [
    "MODES",
    "Draw",
    "PackedSequence",
    "PadsMode",
    "Purpose",
    "Receipt",
    "SamplingMode",
    "Scores",
    "SequencePacker",
    "Targets",
    "UnbiasedMode",
    "UniformMode",
    "Validation",
    "adapted",
    "block_uses",
    "generator",
    "measure",
    "num_steps",
    "rank_order",
    "rank_positions",
    "rank_slice",
    "shares_of",
    "windowed",
]
