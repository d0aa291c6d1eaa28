"""The whole system over gRPC: a control plane, a worker of random weights and the SDK, in three processes.

What the client sees between tokens is compared with the step that the worker's engine does alone. What lies between is
time in which the device waits for the next plan.
"""

from __future__ import annotations

import asyncio

from motet import Client

from benchmarks.engine.step_times import RANK
from benchmarks.gpu_targets.engines import TOKEN_BUDGET, Setup, blocks_of
from benchmarks.serving.checkpoints import SHAPES, make_ranked_adapter
from benchmarks.serving.measure import drive, summarise
from benchmarks.serving.run import warm_up
from benchmarks.serving.workloads import offline
from benchmarks.system import System

NUM_ADAPTERS = 8
TARGET = 0.02  # of the time, in which the device waits


def measure(setup: Setup, num_tokens: int) -> None:
    """Print the times between tokens, beside the engine's own step."""
    report, work_dir = setup.folder / "own_step_ms", setup.folder / "system"
    work_dir.mkdir()
    tokens_per_row = setup.context + num_tokens + 32
    jobs = offline(
        num_requests=setup.num_rows,
        prompt_tokens=setup.context,
        output_tokens=num_tokens,
        num_adapters=NUM_ADAPTERS,
        vocab_size=SHAPES[setup.shape].vocab_size,
        seed=0,
    )
    flags = ["--device", setup.device.type, "--dtype", setup.dtype, "--warm-up", "off"]
    flags += [
        "--token-budget",
        str(TOKEN_BUDGET),
        "--max-rows",
        str(setup.num_rows),
        "--max-model-len",
        str(tokens_per_row),
    ]
    flags += ["--num-blocks", str(blocks_of(setup.num_rows + 1, tokens_per_row))]
    flags += ["--arena-bytes", str(setup.arena_bytes(2 * NUM_ADAPTERS))]
    if setup.device.type == "cuda":
        flags += ["--cuda-graphs", f"1,{setup.num_rows}"]
    case = f"{setup.num_rows},{NUM_ADAPTERS},{setup.context},{num_tokens}"
    control_flags = ["--host-cache", "memory", "--max-streams-per-connection", "4096", "--log-level", "warning"]
    with System(setup.model_dir, work_dir, control_flags=control_flags, timeout_s=90.0) as system:
        system.start_worker(flags=flags, command=("-m", "benchmarks.gpu_targets.random_worker", str(report), case))
        own_ms = float(report.read_text())
        print(f"the engine's own step: {own_ms:.3f} ms", flush=True)
        adapter_dir = make_ranked_adapter(setup.shape, RANK, setup.folder)
        names = [f"bench-{index}" for index in range(NUM_ADAPTERS)]
        with Client(system.address) as client:
            for name in names:
                client.adapters.register(name, adapter_dir)
        asyncio.run(drive(system.address, warm_up(jobs), names, lambda _: None))
        for run in (1, 2):
            # Those of the second run lie in the prefix cache, as far as there is room: it decodes from its start.
            found = summarise(asyncio.run(drive(system.address, jobs, names, lambda _: None)))
            waits = 1 - own_ms / found["itl_ms_p50"]
            between = ", ".join(f"{key} {found[f'itl_ms_{key}']:.3f}" for key in ("p50", "p90", "p99"))
            print(
                f"run {run}: {setup.num_rows} streams of {setup.context} + {num_tokens} tokens, "
                f"{NUM_ADAPTERS} adapters: {found['output_tokens_per_s']:.0f} tokens/s, "
                f"first token p50 {found['ttft_ms_p50']:.1f} ms, "
                f"ms between tokens {between}; the device waits {100 * waits:.1f} % of the p50, "
                f"{'met' if waits <= TARGET else 'MISSED'}",
                flush=True,
            )
