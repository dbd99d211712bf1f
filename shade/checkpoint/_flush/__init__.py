"""The flusher process: moves snapshots from the cluster's memory into durable storage."""
