"""This machine's CPU: its model and the instructions that it and the operating system offer. No torch."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# Lines of /proc/cpuinfo that name the model, on x86 and on ARM.
_MODEL_LINES = (
    "vendor_id", "cpu family", "model", "model name", "stepping",
    "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "uarch", "cpu",
)  # fmt: skip
_FEATURE_LINES = ("flags", "Features", "isa")


@dataclass(frozen=True, slots=True)
class Cpu:
    """One kind of CPU."""

    machine: str  # x86_64, aarch64, ...
    model: str
    features: frozenset[str]  # as Linux names them; none where the system does not list them


@cache
def this_cpu() -> Cpu:
    """The CPU that this process runs on."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            block = []
            for line in file:  # the file is made as it is read: the first CPU's lines are enough
                if not line.strip():
                    break
                block.append(line)
    except OSError:
        return Cpu(platform.machine(), _model_without_proc(), frozenset())
    return parse_cpuinfo("".join(block), platform.machine())


def parse_cpuinfo(text: str, machine: str) -> Cpu:
    """The CPU that one block of /proc/cpuinfo describes. Linux lists there only what it has switched on."""
    lines = [line.partition(":") for line in text.splitlines()]
    fields = {name.strip(): value.strip() for name, _, value in lines}
    model = " ".join(fields[name] for name in _MODEL_LINES if fields.get(name))
    features = " ".join(fields.get(name, "") for name in _FEATURE_LINES).split()
    return Cpu(machine, model, frozenset(features))


def _model_without_proc() -> str:
    try:
        found = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return platform.processor()
    return found.stdout.strip() or platform.processor()
