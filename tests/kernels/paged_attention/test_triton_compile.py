"""What the interpreter cannot show: that the attention kernels compile for an H200, and to which instructions."""

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
    command = [sys.executable, "-m", "tests.kernels.paged_attention.compile_kernels"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert [kernel["kernel"] for kernel in compiled] == ["_decode_kernel", "_combine_kernel", "_prefill_kernel"] * 9
    for kernel in compiled:
        is_narrow = kernel["dtype"] == "bf16"
        if kernel["kernel"] == "_decode_kernel":
            assert (kernel["num_mma"] > 0) == is_narrow
            assert kernel["num_wgmma"] == 0
            assert (kernel["num_async_copies"] > 0) == (kernel["num_stages"] > 1)
            assert kernel["num_stages"] > 1 or not is_narrow, "keys and values are not loaded ahead"
        if kernel["kernel"] == "_prefill_kernel":
            # ptxas before 13.3 miscompiles wgmma with an operand in registers where loads run ahead.
            assert (kernel["num_wgmma"] > 0) == is_narrow
            assert kernel["num_async_copies"] == 0
        is_fp8 = kernel["cache"] == "fp8e4nv" and kernel["kernel"] != "_combine_kernel"
        assert (kernel["num_fp8_casts"] > 0) == is_fp8
        assert kernel["stack_bytes"] == 0, "registers are spilled"
        # Two programs fit on a multiprocessor of 228 KiB.
        assert kernel["shared_bytes"] < 114 * 1024
