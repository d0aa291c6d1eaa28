"""Runs of the serving benchmark share no prompt, so that none is served from the prefix cache of another."""

from __future__ import annotations

import pytest

from benchmarks.serving.run import parser, renewed, workloads_of

REPEATS = 3


@pytest.mark.parametrize("workload", ["offline", "punica", "s-lora"])
def test_no_run_sends_a_prompt_that_an_earlier_one_sent(workload: str) -> None:
    args = parser().parse_args(["--workload", workload])
    runs = [
        renewed(jobs, repeat, index)
        for repeat in range(REPEATS)
        for index, jobs in enumerate(workloads_of(args).values())
    ]
    # The benchmarks' blocks are of 16 tokens: prompts that differ in the first share nothing.
    begun = [(job.adapter, job.prompt_token_ids[:16]) for jobs in runs for job in jobs]
    assert len(set(begun)) == len(begun)


def test_a_marked_prompt_keeps_its_length() -> None:
    args = parser().parse_args(["--prompt-tokens", "1", "--adapters", "2"])
    jobs = workloads_of(args)["2 adapters"]
    assert [len(job.prompt_token_ids) for job in renewed(jobs, 2, 1)] == [1] * len(jobs)
