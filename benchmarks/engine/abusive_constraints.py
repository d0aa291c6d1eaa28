"""What abusive constraints take: time at admission, the longest mask of a step, and the steps of rows beside them.

    python -m benchmarks.engine.abusive_constraints [--steps N] [--rows N] [--rounds N] [--only-steps]

Over a byte-level vocabulary of 131,072 tokens. Admission counts a new child after a kill. The longest mask is CPU time,
which other processes do not change.

Steps are those of a model with that vocabulary in which half of the rows have no constraint. The other half are, in
turns, rows without a constraint, rows that follow a usual schema, and rows that follow the slowest grammars of the
first table. The time of a step is the time between two tokens of every row that does not sit it out. The last number
but two is the median step of a round over that of the same round without a constraint: median and range of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path

import llguidance
import numpy as np

from benchmarks.engine.constrained_rows import LIFE, NUM_CONTEXT, DecodingRows, Step
from benchmarks.engine.driver import make_engine
from benchmarks.engine.structured_output import SCHEMA, VOCAB_SIZE, make_tokenizer
from benchmarks.serving.checkpoints import make_base
from benchmarks.system import ROOT
from contract.sampling import GRAMMAR_LIMITS
from control_plane.constraints.compiler import ConstraintCompiler, ConstraintRefused
from control_plane.scheduler.types import Vocabulary
from data_plane.plan import RowConstraint
from data_plane.plan import Vocabulary as WorkerVocabulary
from tests.control_plane.constraints.abuse import CORPUS

MODEL = "205m-128k"
STEPS_PER_ROUND = 2 * LIFE


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="tokens of the walk that finds the longest mask")
    parser.add_argument("--rows", type=int, default=16, help="rows of a step")
    parser.add_argument("--rounds", type=int, default=4, help="of 64 steps of each kind")
    parser.add_argument("--only-steps", action="store_true", help="leave the first table out")
    parser.add_argument("--cache", type=Path, default=ROOT / ".motet" / "bench")
    arguments = parser.parse_args()
    slowest = asyncio.run(_measure(arguments.steps, is_shown=not arguments.only_steps))
    _measure_steps(slowest[: arguments.rows // 2], arguments.rows, arguments.rounds, arguments.cache)


async def _measure(num_steps: int, *, is_shown: bool) -> list[tuple[str, str]]:
    """Name and grammar of those that are admitted, the longest mask first."""
    vocabulary = Vocabulary("v", make_tokenizer(), VOCAB_SIZE, (0,))
    reader = llguidance.LLTokenizer(vocabulary.tokenizer, n_vocab=VOCAB_SIZE, eos_token=[0])
    compiler = ConstraintCompiler()
    longest: dict[tuple[str, str], float] = {}
    if is_shown:
        print(f"{'constraint':34} {'admission':>10} {'next one':>10} {'mask':>9}  outcome")
    for number, (name, (kind, value)) in enumerate(CORPUS.items()):
        await compiler.compile("choices", [f"before {number}"], vocabulary)
        start_s = time.perf_counter()
        try:
            grammar, outcome = (await compiler.compile(kind, value, vocabulary)).grammar, "compiled"
        except ConstraintRefused as error:
            grammar, outcome = None, " ".join(str(error).split())[:60]
        admitted_s = time.perf_counter()
        await compiler.compile("choices", [f"after {number}"], vocabulary, "another tenant")
        next_s = time.perf_counter()
        longest_s = 0.0
        if grammar is not None:
            longest_s, end = _longest_mask(reader, grammar, num_steps)
            outcome += f", {end}"
            longest[name, grammar] = longest_s
        if is_shown:
            print(
                f"{name:34} {(admitted_s - start_s) * 1000:7.1f} ms {(next_s - admitted_s) * 1000:7.1f} ms "
                f"{longest_s * 1000:6.2f} ms  {outcome}",
                flush=True,
            )
    await compiler.close()
    return sorted(longest, key=lambda one: longest[one], reverse=True)


def _measure_steps(slowest: list[tuple[str, str]], num_rows: int, num_rounds: int, cache: Path) -> None:
    engine = make_engine(
        make_base(MODEL, cache),
        threads=None,
        max_rows=num_rows,
        tokens_per_row=NUM_CONTEXT + LIFE + 16,
        arena_bytes=0,
        native_code="on",
    )
    vocabulary = WorkerVocabulary("v", make_tokenizer(), VOCAB_SIZE, (0,))
    engine.read_vocabulary(vocabulary)
    usual = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA))
    half = num_rows // 2
    grammars: dict[str, list[RowConstraint]] = {
        "no constraint": [],
        "a usual schema": [RowConstraint("usual", usual, vocabulary)],
        "slow grammars": [RowConstraint(name, grammar, vocabulary) for name, grammar in slowest],
    }
    grammars["slow, each new"] = grammars["slow grammars"]
    print(f"{num_rows - half} rows without a constraint, and {half} rows with one; slow: {', '.join(dict(slowest))}")
    steps: dict[str, list[Step]] = {name: [] for name in grammars}
    medians: dict[str, list[float]] = {name: [] for name in grammars}  # of each round
    for turn in range(num_rounds + 1):
        for name, found in grammars.items():
            constraints: list[RowConstraint | None] = [None] * num_rows
            for place in range(half if found else 0):
                constraints[num_rows - half + place] = found[place % len(found)]
            rows = DecodingRows(engine, constraints, is_new="new" in name)
            taken = [rows.step() for _ in range(STEPS_PER_ROUND)]
            rows.end()
            if turn:  # the first one warms up
                steps[name] += taken[1:]  # in the first one all rows begin
                medians[name].append(float(np.median([step.time_s for step in taken[1:]])))
    for name, taken in steps.items():
        times_ms = np.array([step.time_s for step in taken]) * 1000
        middle, high = np.percentile(times_ms, [50, 99])
        ratios = np.array(medians[name]) / np.array(medians["no constraint"])
        print(
            f"{name:16} {len(taken)} steps: p50 {middle:.1f} ms, p99 {high:.1f} ms, longest {times_ms.max():.1f} ms; "
            f"p50 over that of none {np.median(ratios):.3f} ({ratios.min():.3f} to {ratios.max():.3f}); "
            f"sat out {sum(step.num_waiting for step in taken) / (half * len(taken)):.1%}, "
            f"constraints that failed {sum(step.num_failed for step in taken)}"
        )


def _longest_mask(reader: llguidance.LLTokenizer, grammar: str, num_steps: int) -> tuple[float, str]:
    """CPU seconds, and how the walk ended."""
    matcher = llguidance.LLMatcher(reader, grammar, log_level=0, limits=llguidance.LLParserLimits(**GRAMMAR_LIMITS))
    chance, longest_s = np.random.default_rng(1), 0.0
    for step in range(num_steps):
        start_s = time.thread_time()
        mask = matcher.compute_bitmask()
        longest_s = max(longest_s, time.thread_time() - start_s)
        if matcher.is_error():
            return longest_s, f"fails at token {step}"
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little"))
        allowed = allowed[allowed != 0]
        if len(allowed) == 0:
            return longest_s, f"complete after {step} tokens"
        start_s = time.thread_time()
        matcher.consume_token(int(chance.choice(allowed)))
        longest_s = max(longest_s, time.thread_time() - start_s)
    return longest_s, f"goes on after {num_steps} tokens"


if __name__ == "__main__":
    main()
