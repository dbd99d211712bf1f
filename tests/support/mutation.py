"""Makes JSON that is almost right: for tests of everything that reads some."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any


def mutants(body: dict[str, Any], rng: random.Random, count: int) -> Iterator[Any]:
    """Bodies with something in them replaced, removed, doubled or moved."""
    odd = [None, True, -1, 0, 1.5, 2**64, "", "x", [], {}, [[]], {"": 0}, 1e308, "F32", "0" * 32]
    for _ in range(count):
        mutant = copy.deepcopy(body)
        for _ in range(rng.randrange(1, 4)):
            node: Any = mutant
            while isinstance(node, dict | list) and node:
                key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
                if isinstance(node[key], dict | list) and node[key] and rng.random() < 0.8:
                    node = node[key]
                    continue
                action = rng.random()
                if action < 0.2:
                    del node[key]
                elif action < 0.4 and isinstance(node[key], int):
                    node[key] += rng.choice([-(2**63), -1, 1, 4, 2**63])
                else:
                    node[key] = rng.choice(odd)
                break
        yield mutant
