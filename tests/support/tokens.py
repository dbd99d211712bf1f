"""A credential provider as a managed server's users have it: a token that another program replaces in a file."""

from __future__ import annotations

import os
from pathlib import Path

from redis.credentials import CredentialProvider

TOKEN_FILE = "SHADE_TEST_TOKEN_FILE"
USER = "loader"


class FileTokens(CredentialProvider):  # type: ignore[misc]
    """Reads the present token from the file that an environment variable names."""

    def get_credentials(self) -> tuple[str, str]:
        """Returns user and token."""
        return USER, Path(os.environ[TOKEN_FILE]).read_text()


class NoTokens(CredentialProvider):  # type: ignore[misc]
    """A token service that is out."""

    def get_credentials(self) -> tuple[str, str]:
        """Raises what a cloud's own library would."""
        raise LookupError("the token service is out")
