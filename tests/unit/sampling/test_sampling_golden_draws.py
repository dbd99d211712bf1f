"""A seed keeps its draws: hashes of orders and weights, taken before orders had 32 bits."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from shade.sampling import Draw, PadsMode, Scores, UnbiasedMode, UniformMode, Validation

BATCH = {1: 1, 7: 2, 1000: 8, 100_003: 64, 1_000_003: 256}
GOLDEN = {
    ("uniform", 1): ("c77b3abb6f87acd9", "none"),
    ("unbiased", 1): ("c77b3abb6f87acd9", "none"),
    ("unbiased unseen", 1): ("c77b3abb6f87acd9", "none"),
    ("unbiased classes", 1): ("c77b3abb6f87acd9", "none"),
    ("pads", 1): ("c77b3abb6f87acd9", "none"),
    ("uniform", 7): ("544c66f7b0c8968f", "none"),
    ("unbiased", 7): ("031548305449a367", "3427d372e63879e9"),
    ("unbiased unseen", 7): ("b6fd9aae2b24e9e1", "008a712cdb3f9593"),
    ("unbiased classes", 7): ("031548305449a367", "3427d372e63879e9"),
    ("pads", 7): ("ef4f7773a1e55ae0", "none"),
    ("uniform", 1_000): ("47791845b5a434d1", "none"),
    ("unbiased", 1_000): ("b704d8643493e6b7", "0274d8da58f817ec"),
    ("unbiased unseen", 1_000): ("e14699d42e1faee4", "214474073dfda718"),
    ("unbiased classes", 1_000): ("9ffbb251c0a42d05", "0274d8da58f817ec"),
    ("pads", 1_000): ("006fbe3180c47188", "none"),
    ("uniform", 100_003): ("44a4d333450a2310", "none"),
    ("unbiased", 100_003): ("db1a4e927d4c835a", "bbee8337512be3c2"),
    ("unbiased unseen", 100_003): ("f26abd4bf6a9b323", "bae63a5951c0d73d"),
    ("unbiased classes", 100_003): ("03c97bb2a5b2c69e", "bbee8337512be3c2"),
    ("pads", 100_003): ("3257f3ab6d814db4", "none"),
    ("uniform", 1_000_003): ("0e9706919ccd858c", "none"),
    ("unbiased", 1_000_003): ("8a327832d0941d91", "f1a0e0bcc43b6f24"),
    ("unbiased unseen", 1_000_003): ("68a369deacd8ce8a", "e8e7555c7d4957c8"),
    ("unbiased classes", 1_000_003): ("8b20d33c4ae005b8", "f1a0e0bcc43b6f24"),
    ("pads", 1_000_003): ("c465094496cf2087", "none"),
}
"""(Draw, N) → hash of the order as 64-bit numbers, hash of the weights."""


def scores(num_samples: int, seen: str) -> Scores:
    score_N = np.round(np.random.Generator(np.random.Philox(7)).random(num_samples) * 8, 3).astype(np.float32) ** 2
    score_N[::11] = 0
    return Scores(score_N, np.arange(num_samples) % 7 > 0 if seen == "most" else np.ones(num_samples, bool))


def drawn(name: str, num: int) -> Draw:
    batch, class_N = BATCH[num], np.arange(num) * 7919 % max(1, num // 50)
    if name == "uniform":
        return UniformMode(num, batch, 5).draw(3, None)
    if name == "unbiased":
        return UnbiasedMode(num, batch, 5).draw(3, scores(num, "all"))
    if name == "unbiased unseen":
        return UnbiasedMode(num, batch, 5, keep=0.5, pi_min=0.1).draw(4, scores(num, "most"))
    if name == "unbiased classes":
        return UnbiasedMode(num, batch, 5, targets_N=class_N).draw(3, scores(num, "all"))
    mode = PadsMode(num, batch, 5, replication_factor=1.5, targets_N=class_N)
    resident_N, validation = np.arange(num) % 3 == 0, Validation((0.1, 0.3, 0.5))
    return mode.draw(3, scores(num, "most"), resident_N=resident_N, validation=validation)


def digest(array: np.ndarray | None) -> str:
    return "none" if array is None else xxhash.xxh3_64_hexdigest(array.tobytes())


@pytest.mark.parametrize(("name", "num"), list(GOLDEN))
def test_a_seed_keeps_its_draw(name: str, num: int) -> None:
    draw = drawn(name, num)
    assert draw.order_K.dtype == np.int32
    assert (digest(draw.order_K.astype(np.int64)), digest(draw.weight_N)) == GOLDEN[name, num]
