"""Native code for the CPU: how the C sources of `kernels` are compiled, and how they are run in several threads."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kernels.native.build import NativeSettings, configure, library, library_name, prebuild, settings
from kernels.native.clock import clock_ns
from kernels.native.compiler import find_compiler

if TYPE_CHECKING:
    from kernels.native.program import (
        DTYPES,
        Program,
        Run,
        Step,
        add_humble_threads,
        get_num_threads,
        has_native,
        integers,
        num_lanes,
        pointers,
        recording,
        run_one,
        set_num_threads,
    )

__all__ = [
    "DTYPES",
    "NativeSettings",
    "Program",
    "Run",
    "Step",
    "add_humble_threads",
    "clock_ns",
    "configure",
    "find_compiler",
    "get_num_threads",
    "has_native",
    "integers",
    "library",
    "library_name",
    "num_lanes",
    "pointers",
    "prebuild",
    "recording",
    "run_one",
    "set_num_threads",
    "settings",
]


def __getattr__(name: str) -> Any:
    """A name of program.py, which imports torch: compiling needs none."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module("kernels.native.program"), name)
    globals()[name] = value
    return value
