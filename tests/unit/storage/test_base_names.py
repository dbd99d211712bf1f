"""Unfinished names are recognised and never taken by callers; failures are one line with a cure."""

from __future__ import annotations

import errno
import pickle

import pytest

from shade.errors import StorageError, StorageFullError
from shade.storage.base import check_name, failure, is_partial, partial_name


@pytest.mark.parametrize("folder", ["", "run", "run/step-1"])
def test_unfinished_names(folder: str) -> None:
    name = partial_name(folder)
    assert name.rpartition("/")[0] == folder
    assert is_partial(name)
    assert partial_name(folder) != name
    with pytest.raises(StorageError):
        check_name(name)
    assert not is_partial("run/.hidden/name.partial-1")


@pytest.mark.parametrize("name", ["a", "a/b", "run/step-0000000001/rank-0.json", ".hidden", "a b/é", "..a/b.."])
def test_names(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    ("number", "kind", "cure"),
    [
        (errno.ENOSPC, StorageFullError, "free some space"),
        (errno.EDQUOT, StorageFullError, "free some space"),
        (errno.EACCES, StorageError, "give this user the right"),
        (errno.EROFS, StorageError, "mount it writable"),
        (errno.EIO, StorageError, "see the log"),
    ],
)
def test_failures(number: int, kind: type[StorageError], cure: str) -> None:
    error = failure("to write x", OSError(number, "words"), "see the log")
    assert type(error) is kind
    assert cure in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_failure_is_one_line() -> None:
    assert "\n" not in str(failure("to write x", ValueError("two\nlines"), "see the log"))
