"""The launcher: flags → a resolved plan → checks → ranks → report.

In reading order: `flags` (what may be typed), `resolve` (what it comes to), `preflight` (whether it can be), `run`
(from start to report), which uses `workspace` (where it writes), `ranks` (the processes) and `progress` (the bar).
"""
