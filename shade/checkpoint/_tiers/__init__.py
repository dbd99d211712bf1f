"""Tiers that hold committed snapshots: cluster memory and durable storage, behind the one interface in `tier`."""
