"""The blocking client and the asyncio client are twins: the same methods, parameters and documentation."""

from __future__ import annotations

import inspect

import motet
import pytest

TWINS = [
    (motet.Client, motet.AsyncClient),
    (motet.Adapters, motet.AsyncAdapters),
    (motet.Model, motet.AsyncModel),
    (motet.GenerationStream, motet.AsyncGenerationStream),
]
# What has another name in the asyncio client, as in the standard library.
NAMES = {"close": "aclose"}
by_twins = pytest.mark.parametrize(("blocking", "asynchronous"), TWINS, ids=lambda one: one.__name__)


def members(of: type) -> dict[str, object]:
    return {name: member for name, member in vars(of).items() if not name.startswith("_") or name == "__init__"}


def name_of(blocking: type, name: str) -> str:
    """A stream closes as an asynchronous generator does."""
    return NAMES.get(name, name) if blocking is motet.GenerationStream else name


@by_twins
def test_twins_have_the_same_public_methods(blocking: type, asynchronous: type) -> None:
    assert {name_of(blocking, name) for name in members(blocking)} == set(members(asynchronous))


@by_twins
def test_twins_take_the_same_parameters(blocking: type, asynchronous: type) -> None:
    for name, method in members(blocking).items():
        twin = members(asynchronous)[name_of(blocking, name)]
        if not inspect.isfunction(method) or (name == "__init__" and blocking is not motet.Client):
            continue
        assert inspect.isfunction(twin), name
        ours, theirs = inspect.signature(method).parameters, inspect.signature(twin).parameters
        assert [(p.name, p.kind) for p in ours.values()] == [(p.name, p.kind) for p in theirs.values()], name
        # How to sleep is the one thing that both do differently.
        differ = [p for p in ours if ours[p].default != theirs[p].default or ours[p].annotation != theirs[p].annotation]
        assert [p for p in differ if p != "sleep" and p != "client"] == [], name


@by_twins
def test_twins_return_the_same(blocking: type, asynchronous: type) -> None:
    for name, method in members(blocking).items():
        twin = members(asynchronous)[name_of(blocking, name)]
        if isinstance(method, property):
            assert isinstance(twin, property), name
            method, twin = method.fget, twin.fget
        assert callable(method) and callable(twin)
        returned = str(inspect.signature(method).return_annotation)
        for ours, theirs in (("Iterator", "AsyncIterator"), ("GenerationStream", "AsyncGenerationStream")):
            returned = theirs + returned.removeprefix(ours) if returned.startswith(ours) else returned
        assert str(inspect.signature(twin).return_annotation) == returned, name


@by_twins
def test_twins_have_the_same_documentation(blocking: type, asynchronous: type) -> None:
    for name, method in members(blocking).items():
        twin = members(asynchronous)[name_of(blocking, name)]
        assert inspect.getdoc(twin) == inspect.getdoc(method), name
        assert name == "__init__" or inspect.getdoc(method), f"{name} says what it does"
