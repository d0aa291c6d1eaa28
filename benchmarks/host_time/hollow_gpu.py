"""An sm_90 GPU that computes nothing: Triton compiles and launches for it, through its own launchers in C.

CUDA's library is replaced by functions that return at once. So a launch takes the time of its host's part, without that
of the driver. Tensors lie on the CPU.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from triton.backends.compiler import GPUTarget

_LIBRARY = "libcuda.so.1"
_SOURCE = r"""
#include <stdint.h>
static uint64_t launches;
uint64_t hollow_launches(void) { return launches; }
int cuLaunchKernelEx(const void *config, void *function, void **parameters, void **extra) { launches++; return 0; }
int cuPointerGetAttribute(void *data, int attribute, uint64_t pointer) { *(uint64_t *)data = pointer; return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 0; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)1; return 0; }
int cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
int cuGetErrorString(int error, const char **text) { *text = "none"; return 0; }
"""


class HollowUtils:
    """What Triton calls of a driver beside launches."""

    def get_device_properties(self, _device: int) -> dict[str, int]:
        """Those of an H100 that bound a kernel."""
        return {"max_shared_mem": 232_448, "multiprocessor_count": 132, "warpSize": 32}

    def load_binary(self, *_: Any) -> tuple[int, int, int, int, int]:
        """A module and a function that nobody reads, registers, spills, and the most threads."""
        return 1, 1, 32, 0, 1024


class HollowDriver:
    """Triton's driver (triton.backends.driver.DriverBase) of the hollow GPU."""

    def __init__(self) -> None:
        from triton.backends.nvidia.driver import CudaLauncher

        self.utils = HollowUtils()
        self.launcher_cls = CudaLauncher

    def get_current_target(self) -> GPUTarget:
        """Of an H100."""
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """The number that a tensor's get_device() gives: tensors lie on the CPU."""
        return -1

    def get_current_stream(self, _device: int) -> int:
        """The only one."""
        return 0


@contextmanager
def hollow_gpu(folder: Path) -> Iterator[Callable[[], int]]:
    """Triton launches for a hollow GPU, whose library is built in the folder. Yields the count of launches."""
    from triton import knobs
    from triton.runtime import driver

    source, library = folder / "cuda.c", folder / _LIBRARY
    source.write_text(_SOURCE)
    compiler = os.environ.get("CC") or shutil.which("gcc") or "cc"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", f"-Wl,-soname,{_LIBRARY}", source, "-o", library], check=True)
    loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)  # launchers find a library of this name loaded
    loaded.hollow_launches.restype = ctypes.c_uint64
    with knobs.nvidia.scope():
        knobs.nvidia.libcuda_path = str(folder)
        driver.set_active(HollowDriver())
        yield lambda: int(loaded.hollow_launches())
