"""Every kernel on the GPU against its definition on the CPU, over the same cases as the CPU tests."""

from __future__ import annotations

from dataclasses import fields, replace
from operator import attrgetter

import pytest
import torch

from kernels.cases import to_device
from kernels.copy_blocks import cases as copy_cases, copy_blocks
from kernels.gated_activation import ACTIVATIONS, cases as gate_cases, gated_activation
from kernels.lora import ModuleGroup, adapter_segments, add_lora_group, cases as lora_cases, reference
from kernels.rms_norm import cases as norm_cases, rms_norm
from kernels.rope import apply_rope_and_store_kv, cases as rope_cases
from kernels.sampling import Adjustments, rows_of, sample, token_logprobs
from kernels.store_kv import cases as store_cases, store_kv
from kernels.swap_blocks import BlockSwaps
from tests.gpu.rope_check import check_rope_and_store_kv
from tests.kernels.tolerances import assert_close

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16)
CUDA = torch.device("cuda")
case_name = attrgetter("name")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", lora_cases.CASES, ids=case_name)
def test_add_lora_group(case: lora_cases.Case, dtype: torch.dtype) -> None:
    inputs = lora_cases.make(case, dtype)
    expected = inputs.y.clone()
    reference.add_lora(expected, inputs.x, inputs.paged, inputs.token_slots)
    y, x, group = (to_device(value, CUDA) for value in (inputs.y, inputs.x, ModuleGroup.of([inputs.paged])))
    segments = adapter_segments(inputs.token_slots.to(CUDA), group.num_slots)
    add_lora_group(y, x, group, segments, max_rank=max(case.ranks, default=0))
    assert_close(y.cpu(), expected, magnitude=4.0)


@pytest.mark.parametrize("case", copy_cases.CASES, ids=case_name)
def test_copy_blocks(case: copy_cases.Case) -> None:
    caches, pairs = copy_cases.make(case)
    on_gpu = [to_device(cache, CUDA) for cache in caches]
    copy_blocks(caches, pairs)
    copy_blocks(on_gpu, pairs)
    for cache, other in zip(caches, on_gpu, strict=True):
        assert torch.equal(cache, other.cpu())


