"""What can be registered is what a worker serves: both halves of every adapter kind name the same tensors."""

from __future__ import annotations

from control_plane.registry.peft import kinds as registered
from control_plane.registry.peft.kinds.base_bias import PART_BASE_BIAS
from control_plane.registry.peft.kinds.dora import PART_DORA_SCALE
from data_plane.adapters import kinds as served


def test_every_kind_has_its_half_on_the_worker() -> None:
    packed = {frozenset(part.packed_name for part in kind.linear_parts) for kind in registered.KINDS}
    bias = frozenset({PART_BASE_BIAS.packed_name})  # beside a kind, or alone
    packed |= {parts | bias for parts in packed} | {bias}
    packed.add(frozenset(("a", "b", PART_DORA_SCALE.packed_name)))  # of TensorRT-LLM's rows, not of PEFT's files
    assert packed == {frozenset(part.name for part in kind.parts) for kind in served.KINDS}


def test_parts_have_the_same_shape_and_type_on_both_sides() -> None:
    sizes = {"rank": 4, "in_features": 24, "out_features": 40}

    class Module:
        name, scaling = "m", 1.0
        rank, in_features, out_features = sizes.values()

    (base_bias,) = served.kind_with([PART_BASE_BIAS.packed_name]).parts
    assert base_bias.shape(Module) == PART_BASE_BIAS.shape(**sizes)
    assert base_bias.dtype == "float32" and PART_BASE_BIAS.is_vector
    scale = {part.name: part for part in served.kind_with(("a", "b", PART_DORA_SCALE.packed_name)).parts}["dora_scale"]
    assert scale.shape(Module) == PART_DORA_SCALE.shape(**sizes)
    assert scale.dtype == "float32" and PART_DORA_SCALE.is_vector
    for kind in registered.KINDS:
        for parts in filter(None, (kind.linear_parts, kind.embedding_parts)):
            other = {part.name: part for part in served.kind_with(part.packed_name for part in parts).parts}
            for part in parts:
                shape = part.shape(**sizes)
                assert other[part.packed_name].shape(Module) == (shape[::-1] if part.is_transposed else shape)
                assert other[part.packed_name].dtype == ("float32" if part.is_vector else None)


def test_a_worker_knows_every_word_that_a_manifest_may_have() -> None:
    assert set(served.MANIFEST_WORDS) == {prefix + kind.name for kind in registered.KINDS for prefix in ("", "rs")}
