"""Other libraries' plug-in interfaces over our tiers: DCP, ACUTE and DASH."""
