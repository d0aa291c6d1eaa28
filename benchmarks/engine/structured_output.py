"""What the masks of constrained rows cost: 64 rows over a byte-level vocabulary of 131,072 tokens, on the CPU.

    python -m benchmarks.engine.structured_output [--rows N] [--steps N] [--hidden N]

Prints the time of the masks of a step, that of applying them, and their ratio to the head's product of such a step
alone, which is a lower bound of the step. In a worker the masks are computed while the pass runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time

import llguidance
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

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
    arguments = parser.parse_args()
    constraint = RowConstraint(
        "g", llguidance.LLMatcher.grammar_from_json_schema(SCHEMA), Vocabulary("v", make_tokenizer(), VOCAB_SIZE, (0,))
    )
    rows, numbers = ConstraintRows(VOCAB_SIZE), np.arange(arguments.rows)
    for row in numbers.tolist():
        rows.add(_new_row(row, constraint))
    weight = torch.randn(VOCAB_SIZE, arguments.hidden)
    hidden = torch.randn(arguments.rows, arguments.hidden)
    times: dict[str, list[float]] = {"masks": [], "applied": [], "head": []}
    for step in range(arguments.steps + 3):
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
        hidden = torch.randn(arguments.rows, arguments.hidden)
        if step >= 3:  # the tokenizer is read in the first one
            times["head"].append(head_s - start_s)
            times["masks"].append(masks_s - head_s)
            times["applied"].append(applied_s - masks_s)
    found = {name: statistics.median(values) * 1000 for name, values in times.items()}
    both = found["masks"] + found["applied"]
    print(
        f"{arguments.rows} rows, {VOCAB_SIZE} tokens: masks {found['masks']:.2f} ms, "
        f"applied in {found['applied']:.2f} ms, "
        f"head {found['head']:.1f} ms; applied / head {found['applied'] / found['head']:.2%}, "
        f"both one after the other / head {both / found['head']:.2%}"
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
