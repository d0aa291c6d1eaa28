"""Chooses how Triton kernels run in this process, before anything can import triton (transformers does)."""

from __future__ import annotations

import ctypes
import os


def has_cuda() -> bool:
    """Whether torch can use a GPU. Asks torch only where there is a driver, since importing it takes seconds."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    import torch

    return torch.cuda.is_available()


if not has_cuda():
    # Without a GPU the kernels run in triton's interpreter. triton reads this when it is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")
