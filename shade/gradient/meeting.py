"""The old name of `shade.gradient.rendezvous`; ``python -m shade.gradient.meeting PORT`` keeps working."""

from shade.gradient._elastic.rendezvous import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
