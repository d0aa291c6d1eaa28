"""The simulator on small fleets: nothing lost, nothing random, and what its charts are drawn for."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from benchmarks.control_plane.simulator.__main__ import parse
from benchmarks.control_plane.simulator.scenarios import SCENARIOS


def run(*argv: str) -> dict[str, Any]:
    options: argparse.Namespace = parse(list(argv))
    return SCENARIOS[options.scenario](options)


def test_the_same_seed_gives_the_same_figures() -> None:
    command = ("scale", "--workers", "4", "--requests", "300", "--adapters", "100")
    figures = run(*command)["scale"]
    assert run(*command)["scale"] == figures
    assert run(*command, "--seed", "2")["scale"] != figures
    assert figures["requests"] == 300


def test_workers_that_die_lose_and_repeat_no_token() -> None:
    """The simulation compares every token; here that workers died and requests moved."""
    rows = run("failures", "--workers", "3", "--requests", "600", "--adapters", "40", "--rate", "10")
    assert [row["requests"] for row in rows.values()] == [600, 600, 600]
    *_, often = rows.values()
    assert often["failures"] > 0 and often["migrations"] > 0


def test_completions_swapped_to_host_memory_keep_their_tokens() -> None:
    rows = run("preemption", "--requests", "120", "--rate", "40")
    assert rows["recompute"]["preemptions"] > rows["recompute"]["swapped_out"] == 0
    assert rows["swap"]["swapped_out"] > 0
    assert [row["requests"] for row in rows.values()] == [120, 120]


def test_plans_run_ahead_of_a_slow_link() -> None:
    """5 ms each way take more than the two plans of one step that are under way otherwise."""
    command = ("policies", "--requests", "60", "--rate", "5", "--adapters", "5")
    near, far = (run(*command, "--link-ms", ms)["chunked_prefill"][5.0] for ms in ("0.2", "5"))
    assert far["itl_p50_s"] < 1.1 * near["itl_p50_s"]


def test_two_tenants_one_flooding_get_equal_service_within_a_tenth() -> None:
    rows = run("fairness", "--requests", "11200", "--adapters", "10")
    assert rows["chunked_prefill"]["steady_over_flooding"] == pytest.approx(1.0, abs=0.1)
    assert rows["fcfs"]["steady_over_flooding"] < 0.2


def test_policies_differ_on_one_trace() -> None:
    rows = run("policies", "--workers", "1", "--requests", "400", "--rate", "45")
    assert {name: figures[45.0]["requests"] for name, figures in rows.items()} == dict.fromkeys(rows, 400)
    assert len({figures[45.0]["ttft_p99_s"] for figures in rows.values()}) == 3
