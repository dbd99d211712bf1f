"""Keeps the idle connections of one server, and holds one conversation with many servers at once.

Connections belong to a process and to whoever holds them: a batch takes one (the one used last, or a new one), and
gives it back when every reply is read. So threads never share a connection, and a child after fork never continues its
parent's conversation: it sees another process id and lets go of what it inherited.

`exchange` writes to every server first and then reads from whichever has something to say, so that servers and networks
work at the same time, a slow server delays nobody else, and several silent ones cost one timeout together, without
threads. Its price: copying the replies is serial, which the one thread that wants them would do anyway.

A server on this machine may have a unix socket beside its port: then that is tried first, and the port if nobody
listens there.
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

from shade.errors import StoreUnavailableError
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
    """One server.

    Args:
        endpoint: Where and as whom.
        timeout_seconds: See `Link`.
        nearby: The same server's unix socket, where it may have one.
    """

    def __init__(self, endpoint: Endpoint, timeout_seconds: float, nearby: Endpoint | None = None) -> None:
        self.endpoint = endpoint
        self.timeout_seconds = timeout_seconds
        self._nearby = nearby
        self.took_seconds = 0.0
        """From the question to the last byte of the answer, the last time there was one."""
        self._idle: list[Link] = []
        self._process_id = os.getpid()
        self._retired = False

    def __str__(self) -> str:
        return str(self.endpoint)

    def take(self) -> Link:
        """A connection of one's own, to be given back.

        Returns:
            The one used last, or a new one.

        Raises:
            StoreUnavailableError: Nobody there.
            StoreAuthError: Refused.
        """
        if self._process_id != os.getpid():
            self._drop_idle()
        while self._idle:
            try:
                link = self._idle.pop()
            except IndexError:  # another thread took the last one between the look and the pop
                break
            if not link.is_readable():
                return link
            link.close()
        if self._nearby is not None and os.path.exists(self._nearby.path):
            with contextlib.suppress(StoreUnavailableError):  # a file that a dead server left, or another machine's
                return Link(self._nearby, self.timeout_seconds)
        return Link(self.endpoint, self.timeout_seconds)

    def give(self, link: Link) -> None:
        """Takes a connection back whose replies have all been read."""
        if self._retired:
            link.close()
        else:
            self._idle.append(link)

    def ask(self, *commands: Command) -> list[Reply]:
        """One batch to this server alone.

        Args:
            *commands: Each in words.

        Returns:
            A reply for each.

        Raises:
            StoreUnavailableError: No answer.
            StoreAuthError: Refused.
        """
        (answer,) = exchange([(self, commands)])
        if isinstance(answer, StoreUnavailableError):
            raise answer
        return answer

    def retire(self) -> None:
        """Closes the idle connections now, and those in use as they come back."""
        self._retired = True
        self._drop_idle()

    def _drop_idle(self) -> None:
        idle, self._idle, self._process_id = self._idle, [], os.getpid()
        for link in idle:
            link.close()


Answer: TypeAlias = "list[Reply] | StoreUnavailableError"
"""What became of one server's part: its replies in order, or why there are none."""


@dataclass
class _Part:
    """One server's part of a conversation that is under way."""

    node: Node
    link: Link
    begun: float
    until: float
    """When it will have been silent for too long."""

    def hear(self) -> Answer | None:
        """Takes what has come; the whole answer, or why there is none, or None while there is more to come."""
        try:
            if not self.link.advance():
                return None
        except StoreUnavailableError as error:
            return error
        self.node.took_seconds = time.monotonic() - self.begun
        self.node.give(self.link)
        return self.link.replies

    def give_up(self) -> StoreUnavailableError:
        """It was silent for too long."""
        self.link.close()
        return StoreUnavailableError(
            f"could not read from {self.node}: no progress within {self.node.timeout_seconds} s"
        )


def exchange(work: Sequence[tuple[Node, Sequence[Command]]]) -> list[Answer]:
    """Sends each server its batch and reads all replies.

    Args:
        work: Servers, each with its commands.

    Returns:
        One answer for each part of ``work``, in its order. A server that fails does not disturb the others.

    Raises:
        StoreAuthError: One refused us: a mistake in the configuration, not a fault to live with.
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
        for position, part in talking.items():  # one server alone: its socket's own timeout does
            while (answer := part.hear()) is None:
                pass
            answers[position] = answer
        talking.clear()
    finally:
        for part in talking.values():  # only after an exception: their replies are still under way
            part.link.close()
    return answers


def _listen(talking: dict[int, _Part], answers: list[Answer]) -> None:
    """Reads from several servers, whoever has something to say, until each has said all or was silent for too long.

    Args:
        talking: By position in ``answers``; those that are done are taken out.
        answers: Filled in.
    """
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
        # The second look: what seems late may have come while we were off the processor.
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
    """Who is resting.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[Address, float] = {}
        self._pause: dict[Address, float] = {}
        self._strikes: dict[Address, int] = {}

    def resting(self) -> frozenset[Address]:
        """Who is to be left alone now."""
        if not self._until:
            return frozenset()
        now = self._clock()
        return frozenset(address for address, until in list(self._until.items()) if now < until)

    def failed(self, address: Address) -> None:
        """It did not answer."""
        pause = min(2 * self._pause.get(address, FIRST_PAUSE_SECONDS / 2), LONGEST_PAUSE_SECONDS)
        self._pause[address] = pause
        self._until[address] = self._clock() + pause

    def answered(self, seconds: Mapping[Address, float]) -> None:
        """One round: what each of those needed that answered.

        Args:
            seconds: From the question to the last byte.
        """
        usual = statistics.median_low(seconds.values()) if len(seconds) > 1 else 0.0
        for address, took in seconds.items():
            if usual and took > max(SLOW_SECONDS, SLOW_FACTOR * usual):
                self._strikes[address] = self._strikes.get(address, 0) + 1
                if self._strikes[address] >= SLOW_ROUNDS:
                    self.failed(address)
            elif address in self._strikes or address in self._pause:
                for memory in (self._strikes, self._pause, self._until):
                    memory.pop(address, None)
