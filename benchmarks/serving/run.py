"""Measures serving: `python -m benchmarks.serving.run --help`.

Makes a random checkpoint and adapters, starts the system (or uses --server), sends seeded workloads through the SDK,
and reports medians over repeats. Peers do the same offline work in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from motet import Client
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.serving import report
from benchmarks.serving.checkpoints import SHAPES, describe, make_adapters, make_base
from benchmarks.serving.measure import Record, drive, medians, summarise
from benchmarks.serving.peer_process import Peer, PeerFailed
from benchmarks.serving.workloads import POPULARITIES, Job, num_adapters_of, offline, punica, s_lora_trace
from benchmarks.system import ROOT, StartFailed, System

HASH_WORKER = ("-m", "tests.fakes.hash_worker")
NUM_MARKS = 8  # token ids from 0 on that no workload draws


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.run",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = out.add_argument
    add("--model-shape", choices=sorted(SHAPES), default="tiny", help="random Llama to serve")
    add("--dtype", choices=("float32", "bfloat16"), help="element type of the checkpoint (default: the shape's)")
    add("--workload", choices=("offline", "punica", "s-lora"), default="offline", help="what arrives, and when")
    add("--adapters", default="0,4,16", help="adapter counts to compare, separated by commas (offline and s-lora)")
    add("--requests", type=int, default=32, help="requests of one run, a count (offline and punica)")
    add("--prompt-tokens", type=int, default=128, help="prompt length, tokens (offline and punica)")
    add("--output-tokens", type=int, default=64, help="tokens to generate per request (offline and punica)")
    add("--rate", type=float, default=2.0, help="s-lora: requests per second")
    add("--duration-s", type=float, default=30.0, help="s-lora: seconds of arrivals")
    add("--alpha", type=float, default=1.0, help="s-lora: popularity, 1 is uniform, smaller is more skewed")
    add("--cv", type=float, default=1.0, help="s-lora: coefficient of variation of the times between arrivals")
    add("--length-range", default="8,512", help="s-lora: prompt and output lengths, tokens, low,high")
    add("--repeats", type=int, default=3, help="runs per workload; medians are printed")
    add("--seed", type=int, default=42, help="of the workloads")
    add("--server", help="HOST:PORT of a running system that serves the same checkpoint (default: start one)")
    add("--threads", type=int, default=os.cpu_count() or 1, help="compute threads of worker and peers, a count")
    add(
        "--worker-arg",
        action="append",
        default=[],
        help="further argument of the worker, such as --worker-arg=--max-rows=64",
    )
    add("--peer", action="append", choices=("peft", "vllm-cpu"), default=[], help="run the offline work there too")
    add("--peer-python", default=sys.executable, help="interpreter that has vllm, for --peer vllm-cpu")
    add("--control-plane-only", action="store_true", help="serve with the fake worker, which computes hashes only")
    add("--cache", type=Path, default=ROOT / ".motet" / "bench", help="where checkpoints and adapters are kept")
    add("--out", type=Path, help="write the report here as JSON, and a chart beside it as PNG")
    return out


def workloads_of(args: argparse.Namespace) -> dict[str, list[Job]]:
    """The workloads to run, by name."""
    vocab_size = SHAPES[args.model_shape].vocab_size
    sizes = {"num_requests": args.requests, "prompt_tokens": args.prompt_tokens, "output_tokens": args.output_tokens}
    common = {**sizes, "vocab_size": vocab_size, "seed": args.seed}
    if args.workload == "punica":
        return {popularity: punica(popularity, **common) for popularity in POPULARITIES}
    counts = [int(count) for count in args.adapters.split(",")]
    if args.workload == "offline":
        return {f"{count} adapters": offline(num_adapters=count, **common) for count in counts}
    low, high = (int(bound) for bound in args.length_range.split(","))
    return {
        f"{count} adapters": s_lora_trace(
            rate_per_s=args.rate,
            duration_s=args.duration_s,
            num_adapters=count,
            alpha=args.alpha,
            cv=args.cv,
            prompt_range=(low, high),
            output_range=(low, high),
            vocab_size=vocab_size,
            seed=args.seed,
        )
        for count in counts
    }


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    console = Console(stderr=True)
    if args.out and importlib.util.find_spec("matplotlib") is None:
        console.print("--out draws a chart, and matplotlib is not there: make setup-bench, or leave --out out")
        return 2
    if args.peer and args.workload == "s-lora":
        console.print("--peer: a static batch needs prompts and outputs of one length; use --workload offline")
        return 2
    workloads = workloads_of(args)
    console.print(f"making the checkpoint ({args.model_shape}) and its adapters where they are missing")
    model_dir = make_base(args.model_shape, args.cache, args.dtype)
    num_adapters = max(num_adapters_of(jobs) for jobs in workloads.values())
    adapter_dirs = make_adapters(args.model_shape, num_adapters, args.cache)
    try:
        with ExitStack() as stack:
            target = args.server or _start(stack, args, model_dir)
            names = register(target, adapter_dirs)
            results, last = _run_all(console, target, workloads, names, args.repeats)
        peers = [_run_peer(args, name, last, workloads, model_dir, adapter_dirs) for name in args.peer]
    except (PeerFailed, StartFailed) as error:
        console.print(str(error), markup=False, soft_wrap=True)
        return 1
    report.show(console, results)
    for peer, result in ((peer, results[-1]) for peer in peers):
        ratio = result["median"]["output_tokens_per_s"] / peer["output_tokens_per_s"]
        agreement = f"{100 * peer['equal_tokens']:.1f}% of its tokens are ours; {peer['mode']}"
        console.print(f"{peer['name']}: {peer['output_tokens_per_s']:.0f} tokens/s; motet is {ratio:.2f}x; {agreement}")
    if args.out:
        settings = {key: str(value) for key, value in vars(args).items()}
        shape = describe(args.model_shape)
        everything = {
            "machine": report.machine(),
            "settings": settings,
            "model": shape,
            "results": results,
            "peers": peers,
        }
        report.write_json(args.out, everything)
        report.draw(args.out.with_suffix(".png"), results, peers)
        console.print(f"written: {args.out} and {args.out.with_suffix('.png')}")
    return 0


def _start(stack: ExitStack, args: argparse.Namespace, model_dir: Path) -> str:
    data_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="motet-bench-")))
    system = System(
        model_dir,
        data_dir,
        control_flags=["--max-streams-per-connection", "4096", "--log-level", "warning"],
    )
    stack.enter_context(system)
    if args.control_plane_only:
        system.start_worker(flags=args.worker_arg, command=HASH_WORKER)
    else:
        system.start_worker(flags=["--threads", str(args.threads), *args.worker_arg])
    return system.address


def register(target: str, adapter_dirs: Sequence[Path]) -> list[str]:
    """Register the adapters under names of their own; the names."""
    names = [f"bench-{index}" for index in range(len(adapter_dirs))]
    with Client(target) as client:
        for name, directory in zip(names, adapter_dirs, strict=True):
            client.adapters.register(name, directory)
    return names


def _run_all(
    console: Console, target: str, workloads: dict[str, list[Job]], names: Sequence[str], repeats: int
) -> tuple[list[dict[str, Any]], list[Record]]:
    """Each workload `repeats` times, interleaved, after one warm-up that loads its adapters; results, last records."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in workloads}
    records: list[Record] = []
    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for repeat in range(repeats):
            for index, (name, jobs) in enumerate(workloads.items()):
                if repeat == 0:
                    asyncio.run(drive(target, warm_up(jobs), names, lambda _: None))
                task = progress.add_task(f"{name}, run {repeat + 1}", total=sum(job.max_tokens for job in jobs))
                records = asyncio.run(
                    drive(target, renewed(jobs, repeat, index), names, partial(progress.advance, task))
                )
                runs[name].append(summarise(records))
    results = [{"name": name, "median": medians(of_name), "runs": of_name} for name, of_name in runs.items()]
    return results, records


