"""Defines the format of a snapshot: manifest, commit record, digests, canonical JSON, and the rules of retention."""
