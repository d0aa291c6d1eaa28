"""Adapters with DoRA scales and biases at every module, for tests of what expands."""

from __future__ import annotations

import torch

from kernels.lora import Epilogue
from kernels.lora.cases import GroupInputs, with_vectors


def with_every_vector(inputs: GroupInputs, seed: int = 3) -> tuple[GroupInputs, Epilogue]:
    """DoRA scales and biases of every slot; slot 0 has neither, slot 2 no DoRA scale at the last module."""
    generator = torch.Generator().manual_seed(seed)
    shape = (inputs.group.num_slots, sum(inputs.group.out_features))
    dora_scale = torch.rand(shape, generator=generator) + 0.5
    lora_bias = torch.randn(shape, generator=generator)
    dora_scale[0], lora_bias[0] = 1.0, 0.0
    dora_scale[2, -inputs.group.out_features[-1] :] = 1.0
    return with_vectors(inputs, dora_scale, lora_bias, torch.randn(shape[1], generator=generator))
