"""Errors form the tree their docstring draws, say what to do, and survive the trip between processes."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from shade import errors
from shade.errors import BadSampleError, ConfigError, DataError, PayloadError, ShadeError, StoreError, UnknownNameError

EVERY = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, ShadeError)]


@pytest.mark.parametrize("cls", EVERY)
def test_an_error_survives_pickling(cls: type[ShadeError]) -> None:
    again = pickle.loads(pickle.dumps(cls("expected a, got b; do c")))
    assert type(again) is cls
    assert str(again) == str(copy.copy(again)) == "expected a, got b; do c"


@pytest.mark.parametrize("cls", EVERY)
def test_the_docstring_draws_every_error(cls: type[ShadeError]) -> None:
    assert cls.__name__ in (errors.__doc__ or "")


def test_a_message_says_expected_got_and_cure() -> None:
    for cls in (ConfigError, DataError, PayloadError):
        error = cls.of("a fraction in (0, 1]", "2", "leave it at 0.2")
        assert type(error) is cls
        assert str(error) == "expected a fraction in (0, 1], got '2'; leave it at 0.2"


def test_the_families_are_what_a_caller_catches() -> None:
    assert issubclass(UnknownNameError, ConfigError)
    assert issubclass(ConfigError, ValueError)
    assert issubclass(BadSampleError, DataError)
    assert not issubclass(DataError, StoreError)
    assert not issubclass(StoreError, (ConfigError, OSError))
