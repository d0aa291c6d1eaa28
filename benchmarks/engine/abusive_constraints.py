"""What abusive constraints take: time at admission, a new child after a kill included, and the longest mask of a step.

    python -m benchmarks.engine.abusive_constraints [--steps N]

Over a byte-level vocabulary of 131,072 tokens. The longest mask is CPU time, which other processes do not change.
"""

from __future__ import annotations

import argparse
import asyncio
import time

import llguidance
import numpy as np

from benchmarks.engine.structured_output import VOCAB_SIZE, make_tokenizer
from contract.sampling import GRAMMAR_LIMITS
from control_plane.constraints.compiler import ConstraintCompiler, ConstraintRefused
from control_plane.scheduler.types import Vocabulary
from tests.control_plane.constraints.abuse import CORPUS


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    asyncio.run(_measure(parser.parse_args().steps))


async def _measure(num_steps: int) -> None:
    vocabulary = Vocabulary("v", make_tokenizer(), VOCAB_SIZE, (0,))
    reader = llguidance.LLTokenizer(vocabulary.tokenizer, n_vocab=VOCAB_SIZE, eos_token=[0])
    compiler = ConstraintCompiler()
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
        print(
            f"{name:34} {(admitted_s - start_s) * 1000:7.1f} ms {(next_s - admitted_s) * 1000:7.1f} ms "
            f"{longest_s * 1000:6.2f} ms  {outcome}"
        )
    await compiler.close()


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
