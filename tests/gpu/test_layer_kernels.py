"""Norm, gate, rotation, cache write and products of one row on the GPU: at the sizes of models, the same bits in
every batch, over large strides. The small cases of every op are in test_kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch

from kernels.cases import to_device
from kernels.devices import is_hopper
from kernels.gated_activation import cases as gate_cases, gated_activation
from kernels.linear import (
    MAX_ROWS,
    cases as linear_cases,
    reference as linear_reference,
    row_linear,
    rows_linear,
    serves_row,
    serves_rows,
)
from kernels.linear.rows_launch import WIDE
from kernels.rms_norm import cases as norm_cases, rms_norm
from kernels.rope import apply_rope_and_store_kv, cases as rope_cases
from kernels.store_kv import cases as store_cases, store_kv
from tests.gpu.rope_check import check_rope_and_store_kv
from tests.kernels.tolerances import assert_close

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CUDA = torch.device("cuda")
FAR = (1 << 31) + 64  # values between two rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [4096, 5120, 16384])
def test_norms_of_a_models_rows(hidden: int, dtype: torch.dtype) -> None:
    x, weight, residual = norm_cases.make(norm_cases.Case("model", 65, hidden, has_residual=True), dtype)
    assert residual is not None
    there = to_device(residual, CUDA)
    actual = rms_norm(to_device(x, CUDA), to_device(weight, CUDA), 1e-5, residual=there)
    assert_close(actual.cpu(), rms_norm(x, weight, 1e-5, residual=residual), magnitude=4.0)
    assert torch.equal(there.cpu(), residual)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [14336, 11008 + 3])
def test_gates_of_a_models_rows(width: int, dtype: torch.dtype) -> None:
    x = gate_cases.make(gate_cases.Case("model", 65, width), dtype)
    assert_close(gated_activation(to_device(x, CUDA), "silu").cpu(), gated_activation(x, "silu"), magnitude=4.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_in", "num_out", "has_bias"),
    [(4096, 6144, True), (4096, 4096, False), (4096, 28672, False), (14336, 4096, False), (4096, 128_256, False)],
)
def test_a_models_products_of_one_row(num_in: int, num_out: int, dtype: torch.dtype, *, has_bias: bool) -> None:
    """Captured once, and replayed for another row in the same tensor."""
    x, weight, bias = linear_cases.make(linear_cases.Case("model", 1, num_in, num_out, has_bias=has_bias), dtype)
    there = [to_device(tensor, CUDA) for tensor in (x, weight, bias)]
    assert serves_row(there[0], there[1])
    assert_close(row_linear(*there).cpu(), linear_reference.linear(x, weight, bias), magnitude=4.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = row_linear(*there)
    other = x.flip(1)
    there[0].copy_(other)
    graph.replay()
    assert_close(actual.cpu(), linear_reference.linear(other, weight, bias), magnitude=4.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("num_in", "num_out", "has_bias"),
    [
        (4096, 6144, True),
        (4096, 4096, False),
        (4096, 28672, False),
        (14336, 4096, False),
        (4096, 128_256, False),
        (1024 + 16, 1000, True),
        (64, 40, False),
    ],
)
def test_a_models_products_of_few_rows(num_in: int, num_out: int, dtype: torch.dtype, *, has_bias: bool) -> None:
    """A row has the same bits beside any others, in a graph, and beside the products of another stream."""
    generator = torch.Generator(CUDA).manual_seed(0)
    x = torch.randn(MAX_ROWS, num_in, generator=generator, dtype=dtype, device=CUDA)
    weight = torch.randn(num_out, num_in, generator=generator, dtype=dtype, device=CUDA) * num_in**-0.5
    bias = torch.randn(num_out, generator=generator, dtype=dtype, device=CUDA) if has_bias else None
    assert num_out < WIDE or serves_rows(x, weight) == is_hopper(x)
    every = rows_linear(x, weight, bias)
    assert_close(every, linear_reference.linear(x, weight, bias), magnitude=4.0)
    if not is_hopper(x):
        return
    for count in (2, 3, 16, 17, 33):
        assert torch.equal(rows_linear(x[-count:], weight, bias), every[-count:])
    rows = x.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [rows_linear(rows, weight, bias) for _ in range(3)]
    rows.copy_(x.flip(0))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(20):
        graph.replay()
        with torch.cuda.stream(side):
            beside = rows_linear(x, weight, bias)
    torch.cuda.synchronize()
    assert torch.equal(beside, every)
    assert all(torch.equal(one, every.flip(0)) for one in captured)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "case",
    [
        rope_cases.Case("Llama 8B", 32, 32, 8, 128, 128, 128, is_strided=True),
        rope_cases.Case("norms of heads, Qwen3", 31, 32, 8, 128, 128, 128, is_strided=True, has_norm=True),
        rope_cases.Case("wide heads, Gemma3", 32, 8, 4, 256, 256, 256, 3, is_strided=True, has_norm=True),
        rope_cases.Case("part of a head, Phi", 32, 32, 32, 80, 80, 32, 3),
    ],
    ids=lambda case: case.name,
)
def test_rotation_and_cache_write_of_a_models_heads(case: rope_cases.Case, dtype: torch.dtype) -> None:
    check_rope_and_store_kv(case, dtype, CUDA, magnitude=4.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_token_scales", [False, True])
def test_fp8_cache_writes_of_a_models_heads(has_token_scales: bool, dtype: torch.dtype) -> None:
    """Codes and scales are those of the CPU, bit for bit."""
    case = store_cases.Case("model", 256, 8, 128, 128, 64, 16, 5, is_strided=True)
    key, value, slots = store_cases.make(case, dtype)
    here = store_cases.make_fp8_caches(case, has_token_scales=has_token_scales)
    there = store_cases.make_fp8_caches(case, has_token_scales=has_token_scales, device=CUDA)
    store_kv(key, value, *here[:2], slots, *here[2:])
    store_kv(to_device(key, CUDA), to_device(value, CUDA), *there[:2], slots.to(CUDA), *there[2:])
    for tensor, other in zip(here[:2], there[:2], strict=True):
        assert torch.equal(other.cpu().view(torch.uint8), tensor.view(torch.uint8))
    for scale, other_scale in zip(here[2:], there[2:], strict=True):
        if isinstance(scale, torch.Tensor) and isinstance(other_scale, torch.Tensor):
            assert torch.equal(other_scale.cpu(), scale)


def norms(rows: slice) -> torch.Tensor:
    x, weight, residual = (
        to_device(tensor, CUDA)
        for tensor in norm_cases.make(norm_cases.Case("all", 33, 4096, has_residual=True), torch.bfloat16)
    )
    return torch.cat([rms_norm(x[rows], weight, 1e-5, residual=residual[rows]), residual[rows]], dim=1)


def gates(rows: slice) -> torch.Tensor:
    x = to_device(gate_cases.make(gate_cases.Case("all", 33, 14336), torch.bfloat16), CUDA)
    return gated_activation(x[rows], "silu")


def rotated(rows: slice) -> torch.Tensor:
    """Queries, keys and what the cache holds of them."""
    case = rope_cases.Case("all", 32, 32, 8, 128, 128, 128, has_norm=True)
    inputs = to_device(rope_cases.make(case, torch.bfloat16), CUDA)
    assert inputs.positions is not None
    of_tokens = ("query", "key", "value", "positions", "kv_positions")
    inputs = replace(inputs, **{name: getattr(inputs, name)[rows] for name in of_tokens})
    apply_rope_and_store_kv(**{item.name: getattr(inputs, item.name) for item in fields(inputs)})
    cached = [cache.flatten(0, 1)[inputs.kv_positions] for cache in (inputs.key_cache, inputs.value_cache)]
    return torch.cat([tensor.flatten(1) for tensor in (inputs.query, inputs.key, *cached)], dim=1)


@pytest.mark.parametrize("op", [norms, gates, rotated], ids=lambda op: op.__name__)
def test_a_token_has_the_same_bits_in_every_batch(op: Callable[[slice], torch.Tensor]) -> None:
    together = op(slice(0, 32))
    for rows in (slice(0, 1), slice(7, 8), slice(30, 32)):
        assert torch.equal(op(rows), together[rows])


def far_apart(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of two rows on the GPU with FAR values from one to the other."""
    memory = torch.empty(FAR + tensor[0].numel(), dtype=tensor.dtype, device=CUDA)
    return memory.as_strided(tensor.shape, (FAR, *tensor.stride()[1:])).copy_(tensor)


