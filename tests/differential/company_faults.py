"""Known faults of trainings in company, planted again in a script's processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from shade.checkpoint._buffer.shared_memory_tier import SharedMemoryTier
from shade.checkpoint._tiers import identity
from shade.data._sampler import cache_planner, sampler
from shade.data._source import source
from shade.importance.merge import ScoreMerger


def _together(*patches: AbstractContextManager[Any]) -> AbstractContextManager[None]:
    @contextlib.contextmanager
    def planted() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for each in patches:
                stack.enter_context(each)
            yield

    return planted()


def ranks_differ() -> AbstractContextManager[None]:
    """Nothing compares the arguments of the ranks."""
    return _together(*(patch.object(module, "check_alike", lambda *_: None) for module in (sampler, cache_planner)))


def probed_by_script() -> AbstractContextManager[None]:
    """Samples are probed in the script's process: what the data set opens then, forked workers share."""
    return _together(patch.object(source, "in_probe_worker", lambda work, dataset: work()))


def closed_has_no_state() -> AbstractContextManager[None]:
    """A sampler that is closed before its checkpointer has no state."""
    return _together(patch.object(ScoreMerger, "close", lambda self: setattr(self, "_pid", None)))


def memory_is_kept() -> AbstractContextManager[None]:
    """A checkpointer that is closed leaves its buffers in shared memory."""
    return _together(patch.object(SharedMemoryTier, "vacate", SharedMemoryTier.close))


def snapshots_of_a_name() -> AbstractContextManager[None]:
    """Whoever has the run id restores what lies in shared memory."""
    return _together(patch.object(identity, "of_storage", lambda *_, **__: "alone"))


PLANTED: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "ranks differ": ranks_differ,
    "samples are probed by the script": probed_by_script,
    "a closed sampler has no state": closed_has_no_state,
    "memory is kept after close": memory_is_kept,
    "snapshots belong to a name": snapshots_of_a_name,
}
"""By name, what plants each in a process."""
