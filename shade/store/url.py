"""Reads a store URL, hides its password, and checks its options.

A URL is the whole configuration of a store: a run's log shows it, a worker process receives it, and a person types it.
So it is parsed once, strictly (a misspelt option is an error, not a default), and all output for people goes through
`StoreURL.__str__`, where the password is ``***``, or, of a text that is refused, through `shown_url`. Only
`StoreURL.reveal` gives the full text, for a child process.

Invariant: ``StoreURL.parse(url.reveal()) == url``, and the password is in no string but ``reveal()``'s.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Final, TypeAlias
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from shade.errors import SCHEME, ConfigError, shown_url
from shade.store.base import STORES

PASSWORD_VARIABLE: Final = "SHADE_REDIS_PASSWORD"
USERNAME_VARIABLE: Final = "SHADE_REDIS_USERNAME"
DEFAULT_PORT: Final = 6379
Address: TypeAlias = "tuple[str, int]"
"""Host and port."""

_OPTIONS: Final = {
    "redis": ("capacity", "credentials"),
    "rediss": ("capacity", "ca", "cert", "key", "credentials"),
    "redis+cluster": ("capacity", "sockets", "credentials"),
    "rediss+cluster": ("capacity", "ca", "cert", "key", "sockets", "credentials"),
}
_PLAIN_OPTIONS: Final = ("capacity",)
_SERVERLESS: Final = ("memory", "local")
_SINGLE: Final = ("redis", "rediss")
_LOGIN_OPTIONS: Final = ("password", "username")
_UNITS: Final = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}


def parse_bytes(text: str) -> int:
    """Reads an amount of memory > 0, such as ``8GiB``, ``500MB``, ``1.5TiB`` or ``4096``. Raises `ConfigError` if it is
    not a positive number with a known unit."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    units = {name.lower(): factor for name, factor in _UNITS.items()}
    if match is None or match[2].lower() not in units or float(match[1]) <= 0:
        raise ConfigError.of("bytes with a unit of " + ", ".join(filter(None, _UNITS)), text, "write 8GiB or 500MB")
    return int(float(match[1]) * units[match[2].lower()])


