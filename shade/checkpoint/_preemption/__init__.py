"""Preemption notices, the last save before a deadline, and the estimate of what a failure would lose."""