def warm_up(jobs: Sequence[Job]) -> list[Job]:
    """One token for every adapter in use."""
    return [
        Job((1,), 1, adapter) for adapter in sorted({job.adapter for job in jobs}, key=lambda a: -1 if a is None else a)
    ]


def renewed(jobs: Sequence[Job], repeat: int, workload: int) -> list[Job]:
    """The same jobs with first tokens of this run's own, of a range that workloads do not draw from.

    Workloads of one seed share prompts and adapters: what an earlier run sent would come from the prefix cache.
    """
    mark = (repeat % NUM_MARKS, workload % NUM_MARKS)
    return [replace(job, prompt_token_ids=_marked(job.prompt_token_ids, mark)) for job in jobs]


def _marked(token_ids: tuple[int, ...], mark: tuple[int, ...]) -> tuple[int, ...]:
    return (mark + token_ids[len(mark) :])[: len(token_ids)]


def _run_peer(
    args: argparse.Namespace,
    name: str,
    records: Sequence[Record],
    workloads: dict[str, list[Job]],
    model_dir: Path,
    adapter_dirs: Sequence[Path],
) -> dict[str, Any]:
    """The last workload's prompts, as our last run sent them, on another engine."""
    jobs = [record.job for record in records]
    peer = Peer(
        name,
        model_dir=model_dir,
        dtype=args.dtype or SHAPES[args.model_shape].dtype,
        threads=args.threads,
        adapter_dirs=adapter_dirs[: num_adapters_of(jobs)],
        max_model_len=len(jobs[0].prompt_token_ids) + jobs[0].max_tokens,
        interpreter=args.peer_python if name == "vllm-cpu" else sys.executable,
    )
    with peer:
        duration_s, completions = peer.run(jobs)
    return {
        "name": name,
        "mode": peer.mode,
        "workload": list(workloads)[-1],
        "duration_s": duration_s,
        "output_tokens_per_s": sum(len(completion) for completion in completions) / duration_s,
        # Random weights in 16 bits: after the first rounding difference two greedy completions part for good.
        "equal_tokens": share_of_equal_tokens(records, completions),
    }


def share_of_equal_tokens(records: Sequence[Record], completions: Sequence[Sequence[int]]) -> float:
    """The share of our tokens that another engine's completions have at the same places."""
    pairs = [
        pair
        for record, completion in zip(records, completions, strict=True)
        for pair in zip(record.token_ids, completion, strict=True)
    ]
    return sum(ours == theirs for ours, theirs in pairs) / len(pairs)


if __name__ == "__main__":
    sys.exit(main())
