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
    maxnreg: int | None = None,
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
    options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": is_fused}
    if maxnreg is not None:
        options["maxnreg"] = maxnreg
    return triton.compile(source, target=H200, options=options)


def stack_bytes(compiled: Any) -> int:
    """What a thread keeps in memory because registers do not hold it: zero where nothing is spilled."""
    usage = _cuobjdump(compiled, "-res-usage")
    return max(int(size) for size in re.findall(r"(?:STACK|LOCAL):(\d+)", usage))


def num_unwaited(compiled: Any) -> int:
    """Products with a register operand that ptxas before 13.3 may have broken (triton issue 9433); see below."""
    return len(unwaited_products(_cuobjdump(compiled, "-sass")))


def unwaited_products(sass: str) -> list[str]:
    """wgmma of which a register operand may change before it was read.

    From such a product to the wait for it there must be no jump, and no instruction that writes the operand's four
    registers: HGMMA.64x128x16.F32.BF16 R24, R104, gdesc[..] reads R104 to R107.
    """
    instructions = [line.split("/*")[0].strip() for line in re.findall(r"/\*[0-9a-f]{4,}\*/(.*)", sass)]
    products = re.compile(r"HGMMA\S* R\d+, R(\d+), gdesc")
    found = []
    for index, instruction in enumerate(instructions):
        product = products.search(instruction)
        if product is None:
            continue
        operand = {int(product[1]) + place for place in range(4)}
        for later in instructions[index + 1 :]:
            if "WARPGROUP.DEPBAR" in later and later.endswith("0x0 ;"):
                break
            if re.search(r"\b(BRA|EXIT|RET|CALL|WARPGROUP\.DEPBAR)", later) or operand & _written(later):
                found.append(instruction)
                break
        else:
            found.append(instruction)
    return found


def _written(instruction: str) -> set[int]:
    """The registers that an instruction writes."""
    first = re.match(r"(?:@!?U?PT?\d* )?([A-Z]\S*) (?:U?PT?\d*, )*R(\d+)", instruction)
    if first is None or first[1].startswith(("HGMMA", "ST")):
        return set()
    width = 4 if re.search(r"\.128|M88\.4|HMMA", first[1]) else 2 if re.search(r"\.64|WIDE|M88\.2|^D", first[1]) else 1
    return set(range(int(first[2]), int(first[2]) + width))


def _cuobjdump(compiled: Any, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
