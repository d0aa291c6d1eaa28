"""What the passes beside the products cost on a CPU: native ops against the same calls in torch.

    python -m benchmarks.cpu_passes --threads 2

Norms, rotation with the cache write, gates and sampling, at the shapes of the 205M Llama of the serving benchmark. A
native op is timed alone and as one of a list of 20, which is how a step runs it. Each figure is the best of many calls.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import torch

from kernels.gated_activation import cpu as gate_cpu, native as gate
from kernels.native import Program, Step, has_native, set_num_threads
from kernels.rms_norm import cpu as norm_cpu, native as norm
from kernels.rope import cpu as rope_cpu, native as rope
from kernels.sampling import SamplingRows, cpu as sampling_cpu, native, rows_of, sample_and_check
from kernels.store_kv import cpu as store_cpu

HIDDEN, HEADS, KV_HEADS, DIM, MLP = 1024, 16, 8, 64, 2816
NUM_TOKENS = (1, 8, 32, 64, 128, 1024)
VOCABULARIES = (8192, 128_256)
MOST_LOGITS = 1 << 23
OPS_OF_LIST = 20
CALLS, SECONDS = 100, 0.5  # of one figure, at most


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass in its three forms."""

    name: str
    torch: Callable[[], object]
    alone: Callable[[], object]
    op: tuple[str, ctypes.Structure, Step] | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    threads = parser.parse_args().threads
    torch.set_num_threads(threads)
    set_num_threads(threads)
    if not has_native():
        raise SystemExit("there is no native code: install a C compiler")
    print("| us | dtype | tokens | torch | native alone | in a list |\n|---|---|---|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16):
        for num_tokens in NUM_TOKENS:
            # One at a time: what an op points to lives as long as its generator stands still.
            for of in chain(_layer(num_tokens, dtype), _sampling(num_tokens, dtype)):
                listed = "" if of.op is None else f"{_best(_list_of(*of.op)) / OPS_OF_LIST:.1f}"
                row = f"{_best(of.torch):.0f} | {_best(of.alone):.0f} | {listed}"
                print(f"| {of.name} | {str(dtype).removeprefix('torch.')} | {num_tokens} | {row} |", flush=True)


def _best(call: Callable[[], object]) -> float:
    """Microseconds."""
    call()
    begin, best = time.perf_counter(), float("inf")
    for _ in range(CALLS):
        start = time.perf_counter()
        call()
        end = time.perf_counter()
        best = min(best, end - start)
        if end - begin > SECONDS:
            break
    return best * 1e6


def _list_of(name: str, problem: ctypes.Structure, step: Step) -> Callable[[], None]:
    program = Program()
    for _ in range(OPS_OF_LIST):
        program.add(name, problem)
    return lambda: program.run(step)


def _layer(num_tokens: int, dtype: torch.dtype) -> Iterator[Pass]:
    step = Step(num_tokens=num_tokens)
    x, stream, weight = (torch.randn(*shape).to(dtype) for shape in ((num_tokens, HIDDEN),) * 2 + ((HIDDEN,),))
    normed = torch.empty_like(x)
    yield Pass(
        "norm and sum",
        lambda: norm_cpu.rms_norm(x, weight, 1e-5, stream, 0.0),
        lambda: norm.rms_norm(x, weight, 1e-5, stream, 0.0),
        ("rms_norm", norm.problem(x, weight, 1e-5, normed, residual=stream), step),
    )
    widths = [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM]
    joint = torch.randn(num_tokens, sum(widths)).to(dtype)
    query, key, value = (part.view(num_tokens, -1, DIM) for part in torch.split(joint, widths, dim=1))
    caches = [torch.zeros(128, 16, KV_HEADS, DIM, dtype=dtype) for _ in range(2)]
    slots = torch.randperm(128 * 16)[:num_tokens]
    tables = torch.rand(num_tokens, DIM // 2), torch.rand(num_tokens, DIM // 2)
    rotation = rope.rotation(*tables, slots)

    def rotate_and_store() -> None:
        rope_cpu.apply_rope(query, key, None, *tables, None)
        store_cpu.store_kv(key, value, caches[0], caches[1], slots)

    yield Pass(
        "rotation and store",
        rotate_and_store,
        lambda: rope.apply_rope(query, key, None, *tables, None, (value, caches[0], caches[1], slots)),
        (
            "rotate_store",
            rope.problem(query, key, DIM // 2, value=value, key_cache=caches[0], value_cache=caches[1]),
            Step(num_tokens=num_tokens, rotation=rotation.address),
        ),
    )
    both, gated = torch.randn(num_tokens, 2 * MLP).to(dtype), torch.empty(num_tokens, MLP, dtype=dtype)
    yield Pass(
        "gate, silu",
        lambda: gate_cpu.gated_activation(both, "silu"),
        lambda: gate.gated_activation(both, "silu"),
        ("gate", gate.problem(both, gated, "silu"), step),
    )


def _sampling(num_tokens: int, dtype: torch.dtype) -> Iterator[Pass]:
    """Greedy, and drawn with temperature 0.8: from all tokens, from top-p 0.95, from top-k 50."""
    for vocab_size in VOCABULARIES:
        if num_tokens * vocab_size > MOST_LOGITS:
            continue
        logits = (torch.randn(num_tokens, vocab_size) * 3).to(dtype)
        for name, top_k, top_p in (("greedy", 0, 1.0), ("all", 0, 1.0), ("top-p", 0, 0.95), ("top-k", 50, 1.0)):
            rows = None if name == "greedy" else _rows(num_tokens, top_k, top_p)

            def in_torch(logits: torch.Tensor = logits, rows: SamplingRows | None = rows) -> None:
                torch.isfinite(logits).all(dim=-1)
                if rows is None:
                    logits.argmax(dim=-1)
                else:
                    sampling_cpu.sample(logits, rows, None)

            def alone(logits: torch.Tensor = logits, rows: SamplingRows | None = rows) -> None:
                sample_and_check(logits, rows)

            assert native.can_serve(logits)
            yield Pass(f"{name} of {vocab_size}", in_torch, alone)


def _rows(num_rows: int, top_k: int, top_p: float) -> SamplingRows:
    order = torch.arange(num_rows)
    return rows_of(num_rows, temperature=0.8, top_k=top_k, top_p=top_p, min_p=0.0, seed=order, position=order)


if __name__ == "__main__":
    main()
