"""Reads snapshots from all tiers, verifies and repairs them, and gives them back to the ranks."""
