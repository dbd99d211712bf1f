"""Implements the verbs of ``shade checkpoint``."""
