"""Which level of x86 a CPU runs, read from what Linux says of it."""

from __future__ import annotations

import pytest

from kernels.native.cpu import Cpu, parse_cpuinfo, this_cpu
from kernels.native.target import target_of, targets_to_prebuild

HASWELL = "fpu sse2 sse4_2 popcnt avx avx2 bmi1 bmi2 f16c fma abm movbe"
SKYLAKE = f"{HASWELL} avx512f avx512bw avx512cd avx512dq avx512vl"
ZEN4 = f"{SKYLAKE} avx512_bf16 avx512_vnni"


@pytest.mark.parametrize(
    ("features", "name"),
    [
        (ZEN4, "x86-64-v4-bf16"),
        (SKYLAKE, "x86-64-v4"),
        (ZEN4.replace("avx512bw ", ""), "x86-64-v3"),  # what the system did not switch on is not listed
        (HASWELL, "x86-64-v3"),
    ],
)
def test_x86_has_named_levels(features: str, name: str) -> None:
    assert target_of(Cpu("x86_64", "any", frozenset(features.split()))).name == name


def test_other_cpus_have_targets_of_their_own() -> None:
    old = target_of(Cpu("x86_64", "old", frozenset({"sse2"})))
    arm = [
        Cpu("aarch64", model, frozenset(features.split()))
        for model, features in (("a", "fp"), ("a", "fp sve"), ("b", "fp"))
    ]
    names = {old.name, *(target_of(cpu).name for cpu in arm)}
    assert len(names) == 4
    assert old.flags == ("-march=native",)
    assert targets_to_prebuild(arm[0]) == (target_of(arm[0]),)


def test_all_levels_are_made_ahead_on_any_x86() -> None:
    targets = targets_to_prebuild(Cpu("x86_64", "old", frozenset()))
    assert [target.name for target in targets] == ["x86-64-v4-bf16", "x86-64-v4", "x86-64-v3"]


def test_the_cpu_is_read_from_one_block_of_cpuinfo() -> None:
    x86 = (
        "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC\ncpu MHz\t\t: 2596.1\nflags\t\t: fpu avx2\n"
    )
    assert parse_cpuinfo(x86, "x86_64") == Cpu("x86_64", "AuthenticAMD AMD EPYC", frozenset({"fpu", "avx2"}))
    arm = "processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n"
    assert parse_cpuinfo(arm, "aarch64") == Cpu("aarch64", "0x41 0xd0c", frozenset({"fp", "asimd"}))


def test_this_machine_has_a_target() -> None:
    assert target_of(this_cpu()).name
