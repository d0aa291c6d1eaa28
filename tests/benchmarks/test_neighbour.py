"""The neighbours are busy only while they are wanted, and ratios are held against their limits."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks.neighbour import Neighbours, judge, main


def wait_for(pid: int, status: str) -> None:
    os.waitid(os.P_PID, pid, (os.WSTOPPED if status == psutil.STATUS_STOPPED else os.WCONTINUED) | os.WEXITED)
    assert psutil.Process(pid).status() == status


def test_as_many_neighbours_are_busy_as_were_requested() -> None:
    with Neighbours(2) as neighbours:
        first, second = neighbours.pids
        for pid in (first, second):
            wait_for(pid, psutil.STATUS_STOPPED)
        neighbours.let_run(1)
        wait_for(first, psutil.STATUS_RUNNING)
        assert psutil.Process(second).status() == psutil.STATUS_STOPPED
        neighbours.let_run(0)
        wait_for(first, psutil.STATUS_STOPPED)
    assert not psutil.pid_exists(first)
    assert not psutil.pid_exists(second)


@pytest.mark.parametrize(("busy_ms", "is_met"), [(17.0, True), (17.1, False)])
def test_a_step_is_held_against_its_idle_median(busy_ms: float, *, is_met: bool) -> None:
    turns_ms = {"idle": [9.0, 10.0, 50.0], "one": [busy_ms, 1.0, 90.0]}
    assert judge(1, "one", turns_ms) == (1, "one", busy_ms / 10, is_met)


def test_prints_every_state_with_its_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_num_threads()
    arguments = ["--model-shape", "tiny", "--rows", "2", "--steps", "1", "--turns", "2", "--threads", "1"]
    try:
        assert main([*arguments, "--cache", str(tmp_path)]) in (0, 1)
    finally:
        torch.set_num_threads(before)
    shown = capsys.readouterr().err
    for text in ("idle", "one per core", "1.7x", "2.5x"):
        assert text in shown
