"""The rotation's kernel on a GPU against its definition on the CPU, for one case."""

from __future__ import annotations

from dataclasses import fields

import torch

from kernels.cases import to_device
from kernels.rope import apply_rope_and_store_kv, cases
from tests.kernels.tolerances import assert_close


def check_rope_and_store_kv(case: cases.Case, dtype: torch.dtype, device: torch.device, magnitude: float) -> None:
    """Everything that the call changes; magnitude as for assert_close."""
    here = cases.make(case, dtype)
    there = to_device(here, device)
    for inputs in (here, there):
        apply_rope_and_store_kv(**{item.name: getattr(inputs, item.name) for item in fields(inputs)})
    for tensor, other in zip(here.changed(), there.changed(), strict=True):
        assert torch.equal(other.cpu().isnan(), tensor.isnan())
        assert_close(other.cpu().nan_to_num(), tensor.nan_to_num(), magnitude=magnitude)
