"""An eager step on a GPU that computes nothing launches the same by short keys as by Triton, through its code in C."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_step_launches_as_often_by_both_ways(tmp_path: Path) -> None:
    """The benchmark counts launches where the driver receives them."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'client'}"}
    options = ["--layers", "1", "--rows", "2", "--adapters", "0", "--prompt", "0", "--steps-only"]
    command = [sys.executable, "-m", "benchmarks.host_time", *options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("2 rows, 0 adapters")]
    # Two norms, the rotation, attention and the gate; the first norm, the list of attention's parts, the inputs, the
    # choice of tokens in two, and where they are kept.
    assert [(row[4], int(row[5])) for row in rows] == [("triton", 11), ("quick", 11)]
