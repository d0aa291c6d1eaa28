"""What loads of adapters cost rows that decode: times between steps, without loads and with them.

Two threads load, as in a worker, by its own load path: adapters that are hashed and go through a pinned ring, and
adapters that lie in a worker's pinned memory.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from benchmarks.adapters.rig import percentile
from benchmarks.engine.driver import PLAN_DEPTH, Driver
from benchmarks.gpu_targets.engines import PackedVariants, Setup
from data_plane.adapters.format.host_tier import HostTier
from data_plane.plan import AdapterSource

TARGET = 1.10
LOAD_THREADS = 2
WARM_STEPS, MOST_STEPS, QUIET_STEPS = 8, 240, 160
NUM_STEPS = WARM_STEPS + MOST_STEPS + PLAN_DEPTH  # of a row, at most
NUM_SLOWEST = 4  # steps that are shown one by one


@dataclass(frozen=True)
class Interval:
    """Time between the results of two steps."""

    ms: float
    queueing_ms: float  # of these the thread spent on queueing a step


class Loads:
    """Loads into slots of one engine while it decodes."""

    def __init__(self, setup: Setup, driver: Driver, num_adapters: int, num_slots: int) -> None:
        """The rows' adapters are in slots 0 to num_adapters - 1; loads take the next num_slots."""
        self._setup = setup
        self._driver = driver
        self._num_adapters = num_adapters
        self._slots = range(num_adapters, num_adapters + num_slots)
        self._generation = 1

    def measure(self, variants: PackedVariants, tier: HostTier) -> None:
        """Print a line for steps without loads, with loads of new adapters, and of adapters in pinned memory."""
        count = len(self._slots)
        num_kept = max(tier.stats().budget_bytes * 9 // 10 // variants.size_bytes, 1)
        kept = [variants.digests[index % min(num_kept, count)] for index in range(count)]
        self._run(kept[:num_kept], tier.over(variants))
        self._evict(len(kept[:num_kept]))
        quiet = self._intervals([], variants)
        self._line("no loads", quiet, quiet)
        self._line(f"{count} loads, hashed", self._intervals(variants.digests[:count], variants), quiet)
        self._line(f"{count} loads, pinned", self._intervals(kept, tier.over(variants)), quiet)
        self._line("no loads again", self._intervals([], variants), quiet)

    def _run(self, digests: Sequence[str], source: AdapterSource) -> list[float]:
        """Load into the slots, as many at once as there are threads. Milliseconds of each."""
        self._generation += 1
        generation, slots = self._generation, self._driver.engine.slots
        times_ms = []

        def load(slot: int, digest: str) -> None:
            began_s = time.perf_counter()
            slots.load(slot, generation, digest, source)
            times_ms.append((time.perf_counter() - began_s) * 1000)

        with ThreadPoolExecutor(LOAD_THREADS) as pool:
            for future in [pool.submit(load, *pair) for pair in zip(self._slots, digests, strict=False)]:
                future.result()
        return times_ms

    def _evict(self, count: int) -> None:
        for slot in self._slots[:count]:
            self._driver.engine.slots.evict(slot, self._generation)

    def _intervals(self, digests: Sequence[str], source: AdapterSource) -> list[Interval]:
        """Times between the results of steps, while the adapters are loaded."""
        driver, setup = self._driver, self._setup
        driver.begin_decodes(setup.num_rows, self._num_adapters, num_context=setup.context, num_steps=NUM_STEPS)
        driver.decode_ahead(WARM_STEPS)
        times_ms: list[float] = []
        thread = threading.Thread(target=lambda: times_ms.extend(self._run(digests, source)))
        began_s = time.perf_counter()
        if digests:
            thread.start()
        most = MOST_STEPS if digests else QUIET_STEPS
        found = self._decode(lambda done: done == 0 or (done < most and (thread.is_alive() or not digests)))
        took_s = time.perf_counter() - began_s
        driver.end()
        if digests:
            thread.join()
            if len(times_ms) != len(digests):
                raise RuntimeError(f"{len(digests) - len(times_ms)} of {len(digests)} loads failed")
            print(
                f"  a load of {LOAD_THREADS} at once takes {percentile(times_ms, 50):.1f} ms, p99 "
                f"{percentile(times_ms, 99):.1f}; steps were measured for {took_s:.2f} s"
            )
            self._evict(len(digests))
        return found

    def _decode(self, goes_on: Callable[[int], bool]) -> list[Interval]:
        """Decode for as long, each step submitted while the one before is under way, as a worker does."""
        found: list[Interval] = []
        under_way = deque(self._driver.submit() for _ in range(PLAN_DEPTH))
        under_way.popleft().wait()
        ended_s = time.perf_counter()
        while goes_on(len(found)):
            began_s = ended_s
            under_way.append(self._driver.submit())
            queued_s = time.perf_counter()
            under_way.popleft().wait()
            ended_s = time.perf_counter()
            found.append(Interval((ended_s - began_s) * 1000, (queued_s - began_s) * 1000))
        while under_way:
            under_way.popleft().wait()
        return found

    def _line(self, name: str, intervals: Sequence[Interval], quiet: Sequence[Interval]) -> None:
        times_ms = [interval.ms for interval in intervals]
        ratio = percentile(times_ms, 99) / percentile([interval.ms for interval in quiet], 99)
        between = ", ".join(f"p{percent} {percentile(times_ms, percent):.3f}" for percent in (50, 90, 99))
        slowest = sorted(intervals, key=lambda interval: -interval.ms)[:NUM_SLOWEST]
        shown = ", ".join(f"{interval.ms:.2f} ({interval.queueing_ms:.2f})" for interval in slowest)
        print(
            f"  {name:<18} {len(times_ms):>4} steps, ms between: {between}; p99 {ratio:.3f} of without, "
            f"{'met' if ratio <= TARGET else 'MISSED'}\n    slowest, of which queueing: {shown}; queueing p50 "
            f"{percentile([interval.queueing_ms for interval in intervals], 50):.2f}",
            flush=True,
        )
