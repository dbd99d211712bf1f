"""Reads snapshots from all tiers, verifies and repairs them, and restores the state of every rank."""
