"""Continues training after ranks are lost: rendezvous, membership, reconciliation, the elastic engine."""
