"""What every kind of adapter keeps to, and which kind a module's parts belong to."""

from __future__ import annotations

import pytest
import torch

from data_plane.adapters.kinds import KINDS, kind_with
from data_plane.adapters.kinds.adapter_kind import AdapterKind, PackedModule
from data_plane.adapters.kinds.base_bias import BaseBias, LoraWithBaseBias
from data_plane.adapters.kinds.dora import Dora
from data_plane.adapters.kinds.lora import Lora, LoraWithBias
from kernels.lora import VECTOR_TABLES
from tests.data_plane.adapters.factories import TARGETS, RandomBase


class Sizes:
    name, rank, scaling, in_features, out_features = TARGETS[0].name, 3, 2.0, 32, 48


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: type(kind).__name__)
def test_a_kind_gives_the_arena_what_it_declares(kind: AdapterKind) -> None:
    shapes = {part.name: part.shape(Sizes()) for part in kind.parts}
    vectors = kind.vectors(
        PackedModule(Sizes(), {name: torch.ones(shape) for name, shape in shapes.items()}, RandomBase())
    )
    assert kind.has_matrices == ({"a", "b"} <= shapes.keys())
    assert tuple(vectors) == kind.tables
    assert set(kind.tables) <= set(VECTOR_TABLES)
    assert all(vector.shape == (48,) and vector.dtype == torch.float32 for vector in vectors.values())


def test_the_parts_of_a_module_tell_its_kind() -> None:
    some = (["b", "a"], ["a", "b", "bias"], ["magnitude", "a", "b"], ["base_bias"], ["a", "b", "base_bias"])
    assert [type(kind_with(parts)) for parts in some] == [Lora, LoraWithBias, Dora, BaseBias, LoraWithBaseBias]


@pytest.mark.parametrize("parts", [[], ["a"], ["a", "b", "bias", "magnitude"], ["a", "b", "other"]])
def test_parts_of_no_kind_are_refused(parts: list[str]) -> None:
    with pytest.raises(ValueError, match="no kind of adapter has those, only a, b; a, b, bias; a, b, magnitude"):
        kind_with(parts)
