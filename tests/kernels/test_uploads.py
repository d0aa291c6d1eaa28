"""Arrays that go to a device by one copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kernels.devices import upload_all


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.devices.packs_uploads", lambda device: True)


def test_arrays_of_every_type_and_size_are_there() -> None:
    arrays: list[npt.NDArray[Any]] = [np.arange(3, dtype=np.int32), np.zeros((0, 2), dtype=np.int64)]
    arrays.append(np.array([[True], [False]]))
    there = upload_all(torch.device("cpu"), *arrays)
    assert [tensor.dtype for tensor in there] == [torch.int32, torch.int64, torch.bool]
    assert all(np.array_equal(tensor.numpy(), array) for tensor, array in zip(there, arrays, strict=True))
    assert all(tensor.storage_offset() * tensor.element_size() % 16 == 0 for tensor in there)


def test_nothing_but_empty_arrays_is_there_too() -> None:
    """A step without a prompt uploads an empty list of tiles."""
    (there,) = upload_all(torch.device("cpu"), np.zeros((0, 2), dtype=np.int32))
    assert (there.shape, there.dtype) == ((0, 2), torch.int32)
