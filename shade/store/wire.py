"""Names what goes over the wire: a command, a reply, and the errors that a server sends in place of one.

Invariant: an error reply is a *value* (`ServerError`) in the server's own words, whatever version of redis-py brought
it, so a batch is always read to its end. A caller that needs the answer turns it into an exception.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from shade.errors import StoreAuthError, StoreError, StoreFullError, StoreUnavailableError
from shade.types import Bytes

_REFUSED: Final = ("WRONGPASS", "NOAUTH", "NOPERM", "DENIED")
_NOT_NOW: Final = ("BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "MISCONF", "NOREPLICAS", "READONLY", "TRYAGAIN")


@dataclass(frozen=True)
class ServerError:
    """An error that a server sent in place of an answer."""

    text: str
    """``CODE and words``, such as ``OOM command not allowed when used memory > 'maxmemory'.``"""

    @property
    def code(self) -> str:
        """Returns the first word."""
        return self.text.partition(" ")[0]

    def as_exception(self, address: str) -> StoreError:
        """Returns the exception for a caller that needs the answer."""
        message = f"expected an answer from {address}, got {self.text!r}"
        if self.code in _REFUSED or "AUTH" in self.text or "invalid password" in self.text:
            return StoreAuthError(f"{message}; correct the user, the password or the server's ACL")
        if self.code == "OOM":
            return StoreFullError(f"{message}; raise its maxmemory or lower the capacity")
        if self.code in _NOT_NOW or "max number of clients" in self.text:
            return StoreUnavailableError(f"{message}; it may serve later")
        if self.code == "MOVED":
            return StoreError(f"{message}; it is a node of a cluster: write redis+cluster:// (beside --host_ip: -cn 3)")
        if "cluster support disabled" in self.text:
            return StoreError(f"{message}; it is a single server: write redis:// (beside --host_ip: -cn 1)")
        return StoreError(f"{message}; is another program using these keys?")


Reply: TypeAlias = "bytes | int | list[Reply] | ServerError | None"
"""A status line is ``bytes`` as a value is; a missing value is None."""

Command: TypeAlias = "tuple[str | int | Bytes, ...]"
"""A verb and its words; text is sent as UTF-8, a large value as it is, without a copy."""


class GetInto(tuple[str | int | Bytes, ...]):
    """Reads a value straight into the caller's memory. The reply is the value's length; the buffer is filled only if
    its own length is the same."""

    buffer: memoryview

    def __new__(cls, key: str, buffer: memoryview) -> GetInto:
        command = super().__new__(cls, (b"GET", key))
        command.buffer = buffer
        return command
