"""Snapshots to and from other formats: safetensors, DCP folders, foreign state dicts, certificates."""
