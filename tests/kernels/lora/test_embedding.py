"""LoRA of embeddings and of an lm_head, whose vocabulary is of any width, against PEFT's own layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from peft import LoraConfig
from peft.tuners.lora import Embedding as PeftEmbedding, Linear as PeftLinear

from kernels.lora import ModuleGroup, adapter_segments, lora_embed, lora_expand, lora_shrink, reference
from kernels.lora.cases import CASES, Case, Inputs, make, make_group
from tests.kernels.tolerances import assert_close

VOCABULARY = 37
# The vocabulary is the input of an embedding and the output of an lm_head.
EMBEDDING_CASES = [
    Case("divides", (0, 1, -1, 1, 0), (8, 12), 48, 32, 16),
    Case("odd vocabulary", (2, 0, 1, -1, 1, 2, 2), (5, 17, 11), VOCABULARY, 32, 16),
    Case("added token", (0, -1, 0), (8,), 33, 64, 32),
    Case("vocabulary below a page", (1, 0), (3, 9), 5, 32, 32),
    Case("runs", (0,) * 5 + (-1,) * 3 + (1,) * 4, (4, 0), 21, 16, 8),
]


def token_ids(case: Case, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, case.in_features, (len(case.token_slots),), generator=generator, dtype=dtype)
    ids[-1:] = case.in_features - 1  # the last column of the last page
    return ids


def define(inputs: Inputs, ids: torch.Tensor) -> torch.Tensor:
    y = inputs.y.clone()
    reference.add_lora_embedding(y, ids, inputs.paged, inputs.token_slots)
    return y


def added(inputs: Inputs, ids: torch.Tensor) -> torch.Tensor:
    """The columns of A, then an expand."""
    group = ModuleGroup.of([inputs.paged])
    segments = adapter_segments(inputs.token_slots, group.num_slots)
    y = inputs.y.clone()
    lora_expand(lora_embed(ids, inputs.paged, segments, max_rank=max_rank(inputs)), group, y, segments)
    return y


def max_rank(inputs: Inputs) -> int:
    return int(inputs.paged.rank.max())


def peft_embedding(case: Case, a: torch.Tensor, b: torch.Tensor, scaling: float) -> Any:
    base = torch.nn.Embedding(case.in_features, case.out_features)
    alpha: Any = scaling * len(a)
    layer: Any = PeftEmbedding(base, "one", LoraConfig(r=len(a)), r=len(a), lora_alpha=alpha)
    layer.lora_embedding_A["one"].data.copy_(a)
    layer.lora_embedding_B["one"].data.copy_(b.T)
    return layer


@pytest.mark.parametrize("case", EMBEDDING_CASES, ids=lambda case: case.name)
def test_definition_equals_embeddings_of_peft(case: Case) -> None:
    inputs, ids = make(case, torch.float32), token_ids(case)
    actual = define(inputs, ids)
    for row, slot in enumerate(case.token_slots):
        if slot < 0 or case.ranks[slot] == 0:
            assert torch.equal(actual[row], inputs.y[row])
            continue
        layer = peft_embedding(case, *inputs.matrices[slot])
        with torch.no_grad():
            delta = layer(ids[row : row + 1]) - layer.base_layer(ids[row : row + 1])
        assert_close(actual[row], inputs.y[row] + delta[0], magnitude=4.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", EMBEDDING_CASES, ids=lambda case: case.name)
@pytest.mark.usefixtures("lora_form")
def test_operators_equal_the_definition(case: Case, dtype: torch.dtype) -> None:
    inputs = make(case, dtype)
    for ids in (token_ids(case), token_ids(case, torch.int32)):
        expected = define(inputs, ids)
        assert_close(added(inputs, ids), expected, magnitude=4.0)


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=4).flatmap(
        lambda ranks: st.tuples(st.just(tuple(ranks)), st.lists(st.integers(-1, len(ranks) - 1), max_size=12))
    ),
    st.integers(1, 50),
    st.integers(1, 20),
    st.integers(1, 24),
)
def test_random_embeddings(sizes: tuple[tuple[int, ...], list[int]], vocabulary: int, width: int, page: int) -> None:
    ranks, slots = sizes
    case = Case("random", tuple(slots), ranks, vocabulary, width, page)
    inputs, ids = make(case, torch.float32), token_ids(case)
    expected = define(inputs, ids)
    assert_close(added(inputs, ids), expected, magnitude=4.0)


@pytest.mark.usefixtures("lora_form")
@pytest.mark.parametrize("vocabulary", [33, VOCABULARY, 64, 1])
def test_an_lm_head_of_any_vocabulary_equals_a_linear_of_peft(vocabulary: int) -> None:
    """Its rows are the sampled tokens only."""
    case = Case("lm_head", (1, 0, -1, 1, 2), (8, 13, 1), 48, vocabulary, 16)
    inputs = make(case, torch.float32)
    defined, in_steps = inputs.y.clone(), inputs.y.clone()
    reference.add_lora(defined, inputs.x, inputs.paged, inputs.token_slots)
    group, segments = ModuleGroup.of([inputs.paged]), adapter_segments(inputs.token_slots, 3)
    lora_expand(lora_shrink(inputs.x, group, segments, max_rank=13), group, in_steps, segments)
    for row, slot in enumerate(case.token_slots):
        expected = inputs.y[row]
        if slot >= 0:
            a, b, scaling = inputs.matrices[slot]
            base = torch.nn.Linear(48, vocabulary, bias=False)
            alpha: Any = scaling * len(a)
            layer: Any = PeftLinear(base, "one", LoraConfig(r=len(a)), r=len(a), lora_alpha=alpha)
            layer.lora_A["one"].weight.data.copy_(a)
            layer.lora_B["one"].weight.data.copy_(b.T)
            with torch.no_grad():
                expected = expected + (layer(inputs.x[row : row + 1]) - base(inputs.x[row : row + 1]))[0]
        for actual in (defined, in_steps):
            assert_close(actual[row], expected, magnitude=4.0)


@pytest.mark.usefixtures("lora_form")
def test_columns_past_the_width_are_never_read() -> None:
    """The cases fill them with NaN."""
    case = next(case for case in CASES if case.name == "wider pages than widths")
    inputs = make_group(case, (case.out_features,), torch.float32)
    assert inputs.group.pages.isnan().any()
    segments = adapter_segments(inputs.token_slots, inputs.group.num_slots)
    lora_expand(lora_shrink(inputs.x, inputs.group, segments, max_rank=9), inputs.group, inputs.y, segments)
    assert inputs.y.isfinite().all()


@pytest.mark.usefixtures("lora_form")
def test_ids_outside_the_vocabulary_are_nan() -> None:
    case = EMBEDDING_CASES[1]
    inputs = make(case, torch.float32)
    segments = adapter_segments(inputs.token_slots, 3)
    for wrong in (VOCABULARY, -1):
        ids = token_ids(case)
        ids[0] = wrong
        h = lora_embed(ids, inputs.paged, segments, max_rank=17)[0, 0]
        assert h[0, :11].isnan().all()
        assert h[1, :5].isfinite().all()


@pytest.mark.usefixtures("lora_form")
def test_wrong_arguments_are_refused() -> None:
    case = EMBEDDING_CASES[0]
    inputs, ids = make(case, torch.float32), token_ids(case)
    segments = adapter_segments(inputs.token_slots, 2)
    with pytest.raises(ValueError, match=r"token_ids is torch\.int64 \[4\], want int32 or int64 \[5\]"):
        added(inputs, ids[:4])
    with pytest.raises(ValueError, match=r"token_ids is torch\.float32 \[5\]"):
        lora_embed(ids.float(), inputs.paged, segments, max_rank=12)
    with pytest.raises(ValueError, match="max_rank is -1"):
        lora_embed(ids, inputs.paged, segments, max_rank=-1)
    with pytest.raises(ValueError, match="slot 1 has rank 12, h has room for 8"):
        lora_embed(ids, inputs.paged, segments, max_rank=8)
    with pytest.raises(ValueError, match="the segments are of 3 slots, the modules have 2"):
        lora_embed(ids, inputs.paged, adapter_segments(inputs.token_slots, 3), max_rank=12)
    with pytest.raises(ValueError, match="order is on cpu, token_ids on meta"):
        lora_embed(ids.to("meta"), inputs.paged, segments, max_rank=12)
