"""Compiles Triton kernels for an H200, which needs no GPU. Only for processes that do not interpret them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

H200 = GPUTarget("cuda", 90, 32)


def compile_for_h200(
    kernel: Any,
    constants: Mapping[str, Any],
    types: Mapping[str, str],
    *,
    not_of_16: Sequence[str] = (),
    num_warps: int = 4,
    num_stages: int = 3,
    is_fused: bool = True,
) -> Any:
    """Triton's compiled kernel: asm["ptx"], metadata.shared.

    types: of arguments by name, "*bf16" and the like; others are int32, and pointers to it. All pointers and integers
    are multiples of 16 but those named. Without is_fused products and sums are rounded one by one.
    """
    signature = {
        name: "constexpr" if name in constants else types.get(name, "*i32" if name.endswith("_ptr") else "i32")
        for name in kernel.arg_names
    }
    position = {name: index for index, name in enumerate(kernel.arg_names)}
    aligned = [name for name, kind in signature.items() if kind[0] in "*i" and name not in not_of_16]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(position[name],): value for name, value in constants.items()},
        attrs={(position[name],): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": is_fused}
    return triton.compile(source, target=H200, options=options)


def stack_bytes(compiled: Any) -> int:
    """What a thread keeps in memory because registers do not hold it: zero where nothing is spilled."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return max(int(size) for size in re.findall(r"(?:STACK|LOCAL):(\d+)", usage))
