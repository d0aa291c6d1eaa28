"""Launch grids follow numbers of tokens, rows and slots and the buckets of a step: other lengths, slots, ranks or
settings launch the same programs with the same numbers, as a captured graph would."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.buckets import bucket, round_up
from kernels.fp8_rows import triton_kernel as fp8_rows
from kernels.gated_activation import gated_activation, triton_kernel as gate
from kernels.lora import ModuleGroup, adapter_segments, ops, triton_segments
from kernels.lora.cases import Case, GroupInputs, make_group
from kernels.lora.expansion import Expansion
from kernels.lora.layout import page_values
from kernels.paged_attention import AttentionBatch, RowBatch, triton_kernel
from kernels.paged_attention.launch import DecodeLaunch, PrefillLaunch
from kernels.paged_attention.options import Options
from kernels.rms_norm import rms_norm, triton_kernel as norm
from kernels.rope import apply_rope_and_store_kv, cases as rope_cases, triton_kernel as rope
from kernels.row_state import cases as row_cases, triton_kernel as row_state
from kernels.sampling import sample_and_check, triton_kernel as sampling
from kernels.sampling.cases import make_adjustments
from kernels.store_kv import cases as store_cases, triton_kernel as store
from kernels.token_rows import triton_kernel as token_rows
from kernels.token_rows.layout import RowTable
from tests.kernels.replaced_launches import replace_launches
from tests.kernels.sampling.test_triton_sampling import make_logits, make_rows

Launch = tuple[str, tuple[int, ...], dict[str, Any]]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """What is launched from here on, not run: name, grid, and of each argument its number or its shape.

    Of tensors those count that are made anew for each step; the pages of adapters are the arena's.
    """
    recorded: list[Launch] = []

    def launcher(kernel: Any, grid: Sequence[int]) -> Callable[..., None]:
        def launch(*positional: Any, **named: Any) -> None:
            arguments = dict(zip(kernel.arg_names, positional, strict=False)) | named
            passed = {
                name: tuple(value.shape) if isinstance(value, torch.Tensor) else value
                for name, value in arguments.items()
                if name not in ("pages_ptr", "page_ids_ptr")
            }
            recorded.append((kernel.fn.__name__, tuple(grid), passed))

        return launch

    replace_launches(monkeypatch, launcher)
    yield recorded


def test_buckets_add_an_eighth_at_most() -> None:
    sizes = [bucket(count) for count in range(3000)]
    assert sizes[:6] == [0, 1, 2, 4, 4, 8]
    assert sorted({size for size in sizes if 60 < size <= 300}) == [
        64, 72, 80, 88, 96, 104, 112, 120, 128, 144, 160, 176, 192, 208, 224, 240, 256, 288,
    ]  # fmt: skip
    assert all(count <= size <= count * 9 / 8 for count, size in enumerate(sizes) if count > 64)
    assert sizes == sorted(sizes)
    with pytest.raises(ValueError, match="size is -1, want at least 0"):
        round_up(-1)


def attended(
    launches: list[Launch], sequences: Sequence[tuple[int, int]], width: int = 128, window: int | None = None
) -> list[Launch]:
    """Of sequences (queries, keys), with a block table of so many columns. 512 keys a split, 64 queries a tile."""
    query, cache = torch.empty(sum(queries for queries, _ in sequences), 8, 16), torch.empty(4, 16, 2, 16)
    start = [0, *itertools.accumulate(queries for queries, _ in sequences)]
    tables = torch.zeros(len(sequences), width, dtype=torch.int32)
    batch = AttentionBatch.build(tables, start, [keys for _, keys in sequences])
    launches.clear()
    triton_kernel.paged_attention(
        query, cache, cache, batch, Options(0.25, window), decode=DecodeLaunch(16, 64), prefill=PrefillLaunch(256, 64)
    )
    return list(launches)


@pytest.mark.parametrize(
    ("window", "decodes", "others", "more"),
    [
        # Splits beyond the first of each sequence: 3, 3 and 3, which are a bucket of 4; 0.
        (None, (1900, 40, 512), ((7, 400, 2049), (767, 30, 1800)), (600, 600, 7)),
        # At most 963 keys are read, two splits: 1, 1 and 1; 0.
        (900, (1900, 40, 512), ((7, 400, 2049), (900, 30, 300)), (600, 600, 7)),
    ],
)
def test_batches_of_one_bucket_launch_the_same_grids_whatever_their_lengths(
    window: int | None,
    decodes: Sequence[int],
    others: Sequence[Sequence[int]],
    more: Sequence[int],
    launches: list[Launch],
) -> None:
    """Mixed steps of three decodes and two chunks of 128 tokens in all. Two multiprocessors hold six programs."""

    def step(keys: Sequence[int], chunks: Sequence[tuple[int, int]], width: int) -> list[Launch]:
        return attended(launches, [*((1, number) for number in keys), *chunks], width, window)

    first = step(decodes, [(40, 40), (88, 1700)], 140)
    assert [(name, grid) for name, grid, _ in first] == [
        ("list_kernel", (5,)),
        ("decode_kernel", (6,)),
        ("prefill_kernel", (2 + 126 // 64, 2)),
    ]
    assert first[1][2]["programs_ptr"] == (3 + (1 if window else 4), 4)
    assert step(others[0], [(126, 300), (2, 2000)], 144) == first
    assert step(others[1], [(64, 64), (64, 90)], 129) == first
    assert step(more, [(64, 64), (64, 90)], 129) != first


def test_a_step_without_long_sequences_has_parts_for_units_alone(launches: list[Launch]) -> None:
    """Six programs compute units of two tiles of heads each where there are three units or fewer."""
    short = attended(launches, [(1, 40)] * 5)
    assert [(name, grid) for name, grid, _ in short] == [("list_kernel", (5,)), ("decode_kernel", (6,))]
    assert short[1][2]["part_ptr"] == (3, 8, 16)
    assert attended(launches, [(1, 767), (1, 1), (1, 2), (1, 3), (1, 300)]) == short
    # Three splits more, a bucket of four; five sequences of several splits at most.
    assert attended(launches, [(1, 1900), (1, 1), (1, 2), (1, 3), (1, 300)])[1][2]["part_ptr"] == (8, 8, 16)


def test_rows_on_the_device_launch_what_their_number_says(launches: list[Launch]) -> None:
    """Every layer launches one kernel, the first one the list too. Neither the lengths nor the rows change anything."""

    def launched(rows: Sequence[int], lens: Sequence[int]) -> list[Launch]:
        query, cache = torch.empty(len(rows), 8, 16), torch.empty(4, 16, 2, 16)
        tables = torch.zeros(64, 128, dtype=torch.int32)
        indices, lengths = (torch.tensor(values, dtype=torch.int32) for values in (rows, lens))
        batch = RowBatch(tables, indices, lengths, 2048)
        launches.clear()
        for _ in range(3):
            triton_kernel.paged_attention(query, cache, cache, batch, Options(0.25), decode=DecodeLaunch(16, 64))
        return list(launches)

    first = launched([3, 0, 9, -1], [2000, 1, 700, 1])
    assert [(name, grid) for name, grid, _ in first] == [("list_kernel", (4,)), *[("decode_kernel", (6,))] * 3]
    assert first[1][2]["programs_ptr"] == (16, 4)
    assert launched([1, 2, 3, 63], [1, 2, 3, 4]) == first


MIXED = Case("grid", (0, 1, -1, 3, 2, 1, 0, 3), (8, 17, 33, 5), 1536, 1536, 64)


@pytest.mark.parametrize(
    "other",
    [
        replace(MIXED, token_slots=(-1,) * 8),
        replace(MIXED, token_slots=(3,) * 8),
        replace(MIXED, ranks=(1, 50, 2, 64)),
    ],
    ids=["base only", "one slot", "ranks"],
)
def test_adapters_launch_the_same_grids_whatever_their_ranks_and_tokens(
    other: Case, launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks 33 to 64 are one bucket."""
    monkeypatch.setattr(ops, "runs_triton", lambda tensor: True)

    def launched(inputs: GroupInputs) -> list[Launch]:
        launches.clear()
        segments = adapter_segments(inputs.token_slots, 4)
        ops.add_lora_group(inputs.y, inputs.x, inputs.group, segments, max_rank=inputs.max_rank)
        ids, embedding = inputs.token_slots.long(), inputs.group.module(0)
        ops.lora_embed(ids, embedding, segments, max_rank=inputs.max_rank)
        return list(launches)

    first = launched(make_group(MIXED, (64, 32), torch.float32))
    assert [name for name, _, _ in first] == ["shrink_kernel", "expand_kernel", "embed_kernel"]
    assert launched(make_group(other, (64, 32), torch.float32)) == first
    wider = make_group(replace(MIXED, ranks=(8, 65, 33, 5)), (64, 32), torch.float32)
    assert launched(wider) != first


