"""What the interpreter cannot show: that the LoRA kernels compile for an H200, and to which instructions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PRODUCTS = ("shrink_kernel", "expand_kernel", "gate_expand_kernel")


def test_kernels_compile_for_an_h200_without_wgmma(tmp_path: Path) -> None:
    """ptxas before 13.3 miscompiles pipelined wgmma with an operand in registers, so there is none."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.kernels.lora.compile_kernels"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(compiled) == 8
    assert all(kernel["num_wgmma"] == 0 for kernel in compiled)
    assert all(kernel["stack_bytes"] == 0 for kernel in compiled), "registers do not hold what a thread computes"
    products = [kernel for kernel in compiled if kernel["kernel"] in PRODUCTS]
    assert len(products) == 5
    # Weights and inputs are read 16 bytes at a time, those of shrink ahead of their products.
    for kernel in products:
        assert (kernel["num_mma"] > 0, kernel["num_single_loads"]) == (True, 0), kernel["kernel"]
    # A value has the same bits in an expand of its own and in other kernels: one instruction for the products, and no
    # rounding that a compiler may leave out.
    for kernel in products[2:]:
        assert (kernel["mma_shapes"], kernel["num_fused"]) == (["m16n8k16"], 0), kernel["kernel"]
    # Of a block of few tokens a thread finds its share of a product in its own registers.
    assert products[2]["kernel"] == "expand_kernel"
    assert products[2]["num_shuffles"] == 0
    shrinks = [kernel for kernel in compiled if kernel["kernel"] == "shrink_kernel"]
    assert len(shrinks) == 2
    for kernel in shrinks:
        assert kernel["num_copies_of_16"] > 0
        # Page ids are read a step before they are used: where they were read in place, one step was in memory at a
        # time.
        assert kernel["num_ahead"] > 0, "no step is loaded while another is computed"
        assert kernel["num_buffers"] == 3
    # Three programs fit on a multiprocessor of 228 KiB.
    assert all(kernel["shared_bytes"] < 76 * 1024 for kernel in compiled)
