"""How measurements become verdicts, and that the table of targets can be measured."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.serving.contest import PEERS, PRODUCTS, WORKLOADS, parts_of
from benchmarks.serving.run import NUM_MARKS
from benchmarks.serving.targets import ITL, ROWS, TOKENS, Row, judge, main


def row(metric: str, target: float, *against: str, all_tokens_equal: bool = False) -> Row:
    return Row("name", "group", "workload", "ours", against, metric, target, all_tokens_equal)


def runs(metric: str, *values: float, **more: float) -> list[dict[str, float]]:
    return [{metric: value, **more} for value in values]


def test_throughput_is_to_be_at_least_the_target_times_the_best_peers_median() -> None:
    figures = {
        "ours": runs(TOKENS, 1000, 320, 100),
        "slow": runs(TOKENS, 100, 100, 900),
        "fast": runs(TOKENS, 200, 200, 1),
    }
    outcome = judge(row(TOKENS, 1.6, "slow", "fast"), figures)
    assert (outcome.ours, outcome.peer, outcome.theirs, outcome.ratio) == (320, "fast", 200, 1.6)
    assert outcome.is_met
    assert not judge(row(TOKENS, 1.61, "slow", "fast"), figures).is_met


def test_a_time_is_to_be_at_most_the_target_times_the_best_peers_median() -> None:
    figures = {"ours": runs(ITL, 33), "slow": runs(ITL, 60), "fast": runs(ITL, 30)}
    outcome = judge(row(ITL, 1.1, "slow", "fast"), figures)
    assert (outcome.peer, outcome.ratio) == ("fast", 1.1)
    assert outcome.is_met
    assert not judge(row(ITL, 1.09, "slow", "fast"), figures).is_met


@pytest.mark.parametrize(("share", "is_met"), [(1.0, True), (0.9995, False)])
def test_one_other_token_misses_a_target_that_wants_all_equal(share: float, *, is_met: bool) -> None:
    figures = {
        "ours": runs(TOKENS, 500),
        "peft": [{TOKENS: 100, "equal_tokens": 1.0}, {TOKENS: 100, "equal_tokens": share}],
    }
    outcome = judge(row(TOKENS, 4.0, "peft", all_tokens_equal=True), figures)
    assert outcome.is_met is is_met
    assert judge(row(TOKENS, 4.0, "peft"), figures).is_met


def test_every_row_names_measurements_that_there_are() -> None:
    for one in ROWS:
        assert parts_of(one.ours)[0] == ""
        for name in (one.ours, *one.against):
            peer, workload = parts_of(name)
            assert workload in WORKLOADS
            assert peer in ("", PRODUCTS, *PEERS)


def test_no_two_workloads_of_a_server_have_the_same_prompts() -> None:
    marks = Counter((what.server, place % NUM_MARKS) for place, what in enumerate(WORKLOADS.values()))
    assert max(marks.values()) == 1


def test_a_peer_that_is_compared_by_tokens_gets_the_adapters_that_ours_has() -> None:
    for one in ROWS:
        for name in one.against:
            peer, workload = parts_of(name)
            if peer in PEERS:
                assert max(WORKLOADS[workload].adapters, default=0) < 16, "a peer has the first 16"


@pytest.mark.parametrize("repeats", ["0", "8"])
def test_repeats_that_would_send_a_prompt_again_are_refused(repeats: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--repeats", repeats]) == 2
    assert f"--repeats: {repeats} is not in 1..7" in capsys.readouterr().err
