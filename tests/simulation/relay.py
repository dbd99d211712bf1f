"""Stands between clients and the servers of this machine and passes bytes on: late, not at all, or with the door shut.

What a network does to a server cannot be done to the server itself: one that is killed or stopped is gone for the other
nodes of its cluster too, while a client that cannot reach a healthy node is an everyday fault with other consequences.
So each node gets a door, and the nodes announce the doors as their addresses. No rights are needed for it, and no rules
of a firewall.

A program of its own, so that it takes nothing from the process it torments: neither its interpreter's lock nor its file
descriptors. It is run by its path and needs only the standard library, because it must start at once::

    python relay.py 7000 7001 7002      prints the ports of the doors to them, then obeys lines of standard input

``delay 0 0.2`` each answer comes 0.2 s late · ``hold 0`` nothing passes, nothing is lost · ``refuse 0`` connections are
reset, new ones too · ``mend 0``. To each it says how many pieces or connections the door has affected since it was last
mended, which is how a test knows that its fault struck. The end of standard input is its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence

HOST = "127.0.0.1"
_PIECE_BYTES = 1 << 18


class Door:
    """One server's.

    Args:
        port: The server's.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._passing = asyncio.Event()
        self._delay_seconds = 0.0
        self._refusing = False
        self._open: set[asyncio.StreamWriter] = set()
        self._num_affected = 0
        self._passing.set()

    async def listen(self) -> int:
        """Opens it; the port where."""
        server = await asyncio.start_server(self._welcome, HOST, 0)
        return int(server.sockets[0].getsockname()[1])

    def obey(self, verb: str, *words: str) -> int:
        """Changes what it does, and tells how much it has affected so far."""
        if verb == "delay":
            self._delay_seconds = float(words[0])
        elif verb == "hold":
            self._passing.clear()
        elif verb == "refuse":
            self._refusing = True
            self._num_affected += len(self._open)
            for writer in list(self._open):
                writer.transport.abort()
        elif verb == "mend":
            self._delay_seconds, self._refusing = 0.0, False
            self._passing.set()
        affected = self._num_affected
        if verb == "mend":
            self._num_affected = 0
        return affected

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            self._num_affected += 1
            writer.transport.abort()
            return
        try:
            answers, asker = await asyncio.open_connection(HOST, self._port)
        except OSError:
            writer.transport.abort()
            return
        asked = asyncio.Event()
        self._open |= {writer, asker}
        try:
            await asyncio.gather(self._pass(reader, asker, asked, False), self._pass(answers, writer, asked, True))
        finally:
            self._open -= {writer, asker}

    async def _pass(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, asked: asyncio.Event, is_answer: bool
    ) -> None:
        """Until one side hangs up; then the other is hung up on."""
        with contextlib.suppress(OSError):
            while piece := await source.read(_PIECE_BYTES):
                if not self._passing.is_set():
                    self._num_affected += 1
                    await self._passing.wait()
                if not is_answer:
                    asked.set()
                elif self._delay_seconds and asked.is_set():  # once an answer, not once a piece of it
                    asked.clear()
                    self._num_affected += 1
                    await asyncio.sleep(self._delay_seconds)
                sink.write(piece)
                await sink.drain()
        sink.close()


async def run(ports: Sequence[int]) -> None:
    """Opens the doors and obeys.

    Args:
        ports: The servers'.
    """
    doors = [Door(port) for port in ports]
    opened = [str(await door.listen()) for door in doors]
    sys.stdout.write(" ".join(opened) + "\n")
    sys.stdout.flush()
    orders = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    while line := (await orders.readline()).decode():
        verb, number, *words = line.split()
        sys.stdout.write(f"{doors[int(number)].obey(verb, *words)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(run([int(word) for word in sys.argv[1:]]))
