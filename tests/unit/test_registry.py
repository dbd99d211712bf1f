"""A name becomes a class, or an error that lists the names there are."""

from __future__ import annotations

import pytest

from shade.errors import UnknownNameError
from shade.registry import Registry


class Animal:
    """What is registered here."""


def farm() -> Registry[Animal]:
    animals: Registry[Animal] = Registry("animal")
    for name in ("cow", "goat", "ant"):
        animals.register(name)(type(name, (Animal,), {}))
    return animals


def test_a_registered_class_is_returned_unchanged_and_found() -> None:
    animals: Registry[Animal] = Registry("animal")

    @animals.register("horse")
    class Horse(Animal):
        pass

    assert animals.get("horse") is Horse
    assert "horse" in animals
    assert "cow" not in animals


def test_names_come_in_alphabetical_order() -> None:
    assert list(farm()) == ["ant", "cow", "goat"]


def test_an_unknown_name_lists_the_known_and_the_nearest() -> None:
    with pytest.raises(UnknownNameError) as caught:
        farm().get("goar")
    assert str(caught.value) == "no animal named 'goar' (did you mean 'goat'?); known: ant, cow, goat"
    assert caught.value.__suppress_context__


def test_a_name_like_no_other_gets_no_hint() -> None:
    with pytest.raises(UnknownNameError, match=r"^no animal named 'zzz'; known: ant, cow, goat$"):
        farm().get("zzz")


def test_two_classes_cannot_share_a_name() -> None:
    with pytest.raises(RuntimeError, match="two classes claim the animal name 'cow'"):
        farm().register("cow")(Animal)
