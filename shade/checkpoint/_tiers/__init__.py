"""The places where committed snapshots lie: cluster memory and durable storage, behind one interface."""
