"""When a save is due, what it may cost, and how many bytes are written at once."""
