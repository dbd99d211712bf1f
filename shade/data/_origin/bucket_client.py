"""Reads objects of S3 through obstore, a compiled client: a tenth of what s3fs takes of an interpreter and of a core.

It reads where s3fs would: same endpoint, region and login. A process that is forked after its parent has used obstore
waits for ever, so only a process that never forks may have a `BucketClient`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from typing import Any, Final

from fsspec.asyn import sync

_LOGIN_TIME: Final = timedelta(minutes=10)
"""After half of this obstore asks for the login again; botocore renews one before it expires."""
_KNOWN: Final = {"endpoint_url", "region_name", "aws_access_key_id", "aws_secret_access_key", "aws_session_token"}


class BucketClient:
    """Reads objects as an s3fs file system would, whose settings have to be among those that `of` knows."""

    def __init__(self, file_system: Any, library: Any) -> None:
        self._file_system, self._library = file_system, library
        self._buckets: dict[str, Any] = {}

    @classmethod
    def of(cls, file_system: Any) -> BucketClient | None:
        """Returns a client for what this file system reads; None where obstore is missing, or something is set that it
        would have to know, such as keys of a customer's own."""
        is_plain = (
            not (file_system.req_kw or file_system.s3_additional_kwargs or file_system.version_aware)
            and set(file_system.client_kwargs) <= _KNOWN
            and set(file_system.config_kwargs) <= {"signature_version"}
        )
        try:
            return cls(file_system, importlib.import_module("obstore.store")) if is_plain else None
        except ImportError:
            return None

    def read(self, url: str, start: int | None, stop: int | None) -> bytes:
        """Returns an object, or the range of it up to ``stop``, None for its end."""
        bucket, key, version = self._file_system.split_path(url)
        if version is not None or ":" in bucket:
            raise ValueError("a version, or an access point")
        store = self._buckets.get(bucket) or self._buckets.setdefault(bucket, self._opened(bucket))
        if stop is not None:
            content = store.get_range(key, start=start or 0, end=stop)
        else:
            content = store.get(key, options=None if start is None else {"range": {"offset": start}}).bytes()
        return bytes(memoryview(content))

    def _opened(self, bucket: str) -> Any:
        client = sync(self._file_system.loop, self._file_system.set_session)
        config = {"endpoint": client.meta.endpoint_url, "region": client.meta.region_name or "us-east-1"}
        options: dict[str, Any] = {"allow_http": client.meta.endpoint_url.startswith("http://")}
        words: dict[str, Any] = {"credential_provider": self._login}
        if self._file_system.anon:
            config, words = {**config, "skip_signature": "true"}, {}
        # Who asks again, and for how long, is said in `patiently`.
        retries = {"max_retries": 0}
        return self._library.S3Store(bucket, config=config, client_options=options, retry_config=retries, **words)

    def _login(self) -> Mapping[str, Any]:
        client = sync(self._file_system.loop, self._file_system.set_session)
        login = sync(self._file_system.loop, client._request_signer._credentials.get_frozen_credentials)
        return {
            "access_key_id": login.access_key,
            "secret_access_key": login.secret_key,
            "token": login.token,
            "expires_at": datetime.now(timezone.utc) + _LOGIN_TIME,
        }
