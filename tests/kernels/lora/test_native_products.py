"""Adapters with many tokens in a step: which way they go, and that both ways share a step."""

from __future__ import annotations

import pytest
import torch

from kernels.lora import add_lora_group, choice, cpu, native, ops, reference, segments_on_host
from kernels.lora.cases import Case, make_group
from kernels.lora.segments import split_by_length
from kernels.native.measured import Measurements, Results
from tests.kernels.tolerances import assert_close


def results_of(*ratios: float) -> Results:
    """Times of products beside those of native code, by number of tokens."""
    pairs = zip(choice.TOKEN_COUNTS, ratios, strict=False)
    return {str(count): {"native": 100.0, "products": 100.0 * ratio} for count, ratio in pairs}


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ((3.0, 1.5, 1.1), None),
        ((3.0, 1.5, 0.95), None),  # not worth it
        ((3.0, 1.5, 0.8), 1024),
        ((3.0, 0.8, 0.5), 256),
        ((0.8, 0.5, 0.3), 64),
        ((0.8, 1.5, 0.3), 1024),  # all longer ones count
        ((9.0, 18.0), None),  # given up
    ],
)
def test_products_begin_where_they_are_faster_for_all_longer_segments(
    ratios: tuple[float, ...], expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "measured", lambda name, key, measure: results_of(*ratios))
    assert choice.products_from(torch.bfloat16, 16) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_this_machine_is_measured_once_for_each_dtype_and_kind_of_rank(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[str] = []
    results = Measurements(None, {})

    def measured(name: str, key: str, measure: object) -> Results:
        requested.append(key)
        return results.get(name, key, measure)  # type: ignore[arg-type]

    monkeypatch.setattr(choice, "measured", measured)
    monkeypatch.setattr(choice, "BUDGET_S", 0.0)
    for rank in (1, 63, 64):
        for times in choice.timed(dtype, rank).values():
            assert times["native"] > 0 and times["products"] > 0
    name = str(dtype).removeprefix("torch.")
    assert requested == [f"{name} rank 16"] * 2 + [f"{name} rank 64"]


def test_blocks_are_split_by_the_tokens_of_their_slots() -> None:
    slots = torch.tensor([0, 1, 1, -1, 2, 1, 1, 2, 1], dtype=torch.int32)
    short, long = split_by_length(segments_on_host(slots.numpy(), 3, 2), 5)
    assert short.block_slot.tolist() == [0, 2] and long.block_slot.tolist() == [1, 1, 1]
    assert [long.order[start:end].tolist() for start, end in zip(long.block_start, long.block_end, strict=True)] == [
        [1, 2],
        [5, 6],
        [8],
    ]
    short, long = split_by_length(segments_on_host(slots[3:4].numpy(), 3), 1)
    assert short.num_blocks == long.num_blocks == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_ways_share_a_step(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = (0,) * 70 + (1, -1, 2) * 5 + (0,) * 10 + (2,) * 80
    inputs = make_group(Case("prefill", slots, (8, 17, 33), 48, 0, 16), (40, 16), dtype)
    seen: dict[str, list[int]] = {"native": [], "products": []}

    def spy(name: str, module: object) -> None:
        add = module.add  # type: ignore[attr-defined]

        def added(y: object, x: object, group: object, segments: object, *rest: object) -> None:
            seen[name] = sorted(set(segments.block_slot.tolist()))  # type: ignore[attr-defined]
            add(y, x, group, segments, *rest)

        monkeypatch.setattr(module, "add", added)

    spy("native", native)
    spy("products", cpu)
    monkeypatch.setattr(choice, "products_from", lambda dtype, rank: 64)
    monkeypatch.setattr(ops, "get_num_threads", torch.get_num_threads)
    y, expected = inputs.y.clone(), inputs.y.clone()
    segments = segments_on_host(inputs.token_slots.numpy(), 3)
    h = torch.zeros(2, len(slots), inputs.max_rank)
    reference.shrink(inputs.x, h, inputs.group, segments)
    reference.expand(h, expected, inputs.group, segments, add_inputs=True)
    add_lora_group(y, inputs.x, inputs.group, segments, max_rank=inputs.max_rank)
    assert seen == {"native": [1], "products": [0, 2]}
    assert_close(y, expected, magnitude=8.0)
    seen["products"] = []
    monkeypatch.setattr(ops, "get_num_threads", lambda: torch.get_num_threads() + 1)
    add_lora_group(y, inputs.x, inputs.group, segments, max_rank=inputs.max_rank)
    assert seen == {"native": [0, 1, 2], "products": []}
