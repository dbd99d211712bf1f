"""ExCP: of each snapshot what has changed, pruned together with its moments and clustered to sixteen values. Not exact.

Li et al., ICML 2024. All that sets it apart is in its codec (`_codecs.excp`); its paper says nothing of
when bytes are copied, and compresses while training waits. Where we differ: a thread copies and compresses (`overlap`),
what was lost is measured and told with every snapshot, and a keyframe that is exact comes again and again
(``keyframe_every``), so that errors and chains of snapshots end.
"""

from __future__ import annotations

from shade.checkpoint.strategies.base import STRATEGIES, Terms
from shade.checkpoint.strategies.overlap import Overlap


@STRATEGIES.register("excp")
class ExCP(Overlap):
    """Copies in a thread, stores pruned and clustered changes."""

    terms = Terms(codec="excp")
