"""What the interpreter cannot show: that products of a few rows are pipelined tensor core products of shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from kernels.linear.rows_launch import SHARED_BYTES

ROOT = Path(__file__).resolve().parents[3]


def test_products_of_rows_compile_for_an_h200(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.kernels.linear.compile_rows"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    shapes = [kernel["shapes"] for kernel in compiled]
    first = [["m64n16k16"], ["m64n32k16"], ["m64n64k16"], ["m64n64k16"]]  # outputs, by rows of x
    assert shapes == [*first, ["m64n32k16"]]
    for kernel in compiled:
        assert kernel["num_unwaited"] == 0
        assert kernel["stack_bytes"] == 0, "spills"
        assert kernel["copy_bytes"] == ["0x10"] or kernel["copy_bytes"] == ["16"]
        assert kernel["num_waits_ahead"] > 0, "the next steps' loads are on their way"
        assert kernel["shared_bytes"] <= SHARED_BYTES
