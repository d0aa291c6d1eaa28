"""Many requests at once through the SDK."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from motet import Client


@dataclass(frozen=True)
class Job:
    """One request of a test."""

    prompt: tuple[int, ...]
    adapter: str = ""
    num_tokens: int = 16


@dataclass(frozen=True)
class JobCompletion:
    """What the SDK got for one job."""

    job: Job
    token_ids: list[int]
    digest: str


def ask(client: Client, job: Job) -> JobCompletion:
    """Run one job to its end, ignoring end-of-sequence tokens."""
    digest = ""
    token_ids: list[int] = []
    with client.generate(
        list(job.prompt),
        adapter=job.adapter,
        max_tokens=job.num_tokens,
        ignore_eos=True,
        temperature=0.0,
        timeout_s=120.0,
    ) as stream:
        for chunk in stream:
            assert chunk.token_offset == len(token_ids) or not chunk.token_ids
            token_ids.extend(chunk.token_ids)
            digest = chunk.adapter_digest
    return JobCompletion(job, token_ids, digest)


def ask_all(client: Client, jobs: Iterable[Job], *, num_threads: int = 32) -> list[JobCompletion]:
    """Run all jobs, `num_threads` at a time, completions in the jobs' order."""
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(lambda job: ask(client, job), jobs))


def prompts(lengths: Sequence[int], *, vocab_size: int, seed: int) -> list[tuple[int, ...]]:
    """Random prompts of the given lengths; ids below 8 are left to special tokens."""
    state = seed
    result = []
    for length in lengths:
        ids = []
        for _ in range(length):
            state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
            ids.append(8 + (state >> 33) % (vocab_size - 8))
        result.append(tuple(ids))
    return result