def llama_group(widths: tuple[int, ...], in_features: int = 4096) -> ModuleGroup:
    """Linears of an 8B Llama in a table of 256 slots."""
    table = torch.zeros(len(widths), 256, dtype=torch.int32)
    return ModuleGroup(
        torch.empty(1, 8, 1024, dtype=torch.bfloat16), table[0], table, table, table.float(), in_features, widths
    )


@pytest.mark.parametrize(
    ("num_tokens", "num_adapters", "blocks", "steps"),
    [(64, 8, 11, (1, 1, 1)), (64, 64, 64, (4, 4, 2)), (256, 8, 23, (1, 1, 1)), (256, 64, 76, (4, 4, 2))],
)
def test_programs_follow_the_adapters_of_the_step_not_the_slots(
    num_tokens: int,
    num_adapters: int,
    blocks: int,
    steps: tuple[int, int, int],
    launches: list[Launch],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The linears of an 8B Llama with 256 slots, adapters of rank 16: as many programs as work, and a few more.

    The gate has the blocks of tokens with adapters, and those of all tokens for the ones without. `steps` of 128
    columns has each program that expands q, k and v, gate and up, o or down.
    """
    for module in ("lora.ops", "gated_activation", "rms_norm", "rope"):
        monkeypatch.setattr(f"kernels.{module}.runs_triton", lambda tensor: True)
    slots = torch.arange(num_tokens, dtype=torch.int32) % num_adapters * 3
    segments = triton_segments.segments(slots, 256, 16, num_adapters)
    assert [(name, grid) for name, grid, _ in launches] == [("count_kernel", (256,)), ("place_kernel", (257,))]

    def grids(in_features: int, widths: tuple[int, ...], read: Callable[[Expansion], Any]) -> list[tuple[str, int]]:
        """Programs of a linear's shrink, and of whoever reads its output y, by `read`."""
        launches.clear()
        x, y = (torch.empty(num_tokens, width, dtype=torch.bfloat16) for width in (in_features, sum(widths)))
        group = llama_group(widths, in_features)
        h = ops.lora_shrink(x, group, segments, max_rank=16)
        read(Expansion(y, h, group, segments))
        return [(name, math.prod(grid)) for name, grid, _ in launches]

    def rotate(expansion: Expansion) -> None:
        parts = torch.split(expansion.y, [4096, 1024, 1024], dim=1)
        query, key, value = (part.view(num_tokens, -1, 128) for part in parts)
        table = torch.empty(num_tokens, 64)
        caches = [torch.empty(2, 16, 8, 128, dtype=torch.bfloat16) for _ in range(2)]
        positions = torch.empty(num_tokens, dtype=torch.int64)
        expansion.add()
        apply_rope_and_store_kv(query, key, value, None, table, table, caches[0], caches[1], positions)

    def norm_sum(expansion: Expansion) -> None:
        expansion.add()
        rms_norm(expansion.y, residual[0], 1e-5, residual=residual)

    assert grids(4096, (4096, 1024, 1024), rotate) == [
        ("shrink_kernel", blocks * 8 * 3),
        ("expand_kernel", blocks * 48 // steps[0]),
        ("rope_kernel", num_tokens * 10),
    ]
    assert grids(4096, (14336, 14336), lambda each: gated_activation(each.y, "silu", each)) == [
        ("shrink_kernel", blocks * 8 * 2),
        ("gate_expand_kernel", (blocks + num_tokens // 16) * 112 // steps[1]),
    ]
    residual = torch.empty(num_tokens, 4096, dtype=torch.bfloat16)
    for in_features, parts in ((4096, 8), (14336, 16)):
        assert grids(in_features, (4096,), norm_sum) == [
            ("shrink_kernel", blocks * parts),
            ("expand_kernel", blocks * 32 // steps[2]),
            ("rms_norm_kernel", num_tokens),
        ]


@pytest.mark.parametrize("num_rows", [64, 256])
def test_programs_of_the_other_kernels_follow_the_rows(num_rows: int, launches: list[Launch]) -> None:
    """Of one layer of an 8B Llama, and of what a step does once. Neither contexts nor adapters change them."""
    hidden = torch.empty(num_rows, 4096, dtype=torch.bfloat16)
    norm.rms_norm(hidden, hidden[0], 1e-5, hidden, 0.0)
    gate.gated_activation(torch.empty(num_rows, 2 * 14336, dtype=torch.bfloat16), "silu")
    cache = torch.empty(4, 16, 8, 128, dtype=torch.bfloat16)
    numbers = torch.zeros(num_rows, dtype=torch.int32)
    batch = RowBatch(torch.zeros(num_rows, 64, dtype=torch.int32), numbers, numbers, 1024)
    query = torch.empty(num_rows, 32, 128, dtype=torch.bfloat16)
    triton_kernel.paged_attention(query, cache, cache, batch, Options(0.1))
    sampling.sample(torch.empty(num_rows, 128_256, dtype=torch.bfloat16), None, None)
    state, _ = row_cases.make(row_cases.CASES[0])
    row_state.decode_inputs(state, numbers, 16, row_cases.no_drafts(numbers))
    row_state.store_tokens(numbers.long(), numbers, numbers.long())
    row_state.store_differences(numbers, torch.zeros(2 * num_rows, dtype=torch.int32))
    fp8_rows.quantize_rows(hidden)
    assert {name: math.prod(grid) for name, grid, _ in launches} == {
        "rms_norm_kernel": num_rows,
        "gated_activation_kernel": num_rows * 14,
        "list_kernel": num_rows,
        "decode_kernel": 2 * 3,  # three on each of two multiprocessors
        "best_kernel": num_rows * 16,
        "pick_kernel": num_rows,
        "decode_inputs_kernel": -(-num_rows // 128),
        "store_tokens_kernel": -(-num_rows // 128),
        "store_differences_kernel": -(-num_rows // 128),
        "quantize_rows_kernel": num_rows,
    }


@pytest.mark.parametrize(("num_tokens", "num_adapters", "blocks"), [(64, 8, 11), (64, 64, 64), (256, 64, 76)])
def test_programs_of_an_embedding_and_its_rows_follow_the_tokens_not_the_slots(
    num_tokens: int, num_adapters: int, blocks: int, launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An embedding of 4096 values with A and B of rank 16, and rows that adapters replace; 256 slots."""
    monkeypatch.setattr(ops, "runs_triton", lambda tensor: True)
    slots = torch.arange(num_tokens, dtype=torch.int32) % num_adapters * 3
    segments = triton_segments.segments(slots, 256, 16, num_adapters)
    launches.clear()
    ids, y = slots.long(), torch.empty(num_tokens, 4096, dtype=torch.bfloat16)
    h = ops.lora_embed(ids, llama_group((4096,), 128_256).module(0), segments, max_rank=16)
    pages, numbers = torch.empty(1, 8, 1024, dtype=torch.bfloat16), torch.zeros(256, dtype=torch.int32)
    table = RowTable(pages, page_values(pages), numbers, numbers, numbers, numbers.long(), numbers.long(), 4096)
    token_rows.replace_embeddings(y, ids, slots, table, 1.0)
    token_rows.replace_logits(torch.empty(num_tokens, 128_256), h[:, 0], slots, table)
    assert [(name, math.prod(grid)) for name, grid, _ in launches] == [
        ("embed_kernel", blocks),
        ("embeddings_kernel", num_tokens * 4),
        ("logits_kernel", num_tokens),
    ]


def test_routing_tokens_launches_the_same_grids_whatever_their_slots(launches: list[Launch]) -> None:
    def launched(slots: Sequence[int]) -> list[Launch]:
        launches.clear()
        triton_segments.segments(torch.tensor(slots, dtype=torch.int32), 6, 16)
        return list(launches)

    assert launched([0, 5, -1, 2]) == launched([-1] * 4) == launched([3] * 4)


def test_rotation_and_cache_writes_launch_the_same_grids_whatever_their_slots(launches: list[Launch]) -> None:
    def launched(num_skipped: int, seed: int) -> list[Launch]:
        launches.clear()
        inputs = rope_cases.make(rope_cases.Case("grid", 5, num_skipped=num_skipped), torch.float32, seed=seed)
        rope.apply_rope(inputs.query, inputs.key, inputs.positions, inputs.cos, inputs.sin, inputs.norm, inputs.store())
        case = store_cases.Case("grid", 5, 2, 16, 16, 4, 16, num_skipped)
        key, value, slots = store_cases.make(case, torch.float32, seed=seed)
        caches = (torch.empty(4, 16, 2, 16), torch.empty(4, 16, 2, 16))
        store.store_kv(key, value, *caches, slots)
        return list(launches)

    assert launched(0, 0) == launched(5, 1)


def test_sampling_launches_the_same_grids_whatever_the_rows_ask_for(launches: list[Launch]) -> None:
    """With one set of options; the number of biases is an argument of its own."""

    def launched(settings: Sequence[tuple[float, int, float, float]], num_biases: int) -> list[Launch]:
        launches.clear()
        adjustments = make_adjustments(3, 301)
        index = torch.arange(num_biases)
        biases = {"bias_row": index % 3, "bias_token": index, "bias": torch.ones(num_biases)}
        sampling.sample(make_logits(3, 301), make_rows(settings), replace(adjustments, **biases))
        return [(name, grid, passed) for name, grid, passed in launches if name != "bias_kernel"] + [
            (name, grid, {}) for name, grid, _ in launches if name == "bias_kernel"
        ]

    first = launched([(1.0, 5, 0.9, 0.1), (0.0, 0, 1.0, 0.0), (0.7, 0, 1.0, 0.0)], 129)
    assert len(first) == 2 + 1 + 2 * 9 + 2
    assert launched([(0.2, 50, 0.1, 0.0), (2.0, 3, 0.5, 0.2), (0.0, 1, 1.0, 0.0)], 256) == first


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (None, ["best_kernel", "pick_kernel"]),
        ([(0.7, 0, 1.0, 0.0)] * 3, ["best_kernel", "pick_kernel"]),
        (
            [(0.7, 5, 1.0, 0.0)] * 3,
            ["best_kernel", *["digit_kernel"] * 8, "lowest_kernel", "draw_kernel", "pick_kernel"],
        ),
        ([(0.7, 0, 1.0, 0.1)] * 3, ["best_kernel", "draw_kernel", "pick_kernel"]),
    ],
    ids=["greedy", "drawn", "top-k", "min-p"],
)
def test_rows_without_limits_are_sampled_in_one_pass(
    settings: Sequence[tuple[float, int, float, float]] | None,
    expected: Sequence[str],
    launches: list[Launch],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pass that checks the logits and finds each part's winner, and one that joins the parts."""
    monkeypatch.setattr("kernels.sampling.runs_triton", lambda tensor: True)
    monkeypatch.setattr("kernels.sampling.native.can_serve", lambda logits: False)
    sample_and_check(make_logits(3, 301), None if settings is None else make_rows(settings))
    assert [name for name, _, _ in launches] == expected


def test_limits_are_computed_for_the_rows_that_have_one(launches: list[Launch]) -> None:
    """One pass over the logits of all rows; everything else is for rows 1 and 3 alone."""
    drawn = (1.0, 0, 1.0, 0.0)
    rows = make_rows([drawn, (0.7, 5, 0.9, 0.0), (0.0, 5, 0.9, 0.1), (1.0, 0, 1.0, 0.1), *[drawn] * 60])
    sampling.sample(make_logits(64, 301), replace(rows, limited=torch.tensor([1, 3])), None)
    first, *limits, last = [(name, grid) for name, grid, _ in launches]
    assert (first, last) == (("best_kernel", (64, 1)), ("pick_kernel", (64,)))
    assert [name for name, _ in limits] == [*[*["digit_kernel"] * 8, "lowest_kernel"] * 2, "draw_kernel"]
    assert all(grid[0] == 2 for _, grid in limits)
    launches.clear()
    sampling.sample(make_logits(64, 301), replace(rows, limited=torch.tensor([], dtype=torch.int64)), None)
    assert [name for name, _, _ in launches] == ["best_kernel", "pick_kernel"]
