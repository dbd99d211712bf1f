"""One server as a client sees it: its idle connections, a conversation with many servers at once, and its health.

A connection belongs to one process and to one batch at a time. `exchange` writes to every server first and then reads
from whichever has bytes ready: a slow server delays no other, and several silent ones cost one timeout together.

`NodeHealth` is a circuit breaker for each node of a cluster: one that failed, or is slow, is left out for a pause of 2,
then 4, then 8 seconds. *Slow* means: more than `SLOW_SECONDS` and more than `SLOW_FACTOR` times the median of the same
round, twice in a row. If most nodes are slow, none is left out. A slow node costs a cache misses; what has to be
written, or read whole, waits for it (`silent`). Invariant: a node that answered in time is never left out.
"""

from __future__ import annotations

import contextlib
import os
import select
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from shade.errors import StoreTimeoutError, StoreUnavailableError
from shade.store.link import Endpoint, Link
from shade.store.url import Address
from shade.store.wire import Command, Reply
from shade.types import Clock

FIRST_PAUSE_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 8.0
SLOW_SECONDS: Final = 0.1
SLOW_FACTOR: Final = 4.0
SLOW_ROUNDS: Final = 2


class Node:
    """One server and its idle connections.

    Args:
        endpoint: Its address and credentials.
        timeout_seconds: Progress timeout of each connection, see `Link`.
        nearby: The same server's unix socket, if it may have one.
    """

    def __init__(self, endpoint: Endpoint, timeout_seconds: float, nearby: Endpoint | None = None) -> None:
        self.endpoint = endpoint
        self.timeout_seconds = timeout_seconds
        self._nearby = nearby
        self.took_seconds = 0.0
        """Time from the last answered question to the last byte of its answer."""
        self._idle: list[Link] = []
        self._process_id = os.getpid()
        self._retired = False

    def __str__(self) -> str:
        return str(self.endpoint)

    def take(self) -> Link:
        """Returns a connection for one batch: the idle one used last, or a new one, which raises as `Link` does."""
        # A child after fork never continues its parent's conversation.
        if self._process_id != os.getpid():
            self._drop_idle()
        while self._idle:
            try:
                link = self._idle.pop()
            # Another thread took the last one between the look and the pop.
            except IndexError:
                break
            if not link.is_readable():
                return link
            link.close()
        if self._nearby is not None and os.path.exists(self._nearby.path):
            with contextlib.suppress(StoreUnavailableError):  # the socket file of a dead server, or of another machine
                return Link(self._nearby, self.timeout_seconds)
        return Link(self.endpoint, self.timeout_seconds)

    def give(self, link: Link) -> None:
        """Takes back a connection whose replies have all been read."""
        if self._retired:
            link.close()
        else:
            self._idle.append(link)

    def ask(self, *commands: Command) -> list[Reply]:
        """Sends one batch to this server alone and returns a reply for each command; raises as `exchange` does, or
        StoreUnavailableError if the server does not answer."""
        (answer,) = exchange([(self, commands)])
        if isinstance(answer, StoreUnavailableError):
            raise answer
        return answer

    def retire(self) -> None:
        """Closes the idle connections now, and those in use when they are given back."""
        self._retired = True
        self._drop_idle()

    def _drop_idle(self) -> None:
        idle, self._idle, self._process_id = self._idle, [], os.getpid()
        for link in idle:
            link.close()


Answer: TypeAlias = "list[Reply] | StoreUnavailableError"
"""One server's replies in order, or the reason why there are none."""


@dataclass
class _Part:
    """One server's part of a conversation in progress."""

    node: Node
    link: Link
    begun: float
    until: float
    """Time at which its progress timeout ends."""

    def hear(self) -> Answer | None:
        """Reads what has arrived; returns the whole answer, the failure, or None while replies are outstanding."""
        try:
            if not self.link.advance():
                return None
        except StoreUnavailableError as error:
            return error
        self.node.took_seconds = time.monotonic() - self.begun
        self.node.give(self.link)
        return self.link.replies

    def give_up(self) -> StoreTimeoutError:
        """Closes the connection and returns the timeout as an error."""
        self.link.close()
        return StoreTimeoutError(f"could not read from {self.node}: no progress within {self.node.timeout_seconds} s")


