"""Converts snapshots to and from other formats (safetensors, torch, DCP), and compares them for a certificate."""
