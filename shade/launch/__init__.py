"""The launcher: flags → a resolved plan → checks → ranks → report.

Reading order: `flags` (the command line), `resolve` (the plan), `preflight` (its checks), `run` (from start to report),
which uses `workspace` (the run directory) and `ranks` (the processes, and the progress bar). `certify_resume` replays a
run from a snapshot.
"""
