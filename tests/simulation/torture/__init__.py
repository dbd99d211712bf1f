"""Torture: the real commit protocol on a virtual disk, virtual servers and stepped ranks, with every operation failing.

Read in this order: `world` (who may run, and what goes wrong), `disk` and `servers` (what a crash leaves of them),
`ledger` (what was saved and promised), `bench` (what the processes do), `scenario` (one episode with one fault),
`judgement` (what must hold afterwards), `campaign` (all of them). `live` does what can be done to a real disk and a
real store: it kills processes. `outside` lets a program that is not ours judge a whole training, `outside_training`.
`scripts/torture` runs them.
"""
