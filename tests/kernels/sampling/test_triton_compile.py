"""What the interpreter cannot show: that the sampling kernels compile for an H200, and round as the CPU does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_kernels_compile_for_an_h200(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.kernels.sampling.compile_kernels"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert len({line["kernel"] for line in compiled}) == 8
    assert all(line["num_local"] == 0 for line in compiled), "an array lies in local memory"
    # The CPU rounds each product and each sum.
    rounded = [line for line in compiled if line["kernel"] in ("penalise_kernel", "bias_kernel")]
    assert len(rounded) == 2 and all(line["num_fused"] == 0 for line in rounded)
