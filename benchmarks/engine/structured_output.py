"""What the masks of constrained rows cost: 64 rows over a byte-level vocabulary of 131,072 tokens, on the CPU.

    python -m benchmarks.engine.structured_output [--rows N] [--steps N] [--hidden N] [--rounds N]

Prints the time of the masks of a step, that of applying them, and their ratio to the head's product of such a step
alone, which is a lower bound of the step. In a worker the masks are computed while the pass runs: the second line is
the time of whole steps of a model with that vocabulary, its rows with a schema and without one in turns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path

import llguidance
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.engine.constrained_rows import LIFE, NUM_CONTEXT, DecodingRows
from benchmarks.engine.driver import make_engine
from benchmarks.serving.checkpoints import make_base
from benchmarks.system import ROOT
from data_plane.constraints.masks import forbid
from data_plane.constraints.rows import ConstraintRows
from data_plane.plan import NewRow, RowConstraint, RowSampling, Vocabulary

VOCAB_SIZE = 131_072
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=6, help="of 16 whole steps with and 16 without a schema")
    parser.add_argument("--cache", type=Path, default=ROOT / ".motet" / "bench")
    arguments = parser.parse_args()
    constraint = RowConstraint(
        "g", llguidance.LLMatcher.grammar_from_json_schema(SCHEMA), Vocabulary("v", make_tokenizer(), VOCAB_SIZE, (0,))
    )
    _measure_masks(arguments.rows, arguments.steps, arguments.hidden, constraint)
    _measure_steps(arguments.rows, arguments.rounds, constraint, arguments.cache)


def _measure_masks(num_rows: int, num_steps: int, hidden_size: int, constraint: RowConstraint) -> None:
    rows, numbers = ConstraintRows(VOCAB_SIZE), np.arange(num_rows)
    for row in numbers.tolist():
        rows.add(_new_row(row, constraint))
    weight = torch.randn(VOCAB_SIZE, hidden_size)
    hidden = torch.randn(num_rows, hidden_size)
    times: dict[str, list[float]] = {"masks": [], "applied": [], "head": []}
    for step in range(num_steps + 3):
        start_s = time.perf_counter()
        logits = hidden @ weight.T
        head_s = time.perf_counter()
        while (masks := rows.collect(numbers, is_alone=True)) is not None and masks.waiting:
            continue
        assert masks is not None
        masks_s = time.perf_counter()
        forbid(logits, masks)
        applied_s = time.perf_counter()
        rows.advance(masks, numbers, logits.argmax(-1).numpy().astype(np.int32))
        hidden = torch.randn(num_rows, hidden_size)
        if step >= 3:  # the tokenizer is read in the first one
            times["head"].append(head_s - start_s)
            times["masks"].append(masks_s - head_s)
            times["applied"].append(applied_s - masks_s)
    found = {name: statistics.median(values) * 1000 for name, values in times.items()}
    both = found["masks"] + found["applied"]
    print(
        f"{num_rows} rows, {VOCAB_SIZE} tokens: masks {found['masks']:.2f} ms, "
        f"applied in {found['applied']:.2f} ms, "
        f"head {found['head']:.1f} ms; applied / head {found['applied'] / found['head']:.2%}, "
        f"both one after the other / head {both / found['head']:.2%}"
    )


def _measure_steps(num_rows: int, num_rounds: int, constraint: RowConstraint, cache: Path) -> None:
    engine = make_engine(
        make_base("205m-128k", cache),
        threads=None,
        max_rows=num_rows,
        tokens_per_row=NUM_CONTEXT + LIFE + 16,
        arena_bytes=0,
        native_code="on",
    )
    engine.read_vocabulary(constraint.vocabulary)
    medians_ms: dict[str, list[float]] = {"without": [], "with": []}
    num_waiting = 0
    for turn in range(num_rounds + 1):
        for name in list(medians_ms) if turn % 2 else list(medians_ms)[::-1]:
            rows = DecodingRows(engine, [constraint if name == "with" else None] * num_rows, is_new=False)
            taken = [rows.step() for _ in range(17)][1:]  # in the first one all rows begin
            rows.end()
            if turn:  # the first one warms up
                medians_ms[name].append(statistics.median(step.time_s for step in taken) * 1000)
                num_waiting += sum(step.num_waiting for step in taken)
    ratios = [one / other for one, other in zip(medians_ms["with"], medians_ms["without"], strict=True)]
    print(
        f"whole steps of {num_rows} rows: {statistics.median(medians_ms['without']):.1f} ms without, "
        f"{statistics.median(medians_ms['with']):.1f} ms with a schema; ratio {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f}) of {num_rounds} rounds, {num_waiting} rows sat out a step"
    )


def make_tokenizer() -> str:
    """tokenizer.json of a byte-level BPE with VOCAB_SIZE tokens: bytes, then pairs and triples of letters and signs."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"</s>": 0}
    for symbol in symbols:
        vocab[symbol] = len(vocab)
    letters = symbols[:64]
    merges: list[tuple[str, str]] = []
    for length in (2, 3):
        for parts in itertools.product(letters, repeat=length):
            if len(vocab) == VOCAB_SIZE:
                break
            vocab["".join(parts)] = len(vocab)
            merges.append(("".join(parts[:-1]), parts[-1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    return json.dumps(json.loads(tokenizer.to_str()))


def _new_row(row: int, constraint: RowConstraint) -> NewRow:
    return NewRow(
        row=row,
        token_ids=np.ones(1, dtype=np.int32),
        num_prompt_tokens=1,
        num_computed_tokens=0,
        block_ids=np.zeros(1, dtype=np.int32),
        slot=None,
        slot_generation=0,
        sampling=RowSampling(),
        constraint=constraint,
    )


if __name__ == "__main__":
    main()
