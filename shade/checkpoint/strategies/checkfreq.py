"""CheckFreq: snapshot and persist in two phases, as often as one save ends before the next, within a budget.

Mohan et al., FAST 2021. The first phase copies the state: on a device into its spare memory, if there is any, which
takes milliseconds, and the next update waits for nothing more; else into the host's, in a thread, and the update waits
for that. The second phase brings it to storage. The interval is profiled, k = max(⌈(T − o) / t⌉, 1), and grows where
saves cost more than the budget: see `_pacing.schedule`. Where we differ: it is followed all the time, in both
directions; what is half written is never found by a restore; snapshots are retired by rules, not by the order of a
listing. The data loader's position is in the snapshot if it is attached, as anything that has a state.
"""

from __future__ import annotations

from shade.checkpoint._buffer.copy import Copying
from shade.checkpoint.strategies.base import STRATEGIES, Terms
from shade.checkpoint.strategies.overlap import Overlap


@STRATEGIES.register("checkfreq")
class CheckFreq(Overlap):
    """Copies on the device, where it has room, and from there in a thread."""

    terms = Terms(every="profiled 5%")
    is_for_devices = True

    def _secure(self, copying: Copying) -> bool:
        """See `Overlap`."""
        return copying.set_aside()
