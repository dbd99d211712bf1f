"""What strategies have in common that share a copy among threads: a pool, and one check when all have come back."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from shade.checkpoint._buffer.copy import Copying
from shade.checkpoint.strategies.base import Strategy
from shade.errors import TornSnapshotError


class Pooled(Strategy):
    """A pool of copying threads."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None
        self._copied: list[Future[None]] = []
        """Of the save begun last, its parts: all that stands between them and the snapshot is the check."""

    @abstractmethod
    def _num_threads(self) -> int:
        """Of the pool, which is made with the first save."""

    @abstractmethod
    def _parts(self, copying: Copying) -> Sequence[Callable[[], None]]:
        """What the threads shall do; what they leave is copied with the check.

        Args:
            copying: What is not steady is copied already.

        Returns:
            Parts, in the order in which they are begun.
        """

    def begin(self, copying: Copying) -> Future[None]:
        """See `Strategy`."""
        try:
            copying.settle(name for name in copying.names if name not in copying.steady)
        except TornSnapshotError as error:
            failed = self._running = Future[None]()
            failed.set_exception(error)
            return failed
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._num_threads(), thread_name_prefix="shade-copy")
        self._copied = [self._pool.submit(part) for part in self._parts(copying)]
        self._running = self._pool.submit(_finish, copying, self._copied)
        return self._running

    def wait(self) -> None:
        """See `Strategy`."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """See `Strategy`."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _finish(copying: Copying, copied: Sequence[Future[None]]) -> None:
    """Checks what the others have copied. Story: it is submitted last, so whoever runs it waits for nobody queued."""
    for each in copied:
        each.result()
    copying.finish()
