"""Training that survives lost ranks: rendezvous, membership, reconciliation, the elastic engine."""