def test_swap_blocks() -> None:
    """Out to pinned memory and back to other blocks."""
    cache = torch.arange(6 * 32, dtype=torch.float32, device=CUDA).view(6, 4, 8)
    host = torch.zeros(3, 4, 8, pin_memory=True)
    swaps = BlockSwaps([cache], [host])
    swaps.swap_out(torch.tensor([[4, 0], [5, 1], [0, 2]]))
    swaps.swap_in(torch.tensor([[0, 1], [2, 2]]))
    torch.cuda.synchronize()
    assert torch.equal(host, cache[[4, 5, 0]].cpu())
    assert torch.equal(cache[[1, 2]], cache[[4, 0]])
    with pytest.raises(ValueError, match="memory is pageable"):
        BlockSwaps([cache], [torch.zeros(3, 4, 8)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", norm_cases.CASES, ids=case_name)
def test_rms_norm(case: norm_cases.Case, dtype: torch.dtype) -> None:
    x, weight, residual = norm_cases.make(case, dtype)
    there = to_device(residual, CUDA)
    actual = rms_norm(
        to_device(x, CUDA), to_device(weight, CUDA), 1e-5, residual=there, weight_offset=case.weight_offset
    )
    assert_close(actual.cpu(), rms_norm(x, weight, 1e-5, residual=residual, weight_offset=case.weight_offset))
    if residual is not None:
        assert torch.equal(there.cpu(), residual)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_activation(dtype: torch.dtype, activation: str) -> None:
    for case in gate_cases.CASES:
        x = gate_cases.make(case, dtype)
        actual = gated_activation(to_device(x, CUDA), activation)
        assert_close(actual.cpu(), gated_activation(x, activation), magnitude=4.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", rope_cases.CASES, ids=case_name)
def test_rope_and_store_kv(case: rope_cases.Case, dtype: torch.dtype) -> None:
    check_rope_and_store_kv(case, dtype, CUDA, magnitude=4.0 if case.has_norm else 1.0)


def test_norm_gate_and_rotation_replay_in_a_cuda_graph() -> None:
    """Captured once, with other values, positions and slots in the same tensors at each replay."""
    case = rope_cases.CASES[5]
    rotation = to_device(rope_cases.make(case, torch.bfloat16), CUDA)
    x, weight, residual = (to_device(tensor, CUDA) for tensor in norm_cases.make(norm_cases.CASES[4], torch.bfloat16))

    def call() -> torch.Tensor:
        arguments = {item.name: getattr(rotation, item.name) for item in fields(rotation)}
        apply_rope_and_store_kv(**arguments)
        return gated_activation(rms_norm(x, weight, 1e-5, residual=residual), "silu")

    call()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gated = call()
    for seed in (1, 2):
        here = rope_cases.make(case, torch.bfloat16, seed=seed)
        for item in fields(here):
            if isinstance(getattr(here, item.name), torch.Tensor):
                getattr(rotation, item.name).copy_(getattr(here, item.name))
        values, _, total = norm_cases.make(norm_cases.CASES[4], torch.bfloat16, seed=seed)
        x.copy_(values)
        residual.copy_(total)
        graph.replay()
        arguments = {item.name: getattr(here, item.name) for item in fields(here)} | {
            "norm": None
            if rotation.norm is None
            else type(rotation.norm)(
                rotation.norm.query_weight.cpu(), rotation.norm.key_weight.cpu(), rotation.norm.eps
            )
        }
        apply_rope_and_store_kv(**arguments)
        for tensor, other in zip(here.changed(), rotation.changed(), strict=True):
            assert_close(other.cpu().nan_to_num(), tensor.nan_to_num(), magnitude=4.0)
        expected = gated_activation(rms_norm(values, weight.cpu(), 1e-5, residual=total), "silu")
        assert_close(gated.cpu(), expected, magnitude=4.0)


@pytest.mark.parametrize("case", store_cases.CASES, ids=case_name)
def test_store_kv(case: store_cases.Case) -> None:
    key, value, kv_positions = store_cases.make(case, torch.bfloat16)
    shape = (case.num_blocks, case.block_size, case.num_kv_heads)
    key_cache, value_cache = (torch.zeros(*shape, dim, dtype=torch.bfloat16) for dim in (case.key_dim, case.value_dim))
    on_gpu = key_cache.to(CUDA), value_cache.to(CUDA)
    store_kv(key, value, key_cache, value_cache, kv_positions)
    store_kv(to_device(key, CUDA), to_device(value, CUDA), *on_gpu, kv_positions.to(CUDA))
    for cache, other in zip((key_cache, value_cache), on_gpu, strict=True):
        assert torch.equal(cache, other.cpu())


@pytest.mark.parametrize("has_adjustments", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_sampling_draws_what_the_cpu_draws(temperature: float, has_adjustments: bool) -> None:
    """Rows with every kind of limit, at the vocabulary of an 8B Llama."""
    generator = torch.Generator().manual_seed(3)
    count, vocab_size = 48, 128_256
    logits = (3 * torch.randn(count, vocab_size, generator=generator)).to(torch.bfloat16)
    order = torch.arange(count)
    rows = rows_of(
        count,
        temperature=temperature,
        top_k=torch.where(order % 3 == 0, 50, 0),
        top_p=torch.where(order % 4 == 0, 0.9, 1.0),
        min_p=torch.where(order % 5 == 0, 0.01, 0.0),
        seed=order - 5,
        position=7,
    )
    adjusted = order[::2].contiguous()
    history = torch.randint(0, 5, (len(adjusted), vocab_size), generator=generator, dtype=torch.int32)
    adjustments = Adjustments(
        rows=adjusted,
        repetition=torch.full((len(adjusted),), 1.3),
        presence=torch.full((len(adjusted),), 0.4),
        frequency=torch.full((len(adjusted),), -0.2),
        history_row=torch.arange(len(adjusted)) - 1,
        history=history,
        bias_row=torch.arange(len(adjusted)),
        bias_token=torch.arange(len(adjusted)),
        bias=torch.full((len(adjusted),), 9.0),
    )
    some = adjustments if has_adjustments else None
    assert torch.equal(
        sample(logits.to(CUDA), to_device(rows, CUDA), to_device(some, CUDA)).cpu(), sample(logits, rows, some)
    )


def test_sampling_replays_in_a_cuda_graph() -> None:
    """Captured once, with other logits and settings in the same tensors at each replay."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.zeros(8, 32_000, device=CUDA)
    order = torch.arange(8)
    rows = rows_of(8, temperature=1.0, top_k=order * 10, top_p=0.9, min_p=0.01, seed=order)
    there = to_device(rows, CUDA)
    sample(logits, there)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sample(logits, there)
    for step in range(3):
        here = 3 * torch.randn(8, 32_000, generator=generator)
        logits.copy_(here)
        there.position.fill_(step)
        graph.replay()
        assert torch.equal(tokens.cpu(), sample(here, replace(rows, position=torch.full((8,), step))))


def test_token_logprobs() -> None:
    logits = 3 * torch.randn(5, 128_256, generator=torch.Generator().manual_seed(5))
    tokens = torch.arange(5) * 25_000
    expected, actual = token_logprobs(logits, tokens, 20), token_logprobs(logits.to(CUDA), tokens.to(CUDA), 20)
    assert torch.equal(actual.rank.cpu(), expected.rank) and torch.equal(actual.top_token.cpu(), expected.top_token)
    assert_close(actual.logprob.cpu(), expected.logprob)
    assert_close(actual.top_logprob.cpu(), expected.top_logprob)
