"""The launcher: flags → a resolved plan → checks → ranks → report.

Reading order: `resolve` (the command line and the plan), `preflight` (its checks), `run` (from start to report, with
the run directory), `ranks` (the processes, and the progress bar).
"""
