"""The shared-memory buffers that a snapshot is copied into, and the proof that it was not torn."""
