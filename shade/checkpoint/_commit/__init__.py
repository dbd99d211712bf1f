"""How all ranks agree that a snapshot counts: one four-step protocol for every tier."""
