"""A number of bytes that all processes of all jobs share, kept in the store, and outliving the node that it is on.

In a cluster a counter lies on one node. Were that node lost, nobody could reserve room any more, and a cache that has
two thirds of its entries left would take in nothing. So the number is kept on up to three nodes: `add` adds to all of
them in one round, and what the first of them says that answers is what counts. While the first is there it alone
decides, so that two who add at the same moment see one after the other; a node that comes back empty or late is put
right by the next `put`. On a single server there is one copy, and none of this.

Invariant: while no node is lost, `add` is atomic across clients.
"""

from __future__ import annotations

from typing import Final

from shade.errors import StoreError
from shade.store.base import Store
from shade.store.keys import SampleKeys, placement_tags

_COPIES_AT: Final = (1 / 6, 1 / 2, 5 / 6)
"""Of the slots: of any three nodes or more with equal shares, at least two have a copy."""


class Tally:
    """The number.

    Args:
        store: Where.
        keys: Of the data set that it belongs to.
        name: Its own.
    """

    def __init__(self, store: Store, keys: SampleKeys, name: str) -> None:
        self._store, self._keys, self._name = store, keys, name
        self._found: list[str] = []

    def _copies(self) -> list[str]:
        """Their keys; the first one decides."""
        if not self._found:
            self._found = [self._keys.counter_key(self._name)]
            if len(self._store.placement()) > 1:
                tags = placement_tags()
                chosen = [tags[int(len(tags) * part)] for part in _COPIES_AT]
                self._found = [self._keys.counter_key(f"{self._name}:{{{tag}}}") for tag in chosen]
        return self._found

    def add(self, num_bytes: int) -> int:
        """Adds.

        Args:
            num_bytes: May be negative.

        Returns:
            What it is now.

        Raises:
            StoreError: No copy could be counted on.
        """
        outcomes = self._store.increment_many(self._copies(), num_bytes)
        for outcome in outcomes:
            if isinstance(outcome, int):
                return outcome
        failure = outcomes[0]
        assert isinstance(failure, StoreError)
        raise failure

    def value(self) -> int:
        """Reads it.

        Returns:
            What it is; 0 where there is none yet.

        Raises:
            StoreError: The store does not answer.
            ValueError: Under its name there is something else.
        """
        return next((int(copy) for copy in self._store.get_many(self._copies()) if copy is not None), 0)

    def put(self, num_bytes: int) -> bool:
        """Sets it, whatever it was; while nobody else adds. A server without memory for it keeps what it had.

        Args:
            num_bytes: The truth.

        Returns:
            Whether every copy took it; one that is back later, or has room again, says what it said before.

        Raises:
            StoreError: The store does not answer.
        """
        return all(self._store.set_many(dict.fromkeys(self._copies(), b"%d" % num_bytes)))