def exchange(work: Sequence[tuple[Node, Sequence[Command]]]) -> list[Answer]:
    """Sends each server its batch of commands, and returns one answer for each part of ``work``, in its order.

    A server that fails does not disturb the others. Raises StoreAuthError if a server refuses the credentials: a
    mistake in the configuration, not a fault to tolerate.
    """
    answers: list[Answer] = [[] for _ in work]
    talking: dict[int, _Part] = {}
    try:
        for position, (node, commands) in enumerate(work):
            try:
                begun = time.monotonic()
                link = node.take()
                talking[position] = _Part(node, link, begun, 0.0)
                link.send(commands)
            except StoreUnavailableError as error:
                answers[position] = error
                talking.pop(position, None)
        if len(talking) > 1:
            _listen(talking, answers)
        # A single server needs no poll: its socket's own timeout does.
        for position, part in talking.items():
            while (answer := part.hear()) is None:
                pass
            answers[position] = answer
        talking.clear()
    finally:
        # Only after an exception: their replies are still outstanding.
        for part in talking.values():
            part.link.close()
    return answers


def _listen(talking: dict[int, _Part], answers: list[Answer]) -> None:
    """Reads from the servers that have bytes ready, until each has answered or timed out; fills in ``answers``."""
    poller = select.poll()
    positions = {part.link.fileno(): position for position, part in talking.items()}
    now = time.monotonic()
    for descriptor, position in positions.items():
        poller.register(descriptor, select.POLLIN)
        talking[position].until = now + talking[position].node.timeout_seconds
    while talking:
        wait_seconds = max(0.0, min(part.until for part in talking.values()) - now)
        ready = poller.poll(wait_seconds * 1000)
        now = time.monotonic()
        # The second poll: a reply that seems late may have arrived while this process was off the processor.
        for descriptor in [descriptor for descriptor, _ in ready or poller.poll(0)]:
            position = positions[descriptor]
            part = talking[position]
            part.until = now + part.node.timeout_seconds
            answer = part.hear()
            if answer is not None:
                answers[position] = answer
                poller.unregister(descriptor)
                del talking[position]
        if not ready:
            for descriptor, position in positions.items():
                if position in talking and talking[position].until <= now:
                    poller.unregister(descriptor)
                    answers[position] = talking.pop(position).give_up()


class NodeHealth:
    """The circuit breakers of a cluster's nodes, for one process; threads may share it.

    Args:
        clock: Returns monotonic seconds.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[Address, float] = {}
        self._pause: dict[Address, float] = {}
        self._strikes: dict[Address, int] = {}
        """Slow rounds in a row."""

    def resting(self) -> frozenset[Address]:
        """Returns the nodes to leave out now."""
        if not self._until:
            return frozenset()
        now = self._clock()
        return frozenset(address for address, until in list(self._until.items()) if now < until)

    def silent(self) -> frozenset[Address]:
        """Returns those of them that did not answer; the others are slow."""
        return self.resting().difference(self._strikes)

    def failed(self, address: Address) -> None:
        """Starts a pause for a node that did not answer, twice as long as its last one."""
        self._strikes.pop(address, None)
        self._rest(address)

    def _rest(self, address: Address) -> None:
        pause = min(2 * self._pause.get(address, FIRST_PAUSE_SECONDS / 2), LONGEST_PAUSE_SECONDS)
        self._pause[address] = pause
        self._until[address] = self._clock() + pause

    def answered(self, seconds: Mapping[Address, float]) -> None:
        """Compares the seconds that the nodes of one round took to answer, and pauses those that are slow."""
        usual = statistics.median_low(seconds.values()) if len(seconds) > 1 else 0.0
        for address, took in seconds.items():
            if usual and took > max(SLOW_SECONDS, SLOW_FACTOR * usual):
                self._strikes[address] = self._strikes.get(address, 0) + 1
                if self._strikes[address] >= SLOW_ROUNDS:
                    self._rest(address)
            elif address in self._strikes or address in self._pause:
                for memory in (self._strikes, self._pause, self._until):
                    memory.pop(address, None)
