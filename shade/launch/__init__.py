"""The launcher: flags → a resolved plan → checks → ranks → report.

In reading order: `flags` (what may be typed), `resolve` (what it comes to), `preflight` (whether it can be),
`run` (the processes).
"""
