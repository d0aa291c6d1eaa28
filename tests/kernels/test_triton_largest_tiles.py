"""What the interpreter cannot show: that the kernels fit into the shared memory of small GPUs, in two dtypes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARED_BYTES = 99 * 1024  # of a program on sm_86 and sm_89; others have more
# All that hold a tile or a row. The others read and write value by value.
KERNELS = {
    "shrink_kernel",
    "expand_kernel",
    "embed_kernel",
    "gate_expand_kernel",
    "rope_kernel",
    "rms_norm_kernel",
    "quantize_rows_kernel",
    "row_linear_kernel",
    "gated_activation_kernel",
    "gated_activation_fp8_kernel",
    "decode_kernel",
    "prefill_kernel",
    "list_kernel",
    "store_kv_kernel",
    "store_scaled_kernel",
    "best_kernel",
    "draw_kernel",
    "pick_kernel",
    "digit_kernel",
    "lowest_kernel",
    "penalise_kernel",
    "bias_kernel",
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_largest_tiles_fit_into_99_kib(dtype: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "client")])}
    command = [sys.executable, "-m", "tests.kernels.compile_largest", dtype]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert {kernel["kernel"] for kernel in compiled} == KERNELS
    too_large = [kernel for kernel in compiled if kernel["shared_bytes"] > SHARED_BYTES]
    assert not too_large
