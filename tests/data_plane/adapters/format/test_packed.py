"""Values of packed adapters that no computation could use are noticed, whatever their type."""

from __future__ import annotations

import pytest
import torch

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
