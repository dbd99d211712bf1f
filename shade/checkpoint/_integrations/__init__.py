"""Plugs the tiers into other libraries: DCP, ACUTE and DASH."""
