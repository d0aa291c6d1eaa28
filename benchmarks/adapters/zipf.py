"""Many adapters over room for few: requests by Zipf's law, and what becomes of the worker's steps meanwhile.

The same requests run twice, a fixed number of them at a time: with room for all adapters, all loaded before, and with
room for few. Steps without tokens of prompts are judged, from the end of the step before: their rows ran, so the
worker has nothing to wait for. Such a step is stalled if it takes more than `STALL` times their 99th percentile in the
first run. Steps with prompts take several times as long, and would hide a wait for a load.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
from motet import AdapterTier, AsyncClient
from rich.table import Table

from benchmarks.adapters.rig import Rig, percentile, title
from benchmarks.serving.checkpoints import make_ranked_adapter
from benchmarks.serving.registered import fill_store, small_name

STALL = 2.0
OUTPUT_TOKENS = (8, 24)  # the least and the most: requests of one length would run in step with one another


@dataclass
class Run:
    """One run over the trace."""

    room: int  # adapters
    duration_s: float = 0.0
    num_tokens: int = 0  # generated
    first_token_ms: list[float] = field(default_factory=list)
    found_in: dict[str, int] = field(default_factory=dict)  # requests by the tier in which they found their adapter
    steps_ms: list[float] = field(default_factory=list)
    decodes_ms: list[float] = field(default_factory=list)  # steps without prompts, from the end of the step before
    loads_ms: list[float] = field(default_factory=list)

    def num_stalled(self, limit_ms: float) -> int:
        """Steps without prompts above the limit."""
        return sum(decode_ms > limit_ms for decode_ms in self.decodes_ms)


def trace(num_requests: int, num_adapters: int, exponent: float, seed: int = 0) -> list[tuple[int, int]]:
    """Adapter and tokens of each request: the k-th most popular adapter has a share in proportion to k ** -exponent."""
    rng = np.random.default_rng(seed)
    shares = np.arange(1, num_adapters + 1) ** -exponent
    adapters = rng.choice(num_adapters, num_requests, p=shares / shares.sum())
    lengths = rng.integers(*OUTPUT_TOKENS, num_requests, endpoint=True)
    return [(int(adapter), int(length)) for adapter, length in zip(adapters, lengths, strict=True)]


def measure(
    shape: str,
    cache: Path,
    work_dir: Path,
    *,
    num_adapters: int,
    room: int,
    rank: int,
    num_requests: int,
    concurrency: int,
    exponent: float,
    host_cache_bytes: str,
) -> list[Run]:
    """The run with room for all, then the one with room for few."""
    adapter = make_ranked_adapter(shape, rank, cache)
    rig = Rig(shape, cache, work_dir, control_flags=["--host-cache-bytes", host_cache_bytes])
    fill_store(rig.system.data_dir / "store", rig.model_dir, adapter, 0, num_adapters)
    jobs = trace(num_requests, num_adapters, exponent)
    with rig:
        runs = []
        for slots in (num_adapters, room):
            rig.start_worker(num_slots=slots, arena_bytes="2GiB")
            warm = range(num_adapters) if slots == num_adapters else range(room)
            asyncio.run(_drive(rig, [(adapter, 1) for adapter in warm], concurrency, Run(slots)))
            run = Run(slots)
            begin_s = time.monotonic()
            asyncio.run(_drive(rig, jobs, concurrency, run))
            run.duration_s = time.monotonic() - begin_s
            (worker,) = rig.client.status().workers
            assert worker.num_adapters_loaded <= slots, f"{worker.num_adapters_loaded} adapters in {slots} slots"
            entries = rig.entries(begin_s, begin_s + run.duration_s)
            steps = [entry for entry in entries if not entry.is_load]
            run.steps_ms = [step.time_ms for step in steps]
            run.decodes_ms = [
                1e3 * (after.end_s - before.end_s) for before, after in pairwise(steps) if not after.num_prompt_tokens
            ]
            run.loads_ms = [entry.time_ms for entry in entries if entry.is_load]
            runs.append(run)
        return runs


async def _drive(rig: Rig, jobs: list[tuple[int, int]], concurrency: int, run: Run) -> None:
    """All requests, so many at a time, in this order."""
    waiting = iter([(adapter, num_tokens, rig.prompt()) for adapter, num_tokens in jobs])
    async with AsyncClient(rig.system.address) as client:

        async def send_all() -> None:
            for adapter, num_tokens, prompt in waiting:
                name = small_name(adapter)
                tiers = {placement.tier for placement in (await client.adapters.get(name)).placements}
                tier = _highest(tiers)
                run.found_in[tier] = run.found_in.get(tier, 0) + 1
                begin_s, first_s, count = time.monotonic(), 0.0, 0
                async for chunk in client.generate(prompt, adapter=name, max_tokens=num_tokens, ignore_eos=True):
                    first_s = first_s or time.monotonic()
                    count += len(chunk.token_ids)
                assert count == num_tokens, f"{count} tokens of {num_tokens}"
                run.num_tokens += count
                run.first_token_ms.append(1e3 * (first_s - begin_s))

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(send_all())


def _highest(tiers: set[AdapterTier]) -> str:
    return next((str(tier) for tier in (AdapterTier.ARENA, AdapterTier.HOST_CACHE) if tier in tiers), "disk")


def limit_ms(runs: list[Run]) -> float:
    """Above which a step is stalled."""
    return STALL * percentile(runs[0].decodes_ms, 99)


def table(runs: list[Run]) -> Table:
    """A column for each run."""
    num_requests = len(runs[0].first_token_ms)
    out = Table(title=title(f"{num_requests} requests, {runs[0].num_tokens} tokens; room for"))
    out.add_column("")
    for run in runs:
        out.add_column(str(run.room), justify="right")

    def row(what: str, values: list[str]) -> None:
        out.add_row(what, *values)

    row("tokens/s", [f"{run.num_tokens / run.duration_s:.0f}" for run in runs])
    for tier in (AdapterTier.ARENA, AdapterTier.HOST_CACHE, "disk"):
        row(
            f"adapter found in: {tier}", [f"{100 * run.found_in.get(str(tier), 0) / num_requests:.1f}%" for run in runs]
        )
    row("loads into the arena", [str(len(run.loads_ms)) for run in runs])
    for what, of_run in (
        ("load", [run.loads_ms for run in runs]),
        ("first token", [run.first_token_ms for run in runs]),
        ("step", [run.steps_ms for run in runs]),
        ("step without prompts, from the end before", [run.decodes_ms for run in runs]),
    ):
        for percent, name in ((50, "p50"), (99, "p99"), (100, "largest")):
            row(f"{what}, ms, {name}", [f"{percentile(values, percent):.1f}" if values else "-" for values in of_run])
    row("steps, without prompts", [f"{len(run.steps_ms)}, {len(run.decodes_ms)}" for run in runs])
    row(f"stalled, above {limit_ms(runs):.1f} ms", [str(run.num_stalled(limit_ms(runs))) for run in runs])
    return out
