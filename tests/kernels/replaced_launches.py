"""Puts a function of the test in the place of all launches of Triton kernels, interpreted or compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def replace_launches(patched: pytest.MonkeyPatch, launcher: Callable[[Any, Any], Callable[..., Any]]) -> None:
    """launcher(kernel, grid) returns what takes the kernel's arguments."""
    from triton.runtime.jit import KernelInterface

    from kernels.triton_launch import QuickKernel, by_name, forget_prepared

    for kind in (KernelInterface, QuickKernel):
        patched.setattr(kind, "__getitem__", launcher)
    forget_prepared()
    patched.setattr(QuickKernel, "prepare", by_name)