@pytest.mark.xdist_group("memory")
def test_rows_more_than_two_to_the_31_elements_apart() -> None:
    x, weight, residual = norm_cases.make(norm_cases.Case("far", 2, 128, has_residual=True), torch.bfloat16)
    assert residual is not None
    actual = rms_norm(far_apart(x), to_device(weight, CUDA), 1e-5, residual=far_apart(residual))
    assert_close(actual.cpu(), rms_norm(x, weight, 1e-5, residual=residual), magnitude=4.0)
    x = gate_cases.make(gate_cases.Case("far", 2, 64), torch.bfloat16)
    assert_close(gated_activation(far_apart(x), "silu").cpu(), gated_activation(x, "silu"), magnitude=4.0)
    here = rope_cases.make(rope_cases.Case("far", 2), torch.bfloat16)
    there = to_device(here, CUDA)
    there = replace(there, **{name: far_apart(getattr(here, name)) for name in ("query", "key", "value")})
    for inputs in (here, there):
        apply_rope_and_store_kv(**{item.name: getattr(inputs, item.name) for item in fields(inputs)})
    for tensor, other in zip(here.changed(), there.changed(), strict=True):
        assert_close(other.cpu().nan_to_num(), tensor.nan_to_num())
    key, value, slots = store_cases.make(store_cases.Case("far", 2, 2, 16, 16, 4, 16, 0), torch.bfloat16)
    key_cache, value_cache = torch.zeros(2, 4, 16, 2, 16, dtype=torch.bfloat16, device=CUDA)
    store_kv(far_apart(key), far_apart(value), key_cache, value_cache, slots.to(CUDA))
    for cache, tokens in zip((key_cache, value_cache), (key, value), strict=True):
        assert torch.equal(cache.flatten(0, 1)[slots.to(CUDA)].cpu(), tokens)
