"""Keeps ``python -m shade.gradient.meeting PORT`` working, the old name of `shade.gradient.rendezvous`."""

from shade.gradient._elastic.rendezvous import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
