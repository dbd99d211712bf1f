"""Control: what was measured on every rank goes in, one decision for all ranks comes out. Arithmetic; no transport."""
