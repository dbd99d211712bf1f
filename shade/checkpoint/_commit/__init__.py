"""Commits a snapshot on all ranks at once: one four-step protocol for every tier."""
