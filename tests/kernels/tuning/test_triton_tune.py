"""The tuner: what it accepts, what it writes, and that its problems tell right from wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.kernels.problem import Problem
from benchmarks.kernels.tune import main, search, tune
from benchmarks.kernels.tune_lora import Shape, expand_problem, shapes, shrink_problem
from kernels.lora import triton_expand, triton_shrink
from kernels.lora.launch import ExpandLaunch, ShrinkLaunch
from kernels.tuning import read_tables, write_table
from tests.kernels.replaced_launches import replace_launches

DEVICE = "A GPU"
CPU = torch.device("cpu")
Timer = Callable[[Sequence[Callable[[], Any]]], list[float]]


@dataclass(frozen=True)
class Launch:
    num_warps: int
    columns: int = 64


def timer_of(*rounds: dict[int, float]) -> tuple[Timer, list[list[int]]]:
    """Seconds by num_warps, which `run` returns; one dictionary per round. Also what was timed."""
    left = list(rounds)
    timed: list[list[int]] = []

    def timer(calls: Sequence[Callable[[], Any]]) -> list[float]:
        seconds = left.pop(0)
        timed.append([call() for call in calls])
        return [seconds[warps] for warps in timed[-1]]

    return timer, timed


def problem_of(candidates: Sequence[int], *, wrong: Sequence[int] = (), too_large: Sequence[int] = ()) -> Problem:
    def is_right(launch: Launch) -> bool:
        if launch.num_warps in too_large:
            raise MemoryError("too much shared memory\nand more")
        return launch.num_warps not in wrong

    launches = [Launch(num_warps) for num_warps in candidates]
    return Problem({"tokens": 3}, Launch(4), launches, is_right, lambda launch: launch.num_warps)


def test_the_fastest_that_wins_twice_is_found() -> None:
    timer, timed = timer_of({4: 1.0, 2: 0.9, 8: 0.5}, {4: 1.1, 8: 0.6})
    found = search(problem_of([2, 4, 8]), timer)
    assert (found.best, found.default_s, found.best_s) == (Launch(8), 1.1, 0.6)
    assert timed == [[4, 2, 8], [4, 8]]


def test_a_winner_by_chance_is_not_taken() -> None:
    timer, _ = timer_of({4: 1.0, 8: 0.5}, {4: 1.0, 8: 0.98})
    assert search(problem_of([8]), timer).best == Launch(4)
    timer, timed = timer_of({4: 1.0, 8: 0.98})
    assert search(problem_of([8]), timer).best == Launch(4)
    assert len(timed) == 1


def test_wrong_bits_and_launches_that_fail_are_never_timed() -> None:
    timer, timed = timer_of({4: 1.0, 8: 1.0})
    found = search(problem_of([1, 2, 8], wrong=[1], too_large=[2]), timer)
    assert timed == [[4, 8]]
    assert found.wrong == [Launch(1)]
    assert found.cannot_run == [(Launch(2), "MemoryError: too much shared memory")]


@pytest.mark.parametrize("fault", ["wrong", "too_large"])
def test_a_default_that_is_wrong_ends_the_search(fault: str) -> None:
    timer, _ = timer_of({})
    faults: dict[str, Any] = {fault: [4]}
    with pytest.raises(RuntimeError, match="tokens=4: the default Launch"):
        search(problem_of([8], **faults), timer)


def test_what_was_found_is_written_beside_what_was_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_table("op", DEVICE, {}, {"tokens=1": {"columns": 32}, "tokens=4": {"columns": 16}}, tmp_path)
    timer, _ = timer_of({4: 1.0, 8: 0.5}, {4: 1.0, 8: 0.5}, {4: 1.0, 2: 1.0})
    problems = [problem_of([8]), replace(problem_of([2]), sizes={"tokens": 9})]
    assert tune("op", problems, timer, DEVICE, tmp_path)
    table = read_tables(DEVICE, tmp_path)["op"]
    assert table.buckets == {"tokens=1": {"columns": 32}, "tokens=4": {"num_warps": 8}, "tokens=16": {}}
    assert set(table.made_with) == {"date", "torch", "triton"}
    assert "op tokens=4: 1000000.0 -> 500000.0 us with num_warps=8" in capsys.readouterr().out


def test_wrong_bits_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timer, _ = timer_of({4: 1.0})
    assert not tune("op", [problem_of([8], wrong=[8])], timer, DEVICE, tmp_path)
    assert "WRONG BITS: op tokens=4 Launch(num_warps=8" in capsys.readouterr().err


def test_without_a_gpu_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--out", str(tmp_path)]) == 2
    assert "no CUDA device here" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


SMALL = Shape(1024, (48, 32), 16, 5, 3)


def test_shrink_is_checked_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = shrink_problem(replace(SMALL, in_features=96), CPU, torch.bfloat16)
    assert problem.sizes == {
        "dtype": "bfloat16", "features": 96, "page": 16, "planes": 1, "rank": 5, "modules": 2, "tokens": 3
    }  # fmt: skip
    assert problem.default in problem.candidates or problem.default.in_columns == 16
    assert problem.is_right(problem.default)
    assert problem.is_right(ShrinkLaunch(16, 64, 8, 2))
    right = triton_shrink.shrink

    def off_by_one_bit(x: torch.Tensor, h: torch.Tensor, *rest: Any, **options: Any) -> None:
        right(x, h, *rest, **options)
        h[0, 0, 0, 0] += 1

    monkeypatch.setattr(triton_shrink, "shrink", off_by_one_bit)
    assert not problem.is_right(problem.default)


def test_expand_is_checked_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """From one plane, as the shrink leaves it though it sums 1024 columns in two parts."""
    problem = expand_problem(SMALL, CPU, torch.bfloat16)
    assert problem.sizes == {
        "dtype": "bfloat16", "features": 48, "page": 16, "planes": 1, "rank": 5, "modules": 2, "tokens": 3
    }  # fmt: skip
    assert problem.is_right(problem.default)
    assert problem.is_right(ExpandLaunch(64, 8))
    assert problem.is_right(ExpandLaunch(16))
    monkeypatch.setattr(triton_expand, "expand", lambda *rest, **options: None)
    assert not problem.is_right(problem.default)


def test_every_bucket_is_searched_once() -> None:
    for is_short in (True, False):
        every = list(shapes(is_short))
        assert len(every) == len(set(every)) > 10


def test_problems_have_the_slot_table_and_the_programs_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight adapters in a table of 256 slots: 64 tokens launch the programs of 11 blocks."""
    launched: list[tuple[tuple[int, ...], dict[str, Any]]] = []

    def launcher(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*positional: Any, **named: Any) -> None:
            launched.append((grid, dict(zip(kernel.arg_names, positional, strict=False)) | named))

        return launch

    shape = Shape(64, (64, 64), 64, 16, 64)
    problems = (shrink_problem(shape, CPU, torch.bfloat16), expand_problem(shape, CPU, torch.bfloat16))
    with monkeypatch.context() as patched:
        replace_launches(patched, launcher)
        for problem in problems:
            problem.run(problem.default)
    assert [grid[0] for grid, _ in launched] == [11, 11]
    assert all(arguments["stride_table"] == 256 for _, arguments in launched)
