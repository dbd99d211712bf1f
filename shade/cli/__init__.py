"""The command `shade`: one door to the launcher, the caches, the reports, the simulator and the doctor.

In reading order: `command` (what may be typed), then one file a verb: `caches`, `simulation`, `tune`, `top`,
`doctor`. ``shade run`` is the launcher itself (`shade.launch`), ``shade report`` one call of `shade.report`.
"""

from shade.cli.command import main

__all__ = ["main"]
