"""What the C sources are compiled for: named levels of x86, so that a library serves many machines. No torch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from kernels.native.cpu import Cpu


@dataclass(frozen=True, slots=True)
class Target:
    """One kind of CPU to compile for."""

    name: str  # stands in file names
    flags: tuple[str, ...]  # for gcc and clang


@dataclass(frozen=True, slots=True)
class _Level:
    target: Target
    needs: frozenset[str]  # features, as Linux names them


def _level(name: str, flags: str, needs: str) -> _Level:
    return _Level(Target(name, tuple(flags.split())), frozenset(needs.split()))


_V3 = "avx avx2 bmi1 bmi2 f16c fma abm movbe"
_V4 = _V3 + " avx512f avx512bw avx512cd avx512dq avx512vl"
_V4_FLAGS = "-march=x86-64-v4 -mtune=generic -mprefer-vector-width=512"
# The best first. Products compiled so take as long as with -march=native (Zen 5, gcc 12, 1 to 1024 rows).
_LEVELS = (
    _level("x86-64-v4-bf16", f"{_V4_FLAGS} -mavx512bf16", f"{_V4} avx512_bf16"),
    _level("x86-64-v4", _V4_FLAGS, _V4),
    _level("x86-64-v3", "-march=x86-64-v3 -mtune=generic", _V3),
)


def target_of(cpu: Cpu) -> Target:
    """The best target that a CPU can run. A CPU that fits no level has a target of its own."""
    if cpu.machine in ("x86_64", "AMD64"):
        for level in _LEVELS:
            if level.needs <= cpu.features:
                return level.target
    own = hashlib.sha256("\n".join([cpu.model, *sorted(cpu.features)]).encode()).hexdigest()[:12]
    return Target(f"{cpu.machine}-native-{own}", ("-march=native",))


def targets_to_prebuild(cpu: Cpu) -> tuple[Target, ...]:
    """The targets of a library for other machines of this kind: on x86 every level."""
    if cpu.machine in ("x86_64", "AMD64"):
        return tuple(level.target for level in _LEVELS)
    return (target_of(cpu),)
