"""Captures the attached objects' state as JSON and named tensors, and lays the tensors out."""