@dataclass(frozen=True)
class StoreURL:
    """The address of a store, and the credentials; immutable, hashable, safe to print."""

    scheme: str
    addresses: tuple[Address, ...] = ()
    """``(host, port)``; several only for a cluster, none for ``unix``, ``memory`` and ``local``."""
    path: str = ""
    """Path of the unix socket, or of the folder on a disk."""
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    database: int = 0
    options: tuple[tuple[str, str], ...] = ()
    """Query parameters in the order written."""

    @classmethod
    def parse(cls, text: str) -> StoreURL:
        """Parses ``scheme://[user:password@]where[/database][?option=value]``.

        ``SHADE_REDIS_PASSWORD`` (``SHADE_REDIS_USERNAME``) completes a URL without a password (user), but not for a
        unix socket: the URL of a private server must work whatever is set for others, and the file's mode guards it.
        ``?credentials=module:name`` takes the place of both (`shade.store.link.credential_provider`).

        Args:
            text: As a person types it.

        Returns:
            The URL, with checked options.

        Raises:
            UnknownNameError: No store has that scheme; the message lists the known ones.
            ConfigError: Any other mistake; the message names the cure and never the password.
        """
        shown = shown_url(text)
        scheme, separator, rest = text.partition("://")
        if not separator or not SCHEME.fullmatch(scheme):
            raise ConfigError.of("a store URL", shown, "write one such as redis://host:6379 or local://")
        STORES.get(scheme)
        # Not `urlsplit`: it takes one host, and refuses a list of them that ends in an IPv6 address.
        authority, _, query = rest.partition("?")
        netloc, slash, path = authority.partition("/")
        path = slash + path
        # The last "@": a password may hold one.
        login, _, hosts = netloc.rpartition("@")
        if "@" in query:
            cure = f"write ? as %3F and @ as %40, or put the password into {PASSWORD_VARIABLE}"
            raise ConfigError.of("a login without a raw '?', and options without '@'", shown, cure)
        options = _options(scheme, query, shown)
        if scheme in _SERVERLESS:
            if netloc or path.strip("/"):
                raise ConfigError.of(f"{scheme}:// and nothing but options", shown, f"write {scheme}://?capacity=8GiB")
            return cls(scheme, options=options)
        if scheme == "disk":
            if netloc or not path.strip("/"):
                cure = "write disk:///nvme/shade?capacity=500GiB, three slashes"
                raise ConfigError.of("an absolute path of a folder", shown, cure)
            return cls(scheme, path=os.path.normpath(unquote(path)), options=options)
        username, _, password = (unquote(piece) for piece in login.partition(":"))
        if scheme == "unix":
            if hosts or len(path) < 2:
                raise ConfigError.of("an absolute socket path", shown, "write unix:///run/redis.sock, three slashes")
            return cls(scheme, (), unquote(path), username or None, password or None, 0, options)
        if "credentials" in dict(options):
            if login:
                raise ConfigError.of("a login or credentials=, not both", shown, "take the login out of the URL")
            user = secret = None
        else:
            user = username or os.environ.get(USERNAME_VARIABLE) or None
            secret = password or os.environ.get(PASSWORD_VARIABLE) or None
        addresses = tuple(_address(host, shown) for host in hosts.split(","))
        if len(addresses) > 1 and scheme in _SINGLE:
            raise ConfigError.of("one host", shown, "write redis+cluster:// for the nodes of a cluster")
        database = path.strip("/")
        if database and (scheme not in _SINGLE or not database.isdecimal()):
            raise ConfigError.of("a database number (a cluster has none)", shown, "write redis://host:6379/0")
        return cls(scheme, addresses, "", user, secret, int(database or 0), options)

    def option(self, name: str) -> str | None:
        """Returns a query parameter, or None if it was not given."""
        return dict(self.options).get(name)

    @property
    def capacity_bytes(self) -> int | None:
        """Returns ``?capacity=`` in bytes, or None if it was not given."""
        text = self.option("capacity")
        return None if text is None else parse_bytes(text)

    def reveal(self) -> str:
        """Returns the full text, password included: for a child process, never for a log."""
        return self._text(self.password)

    def __str__(self) -> str:
        return self._text("***" if self.password else None)

    def _text(self, password: str | None) -> str:
        secret = "" if password is None else ":" + (password if password == "***" else quote(password, safe=""))
        login = quote(self.username or "", safe="") + secret
        hosts = ",".join(format_address(host, port) for host, port in self.addresses)
        path = quote(self.path) if self.path else (f"/{self.database}" if self.database else "")
        query = urlencode(self.options, safe="/")
        return f"{self.scheme}://{login}{'@' if login else ''}{hosts}{path}{'?' if query else ''}{query}"


def format_address(host: str, port: int) -> str:
    """Returns ``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _address(text: str, shown: str) -> Address:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host:
        raise ConfigError.of("host:port", shown, f"write redis://host:{DEFAULT_PORT}, IPv6 as [::1]:{DEFAULT_PORT}")
    return host, DEFAULT_PORT if port is None else port


def _options(scheme: str, query: str, shown: str) -> tuple[tuple[str, str], ...]:
    known = _OPTIONS.get(scheme, _PLAIN_OPTIONS)
    options = parse_qsl(query, keep_blank_values=True)
    for name, value in options:
        if name not in known:
            login = f"; a login goes before the host, or into {PASSWORD_VARIABLE}" if name in _LOGIN_OPTIONS else ""
            is_shown = value and "***" not in shown.partition("?")[0] and re.fullmatch(r"\w+", name)
            cure = f"correct it in {shown}{login}"
            raise ConfigError.of(f"an option of {scheme}:// ({', '.join(known)})", name if is_shown else "***", cure)
        if name == "capacity":
            parse_bytes(value)
    if len(dict(options)) != len(options):
        raise ConfigError.of("each option once", shown, "drop the repetition")
    return tuple(options)
