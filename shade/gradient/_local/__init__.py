"""Trains apart for H steps, then agrees: local updates, and their exchange beside the inner steps."""
