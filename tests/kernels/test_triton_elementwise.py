"""What the interpreter cannot show: that the kernels around a layer's products compile for an H200, and to what."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_kernels_compile_for_an_h200_to_vectors_without_a_spill(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.kernels.compile_elementwise"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(compiled) == 16
    assert sum(kernel["num_fp8_casts"] > 0 for kernel in compiled) == 3
    for kernel in compiled:
        assert kernel["stack_bytes"] == 0, f"{kernel['kernel']} spills"
        if kernel["kernel"] in ("decode_inputs_kernel", "store_differences_kernel", "store_tokens_kernel"):
            continue  # a value of each row
        # Logits are put in any order.
        assert kernel["num_vectors"] > 0, f"{kernel['kernel']} moves single values"
