"""The data plane's generator: samples, order and number are plain PyTorch's, or the script is refused by name."""

from __future__ import annotations

from tests.differential.data_faults import FAULTS
from tests.differential.data_playing import play
from tests.differential.data_script import Script, prefixed, scripts
from tests.differential.harness import Plane

PLANE = Plane("data", scripts(), play, FAULTS, {"Script": Script})
ALONE = Plane("data, in one process", scripts(processes=False), play, FAULTS, {"Script": Script})
"""Scripts that start neither workers nor servers."""
PREFIXED = Plane("data with a prefix", scripts(processes=False).map(prefixed), play, FAULTS, {"Script": Script})
"""The same scripts, with a first step that is cached."""
