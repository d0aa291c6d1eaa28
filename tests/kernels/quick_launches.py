"""Compares launches of all kernels with Triton's own, for arguments that differ in one fact each. Needs no GPU.

Nothing is compiled: what Triton would compile is known by the key that it looks up. Only for processes that do not
interpret kernels. Prints what it compared, and fails at the first launch that is not Triton's.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import kernels
from benchmarks.host_time.hollow_gpu import HollowDriver
from kernels.triton_launch import QuickKernel

LAUNCHED: list[tuple[object, ...]] = []  # key of Triton, grid, options of the launch, arguments
MEMORY = torch.zeros(64, dtype=torch.int64)  # begins at a multiple of 64 bytes
WHOLE = 48  # an integer's usual value: a multiple of 16
ODD_INTEGERS = (1, 0, 17, 64, -1, -16, 2**31 - 1, 2**31, 2**31 + 1, 2**40, True, 0.5)


class NotedLauncher:
    """In the place of Triton's launcher: notes what is launched."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = False, True

    def __init__(self, key: str) -> None:
        self._key = key

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, metadata: object, *rest: Any) -> None:
        """As JITFunction.run calls it: metadata and two hooks of the launch, then the arguments."""
        self.launch(
            x, y, z, stream, function, self.launch_cooperative_grid, self.launch_pdl, None, None, metadata, *rest
        )

    def launch(self, *arguments: Any) -> None:
        """The function in C. Behind the metadata come those of hooks and the hooks, which are left out."""
        values = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in arguments[13:]]
        LAUNCHED.append((self._key, arguments[:10], *((value, type(value)) for value in values)))


def compiled(_kernel: JITFunction, key: str, *_: object) -> object:
    """In the place of what Triton compiles for this key."""
    return SimpleNamespace(
        run=NotedLauncher(key), function=7, packed_metadata=(4, 1, 0), launch_metadata=lambda *_: None
    )


class Noted(QuickKernel):
    """A kernel of ours that compiles nothing."""

    _do_compile = compiled


class Plain(JITFunction):  # type: ignore[misc]  # triton is untyped
    """A kernel of Triton's that compiles nothing."""

    _do_compile = compiled


def all_kernels() -> Iterator[QuickKernel]:
    """Every kernel of the package."""
    for path in sorted(Path(kernels.__file__).parent.glob("*/triton_*.py")):
        module = importlib.import_module(f"kernels.{path.parent.name}.{path.stem}")
        yield from (
            value
            for value in vars(module).values()
            if isinstance(value, QuickKernel) and value.__module__ == module.__name__
        )


def usual_arguments(kernel: QuickKernel) -> dict[str, Any]:
    """One for each parameter."""
    given: dict[str, Any] = {}
    for param in kernel.params:
        if param.is_constexpr:
            given[param.name] = param.name.startswith(("HAS_", "IS_")) or 16
        elif param.name.endswith("_ptr"):
            given[param.name] = MEMORY
        else:
            given[param.name] = WHOLE
    return given


def changed_arguments(kernel: QuickKernel, usual: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Arguments that differ from the usual ones in one fact, and its name."""
    for name, value in usual.items():
        if isinstance(value, torch.Tensor):
            others: list[Any] = [MEMORY[1:], MEMORY[2:], MEMORY.view(torch.bfloat16), MEMORY.view(torch.int32)[1:]]
        elif name in [param.name for param in kernel.params if param.is_constexpr]:
            others = [not value, 1, 1.0, "silu"] if isinstance(value, bool) else [1, True, 1.0, 32, "silu", None]
        else:
            others = list(ODD_INTEGERS)
        for other in others:
            yield f"{name} = {other!r:.40}", usual | {name: other}
    for options in (
        {"num_warps": 8},
        {"num_stages": 2},
        {"enable_fp_fusion": False},
        {"num_warps": 4, "num_stages": 1},
    ):
        yield str(options), usual | options


class Elsewhere:
    """A tensor of another device."""

    dtype = MEMORY.dtype

    def data_ptr(self) -> int:
        """At a multiple of 16."""
        return 1 << 20

    def get_device(self) -> int:
        """Of a GPU, where the current device has the number of a CPU."""
        return 1


def launched(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any]) -> list[tuple[object, ...]]:
    LAUNCHED.clear()
    kernel[grid](**arguments)
    return LAUNCHED[:]


def launched_prepared(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any]) -> list[tuple[object, ...]]:
    """The last of three launches that were prepared: the first goes through Triton."""
    names = [name for name in kernel.arg_names if name.endswith("_ptr")]
    numbers = {name: value for name, value in arguments.items() if name not in names}
    launch = kernel.prepare(grid, numbers)
    for _ in range(3):
        LAUNCHED.clear()
        launch(*(arguments[name] for name in names))
    return LAUNCHED[:]


def compare(kernel: QuickKernel) -> int:
    """How many launches were compared."""
    options = {"do_not_specialize": kernel.do_not_specialize}
    ours, plain = Noted(kernel.fn, **options), Plain(kernel.fn, **options)
    usual = usual_arguments(kernel)
    count, keys = 0, set()
    for grid in ((3,), (3, 2), (3, 2, 5)):
        for fact, arguments in [("usual", usual), *changed_arguments(kernel, usual)]:
            expected = launched(plain, grid, arguments)
            for turn in ("first", "second"):
                assert launched(ours, grid, arguments) == expected, f"{kernel.__name__}, {fact}, {turn} launch"
            assert launched_prepared(ours, grid, arguments) == expected, f"{kernel.__name__}, {fact}, prepared"
            count += 1
            keys.add(expected[0][0])
    bound = ours.num_bound_by_triton
    for _ in range(3):
        launched(ours, (3,), usual)
        launched_prepared(ours, (3,), usual)
    assert ours.num_bound_by_triton == bound, f"{kernel.__name__}: Triton binds each of its launches"
    for name in (name for name, value in usual.items() if value is MEMORY):
        for _ in range(2):  # Triton's launcher is the one that refuses it
            launched(ours, (3,), usual | {name: Elsewhere()})
            bound += 1
            assert ours.num_bound_by_triton == bound, f"{kernel.__name__}: {name} on another device is launched"
    assert len(keys) > len(usual), f"{kernel.__name__}: {len(keys)} kernels for all of these arguments"
    return count


def main() -> None:
    driver.set_active(HollowDriver())
    found = list(all_kernels())
    total = sum(compare(kernel) for kernel in found)
    print(f"{len(found)} kernels, {total} launches")


if __name__ == "__main__":
    main()
