"""Where the kernels' tests run: on the GPU if there is one, else on the CPU with Triton's interpreter.

Tests of Triton kernels are in files test_triton_*.py and put their tensors on the fixture `device`.
"""

from __future__ import annotations

import importlib.util
import os
import platform
from typing import Any

import pytest
import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
# triton is not made for every platform. Where `make` installs it, its absence is an error.
if not HAS_TRITON and (platform.system(), platform.machine()) != ("Linux", "x86_64"):
    collect_ignore_glob = ["*/test_triton_*.py"]


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device whose kernels are tested."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def let_interpreter_count() -> None:
    """Let the interpreter of Triton 3.6 run `range(0, n)` for an n that is known at run time.

    It takes int() of an array with one element, which NumPy 2.4 refuses.
    """
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_and_index


if os.environ.get("TRITON_INTERPRET") == "1" and HAS_TRITON:
    let_interpreter_count()
