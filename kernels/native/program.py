"""Lists of native ops, and the threads that run them.

An op is one of the C sources' OpKind symbols and the ctypes structure that it takes, its problem. A Program is a list
of ops that stays the same over many steps; the Step that `run` receives has what differs between steps.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from kernels.native.build import library
from kernels.native.clock import clock_ns

# Element types, as kernels/native/ops.h numbers them.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float8_e4m3fn: 3}


class Step(ctypes.Structure):
    """What the ops of one run share; see kernels/native/ops.h."""

    _fields_ = [  # ctypes wants a list
        ("num_tokens", ctypes.c_int64),
        ("lora", ctypes.c_void_p),
        ("rotation", ctypes.c_void_p),
        ("attention", ctypes.c_void_p),
    ]


class _Op(ctypes.Structure):
    _fields_ = [  # ctypes wants a list
        ("kind", ctypes.c_void_p),
        ("problem", ctypes.c_void_p),
        ("is_open", ctypes.c_int64),
    ]


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a program, as `recording` has it. Times are those of clock_ns."""

    names: tuple[str, ...]  # of the ops
    began_ns: int
    times: npt.NDArray[np.int64]  # [ops, 2] see Program.run


class Program:
    """Ops that run one after the other. Keeps the problems, but not the memory that they point to."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._problems: list[ctypes.Structure] = []
        self._ops: list[_Op] = []
        self._array: ctypes.Array[_Op] | None = None

    def add(self, name: str, problem: ctypes.Structure, *, is_open: bool = False) -> None:
        """Append an op. The op that follows an open one may begin before the open one has ended."""
        self.names.append(name)
        self._problems.append(problem)
        self._ops.append(_Op(_kind(name), ctypes.addressof(problem), is_open))
        self._array = None

    def run(self, step: Step, times: npt.NDArray[np.int64] | None = None) -> None:
        """Run all ops. times int64 [ops, 2] takes when the calling thread, and when all threads, had ended each, ns.

        Raises MemoryError.
        """
        if self._array is None:
            self._array = (_Op * len(self._ops))(*self._ops)
        recorded = _recorded  # another thread may end the recording meanwhile
        if recorded is not None and times is None:
            times = np.zeros((len(self._ops), 2), dtype=np.int64)
            recorded.append(Run(tuple(self.names), clock_ns(), times))
        at = None if times is None else times.ctypes.data
        with _running:
            is_run = _function("motet_run")(_pool(), self._array, len(self._ops), ctypes.byref(step), at)
        if not is_run:
            raise MemoryError("no memory for the scratch space of native code")


def run_one(name: str, problem: ctypes.Structure, step: Step) -> None:
    """Run a single op."""
    program = Program()
    program.add(name, problem)
    program.run(step)


@contextmanager
def recording() -> Iterator[list[Run]]:
    """Add every run of native code in this process to the returned list, one after the other. No op is open meanwhile.

    Raises RuntimeError inside of another recording.
    """
    global _recorded
    if _recorded is not None:
        raise RuntimeError("the runs of native code are being recorded already")
    runs: list[Run] = []
    _recorded = runs
    try:
        yield runs
    finally:
        _recorded = None


def add_humble_threads(more: int) -> None:
    """Count threads of a lower priority, which compute beside the ops: while there are any, ops offer nobody a core."""
    if library() is not None:
        add = _function("motet_add_humble")
        add.argtypes = [ctypes.c_int64]
        add(more)


def set_num_threads(num_threads: int) -> None:
    """Set the number of threads that ops run in, the caller included. The default is torch's number."""
    global _num_threads
    if num_threads < 1:
        raise ValueError(f"num_threads is {num_threads}, want at least 1")
    _num_threads = num_threads


def get_num_threads() -> int:
    """Threads that ops run in."""
    return torch.get_num_threads() if _num_threads is None else _num_threads


@contextmanager
def one_thread() -> Iterator[None]:
    """While entered, ops and torch's operators run in the calling thread only. Other threads must run none."""
    global _num_threads
    before, torch_before = _num_threads, torch.get_num_threads()
    try:
        _num_threads = 1
        torch.set_num_threads(1)
        yield
    finally:
        _num_threads = before
        torch.set_num_threads(torch_before)


def has_native(*tensors: torch.Tensor | None) -> bool:
    """Whether there is native code, and all these tensors lie on the CPU."""
    return all(tensor is None or tensor.device.type == "cpu" for tensor in tensors) and library() is not None


@cache
def num_lanes() -> int:
    """Floats of one vector in the compiled code: 16 with AVX-512, else 8."""
    return int(_function("motet_lanes", ctypes.c_int64)())


_running = threading.Lock()  # a pool has one run at a time
_num_threads: int | None = None
_recorded: list[Run] | None = None  # where recording puts runs
_pools: dict[int, int] = {}  # address by number of threads


def _pool() -> ctypes.c_void_p:
    """The threads' pool; called under _running."""
    num_threads = get_num_threads()
    if num_threads not in _pools:
        address = _function("motet_open", ctypes.c_void_p)(ctypes.c_int64(num_threads))
        if address is None:
            raise MemoryError(f"no memory or no threads for native code in {num_threads} threads")
        _pools[num_threads] = address
    return ctypes.c_void_p(_pools[num_threads])


@cache
def _function(name: str, result: type[ctypes._SimpleCData[int]] = ctypes.c_int) -> ctypes._NamedFuncPointer:
    function = _loaded()[name]
    function.restype = result
    if name == "motet_run":
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
    return function


@cache
def _kind(name: str) -> int:
    return ctypes.addressof(ctypes.c_char.in_dll(_loaded(), f"{name}_op"))


def _loaded() -> ctypes.CDLL:
    loaded = library()
    assert loaded is not None, "call has_native first"
    return loaded


def pointers(*names: str) -> Sequence[tuple[str, type[ctypes.c_void_p]]]:
    """Fields of a structure that are pointers."""
    return [(name, ctypes.c_void_p) for name in names]


def integers(*names: str) -> Sequence[tuple[str, type[ctypes.c_int64]]]:
    """Fields of a structure that are int64."""
    return [(name, ctypes.c_int64) for name in names]
