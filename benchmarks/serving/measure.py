"""Drives the SDK with a workload and turns what arrived into figures."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from motet import AsyncClient

from benchmarks.serving.workloads import Job

Advance = Callable[[int], None]  # called with the number of tokens that arrived


@dataclass
class Record:
    """One request as its client saw it; times in seconds after the start of the run."""

    job: Job
    sent_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)  # of each token; coalesced ones share a time
    token_ids: list[int] = field(default_factory=list)


async def drive(target: str, jobs: Sequence[Job], adapter_names: Sequence[str], advance: Advance) -> list[Record]:
    """Send every job at its time and wait for all completions."""
    records = [Record(job) for job in jobs]
    async with AsyncClient(target) as client:
        begin_s = time.monotonic()

        async def run(record: Record) -> None:
            job = record.job
            await asyncio.sleep(max(begin_s + job.arrival_s - time.monotonic(), 0.0))
            record.sent_s = time.monotonic() - begin_s
            adapter = "" if job.adapter is None else adapter_names[job.adapter]
            stream = client.generate(
                job.prompt_token_ids, adapter=adapter, max_tokens=job.max_tokens, ignore_eos=True, timeout_s=3600.0
            )
            async for chunk in stream:
                now_s = time.monotonic() - begin_s
                record.token_times_s += [now_s] * len(chunk.token_ids)
                record.token_ids += chunk.token_ids
                advance(len(chunk.token_ids))

        async with asyncio.TaskGroup() as group:
            for record in records:
                group.create_task(run(record))
    return records


def summarise(records: Sequence[Record]) -> dict[str, float]:
    """Throughput over the whole run, first-token times, and times between tokens."""
    short = [record for record in records if len(record.token_ids) != record.job.max_tokens]
    if short:
        raise RuntimeError(f"{len(short)} of {len(records)} requests ended before their max_tokens")
    duration_s = max(record.token_times_s[-1] for record in records) - min(record.sent_s for record in records)
    num_tokens = sum(len(record.token_ids) for record in records)
    ttft_s = [record.token_times_s[0] - record.sent_s for record in records]
    # Tokens that came together have gaps of zero: counted, since that is what a reader sees.
    gaps_s = [
        later - earlier
        for record in records
        for earlier, later in zip(record.token_times_s, record.token_times_s[1:], strict=False)
    ]
    return {
        "num_requests": len(records),
        "num_output_tokens": num_tokens,
        "duration_s": duration_s,
        "output_tokens_per_s": num_tokens / duration_s,
        "requests_per_s": len(records) / duration_s,
        **_percentiles("ttft_ms", ttft_s),
        **_percentiles("itl_ms", gaps_s),
    }


def medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each figure over repeated runs."""
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def _percentiles(name: str, values_s: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values_s) or [0.0]
    return {
        f"{name}_p{percent}": 1000 * ordered[min(int(len(ordered) * percent / 100), len(ordered) - 1)]
        for percent in (50, 90, 99)
    }
