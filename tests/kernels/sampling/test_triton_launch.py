"""What launches are refused and chosen, that no launch changes a token, and that the tuner refuses one that does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.kernels import tune_rows
from kernels.sampling import triton_kernel
from kernels.sampling.launch import SampleLaunch, Sizes, sample_launch
from kernels.tuning import write_table


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((128, 128), "part is 128, want a power of two from 256 to 65536"),
        ((512, 1024), "tile is 1024, want a power of two from 128 to 512"),
        ((8192, 1024, 3), "num_warps is 3"),
        ((8192, 1024, 4, 32), "search_warps is 32, want a power of two from 1 to 16"),
    ],
)
def test_launches_that_cannot_run_are_refused(values: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SampleLaunch(*values)


def test_a_table_replaces_the_defaults_in_its_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_table("sample", "A GPU", {}, {"dtype=bfloat16 rows=1 vocab=131072": {"part": 1024}}, tmp_path)
    monkeypatch.setattr("kernels.tuning.TABLES", tmp_path)
    sample_launch.cache_clear()
    assert sample_launch("A GPU", Sizes("bfloat16", 1, 128_256)) == SampleLaunch(1024)
    assert sample_launch("A GPU", Sizes("bfloat16", 2, 128_256)) == SampleLaunch()
    assert sample_launch(None, Sizes("bfloat16", 1, 128_256)) == SampleLaunch()
    sample_launch.cache_clear()


def test_no_launch_changes_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the tuner's own check."""
    problem = tune_rows.sample_problem(2, 300, torch.device("cpu"), torch.bfloat16)
    assert problem.sizes == {"dtype": "bfloat16", "rows": 2, "vocab": 300}
    assert problem.default in problem.candidates
    some = SampleLaunch(256, 128, 1, 1)
    assert problem.is_right(some)
    assert problem.is_right(SampleLaunch(512, 512, 8, 16))
    right = triton_kernel.sample
    monkeypatch.setattr(triton_kernel, "sample", lambda *a, **b: right(*a, **b) + 1)
    assert not problem.is_right(some)


def test_every_bucket_is_searched_once() -> None:
    for is_short in (True, False):
        every = list(tune_rows.sample_shapes(is_short))
        assert len(every) == len(set(every)) >= 1
