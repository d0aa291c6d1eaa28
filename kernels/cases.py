"""What the cases of all ops share, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import torch


def to_device(value: Any, device: torch.device) -> Any:
    """A copy on the device, strides kept, of a tensor or of a dataclass with every tensor in it."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device).copy_(value)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(*(to_device(getattr(value, item.name), device) for item in fields(value) if item.init))
    return value
