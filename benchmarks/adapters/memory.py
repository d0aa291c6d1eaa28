"""Memory of every process while requests go through many adapters, over room for few.

The requests take all adapters in an order of their own in every round. A line of least squares through the samples
after the warm-up says how much a process grows; it is flat if the line rises by at most MAX_GROWTH_SHARE of the mean,
or by MAX_GROWTH_BYTES.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
from motet import AsyncClient
from rich.table import Table

from benchmarks.adapters.rig import Rig, title
from benchmarks.serving.checkpoints import make_ranked_adapter
from benchmarks.serving.registered import fill_store, small_name

MAX_GROWTH_SHARE = 0.03
MAX_GROWTH_BYTES = 3 << 20
SAMPLE_PAUSE_S = 1.0
OUTPUT_TOKENS = 2


@dataclass(eq=False)
class Process:
    """Samples of one process, the warm-up left out."""

    role: str
    times_s: list[float] = field(default_factory=list)
    resident_bytes: list[float] = field(default_factory=list)

    @property
    def bytes_per_s(self) -> float:
        """The slope of the line of least squares."""
        return float(np.polyfit(np.subtract(self.times_s, self.times_s[0]), self.resident_bytes, 1)[0])

    @property
    def growth_bytes(self) -> float:
        """How much the line rises from the first sample to the last."""
        return self.bytes_per_s * (self.times_s[-1] - self.times_s[0])

    @property
    def is_flat(self) -> bool:
        return self.growth_bytes <= max(MAX_GROWTH_SHARE * float(np.mean(self.resident_bytes)), MAX_GROWTH_BYTES)


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
    rig = Rig(shape, cache, work_dir, control_flags=["--host-cache-bytes", "64MiB"])
    fill_store(rig.system.data_dir / "store", rig.model_dir, adapter, 0, num_adapters)
    with rig:
        rig.start_worker(num_slots=room)
        return asyncio.run(_run(rig, num_adapters, seconds, warm_up_s, concurrency))


async def _run(rig: Rig, num_adapters: int, seconds: float, warm_up_s: float, concurrency: int) -> Memory:
    watched = {Process(role): process for role, process in _processes(rig)}
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
            await asyncio.sleep(SAMPLE_PAUSE_S)

    async with AsyncClient(rig.system.address) as client, asyncio.TaskGroup() as group:
        group.create_task(sample())
        for _ in range(concurrency):
            group.create_task(send(client))
    num_loads = sum(entry.is_load for entry in rig.entries(begin_s + warm_up_s))
    return Memory(num_adapters, num_requests, num_loads, list(watched))


def _processes(rig: Rig) -> list[tuple[str, psutil.Process]]:
    control_plane = psutil.Process(rig.system.control_plane.pid)
    found = [("control plane", control_plane), ("worker", psutil.Process(rig.system.workers["worker"].pid))]
    return found + [("redis", child) for child in control_plane.children(recursive=True) if "redis" in child.name()]


def table(memory: Memory) -> Table:
    """A row for each process."""
    what = f"{memory.num_adapters} adapters, {memory.num_requests} requests, {memory.num_loads} loads"
    out = Table(title=title(what))
    for heading in ("process", "samples", "minutes", "mean MiB", "MiB/minute", "growth, MiB", "verdict"):
        out.add_column(heading, justify="left" if heading in ("process", "verdict") else "right")
    for one in memory.processes:
        minutes = (one.times_s[-1] - one.times_s[0]) / 60
        figures = (minutes, np.mean(one.resident_bytes) / 2**20, 60 * one.bytes_per_s / 2**20, one.growth_bytes / 2**20)
        cells = [one.role, str(len(one.times_s)), *(f"{value:.2f}" for value in figures)]
        out.add_row(*cells, "flat" if one.is_flat else "GROWS")
    return out
