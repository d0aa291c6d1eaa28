"""The benchmark of the passes beside the products, at small sizes."""

from __future__ import annotations

import sys

import pytest
import torch

from benchmarks import cpu_passes
from kernels.native import get_num_threads, has_native, set_num_threads


def test_every_pass_is_timed_in_its_forms(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["cpu_passes", "--threads", "1"])
    for name, value in (("NUM_TOKENS", (3,)), ("VOCABULARIES", (50,)), ("CALLS", 1), ("OPS_OF_LIST", 2)):
        monkeypatch.setattr(cpu_passes, name, value)
    if not has_native():
        with pytest.raises(SystemExit, match="install a C compiler"):
            cpu_passes.main()
        return
    before = torch.get_num_threads(), get_num_threads()
    try:
        cpu_passes.main()
    finally:
        torch.set_num_threads(before[0])
        set_num_threads(before[1])
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[2:]]
    names = ["norm and sum", "rotation and store", "gate, silu"]
    names += [f"{way} of 50" for way in ("greedy", "all", "top-p", "top-k")]
    assert [row[0].strip() for row in rows] == names * 2
    assert all(float(row[3]) > 0 and float(row[4]) > 0 for row in rows)
    assert [bool(row[5].strip()) for row in rows] == [*[True] * 3, *[False] * 4] * 2
