"""Compiles the kernels at the largest tiles that models bring for GPUs with 99 KiB of shared memory, which needs none.

`python -m tests.kernels.compile_largest DTYPE`. The kernels' own launchers choose tiles, warps and stages: their
launches are noted instead of run, and each is compiled as it would be on a GPU. Prints a line of JSON for each. Run by
its test in a process of its own, since triton either interprets or compiles.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import create_function_from_signature

from kernels.fp8 import KVScale
from kernels.fp8_rows import quantize_rows
from kernels.gated_activation import gated_activation, gated_activation_fp8
from kernels.linear import row_linear
from kernels.lora import adapter_segments, lora_embed, lora_expand, lora_shrink
from kernels.lora.cases import Case as LoraCase, make_group
from kernels.lora.expansion import Expansion
from kernels.paged_attention import AttentionBatch, paged_attention
from kernels.rms_norm import rms_norm, rms_norm_fp8
from kernels.rope import apply_rope_and_store_kv
from kernels.sampling import rows_of, triton_kernel
from kernels.sampling.cases import make_adjustments
from kernels.store_kv import store_kv
from tests.data_plane.engine.device.launch_traces import TRITON_BRANCHES
from tests.kernels.lora.vectors import with_every_vector
from tests.kernels.replaced_launches import replace_launches

WITHOUT_FP8, WITH_FP8 = GPUTarget("cuda", 86, 32), GPUTarget("cuda", 89, 32)
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg")
Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]  # kernel, positional and named arguments


@contextmanager
def launches() -> Iterator[list[Launch]]:
    """The launches of the block, which takes a GPU's branches."""
    found: list[Launch] = []

    def launcher(kernel: Any, _grid: Sequence[int]) -> Callable[..., None]:
        return lambda *positional, **named: found.append((kernel, positional, named))

    with pytest.MonkeyPatch.context() as patched:
        replace_launches(patched, launcher)
        for branch in TRITON_BRANCHES:
            patched.setattr(branch, lambda tensor: True)
        yield found


def compiled(launch: Launch) -> tuple[str, Callable[[], int]]:
    """The key of what a GPU would compile for the launch, and what finds the shared memory that it takes."""
    kernel, positional, named = launch
    target = WITH_FP8 if any(_is_fp8(value) for value in (*positional, *named.values())) else WITHOUT_FP8
    backend = CUDABackend(target)
    given = named | {"debug": False, "instrumentation_mode": ""}
    bound, specialization, options = create_function_from_signature(kernel.signature, kernel.params, backend)(
        *positional, **given
    )
    _, signature, constants, attributes = kernel._pack_args(backend, given, bound, specialization, options)
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    chosen = {name: named[name] for name in OPTIONS if name in named}
    key = f"{kernel.__name__} {signature} {constants} {attributes} {chosen}"
    return key, partial(shared_bytes, source, target, chosen)


def shared_bytes(source: ASTSource, target: GPUTarget, chosen: dict[str, Any]) -> int:
    """Shared memory of a program, which is known once the layouts are: nothing is assembled."""
    backend, context, metadata, stages = CUDABackend(target), ir.context(), dict[str, Any](), dict[str, Any]()
    options = backend.parse_options(chosen)
    backend.add_stages(stages, options, source.language)
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(
        target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    )
    for stage in ("ttir", "ttgir", "llir"):
        module = stages[stage](module, metadata)
    return int(metadata["shared"])


