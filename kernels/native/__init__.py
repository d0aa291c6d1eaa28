"""Native code for the CPU: how the C sources of `kernels` are compiled, and how they are run in several threads."""

from kernels.native.build import find_compiler, library, turn_off
from kernels.native.program import (
    DTYPES,
    Program,
    Run,
    Step,
    clock_ns,
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
    "Program",
    "Run",
    "Step",
    "clock_ns",
    "find_compiler",
    "get_num_threads",
    "has_native",
    "integers",
    "library",
    "num_lanes",
    "pointers",
    "recording",
    "run_one",
    "set_num_threads",
    "turn_off",
]
