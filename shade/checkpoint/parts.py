"""Parts of a saved state: some of the attached things, and the tensors that those consist of.

The root of a snapshot's tree is a dict by the names that things were attached under. A part of it is such a tree again,
so that a model can be read without its optimizer, and nothing else of the snapshot is touched.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from shade.errors import CorruptCheckpointError


def part_of(tree: Any, only: Collection[str] | None) -> Any:
    """A tree with some of its things.

    Args:
        tree: Of a manifest.
        only: Their names; None for all of them.

    Returns:
        The tree; things that it does not have are not in it.

    Raises:
        CorruptCheckpointError: Its root is no dict.
    """
    try:
        names, things = tree["dict"]
        kept = [(name, thing) for name, thing in zip(names, things, strict=True) if only is None or name in only]
    except (TypeError, KeyError, ValueError) as error:
        raise CorruptCheckpointError(
            f"expected a tree of attached things, got one whose root fails: {error}"
        ) from error
    return {"dict": [[name for name, _ in kept], [thing for _, thing in kept]]}


def tensors_in(tree: Any) -> set[str]:
    """Every string in a tree that may be a tensor's name: all that it needs, and perhaps words that are none."""
    found: set[str] = set()
    left = [tree]
    while left:
        node = left.pop()
        if isinstance(node, str):
            found.add(node)
        elif isinstance(node, list):
            left.extend(node)
        elif isinstance(node, dict):
            left.extend(node.values())
    return found
