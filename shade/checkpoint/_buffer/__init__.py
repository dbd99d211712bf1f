"""The shared-memory buffers that a snapshot is copied into, and the detection of torn reads."""
