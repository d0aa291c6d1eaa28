"""Values of packed adapters that no computation could use are noticed, whatever their type."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from data_plane.adapters.format.packed import is_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_value_that_is_not_finite_is_noticed_wherever_it_is(dtype: torch.dtype) -> None:
    largest = torch.full((3, 5), torch.finfo(dtype).max, dtype=dtype)
    largest[1] *= -1
    assert is_finite(largest) and is_finite(torch.zeros(0, 5, dtype=dtype))
    for value in (float("nan"), float("inf"), float("-inf")):
        for place in range(largest.numel()):
            tensor = largest.clone()
            tensor.view(-1)[place] = value
            assert not is_finite(tensor), (value, place)


def test_every_integer_is_finite() -> None:
    assert is_finite(torch.tensor([0, -1, 0x7F800000, -(1 << 31)], dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_value_of_16_bits_is_judged_as_torch_does(dtype: torch.dtype) -> None:
    values = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    expected = torch.isfinite(values).tolist()
    assert [is_finite(value) for value in values.split(1)] == expected


class Operations(TorchDispatchMode):
    """Notes what torch is given to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_values_are_looked_at_without_the_threads_of_torch() -> None:
    """They wait by spinning: those of two loads took the cores of the steps beside them."""
    chunk = torch.zeros(64, 8, 1024, dtype=torch.bfloat16)
    with Operations() as operations:
        assert is_finite(chunk)
    assert set(operations.names) <= {"aten.view.dtype", "aten.detach.default"}
