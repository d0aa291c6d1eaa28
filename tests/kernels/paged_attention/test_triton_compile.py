"""What the interpreter cannot show: that the attention kernels compile for an H200, and to which instructions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def test_kernels_compile_for_an_h200(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.kernels.paged_attention.compile_kernels"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    of_each = ["decode_kernel", "prefill_kernel"]
    assert [kernel["kernel"] for kernel in compiled if kernel["kernel"] != "list_kernel"] == of_each * 9
    assert len(compiled) == 2 * 9 + 2
    for kernel in compiled:
        is_narrow = kernel["dtype"] == "bf16"
        runs_ahead = kernel["num_stages"] > 2
        if kernel["kernel"] == "decode_kernel":
            assert (kernel["num_mma"] > 0) == is_narrow
            assert kernel["num_wgmma"] == 0
        if kernel["kernel"] == "prefill_kernel":
            assert (kernel["num_wgmma"] > 0) == is_narrow
        if kernel["kernel"] != "list_kernel":
            assert runs_ahead or not is_narrow
            assert (kernel["num_ahead"] > 0) == runs_ahead, "no tile is loaded while another is computed"
        assert kernel["num_unwaited"] == 0, "a wgmma that ptxas before 13.3 may have broken"
        is_fp8 = kernel["cache"] == "fp8e4nv" and kernel["kernel"] != "list_kernel"
        assert (kernel["num_fp8_casts"] > 0) == is_fp8
        assert kernel["stack_bytes"] == 0, "registers are spilled"
        # One program of prefill, whose registers leave no room for two, or two others on a multiprocessor of 228 KiB.
        # (The 99 KiB of sm_89 hold one of each: wgmma takes more than the products there.)
        assert kernel["shared_bytes"] < (227 if kernel["kernel"] == "prefill_kernel" else 114) * 1024


PRODUCT = """
        /*2ff0*/                   HGMMA.64x128x16.F32.BF16 R24, R104, gdesc[UR16].tnspB, RZ, !UPT ;  /* 0x01 */
        /*3000*/                   HGMMA.64x128x16.F32.BF16 R24, R108, gdesc[UR16].tnspB, R24, gsb0 ;  /* 0x01 */
        /*3010*/                   IADD3 R103, R9, 0x40, RZ ;
        %s
        /*3030*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*3040*/                   MOV R104, R9 ;
"""


@pytest.mark.parametrize(
    ("between", "num_found"),
    [
        ("/*3020*/                   IMAD.WIDE R112, R4, 0x4, R6 ;", 0),
        ("/*3020*/              @!P0 STS.128 [R104], R108 ;", 0),
        ("/*3020*/                   MOV R107, R9 ;", 1),
        ("/*3020*/              @!P0 LDG.E.64 R106, desc[UR32][R188.64] ;", 1),
        ("/*3020*/                   SHFL.BFLY PT, R105, R9, 0x2, 0x1f ;", 1),
        ("/*3020*/                   LDSM.16.M88.4 R104, [R9] ;", 1),
        ("/*3020*/                   @P0 BRA 0x1c20 ;", 2),
        ("/*3020*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;", 2),
    ],
)
def test_products_whose_operand_may_change_before_the_wait_are_found(between: str, num_found: int) -> None:
    from tests.kernels.compiling import unwaited_products

    assert len(unwaited_products(PRODUCT % between)) == num_found
