"""Settings of the whole run: how Triton kernels run in this process, how hypothesis draws its examples, and which way
LoRA goes on a CPU.

The first is chosen before anything can import triton (transformers does).
"""

from __future__ import annotations

import contextlib
import ctypes
import os

import pytest


def has_cuda() -> bool:
    """Whether torch can use a GPU. Imports torch only where there is a driver, since that takes seconds."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    import torch

    return torch.cuda.is_available()


if not has_cuda():
    # Without a GPU the kernels run in triton's interpreter. triton reads this when it is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

with contextlib.suppress(ImportError):  # the GPU's own tests run where there is no hypothesis
    from hypothesis import settings

    # An example may take long on a busy machine, and every run draws the same ones.
    settings.register_profile("motet", deadline=None, derandomize=True)
    settings.load_profile("motet")


@pytest.fixture(params=["native", "torch"])
def lora_form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """LoRA on a CPU in native code, and in torch as without a C compiler."""
    if request.param == "torch":
        monkeypatch.setattr("kernels.lora.ops.has_native", lambda *tensors: False)
    return str(request.param)
