"""The LoRA operators on the GPU: against their definitions, in graphs, over large strides, the same bits throughout."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch

from benchmarks.kernels.tune_lora import Shape, expand_problem, shrink_problem
from data_plane.adapters.step.adapter_steps import AdapterSteps
from kernels.cases import to_device
from kernels.lora import adapter_segments, add_lora_group, lora_embed, lora_expand, reference
from kernels.lora.cases import CASES, Case, GroupInputs, make_group
from kernels.lora.segments import MANY_TOKENS, segments_in_torch
from tests.data_plane.adapters.factories import TARGETS, expected_delta, load, make_arena, pack
from tests.kernels.tolerances import assert_close

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
GROUP = (96, 32, 32)
WIDE = Case("wide", tuple(token % 7 - 1 for token in range(64)), (8, 17, 64, 3, 16, 200), 4096, tile_width=1024)


def added(inputs: GroupInputs, y: torch.Tensor) -> torch.Tensor:
    segments = adapter_segments(inputs.token_slots, inputs.group.num_slots)
    add_lora_group(y, inputs.x, inputs.group, segments, max_rank=inputs.max_rank)
    return y


def defined(inputs: GroupInputs) -> torch.Tensor:
    """By the definitions, on the CPU."""
    segments = segments_in_torch(inputs.token_slots, inputs.group.num_slots, 16)
    h = torch.empty(inputs.group.num_modules, len(inputs.token_slots), inputs.max_rank)
    y = inputs.y.clone()
    reference.shrink(inputs.x, h, inputs.group, segments)
    reference.expand(h, y, inputs.group, segments, add_inputs=True)
    return y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_groups_equal_the_definition(case: Case, dtype: torch.dtype) -> None:
    widths = tuple(width * case.tile_width for width in (6, 2, 2))
    inputs = make_group(case, widths, dtype)
    on_gpu = to_device(inputs, CUDA)
    assert_close(added(on_gpu, on_gpu.y).cpu(), defined(inputs), magnitude=4.0)


@pytest.mark.parametrize("num_tokens", [1, 64, MANY_TOKENS, 3000])
def test_exact_sums_at_the_sizes_of_a_model(num_tokens: int) -> None:
    """In bfloat16, in parts and whole; not one bit may differ."""
    case = replace(WIDE, token_slots=tuple(token % 7 - 1 for token in range(num_tokens, 0, -1)))
    inputs = make_group(case, (4096, 1024, 1024), torch.bfloat16, is_exact=True)
    on_gpu = to_device(inputs, CUDA)
    assert torch.equal(added(on_gpu, on_gpu.y).cpu(), defined(inputs))


def test_a_token_has_the_same_bits_in_every_batch() -> None:
    inputs = to_device(make_group(WIDE, (4096, 1024, 1024), torch.bfloat16), CUDA)
    together = added(inputs, inputs.y.clone())
    for token in (1, 2, 30, 63):
        row = slice(token, token + 1)
        alone = replace(inputs, x=inputs.x[row], y=inputs.y[row], token_slots=inputs.token_slots[row])
        assert torch.equal(added(alone, alone.y.clone()), together[row])
    times = 1 + MANY_TOKENS // len(inputs.x)
    many = replace(inputs, x=inputs.x.repeat(times, 1), token_slots=inputs.token_slots.repeat(times))
    y = added(many, inputs.y.repeat(times, 1))
    assert torch.equal(y, together.repeat(times, 1))


def test_a_captured_graph_follows_the_slots_of_its_tokens() -> None:
    inputs = to_device(make_group(WIDE, (4096, 1024, 1024), torch.bfloat16), CUDA)
    static = inputs.y.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        added(inputs, static)  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        added(inputs, static)
    for shift in (1, 5):
        inputs.token_slots.copy_(inputs.token_slots.roll(shift))
        static.copy_(inputs.y)
        graph.replay()
        assert torch.equal(static, added(inputs, inputs.y.clone()))


@pytest.mark.parametrize("tokens", [64, 2048])
def test_launches_of_the_tuner_have_the_bits_of_the_definition(tokens: int) -> None:
    """Of every width and number of warps and stages, a part of all, so that compiling them takes a few seconds; the
    tuner itself checks each one that it times."""
    shape = Shape(4096, (1024, 1024), 1024, 128, tokens)
    problems = (shrink_problem(shape, CUDA, torch.bfloat16), 7), (expand_problem(shape, CUDA, torch.bfloat16), 2)
    for problem, step in problems:
        chosen = problem.candidates[::step]
        for name in asdict(problem.default):
            assert {getattr(c, name) for c in chosen} == {getattr(c, name) for c in problem.candidates}
        assert problem.is_right(problem.default)
        assert [launch for launch in chosen if not problem.is_right(launch)] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_embeddings_equal_the_definition(dtype: torch.dtype) -> None:
    """Of an odd vocabulary, with an id that is outside it."""
    case = Case("embedding", tuple(token % 5 - 1 for token in range(40)), (8, 17, 64, 3), 32001, tile_width=64)
    inputs = make_group(case, (64,), dtype)
    on_gpu = to_device(inputs, CUDA)
    ids = torch.randint(0, 32001, (40,), generator=torch.Generator().manual_seed(0))
    ids[:2] = torch.tensor([32000, 32001])
    segments = segments_in_torch(inputs.token_slots, 4, 16)
    h = torch.zeros(40, 64)
    reference.embed(ids, h, inputs.group.module(0), segments)
    expected = inputs.y.clone()
    reference.expand(h[None], expected, inputs.group, segments, add_inputs=True)
    on_device = adapter_segments(on_gpu.token_slots, 4)
    actual = lora_embed(ids.to(CUDA), on_gpu.group.module(0), on_device, max_rank=64)
    for token, slot in enumerate(case.token_slots):
        if slot >= 0:
            rank = case.ranks[slot]
            torch.testing.assert_close(
                actual[0, 0, token, :rank].cpu(), h[token, :rank], rtol=0, atol=0, equal_nan=True
            )
    lora_expand(actual, on_gpu.group, on_gpu.y, on_device)
    assert on_gpu.y[1].isnan().all()
    keep = torch.arange(40) != 1
    assert_close(on_gpu.y.cpu()[keep], expected[keep], magnitude=4.0)


def test_fused_modules_of_an_arena_equal_the_packed_matrices() -> None:
    arena = make_arena(device="cuda")
    adapters = {slot: pack(rank, seed=slot) for slot, rank in enumerate((1, 8, 13, 64))}
    for slot, packed in adapters.items():
        load(arena, slot, 1, packed)
    slots = [0, -1, 3, 2, 1, 1, 0]
    step = AdapterSteps(arena).begin(torch.tensor(slots, dtype=torch.int32), [0, 1, 2, 3])
    assert step is not None
    names = tuple(target.name for target in TARGETS[:3])
    x = torch.randn(len(slots), 32, generator=torch.Generator().manual_seed(0))
    expected = torch.cat([expected_delta(name, x, slots, adapters) for name in names], dim=1)
    y = torch.zeros_like(expected, device=CUDA)
    step.apply_group(names, x.to(CUDA), y)
    torch.testing.assert_close(y.cpu(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.xdist_group("memory")
def test_rows_more_than_two_to_the_31_elements_apart() -> None:
    inputs = to_device(make_group(replace(WIDE, token_slots=(1, 2)), (1024,), torch.bfloat16), CUDA)
    expected = added(inputs, inputs.y.clone())
    stride = 2**31 + 64
    memory = torch.empty(stride + 4096, dtype=torch.bfloat16, device=CUDA)
    x = memory.as_strided((2, 4096), (stride, 1)).copy_(inputs.x)
    assert torch.equal(added(replace(inputs, x=x), inputs.y.clone()), expected)
    y = memory.as_strided((2, 1024), (stride, 1)).copy_(inputs.y)
    assert torch.equal(added(inputs, y), expected)
