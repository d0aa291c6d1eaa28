"""Launches that the host binds by short keys are those of Triton, for arguments that differ in one fact each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_kernel_is_launched_as_triton_launches_it() -> None:
    """What is compiled for a multiple of 16 reads another address where the argument is none."""
    # In a process of its own: Triton decides when it is imported whether it interprets kernels.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = [sys.executable, "-m", "tests.kernels.quick_launches"]
    result = subprocess.run(script, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    num_kernels, num_launches = (int(word) for word in result.stdout.split() if word.isdecimal())
    assert (
        num_kernels == sum(path.read_text().count("@kernel") for path in (ROOT / "kernels").glob("*/triton_*.py"))
        and num_launches > 50 * num_kernels
    )
