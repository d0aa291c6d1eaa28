"""Pushes per second, one after the other and by several trainers at once, each with a name of its own.

At the end a request of every name has to get the version that was pushed last.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from motet import Client
from rich.table import Table

from benchmarks.adapters.rig import percentile, title
from benchmarks.push import adapter_config, make_checkpoint, make_tensors
from benchmarks.system import System


@dataclass
class Pushes:
    """What so many trainers reached."""

    size_bytes: int
    num_trainers: int
    duration_s: float = 0.0
    calls_ms: list[float] = field(default_factory=list)
    visible_ms: list[float] = field(default_factory=list)


def measure(work_dir: Path, *, num_layers: int, ranks: list[int], trainers: list[int], seconds: float) -> list[Pushes]:
    """Every rank by every number of trainers."""
    checkpoint = make_checkpoint(work_dir / "model", num_layers=num_layers)
    with System(checkpoint, work_dir, control_flags=["--dtype", "bfloat16"]) as system:
        flags = ["--dtype", "bfloat16", "--num-blocks", "64", "--max-model-len", "256", "--arena-bytes", "512MiB"]
        system.start_worker(flags=flags)
        return [_measure(system.address, num_layers, rank, count, seconds) for rank in ranks for count in trainers]


def _measure(address: str, num_layers: int, rank: int, num_trainers: int, seconds: float) -> Pushes:
    found = Pushes(sum(tensor.nbytes for tensor in make_tensors(num_layers, rank, 0).values()), num_trainers)
    lock = threading.Lock()
    ready = threading.Barrier(num_trainers + 1, timeout=120.0)  # broken where a trainer fails before it is ready

    def train(number: int) -> None:
        name, tensors, num_pushed = f"policy-{rank}-{number}", make_tensors(num_layers, rank, number), 0
        changed = next(iter(tensors.values()))
        with Client(address) as client:
            client.adapters.push(name, adapter_config(rank), tensors)  # warm-up: the name is new
            client.adapters.update(name, keep_versions=2)
            ready.wait()
            begin_s = time.monotonic()
            while True:
                num_pushed += 1
                changed[0, 0] = num_pushed  # other bytes
                began_s = time.monotonic()
                pushed = client.adapters.push(name, adapter_config(rank), tensors)
                ended_s = time.monotonic()
                with lock:
                    found.calls_ms.append(1e3 * (ended_s - began_s))
                    found.visible_ms.append(1e3 * pushed.visible_s)
                if ended_s - begin_s >= seconds:
                    break
            stream = client.generate([5, 6, 7], adapter=name, max_tokens=1)
            stream.result()
            assert pushed.adapter.active_version is not None and stream.started is not None
            assert stream.started.adapter_digest == pushed.adapter.active_version.digest, (
                "a request got another version"
            )

    with ThreadPoolExecutor(num_trainers) as pool:
        done = [pool.submit(train, number) for number in range(num_trainers)]
        ready.wait()
        begin_s = time.monotonic()
        for future in done:
            future.result()
        found.duration_s = time.monotonic() - begin_s
    with Client(address) as client:
        for number in range(num_trainers):
            client.adapters.delete(f"policy-{rank}-{number}")
    return found


def table(found: list[Pushes]) -> Table:
    """A row for each size and number of trainers."""
    out = Table(title=title("versions pushed"))
    headings = ("MB", "trainers", "pushes", "pushes/s", "MB/s", "call p50 ms", "p99", "visible p50 ms", "p99")
    for heading in headings:
        out.add_column(heading, justify="right")
    for one in found:
        rate = len(one.calls_ms) / one.duration_s
        times = [percentile(values, percent) for values in (one.calls_ms, one.visible_ms) for percent in (50, 99)]
        cells = [f"{one.size_bytes / 1e6:.1f}", str(one.num_trainers), str(len(one.calls_ms)), f"{rate:.2f}"]
        out.add_row(*cells, f"{rate * one.size_bytes / 1e6:.1f}", *(f"{value:.0f}" for value in times))
    return out
