"""Starts, joins and reshards Redis servers: a private one, a cluster on this machine, one node a machine."""
