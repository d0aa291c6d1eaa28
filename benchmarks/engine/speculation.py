"""What speculative decoding gains and costs: the same requests with and without, in turns, on the CPU.

    python -m benchmarks.engine.speculation [--model-shape S] [--rows 1,8] [--adapters 0,8] [--tokens N] [--rounds N]

Repetitive text is what a random model generates greedily after a repeating prompt: it falls into loops. Other text is
sampled at temperature 1 after a random prompt. Both sides run plans of 4 steps and must return the same tokens; printed
are the ratios of their throughputs (above 1: drafts gain), median and range over the rounds, and the drafts accepted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np

from benchmarks.engine.driver import load_adapters, make_engine
from benchmarks.serving.checkpoints import SHAPES, make_adapters, make_base
from benchmarks.system import ROOT
from control_plane.scheduler.types import MAX_PLAN_STEPS
from data_plane.engine.engine import TorchEngine
from data_plane.plan import NewRow, RowSampling, StepPlan

NUM_PROMPT = 64
BLOCK_SIZE = 16


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-shape", choices=sorted(SHAPES), default="205m")
    parser.add_argument("--rows", default="1,8", help="rows that decode, counts separated by commas")
    parser.add_argument("--adapters", default="0,8", help="adapters that the rows take in turn, counts")
    parser.add_argument("--tokens", type=int, default=96, help="tokens that each row generates")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cache", type=Path, default=ROOT / ".motet" / "bench")
    arguments = parser.parse_args()
    rows = [int(count) for count in arguments.rows.split(",")]
    adapters = [int(count) for count in arguments.adapters.split(",")]
    model_dir = make_base(arguments.model_shape, arguments.cache, None)
    adapter_dirs = make_adapters(arguments.model_shape, max(adapters), arguments.cache)
    engines = {}
    for speculative in ("off", "ngram"):
        engines[speculative] = make_engine(
            model_dir,
            threads=None,
            max_rows=max(rows),
            tokens_per_row=NUM_PROMPT + arguments.tokens + 2 * BLOCK_SIZE,
            arena_bytes=(1 << 30) if adapter_dirs else 0,
            native_code="on",
            speculative=speculative,
        )
        load_adapters(engines[speculative], model_dir, adapter_dirs)
    for is_repetitive in (True, False):
        for num_rows in rows:
            for num_adapters in adapters:
                compare(engines, arguments.rounds, arguments.tokens, num_rows, num_adapters, is_repetitive)


def compare(
    engines: dict[str, TorchEngine], rounds: int, num_tokens: int, num_rows: int, num_adapters: int, is_repetitive: bool
) -> None:
    """Run both sides in turns and print their ratio."""
    ratios, drafts = [], (0, 0)
    for turn in range(rounds + 1):
        found = {}
        order = list(engines) if turn % 2 else list(engines)[::-1]
        for name in order:
            found[name] = generate(engines[name], num_rows, num_adapters, num_tokens, is_repetitive, seed=turn)
        assert found["off"][0] == found["ngram"][0], "drafts changed a token"
        if turn:  # the first one warms up
            ratios.append(found["off"][1] / found["ngram"][1])
            drafts = (drafts[0] + found["ngram"][2], drafts[1] + found["ngram"][3])
    text = "repetitive" if is_repetitive else "other"
    print(
        f"{text} rows={num_rows} adapters={num_adapters}: {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f}), {drafts[1]} of {drafts[0]} drafts accepted",
        flush=True,
    )


def generate(
    engine: TorchEngine, num_rows: int, num_adapters: int, num_tokens: int, is_repetitive: bool, *, seed: int
) -> tuple[list[list[int]], float, int, int]:
    """Tokens of each step, seconds of the decode steps, tokens drafted, and accepted."""
    rng = np.random.default_rng(seed)
    blocks_of_row = -(-(NUM_PROMPT + num_tokens + 1) // BLOCK_SIZE)
    new_rows = []
    for row in range(num_rows):
        prompt = rng.integers(8, engine.capacities.vocab_size, NUM_PROMPT).astype(np.int32)
        if is_repetitive:
            prompt = np.tile(prompt[:8], NUM_PROMPT // 8)
        new_rows.append(
            NewRow(
                row=row,
                token_ids=prompt,
                num_prompt_tokens=NUM_PROMPT,
                num_computed_tokens=0,
                block_ids=np.arange(row * blocks_of_row, (row + 1) * blocks_of_row, dtype=np.int32),
                slot=row % num_adapters if num_adapters else None,
                slot_generation=1 if num_adapters else 0,
                sampling=RowSampling(temperature=0.0 if is_repetitive else 1.0, top_k=0, top_p=1.0, seed=seed + row),
            )
        )
    prefills = np.array([(row, NUM_PROMPT) for row in range(num_rows)], dtype=np.int32)
    engine.execute(StepPlan(1, new_rows=new_rows, prefills=prefills))
    outputs = []
    start_s = time.perf_counter()
    for step in range(num_tokens - num_tokens % MAX_PLAN_STEPS):
        outputs.append(engine.execute(StepPlan(2 + step, num_more=MAX_PLAN_STEPS - 1 - step % MAX_PLAN_STEPS)))
    time_s = time.perf_counter() - start_s
    engine.execute(StepPlan(2 + num_tokens, freed_rows=np.arange(num_rows, dtype=np.int32)))
    tokens = [output.token_ids.tolist() for output in outputs]
    return tokens, time_s, sum(o.num_drafted for o in outputs), sum(o.num_accepted for o in outputs)


if __name__ == "__main__":
    main()
