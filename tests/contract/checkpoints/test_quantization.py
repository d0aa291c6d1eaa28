"""Which quantised checkpoints are served, and what is said of the others."""

from __future__ import annotations

from typing import Any

import pytest

from contract.checkpoints.quantization import (
    BITS_4,
    BITS_8,
    FLOAT8_BLOCKS,
    FLOAT8_SCALED,
    CheckpointQuantization,
    NotServed,
    read_quantization,
)


def compressed(format_: str = "float-quantized", **weights: Any) -> dict[str, Any]:
    own = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"} | weights
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": own}},
        "sparsity_config": {"format": "dense"},
        "transform_config": {},
    }


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, CheckpointQuantization(BITS_4)),
        ({"load_in_8bit": True}, CheckpointQuantization(BITS_8)),
        ({"quant_method": "fp8", "weight_block_size": [128, 64]}, CheckpointQuantization(FLOAT8_BLOCKS, (128, 64))),
        ({"quant_method": "fp8"}, CheckpointQuantization(FLOAT8_BLOCKS)),
        (compressed(), CheckpointQuantization(FLOAT8_SCALED)),
        (compressed(strategy="tensor"), CheckpointQuantization(FLOAT8_SCALED)),
        (compressed(strategy="block", block_structure=[128, 128]), CheckpointQuantization(FLOAT8_SCALED, (128, 128))),
    ],
)
def test_what_is_served(given: Any, expected: CheckpointQuantization | None) -> None:
    assert read_quantization({"quantization_config": given}) == expected
    assert read_quantization({"text_config": {"quantization_config": given}}) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *(({"quant_method": name}, f"quant_method.*'{name}' are not served; use") for name in ("gptq", "awq", "mxfp4")),
        ({"bits": 4}, "quant_method.*None are not served"),
        ({"quant_method": "bitsandbytes"}, "neither load_in_4bit nor load_in_8bit"),
        ({"quant_method": "fp8", "weight_block_size": [0, 1]}, r"weight_block_size: is \[0, 1\]"),
        (compressed("pack-quantized"), "format: 'pack-quantized' of compressed-tensors is not served"),
        (compressed(num_bits=4), "group_0.weights: 4 bits of type 'float'"),
        (compressed(strategy="group"), "strategy 'group'"),
        (compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config: is not served"),
        ("gptq", "is 'gptq'; an object is expected"),
    ],
)
def test_what_is_not_served_is_refused_by_name_with_the_next_step(given: Any, message: str) -> None:
    with pytest.raises(NotServed, match=message):
        read_quantization({"quantization_config": given})
