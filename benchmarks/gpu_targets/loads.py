"""What loads of adapters cost rows that decode: times between steps, without loads and with them.

Two threads load, as in a worker, by its own load path: adapters that are hashed and go through a pinned ring, and
adapters that lie in a worker's pinned memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

from benchmarks.adapters.rig import percentile
from benchmarks.engine.driver import Driver
from benchmarks.gpu_targets.engines import PackedVariants, Setup
from data_plane.adapters.format.host_tier import HostTier
from data_plane.plan import AdapterSource

TARGET = 1.10
LOAD_THREADS = 2
WARM_STEPS, RUN_STEPS, MOST_RUNS = 8, 40, 6
NUM_STEPS = WARM_STEPS + MOST_RUNS * RUN_STEPS  # of a row, at most


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
        fresh = variants.digests[:count]
        num_kept = max(tier.stats().budget_bytes * 9 // 10 // variants.size_bytes, 1)
        kept = [variants.digests[index % min(num_kept, count)] for index in range(count)]
        self._run(kept[:num_kept], tier.over(variants), is_timed=False)
        quiet = self._intervals_ms([], variants)
        self._line("no loads", quiet, quiet)
        loaded = self._intervals_ms(fresh, variants)
        self._line(f"{count} loads, hashed", loaded, quiet)
        loaded = self._intervals_ms(kept, tier.over(variants))
        self._line(f"{count} loads, pinned", loaded, quiet)
        self._line("no loads again", self._intervals_ms([], variants), quiet)

    def _run(self, digests: Sequence[str], source: AdapterSource, *, is_timed: bool = True) -> list[float]:
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
        if not is_timed:
            self._evict(len(digests))
        return times_ms

    def _evict(self, count: int) -> None:
        for slot in self._slots[:count]:
            self._driver.engine.slots.evict(slot, self._generation)

    def _intervals_ms(self, digests: Sequence[str], source: AdapterSource) -> list[float]:
        """Times between the results of steps, while the adapters are loaded."""
        driver, setup, found = self._driver, self._setup, list[float]()
        driver.begin_decodes(setup.num_rows, self._num_adapters, num_context=setup.context, num_steps=NUM_STEPS)
        driver.decode_ahead(WARM_STEPS)
        times_ms: list[float] = []
        thread = threading.Thread(target=lambda: times_ms.extend(self._run(digests, source)))
        ended_s: list[float] = []
        began_s = time.perf_counter()
        thread.start()
        num_runs = 0
        # Without loads, as many steps as there may be.
        while num_runs < MOST_RUNS and (thread.is_alive() or not digests):
            ended_s.clear()
            driver.decode_ahead(RUN_STEPS, lambda: ended_s.append(time.perf_counter()))
            num_runs += 1
            # The first step of a run had nothing queued before it.
            found += [(after - before) * 1000 for before, after in pairwise(ended_s[1:])]
        took_s = time.perf_counter() - began_s
        thread.join()
        if len(times_ms) != len(digests):
            raise RuntimeError(f"{len(digests) - len(times_ms)} of {len(digests)} loads failed")
        driver.end()
        if digests:
            print(
                f"  a load of {LOAD_THREADS} at once takes {percentile(times_ms, 50):.1f} ms, p99 "
                f"{percentile(times_ms, 99):.1f}; steps were measured for {took_s:.2f} s"
            )
            self._evict(len(digests))
        return found

    def _line(self, name: str, times_ms: Sequence[float], quiet: Sequence[float]) -> None:
        ratio = percentile(times_ms, 99) / percentile(quiet, 99)
        print(
            f"  {name:<18} {len(times_ms):>4} steps, ms between: p50 {percentile(times_ms, 50):.3f}, p99 "
            f"{percentile(times_ms, 99):.3f}, longest {max(times_ms):.3f}; p99 {ratio:.3f} of without, "
            f"{'met' if ratio <= TARGET else 'MISSED'}",
            flush=True,
        )
