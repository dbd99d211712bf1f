"""Where the small things of a run lie that must outlive a server: who saves, who flushes, whether it has ended."""

from __future__ import annotations

from typing import Final

from shade.store.keys import placement_tags

TRAINER: Final = "lease"
"""What the process that saves keeps alive: see `shade.checkpoint.lease`."""
FLUSHER: Final = "flusher"
"""What a run's flusher keeps alive."""
ENDED: Final = "ended"
"""What a run leaves when it has ended as it should."""
_NUM_KEYS: Final = 3


def spread_keys(run: str, name: str) -> list[str]:
    """The keys of something small, in a few distant parts of the key space.

    Args:
        run: The run id.
        name: What it is.

    Returns:
        Three keys, on as many servers of a cluster that has them.
    """
    tags = placement_tags()
    return [f"shade:checkpoint:{run}:{{{tag}}}{name}" for tag in tags[:: -(-len(tags) // _NUM_KEYS)]]
