"""Adapters of a request as callers give them, and what a continuation sends."""

from __future__ import annotations

from typing import Any

import motet
import pytest
from motet.requests import generate_request, repetition
from motet.v1 import generation_pb2


@pytest.mark.parametrize(
    "adapters",
    [
        {"a": 1.0, "b": 0.5},
        ["a", motet.AdapterUse("b", 0.5)],
        (motet.AdapterUse("a"), motet.AdapterUse("b", 0.5)),
    ],
)
def test_names_with_scales_and_adapters_one_by_one_are_the_same(adapters: Any) -> None:
    message = generate_request("hi", {"adapters": adapters, "combination": "linear"})
    assert [(use.name, use.scale) for use in message.adapters] == [("a", 1.0), ("b", 0.5)]
    assert message.combination == generation_pb2.COMBINATION_LINEAR


@pytest.mark.parametrize("adapters", ["poet", {"poet": "0.5"}, [3], {"poet": True}])
def test_other_types_are_refused(adapters: Any) -> None:
    with pytest.raises(TypeError):
        generate_request("hi", {"adapters": adapters})


def test_an_unknown_combination_is_refused() -> None:
    with pytest.raises(ValueError, match='give "cat" or "linear"'):
        generate_request("hi", {"adapters": ["a", "b"], "combination": "svd"})  # type: ignore[typeddict-item]


def test_a_continuation_pins_the_version_of_every_adapter() -> None:
    first = generate_request("hi", {"adapters": {"a": 0.5, "b@newest": 0.25}, "combination": "linear"})
    uses = [generation_pb2.AdapterUse(name=f"adapters/{name}", digest=name * 64, scale=0.5) for name in "ab"]
    again = repetition(first, generation_pb2.GenerationStarted(adapters=uses))
    assert list(again.adapters) == uses and again.combination == generation_pb2.COMBINATION_LINEAR
    assert not again.adapter and not again.adapter_digest
