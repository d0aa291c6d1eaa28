"""How recorded runs become the parts of a step."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks.engine.bounds import Rates, Work, bounds_ms
from benchmarks.engine.split import ATTENTION, LORA, OTHER, PRODUCTS, WAITING, measure, part_of, split
from benchmarks.serving.checkpoints import SHAPES
from kernels.native import Run


def run(began_ns: int, *ops: tuple[str, int, int]) -> Run:
    names = tuple(name for name, _, _ in ops)
    return Run(names, began_ns, np.array([times for _, *times in ops], dtype=np.int64))


def test_every_nanosecond_of_a_step_is_in_one_part() -> None:
    ms = 1_000_000
    runs = [
        run(
            2 * ms,
            ("rms_norm", 3 * ms, 3 * ms),
            ("linear", 7 * ms, 9 * ms),
            ("lora_shrink", 10 * ms, 10 * ms),
            ("lora_expand", 13 * ms, 13 * ms),
        ),
        run(20 * ms, ("attention_decode", 25 * ms, 26 * ms), ("linear", 27 * ms, 27 * ms)),
    ]
    parts = split(runs, 30 * ms)
    assert parts == {
        "products": 4 + 1,
        "LoRA": 1 + 3,
        "attention": 5,
        "other passes": 1,
        "waiting": 2 + 1,
        "Python": 30 - 11 - 7,
    }
    assert sum(parts.values()) == 30


def test_a_step_without_native_calls_is_one_part() -> None:
    assert split([], 5_000_000) == {"not split": 5.0}


def test_what_comes_before_a_step_is_not_measured() -> None:
    calls: list[str] = []
    result = measure(lambda: calls.append("step"), 2, before=lambda: calls.append("before"))
    assert calls == ["before", "step"] * 5
    assert result.runs == 0
    assert result.parts_ms.keys() == {"not split"}


@pytest.mark.parametrize("part", ["products", "LoRA", "attention", "other passes"])
def test_parts_have_the_unit_of_their_bounds(part: str) -> None:
    shape = SHAPES["tiny"]
    work = Work(num_tokens=4, num_kept=4, num_keys=80, num_scores=80, ranks=[8, 16], lora_rows=[2, 2])
    rates = Rates(read_bytes_per_s=1e9, flops_per_s=1e15)
    ms = bounds_ms(shape, 4, work, rates)[part]
    # tiny: hidden 64, 2 layers, 4 heads and 2 KV heads of 16, MLP 128, vocabulary 512; a byte takes 1e-6 ms.
    layer = {
        "products": 64 * 128 + 64 * 64 + 64 * 256 + 128 * 64,
        "LoRA": 24 * ((64 + 64) + 2 * (64 + 32) + (64 + 64) + 3 * (64 + 128)),
        "attention": 80 * 2 * 2 * 16,
        "other passes": 4 * (8 * 64 + 2 * (64 + 2 * 32) + 3 * 128),
    }[part]
    outside = 64 * 512 if part == "products" else 0
    assert ms == pytest.approx((2 * layer + outside) * 4 / 1e6)


def test_every_native_op_has_a_part() -> None:
    kernels = Path(__file__).parents[3] / "kernels"
    kinds = [
        re.findall(r"const OpKind \w+_op = {\s*\"(\w+)\"", path.read_text("utf-8")) for path in kernels.rglob("*.c")
    ]
    names = [name for of_file in kinds for name in of_file]
    assert len(names) > 10
    assert {part_of(name) for name in names} == {PRODUCTS, LORA, ATTENTION, OTHER}
    assert part_of("plain_linear") == part_of("linear") == PRODUCTS
    with pytest.raises(ValueError, match="is of no part"):
        part_of("unknown")


def test_an_op_that_the_other_threads_did_is_no_waiting() -> None:
    run = Run(("linear", "gate"), 100, np.array([[100, 300], [350, 360]]))
    parts = split([run], 400)
    assert (parts[PRODUCTS], parts[OTHER], parts[WAITING]) == (200 / 1e6, 50 / 1e6, 10 / 1e6)
