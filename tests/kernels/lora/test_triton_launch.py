"""Launch parameters: what is refused, that tables reach the kernels, that no choice moves the parts of a sum."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import tuning
from kernels.cases import to_device
from kernels.lora import triton_expand, triton_shrink
from kernels.lora.cases import Case, make_group
from kernels.lora.launch import (
    ExpandLaunch,
    ShrinkLaunch,
    Sizes,
    expand_launch,
    num_parts,
    part_steps,
    shrink_launch,
)
from kernels.lora.segments import segments_in_torch
from kernels.triton_launch import forget_prepared

DEVICE = "A GPU"


@pytest.mark.parametrize("in_features", [1, 100, 1024, 4096, 5120, 11008, 14336])
def test_parts_have_the_same_columns_whatever_the_steps(in_features: int) -> None:
    parts = num_parts(in_features)
    whole = part_steps(in_features, parts, 128) * 128
    assert parts * whole >= in_features
    for in_columns in (16, 32, 64):
        columns = part_steps(in_features, parts, in_columns) * in_columns
        assert columns == whole if parts > 1 else columns >= in_features


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ShrinkLaunch(8, 64), "ranks is 8, want a power of two from 16 to 128"),
        (lambda: ShrinkLaunch(16, 256), "in_columns is 256, want a power of two from 16 to 128"),
        (lambda: ShrinkLaunch(16, 64, num_warps=3), "num_warps is 3"),
        (lambda: ShrinkLaunch(16, 64, num_stages=0), "num_stages is 0, want 1 to 8"),
        (lambda: ExpandLaunch(24), "out_columns is 24"),
        (lambda: ExpandLaunch(64, num_warps=32), "num_warps is 32"),
    ],
)
def test_what_the_kernels_cannot_run_with_is_refused(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("width", "page", "ranks", "columns", "num_warps"),
    [(8, 1024, 16, 128, 2), (40, 48, 64, 16, 4), (200, 5, 64, 64, 4)],
)
def test_defaults_follow_ranks_and_pages(width: int, page: int, ranks: int, columns: int, num_warps: int) -> None:
    assert ShrinkLaunch.default(width, page, "float32") == ShrinkLaunch(ranks, columns, num_warps, num_stages=3)
    assert ShrinkLaunch.default(width, page, "bfloat16") == ShrinkLaunch(ranks, columns, num_warps, num_stages=4)
    assert ExpandLaunch.default(page) == ExpandLaunch(columns)


def test_tables_reach_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    inputs = make_group(Case("tuned", (0, 1, -1), (8, 20), 96), (32, 64), torch.bfloat16, is_exact=True)
    group = to_device(inputs.group, device)
    x, y, segments = inputs.x.to(device), inputs.y.to(device), segments_in_torch(inputs.token_slots.to(device), 2, 16)
    h = torch.empty(1, 2, 3, 21, device=device)
    buckets = (
        ("lora_shrink", Sizes.of_shrink(h, group), {"ranks": 16, "in_columns": 32, "num_warps": 2}),
        ("lora_expand", Sizes.of_expand(h, group), {"out_columns": 64, "num_warps": 8}),
    )
    for op, sizes, parameters in buckets:
        tuning.write_table(op, DEVICE, {}, {tuning.bucket_name(**asdict(sizes)): parameters}, tmp_path)
    monkeypatch.setattr(tuning, "TABLES", tmp_path)
    for module in (triton_shrink, triton_expand):
        monkeypatch.setattr(module, "device_name", lambda _: DEVICE)
    forget_prepared()
    assert shrink_launch(DEVICE, Sizes.of_shrink(h, group)) == ShrinkLaunch(16, 32, 2, num_stages=4)
    assert expand_launch(DEVICE, Sizes.of_expand(h, group)) == ExpandLaunch(64, 8)
    other = replace(Sizes.of_shrink(h, group), rank=40)
    assert shrink_launch(DEVICE, other) == ShrinkLaunch.default(40, 16, "bfloat16")
    results = []
    for of_shrink, of_expand in ((None, None), (ShrinkLaunch(64, 16), ExpandLaunch(16))):
        total = y.clone()
        triton_shrink.shrink(x, h, group, segments, launch=of_shrink)
        triton_expand.expand(h, total, group, segments, add_inputs=True, launch=of_expand)
        results.append(total)
    forget_prepared()
    assert torch.equal(results[0], results[1])
