"""What abusive constraints take: time at admission, the longest mask of a step, and the steps of rows beside them.

    python -m benchmarks.engine.abusive_constraints [--steps N] [--rows N] [--rounds N] [--only-steps]

Over a byte-level vocabulary of 131,072 tokens. Admission counts a new child after a kill. The longest mask is CPU time,
which other processes do not change.

Steps are those of a model with that vocabulary in which half of the rows have no constraint. The other half are, in
turns, rows that follow a usual schema, rows that follow the slowest grammars of the first table, and rows that follow
new ones of either. The time of a step is the time between two tokens of every row that does not sit it out. Each series
has two of rows without any constraint beside it, in which as many rows begin again in the same steps: one before it and
one behind it. Ratios are those of the medians: median and quartiles of the rounds, and how the two without a constraint
differ. Series are short, so that what else changes on the machine changes all of a round. "Without a core" is how long
the compute thread was ready to run and had to wait: that differs less between rounds than the time of a step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import llguidance
import numpy as np
import numpy.typing as npt

from benchmarks.engine.constrained_rows import LIFE, NUM_CONTEXT, DecodingRows, Step
from benchmarks.engine.driver import make_engine
from benchmarks.engine.structured_output import SCHEMA, VOCAB_SIZE, make_tokenizer
from benchmarks.serving.checkpoints import make_base
from benchmarks.system import ROOT
from contract.sampling import GRAMMAR_LIMITS
from control_plane.constraints.compiler import ConstraintCompiler, ConstraintRefused
from control_plane.scheduler.types import Vocabulary
from data_plane.engine.engine import TorchEngine
from data_plane.plan import RowConstraint, Vocabulary as WorkerVocabulary
from tests.control_plane.constraints.abuse import CORPUS

MODEL = "205m-128k"
STEPS_PER_SERIES = LIFE // 2


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="tokens of the walk that finds the longest mask")
    parser.add_argument("--rows", type=int, default=16, help="rows of a step")
    parser.add_argument("--rounds", type=int, default=16, help=f"of {STEPS_PER_SERIES} steps of each kind")
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
    of_usual = [RowConstraint("usual", usual, vocabulary)]
    of_slow = [RowConstraint(name, grammar, vocabulary) for name, grammar in slowest]
    grammars = {"usual": of_usual, "usual, each new": of_usual, "slow": of_slow, "slow, each new": of_slow}
    print(f"{num_rows - half} rows without a constraint, and {half} rows with one; slow: {', '.join(dict(slowest))}")
    plain: list[RowConstraint | None] = [None] * num_rows
    for name, found in grammars.items():
        constrained = plain[half:] + [found[place % len(found)] for place in range(half)]
        rounds = []
        # Rows without a constraint that begin again where those with one do: they come first, so from the round before.
        endings: list[frozenset[int]] | None = None
        for _ in range(num_rounds + 1):
            before = _series(engine, plain, False, endings)
            taken = _series(engine, constrained, "new" in name, None)
            endings = [step.ended for step in taken]
            rounds.append((before, taken, _series(engine, plain, False, endings)))
        _print_steps(name, half, rounds[1:])  # the first one warms up


def _series(
    engine: TorchEngine,
    constraints: Sequence[RowConstraint | None],
    is_new: bool,
    endings: Sequence[Collection[int]] | None,
) -> list[Step]:
    rows = DecodingRows(engine, constraints, is_new=is_new)
    taken = [rows.step(endings[number] if endings else None) for number in range(STEPS_PER_SERIES)]
    rows.end()
    return taken


def _print_steps(name: str, num_constrained: int, rounds: Sequence[tuple[list[Step], list[Step], list[Step]]]) -> None:
    times_ms = [[step.time_s * 1000 for each in rounds for step in each[place][1:]] for place in range(3)]
    medians = np.array([[np.median([step.time_s for step in series[1:]]) for series in each] for each in rounds])
    ratios = medians[:, 1] / medians[:, [0, 2]].mean(axis=1)
    of_none = medians[:, 2] / medians[:, 0]
    taken = [step for each in rounds for step in each[1][1:]]  # in the first one all rows begin
    plain = [step for each in rounds for place in (0, 2) for step in each[place][1:]]
    print(
        f"{name:16} {len(taken)} steps: p50 {np.median(times_ms[1]):.1f} ms, p99 {np.percentile(times_ms[1], 99):.1f}, "
        f"longest {max(times_ms[1]):.1f} (none: {np.median(times_ms[0] + times_ms[2]):.1f}, "
        f"{np.percentile(times_ms[0] + times_ms[2], 99):.1f}, {max(times_ms[0] + times_ms[2]):.1f}); "
        f"p50 over that of none {_quartiles(ratios)}, of none over none {_quartiles(of_none)}; "
        f"without a core {_coreless_ms(taken):.2f} ms a step (none: {_coreless_ms(plain):.2f}); "
        f"sat out {sum(step.num_waiting for step in taken) / (num_constrained * len(taken)):.1%}, "
        f"begun {sum(len(step.ended) for step in taken) / len(taken):.2f} a step, "
        f"constraints that failed {sum(step.num_failed for step in taken)}",
        flush=True,
    )


def _quartiles(ratios: npt.NDArray[np.float64]) -> str:
    first, median, third = np.percentile(ratios, [25, 50, 75])
    return f"{median:.3f} ({first:.3f} to {third:.3f})"


def _coreless_ms(steps: Sequence[Step]) -> float:
    return float(np.mean([step.coreless_s for step in steps]) * 1000)


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
