"""The bytes of a snapshot: manifest and commit record, their JSON, digests, retention."""
