"""Chooses which elements of a bucket are sent, and keeps the rest for later steps."""