def _is_fp8(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float8_e4m3fn


def run_all(dtype: torch.dtype) -> None:
    """The kernels of layers of models with wide rows, and of a sampler."""
    run_adapters(dtype, 4, {"norm": (4096,), "gate": (14336, 14336), "rotation": (4096, 1024, 1024)})
    run_adapters(dtype, 512, {"gate": (14336, 14336)})
    run_attention(dtype, 128, dtype, 1.0)
    run_attention(dtype, 256, dtype, 1.0)
    run_attention(dtype, 256, torch.float8_e4m3fn, torch.ones(64, 16, 2))
    x = torch.empty(4, 1 << 15, dtype=dtype)
    rms_norm(x, x[0], 1e-5, residual=x.clone())
    rms_norm_fp8(x, x[0], 1e-5, residual=x.clone())
    quantize_rows(x)
    gated_activation(x, "silu")
    gated_activation_fp8(x, "gelu")
    for num_in in (8192, 1 << 15):
        weight = torch.empty(8, num_in, dtype=dtype)
        row_linear(weight[:1], weight, weight[:, 0].contiguous())
    logits = torch.empty(4, 256_000, dtype=dtype)
    for rows in (None, rows_of(4, temperature=0.7, top_k=20, top_p=0.9, min_p=0.01)):
        triton_kernel.sample_and_check(logits, rows, make_adjustments(4, 256_000))


def run_adapters(dtype: torch.dtype, num_tokens: int, forms: dict[str, tuple[int, ...]]) -> None:
    """Shrinks and expands, and who reads their rows next, with every vector; the gate expands on the way."""
    slots = tuple(token % 2 for token in range(num_tokens))
    for form, widths in forms.items():
        case = LoraCase(form, slots, (64, 8, 3), 4096, tile_width=1024)
        inputs, epilogue = with_every_vector(make_group(case, widths, dtype))
        segments = adapter_segments(inputs.token_slots, inputs.group.num_slots, num_groups=2)
        h = lora_shrink(inputs.x, inputs.group, segments, max_rank=64)
        lora_expand(h, inputs.group, inputs.y, segments, epilogue=epilogue)
        expansion = Expansion(inputs.y, h, inputs.group, segments, epilogue)
        if form == "norm":
            rms_norm(inputs.y, inputs.y[0], 1e-5, residual=inputs.y.clone())
        elif form == "gate":
            gated_activation(inputs.y, "silu", expansion)
        else:
            run_rotation(inputs.y)
    lora_embed(torch.zeros(num_tokens, dtype=torch.int64), inputs.group.module(0), segments, max_rank=64)


def run_rotation(y: torch.Tensor) -> None:
    """32 heads of 128 over 8 of keys."""
    query, key, value = y.split((4096, 1024, 1024), dim=1)
    query, key, value = query.unflatten(1, (32, 128)), key.unflatten(1, (8, 128)), value.unflatten(1, (8, 128))
    caches = torch.empty(2, 8, 16, 8, 128, dtype=y.dtype)
    angles = torch.zeros(len(y), 64)
    positions = torch.zeros(len(y), dtype=torch.int64)
    apply_rope_and_store_kv(query, key, value, None, angles, angles, caches[0], caches[1], positions)


def run_attention(dtype: torch.dtype, dim: int, cache_dtype: torch.dtype, scale: KVScale) -> None:
    """A decode of several splits and a prefill of 8 tokens, 8 heads over each of keys, and their writes."""
    query = torch.empty(9, 16, dim, dtype=dtype)
    cache = torch.empty(64, 16, 2, dim, dtype=cache_dtype)
    batch = AttentionBatch.build(torch.zeros(2, 40, dtype=torch.int32), [0, 1, 9], [640, 40])
    paged_attention(query, cache, cache, batch, scale=1.0, key_scale=scale, value_scale=scale)
    key = torch.empty(9, 2, dim, dtype=dtype)
    store_kv(key, key, cache, cache, torch.zeros(9, dtype=torch.int64), key_scale=scale, value_scale=scale)


def main() -> None:
    """Compile each of them once."""
    with launches() as found:
        run_all(getattr(torch, sys.argv[1]))
    seen = set[str]()
    for launch in found:
        key, size_of = compiled(launch)
        if key not in seen:
            seen.add(key)
            print(json.dumps({"kernel": launch[0].__name__, "shared_bytes": size_of()}), flush=True)


if __name__ == "__main__":
    main()
