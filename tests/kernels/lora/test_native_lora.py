"""LoRA in native code: the same bits whatever the threads, blocks and other rows, over all that an epilogue does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.lora import Epilogue, add_lora_group, lora_embed, lora_expand, native, reference, segments_on_host
from kernels.lora.cases import CASES, Case, GroupInputs, make_group, with_vectors
from kernels.lora.segments import AdapterSegments
from kernels.native import Program
from tests.kernels.threads import in_threads
from tests.kernels.tolerances import assert_close

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Ranks that fill no page and some that fill several; widths beside every size of tile; rows beside every number that
# registers hold, up to more than two tiles of 12.
SLOTS = tuple(slot for slot, count in enumerate((1, 2, 3, 5, 7, 12, 13, 26, 40)) for _ in range(count))
RANKS = (1, 7, 8, 9, 16, 23, 33, 64, 65)
WIDE_CASES = (
    Case("tiles of several strips", SLOTS, RANKS, 512, 0, 256),
    Case("tiles of several chunks", SLOTS, RANKS, 600, 0, 600),
    Case("ends in the middle of a pair", SLOTS, RANKS, 301, 0, 128),
    Case("narrow tiles", SLOTS, RANKS, 96, 0, 24),
)
WIDTHS = (600, 40, 301)


def tables(inputs: GroupInputs) -> tuple[GroupInputs, Epilogue]:
    """Slots with neither DoRA scale nor bias, with one of them and with both; a bias of the base."""
    generator = torch.Generator().manual_seed(3)
    shape = (inputs.group.num_slots, sum(inputs.group.out_features))
    dora_scale, lora_bias = torch.rand(shape, generator=generator) + 0.5, torch.randn(shape, generator=generator)
    dora_scale[::2], lora_bias[::3] = 1.0, 0.0
    return with_vectors(inputs, dora_scale, lora_bias, torch.randn(shape[1], generator=generator))


def copy_of(y: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(y.shape, y.stride(), dtype=y.dtype).copy_(y)


def added(inputs: GroupInputs, epilogue: Epilogue | None, block_tokens: int = 32) -> torch.Tensor:
    y, segments = copy_of(inputs.y), segments_on_host(inputs.token_slots.numpy(), inputs.group.num_slots, block_tokens)
    add_lora_group(y, inputs.x, inputs.group, segments, max_rank=inputs.max_rank, epilogue=epilogue)
    return y


def defined(inputs: GroupInputs, epilogue: Epilogue | None) -> torch.Tensor:
    y, segments = copy_of(inputs.y), segments_on_host(inputs.token_slots.numpy(), inputs.group.num_slots)
    h = torch.zeros(inputs.group.num_modules, len(y), inputs.max_rank)
    reference.shrink(inputs.x, h, inputs.group, segments)
    reference.expand(h, y, inputs.group, segments, add_inputs=True, epilogue=epilogue)
    return y


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_vectors", [False, True], ids=["plain", "vectors"])
@pytest.mark.parametrize("case", [*CASES, *WIDE_CASES], ids=lambda case: case.name)
def test_equals_the_definition_with_the_same_bits_in_any_threads_and_blocks(
    case: Case, has_vectors: bool, dtype: torch.dtype
) -> None:
    inputs, epilogue = make_group(case, WIDTHS if case in WIDE_CASES else (case.out_features, 3), dtype), None
    if has_vectors and case.ranks:
        inputs, epilogue = tables(inputs)
    expected = defined(inputs, epilogue)
    one, two, three = in_threads(lambda: added(inputs, epilogue))
    assert_close(one, expected, magnitude=16.0)
    same = [two, three, *(added(inputs, epilogue, block_tokens) for block_tokens in (1, 5, 100))]
    for other in same:
        assert torch.equal(other.contiguous().view(torch.uint8), one.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_alone_has_the_bits_that_it_has_in_a_batch(dtype: torch.dtype) -> None:
    inputs, epilogue = tables(make_group(WIDE_CASES[2], WIDTHS, dtype))
    together = added(inputs, epilogue)
    for row in (0, 2, 5, 10, 17, 29, 41, 60, 108):
        only = replace(
            inputs, x=inputs.x[row : row + 1], y=inputs.y[row : row + 1], token_slots=inputs.token_slots[row : row + 1]
        )
        assert torch.equal(added(only, epilogue)[0], together[row])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_any_stride_are_read_and_written_where_they_lie(dtype: torch.dtype) -> None:
    """What lies between the rows is left alone."""
    inputs, epilogue = tables(make_group(WIDE_CASES[0], WIDTHS, dtype))
    expected = added(inputs, epilogue)
    wide_x = torch.full((len(expected), 700), float("nan"), dtype=dtype)
    wide_y = torch.full((len(expected), 1000), 7.0, dtype=dtype)
    x, y = wide_x[:, 3:515].copy_(inputs.x), wide_y[:, 5:946].copy_(inputs.y)
    segments = segments_on_host(inputs.token_slots.numpy(), inputs.group.num_slots)
    add_lora_group(y, x, inputs.group, segments, max_rank=inputs.max_rank, epilogue=epilogue)
    assert torch.equal(y, expected)
    assert (wide_y[:, :5] == 7).all() and (wide_y[:, 946:] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")], ids=str)
def test_numbers_that_are_not_finite_stay_in_the_rows_of_their_adapter(wrong: float, dtype: torch.dtype) -> None:
    """In A, in B, in a row of x, and in h past the rank."""
    inputs, _ = tables(make_group(WIDE_CASES[0], WIDTHS, dtype))
    group, slots = inputs.group, inputs.token_slots
    clean = added(inputs, None)
    for slot, at in ((3, 0), (5, -1)):
        first, rank = int(group.first[1, slot]), int(group.rank[1, slot])
        num_pages = -(-rank // 8) * (2 + 1)  # 512 and 40 columns in tiles of 256
        group.pages[group.page_ids[range(first, first + num_pages)[at]].long(), 0, 0] = wrong
    inputs.x[-1, 0] = wrong
    spoiled = added(inputs, None)
    is_clean = (slots != 3) & (slots != 5)
    is_clean[-1] = False
    assert torch.equal(spoiled[is_clean], clean[is_clean])
    assert not spoiled[~is_clean].isfinite().all(1).any()
    segments = segments_on_host(slots.numpy(), group.num_slots)
    h = torch.full((1, 3, len(slots), inputs.max_rank), wrong)
    reference.shrink(inputs.x, h[0], group, segments)
    y = copy_of(inputs.y)
    lora_expand(h, group, y, segments)
    assert torch.equal(y[is_clean].isfinite(), clean[is_clean].isfinite())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embeddings_have_the_same_bits_in_any_threads(dtype: torch.dtype) -> None:
    case = Case("embedding", SLOTS, RANKS, 301, 0, 128)
    inputs, epilogue = tables(make_group(case, (301,), dtype))
    ids = torch.arange(len(SLOTS)) * 7 % 301
    ids[3], ids[7] = 301, -1
    segments = segments_on_host(inputs.token_slots.numpy(), len(RANKS))

    def embedded() -> torch.Tensor:
        y = inputs.y.clone()
        lora_expand(
            lora_embed(ids, inputs.group.module(0), segments, max_rank=65), inputs.group, y, segments, epilogue=epilogue
        )
        return y

    one, two, three = in_threads(embedded)
    h, expected = torch.zeros(1, len(SLOTS), 65), inputs.y.clone()
    reference.embed(ids, h[0], inputs.group.module(0), segments)
    reference.expand(h, expected, inputs.group, segments, add_inputs=True, epilogue=epilogue)
    is_known = torch.ones(len(SLOTS), dtype=torch.bool)
    is_known[[3, 7]] = False
    assert_close(one[is_known], expected[is_known], magnitude=16.0)
    assert one[~is_known].isnan().all()
    for other in (two, three):
        assert torch.equal(other.nan_to_num(), one.nan_to_num())


def test_a_recorded_program_follows_the_step_and_the_slot_table() -> None:
    """Its tensors stay; tokens, slots, ranks and weights change between runs."""
    inputs = make_group(CASES[6], (32, 16), torch.float32)
    group, x, y = inputs.group, inputs.x, inputs.y.clone()
    program, modules = Program(), native.problem(inputs.group, x, y)
    program.add("lora_shrink", modules, is_open=True)
    program.add("lora_expand", modules)
    for num_tokens, width in ((9, inputs.max_rank), (4, 2 * inputs.max_rank), (1, inputs.max_rank)):
        y.copy_(inputs.y)
        segments: AdapterSegments = segments_on_host(inputs.token_slots[:num_tokens].numpy(), group.num_slots)
        program.run(native.step_of(segments, torch.zeros(2, num_tokens, width)))
        part = replace(inputs, x=x[:num_tokens], y=inputs.y[:num_tokens], token_slots=inputs.token_slots[:num_tokens])
        assert torch.equal(y[:num_tokens], added(part, None))
        assert torch.equal(y[num_tokens:], inputs.y[num_tokens:])
    group.rank[:, 1] = 0  # slot 1 is emptied
    y.copy_(inputs.y)
    segments = segments_on_host(inputs.token_slots.numpy(), group.num_slots)
    program.run(native.step_of(segments, torch.zeros(2, 9, inputs.max_rank)))
    of_slot = inputs.token_slots == 1
    assert torch.equal(y[of_slot], inputs.y[of_slot]) and not torch.equal(y[~of_slot], inputs.y[~of_slot])
