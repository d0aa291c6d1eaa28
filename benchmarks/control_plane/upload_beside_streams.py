"""Time between tokens of concurrent streams, alone and beside uploads of a large adapter.

`python -m benchmarks.control_plane.upload_beside_streams` prints one JSON object: percentiles of the time between
tokens at the client without and with an upload that is received, packed and stored, and their ratio. A worker that only
hashes takes `--step-ms` for a step. Streams, uploads and worker are processes beside the control plane's, on
the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import uvloop
from motet import Client
from motet.v1 import generation_pb2, generation_pb2_grpc

from benchmarks.serving.checkpoints import make_adapters, make_base
from benchmarks.system import ROOT, System

MAX_TOKENS = 1000  # a stream that ends is followed by another one


def make_large_adapter(small: Path, out: Path, size_bytes: int) -> Path:
    """An adapter like `small` of about this size: its ranks are repeated."""
    out.mkdir(parents=True)
    config = json.loads((small / "adapter_config.json").read_bytes())
    raw = (small / "adapter_model.safetensors").read_bytes()
    header_bytes = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + header_bytes]), raw[8 + header_bytes :]
    times = max(1, size_bytes // len(data))
    entries, parts, position = {}, [], 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        element = np.dtype(f"V{(end - begin) // int(np.prod(entry['shape']))}")
        values = np.frombuffer(data[begin:end], element).reshape(entry["shape"])
        values = np.tile(values, (times, 1) if ".lora_A." in name else (1, times))
        entries[name] = entry | {
            "shape": list(values.shape),
            "data_offsets": [position, position + values.nbytes],
        }
        position += values.nbytes
        parts.append(values)
    encoded = json.dumps(entries).encode()
    with (out / "adapter_model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for values in parts:
            file.write(values.tobytes())
    config |= {"r": config["r"] * times, "lora_alpha": config["lora_alpha"] * times, "rank_pattern": {}}
    (out / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return out


class Streams:
    """Streams without an end, and the times between their messages."""

    def __init__(self, target: str, num_streams: int) -> None:
        self._target = target
        self._num_streams = num_streams
        self._gaps_ms: list[float] = []

    async def run(self, waiting: asyncio.Event) -> None:
        """Read until cancelled; `waiting` is set once every stream has a token."""
        rng, num_started = random.Random(0), 0
        async with grpc.aio.insecure_channel(self._target) as channel:
            stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]

            async def read() -> None:
                nonlocal num_started
                request = generation_pb2.GenerateRequest(
                    token_ids={"ids": [rng.randrange(1, 500) for _ in range(32)]},
                    stopping={"max_tokens": MAX_TOKENS, "ignore_eos": True},
                )
                while True:
                    last_s = None
                    async for response in stub.Generate(request):
                        if not response.delta.token_ids:
                            continue
                        now_s = time.perf_counter()
                        if last_s is None:
                            num_started += 1
                            if num_started == self._num_streams:
                                waiting.set()
                        else:
                            self._gaps_ms.append((now_s - last_s) * 1e3)
                        last_s = now_s

            await asyncio.gather(*(read() for _ in range(self._num_streams)))

    def take_gaps(self) -> list[float]:
        """The times since the last call, ms."""
        gaps, self._gaps_ms = self._gaps_ms, []
        return gaps


async def measure(target: str, adapter: Path, args: argparse.Namespace) -> list[dict[str, float]]:
    """Rounds of a time alone and one upload."""
    streams, running = Streams(target, args.streams), asyncio.Event()
    reading = asyncio.ensure_future(streams.run(running))
    try:
        await asyncio.wait([reading, asyncio.ensure_future(running.wait())], return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            reading.result()
        rounds = []
        for number in range(args.rounds):
            streams.take_gaps()
            await asyncio.sleep(args.alone_s)
            alone = streams.take_gaps()
            begin_s = time.perf_counter()
            command = [sys.executable, "-m", __spec__.name, "--upload", target, str(adapter), f"large-{number}"]
            process = await asyncio.create_subprocess_exec(*command, cwd=ROOT)
            status = await process.wait()
            assert status == 0, "the upload failed"
            upload_s = time.perf_counter() - begin_s
            beside = streams.take_gaps()
            rounds.append(compared(alone, beside) | {"upload_s": round(upload_s, 1)})
            with Client(target) as client:
                client.adapters.delete(f"large-{number}")
        return rounds
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


def compared(alone: list[float], beside: list[float]) -> dict[str, float]:
    """Percentiles of both, ms, and the ratio of the 99th ones."""
    figures = {}
    for name, gaps in (("alone", alone), ("beside", beside)):
        for percent in (50, 99, 99.9):
            figures[f"{name}_p{percent:g}_ms"] = round(float(np.percentile(gaps, percent)), 2)
        figures[f"{name}_max_ms"] = round(max(gaps), 2)
    return figures | {"p99_ratio": round(figures["beside_p99_ms"] / figures["alone_p99_ms"], 2)}


def upload(target: str, adapter: str, name: str) -> None:
    """Register an adapter, in a process of its own."""
    with Client(target) as client:
        client.adapters.register(name, Path(adapter), timeout_s=600)


def main() -> int:
    """Measure as the flags say and print JSON."""
    if sys.argv[1:2] == ["--upload"]:
        upload(*sys.argv[2:5])
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=100, help="concurrent streams, a count (default 100)")
    parser.add_argument("--size-mb", type=int, default=500, help="size of the upload, MB (default 500)")
    parser.add_argument("--step-ms", type=float, default=20.0, help="time of a worker's step, ms (default 20)")
    parser.add_argument("--alone-s", type=float, default=5.0, help="time without an upload, seconds (default 5)")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions (default 3)")
    args = parser.parse_args()
    cache = ROOT / ".motet" / "bench"
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        directory = Path(folder)
        adapter = make_large_adapter(make_adapters("tiny", 1, cache)[0], directory / "large", args.size_mb * 1_000_000)
        flags = ["--max-streams-per-connection", "4096", "--log-level", "warning", "--max-adapter-bytes", "2GiB"]
        system = System(make_base("tiny", cache), directory / "data", control_flags=flags)
        with system:
            blocks = ["--max-rows", str(args.streams), "--num-blocks", str(args.streams * 128)]
            length = ["--step-time-ms", str(args.step_ms)]
            system.start_worker(flags=[*blocks, *length], command=("-m", "tests.fakes.hash_worker"))
            rounds = uvloop.run(measure(system.address, adapter, args))
    print(json.dumps({"streams": args.streams, "size_mb": args.size_mb, "rounds": rounds}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
