"""Keeps the idle connections of one server, and holds one conversation with many servers at once.

Connections belong to a process and to whoever holds them: a batch takes one (the one used last, or a new one), and
gives it back when every reply is read. So threads never share a connection, and a child after fork never continues its
parent's conversation: it sees another process id and lets go of what it inherited.

`exchange` writes to every server first and then reads one after the other, so that servers work at the same time and
several silent ones cost one timeout together, without threads. Its price: copying the replies is serial, which the one
thread that wants them would do anyway, and a silent server is waited for before the next one is read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TypeAlias

from shade.errors import StoreUnavailableError
from shade.store.link import Endpoint, Link
from shade.store.wire import Command, GetInto, Reply


class Node:
    """One server.

    Args:
        endpoint: Where and as whom.
        timeout_seconds: See `Link`.
    """

    def __init__(self, endpoint: Endpoint, timeout_seconds: float) -> None:
        self.endpoint = endpoint
        self.timeout_seconds = timeout_seconds
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
    talking: dict[int, Link] = {}
    try:
        for position, (node, commands) in enumerate(work):
            try:
                talking[position] = link = node.take()
                link.send(commands)
            except StoreUnavailableError as error:
                answers[position] = error
                talking.pop(position, None)
        timeout_seconds = max((work[position][0].timeout_seconds for position in talking), default=0.0)
        deadline = time.monotonic() + timeout_seconds
        for position in list(talking):
            node, commands = work[position]
            link = talking[position]
            try:
                direct = bool(commands) and isinstance(commands[-1], GetInto)
                # Looking lets the library's parser read ahead, and what goes into a buffer must not pass through it.
                if len(work) > 1 and not direct and not link.is_readable(max(0.0, deadline - time.monotonic())):
                    link.close()
                    raise StoreUnavailableError(f"{node} made no progress within {timeout_seconds} s")
                answers[position] = link.receive_into(commands) if direct else link.receive(len(commands))
                node.give(link)
            except StoreUnavailableError as error:
                answers[position] = error
            del talking[position]
    finally:
        for link in talking.values():  # only after an exception: their replies are still under way
            link.close()
    return answers
