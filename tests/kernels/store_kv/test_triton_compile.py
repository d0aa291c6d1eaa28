"""What the interpreter cannot show: that store_kv's kernels compile for an H200, with its own casts to FP8."""

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
    command = [sys.executable, "-m", "tests.kernels.store_kv.compile_kernels"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert [kernel["cache"] for kernel in compiled] == ["bf16", "fp8e4nv", "fp8e4nv"]
    assert all((kernel["num_fp8_casts"] > 0) == (kernel["cache"] == "fp8e4nv") for kernel in compiled)
