"""Autopilot: which strategy, and how often; measured, predicted, chosen, and replayed on a trace of preemptions.

In reading order: `costs` (what was measured), `predict` (what a save will be like), `interval` (Young, Daly, the exact
optimum), `choose`, `trace` and `replay` (what would have come of it), `measure`, `pilot` (all of it in a running
training). All but the last two are arithmetic: no clock, no files, no torch.
"""
