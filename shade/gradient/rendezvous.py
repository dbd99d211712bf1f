"""Runs the rendezvous server of elastic training: ``python -m shade.gradient.rendezvous 29600``, on a machine that
stays.
"""

from shade.gradient._elastic.rendezvous import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
