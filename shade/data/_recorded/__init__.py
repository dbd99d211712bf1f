"""A stream that is recorded while the first epoch trains on it."""
