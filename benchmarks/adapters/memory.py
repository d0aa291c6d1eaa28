"""Memory of every process while requests go through many adapters, over room for few.

The requests take all adapters in an order of their own in every round. A line of least squares through the samples
after the warm-up says how much a process grows; it is flat if the line rises by at most MAX_GROWTH_SHARE of the mean,
or by MAX_GROWTH_BYTES.

Redis is judged by what it holds by its own count. The memory of its heap that lies free between values grows for a
while beside that, less and less, since values come and go in another order each round; it may be so large that Redis
takes MAX_FRAGMENTATION of what it holds.
"""

from __future__ import annotations

import asyncio
import operator
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
from motet import AsyncClient
from rich.table import Table

from benchmarks.adapters.plain_redis import PlainRedis
from benchmarks.adapters.rig import Rig, title
from benchmarks.serving.checkpoints import make_ranked_adapter
from benchmarks.serving.registered import fill_store, small_name

MAX_GROWTH_SHARE = 0.03
MAX_GROWTH_BYTES = 3 << 20
MAX_FRAGMENTATION = 1.4  # where `MEMORY DOCTOR` of Redis begins to complain
SAMPLE_PAUSE_S = 1.0
OUTPUT_TOKENS = 2
REDIS = "redis"


@dataclass(eq=False)
class Process:
    """Samples of one process, the warm-up left out."""

    role: str
    times_s: list[float] = field(default_factory=list)
    resident_bytes: list[float] = field(default_factory=list)
    held_bytes: list[float] = field(default_factory=list)  # by the process's own count; empty: it has none

    @property
    def fragmentation(self) -> float:
        """The most memory that it took for each byte that it holds."""
        return max(map(operator.truediv, self.resident_bytes, self.held_bytes), default=1.0)

    @property
    def is_flat(self) -> bool:
        judged = self.held_bytes or self.resident_bytes
        is_level = growth_bytes(self.times_s, judged) <= max(
            MAX_GROWTH_SHARE * float(np.mean(judged)), MAX_GROWTH_BYTES
        )
        return is_level and self.fragmentation <= MAX_FRAGMENTATION


def growth_bytes(times_s: Sequence[float], values: Sequence[float]) -> float:
    """How much the line of least squares rises from the first sample to the last."""
    since_first_s = np.subtract(times_s, times_s[0])
    return float(np.polyfit(since_first_s, values, 1)[0] * since_first_s[-1])


@dataclass
class Memory:
    """What was found."""

    num_adapters: int
    num_requests: int  # after the warm-up
    num_loads: int  # after the warm-up
    processes: list[Process]


def measure(
    shape: str,
    cache: Path,
    work_dir: Path,
    *,
    num_adapters: int,
    room: int,
    rank: int,
    seconds: float,
    warm_up_s: float,
    concurrency: int,
) -> Memory:
    """The whole time, warm-up included."""
    adapter = make_ranked_adapter(shape, rank, cache)
    with PlainRedis(work_dir) as redis:
        flags = ["--host-cache-bytes", "64MiB", "--redis-url", redis.url, "--worker-redis-url", redis.url]
        rig = Rig(shape, cache, work_dir, control_flags=flags)
        fill_store(rig.system.data_dir / "store", rig.model_dir, adapter, 0, num_adapters)
        with rig:
            rig.start_worker(num_slots=room)
            return asyncio.run(_run(rig, redis, num_adapters, seconds, warm_up_s, concurrency))


async def _run(
    rig: Rig, redis: PlainRedis, num_adapters: int, seconds: float, warm_up_s: float, concurrency: int
) -> Memory:
    pids = {
        "control plane": rig.system.control_plane.pid,
        "worker": rig.system.workers["worker"].pid,
        REDIS: redis.pid,
    }
    watched = {Process(role): psutil.Process(pid) for role, pid in pids.items()}
    begin_s = time.monotonic()
    end_s, num_requests, order = begin_s + seconds, 0, random.Random(0)
    left: list[int] = []

    async def send(client: AsyncClient) -> None:
        nonlocal num_requests
        while time.monotonic() < end_s:
            if not left:
                left.extend(order.sample(range(num_adapters), num_adapters))
            name = small_name(left.pop())
            await client.generate(rig.prompt(), adapter=name, max_tokens=OUTPUT_TOKENS, ignore_eos=True).result()
            num_requests += time.monotonic() >= begin_s + warm_up_s

    async def sample() -> None:
        await asyncio.sleep(warm_up_s)
        while time.monotonic() < end_s:
            for record, process in watched.items():
                record.times_s.append(time.monotonic())
                record.resident_bytes.append(float(process.memory_info().rss))
                if record.role == REDIS:
                    record.held_bytes.append(redis.held_bytes())
            await asyncio.sleep(SAMPLE_PAUSE_S)

    async with AsyncClient(rig.system.address) as client, asyncio.TaskGroup() as group:
        group.create_task(sample())
        for _ in range(concurrency):
            group.create_task(send(client))
    num_loads = sum(entry.is_load for entry in rig.entries(begin_s + warm_up_s))
    return Memory(num_adapters, num_requests, num_loads, list(watched))


def table(memory: Memory) -> Table:
    """A row for each process, and one for what Redis holds."""
    what = f"{memory.num_adapters} adapters, {memory.num_requests} requests, {memory.num_loads} loads"
    out = Table(title=title(what))
    for heading in ("process", "samples", "minutes", "mean MiB", "MiB/minute", "growth, MiB", "verdict"):
        out.add_column(heading, justify="left" if heading in ("process", "verdict") else "right")
    for one in memory.processes:
        verdict = "flat" if one.is_flat else "GROWS"
        if one.held_bytes:
            out.add_row(*_cells(f"{one.role} holds", one.times_s, one.held_bytes), verdict)
            verdict = f"at most {one.fragmentation:.2f} of that"
        out.add_row(*_cells(one.role, one.times_s, one.resident_bytes), verdict)
    return out


def _cells(name: str, times_s: Sequence[float], values: Sequence[float]) -> list[str]:
    minutes, growth_mib = (times_s[-1] - times_s[0]) / 60, growth_bytes(times_s, values) / 2**20
    figures = (minutes, np.mean(values) / 2**20, growth_mib / minutes, growth_mib)
    return [name, str(len(times_s)), *(f"{value:.2f}" for value in figures)]
