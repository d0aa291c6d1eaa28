"""Decides which kernels serve a tensor (Triton's on an NVIDIA GPU, else torch's), and uploads arrays to a device."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def runs_triton(tensor: torch.Tensor) -> bool:
    """Whether the Triton kernels take tensors like this one. Without triton, plain torch serves the GPU too."""
    return tensor.is_cuda and tensor.dtype in TRITON_DTYPES and has_triton()


@cache
def has_triton() -> bool:
    """Whether triton is installed. CPU builds of torch come without it."""
    return importlib.util.find_spec("triton") is not None


class Placed(Protocol):
    """A tensor, or what stands for one."""

    @property
    def device(self) -> torch.device:
        """Where it is."""


def check_devices(**tensors: Placed | None) -> None:
    """Raise ValueError, by name, for a tensor that is on another device than the first. None is skipped."""
    head, device = "", None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if device is None:
            head, device = name, tensor.device
        elif tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, {head} on {device}; move one of them")


def device_name(device: torch.device) -> str | None:
    """The GPU of a tensor as its maker names it, such as "NVIDIA H200"; None on the CPU. `device`: of a tensor."""
    return _gpu_name(device.index) if device.type == "cuda" else None


def is_hopper(tensor: torch.Tensor) -> bool:
    """Whether the tensor's GPU is of the kind of an H100 or H200. True on the CPU, where kernels are interpreted."""
    return not tensor.is_cuda or _major(tensor.get_device()) == 9


def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a tensor's GPU. Two on the CPU, where kernels are interpreted. `device`: of a tensor."""
    return _num_multiprocessors(device.index) if device.type == "cuda" else 2


@cache
def _num_multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


@cache
def _major(index: int) -> int:
    return torch.cuda.get_device_capability(index)[0]


@cache
def _gpu_name(index: int) -> str:
    return torch.cuda.get_device_name(index)


def upload(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array as a tensor on the device. Nothing waits for a GPU: the bytes go through pinned memory.

    On the CPU the tensor may share the array's memory.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def put_number(tensor: torch.Tensor, index: int, number: float) -> None:
    """`tensor[index] = number` without waiting. For one element torch copies the number to a GPU, and waits for that
    copy and so for all steps that are queued."""
    tensor[index : index + 1].fill_(number)


def packs_uploads(device: torch.device) -> bool:
    """Whether arrays go to the device together. On a CPU nothing is copied, so that packing is work for nothing."""
    return device.type != "cpu"


def upload_all(device: torch.device, *arrays: npt.NDArray[Any]) -> list[torch.Tensor]:
    """The arrays on the device by one copy, see `upload`.

    Each begins at a multiple of 16 bytes: Triton compiles a kernel anew for a pointer that does not.
    """
    if not packs_uploads(device):
        return [upload(array, device) if array.size else torch.from_numpy(array) for array in arrays]
    places = np.cumsum([0, *(-(-array.nbytes // 16) * 16 for array in arrays)]).tolist()
    packed = np.zeros(places[-1], dtype=np.uint8)
    for place, array in zip(places, arrays, strict=False):
        packed[place : place + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    dtypes = [torch.from_numpy(array[:0]).dtype for array in arrays]
    typed = zip(arrays, dtypes, strict=True)
    if len(packed) == 0:  # nothing to copy: a step that is recorded may copy nothing, and torch views no empty tensor
        return [torch.empty(array.shape, dtype=dtype, device=device) for array, dtype in typed]
    there = upload(packed, device)
    return [
        there[place : place + array.nbytes].view(dtype).view(array.shape)
        for place, array, dtype in zip(places, arrays, dtypes, strict=False)
    ]
