"""What this machine can do, measured here, and the least time of each part of a step that follows from it.

    python -m benchmarks.engine.bounds --shape 205m --rows 1,32,1024

prints, as JSON, the machine's rates, and the seconds that a model's products of so many rows take alone, those of all
decoder layers and that of the head.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from benchmarks.engine.split import ATTENTION, LORA, OTHER, PRODUCTS
from benchmarks.serving.checkpoints import SHAPES, ModelShape
from kernels.linear import native, to_panels
from kernels.native import Program, Step, clock_ns, has_native, set_num_threads

READ_BYTES = 512 << 20
ROWS_OF_PEAK = 1024


@dataclass(frozen=True)
class Rates:
    """Of all threads together."""

    read_bytes_per_s: float
    flops_per_s: float  # of products of 1024 rows

    def best(self, other: Rates) -> Rates:
        """The higher of each."""
        reads = max(self.read_bytes_per_s, other.read_bytes_per_s)
        return Rates(reads, max(self.flops_per_s, other.flops_per_s))


@dataclass(frozen=True)
class Work:
    """What a step has to do."""

    num_tokens: int
    num_kept: int  # tokens whose logits are wanted
    num_keys: int  # keys that the sequences' queries read together, those of a prefill once
    num_scores: int  # pairs of a query and a key
    ranks: Sequence[int]  # of the adapters in the step
    lora_rows: Sequence[int]  # tokens of each


def linears(shape: ModelShape) -> list[tuple[int, int]]:
    """(in, out) of the products of a step as they are fused, the head last."""
    head = shape.hidden_size // shape.num_heads
    qkv = (shape.num_heads + 2 * shape.num_kv_heads) * head
    layer = [
        (shape.hidden_size, qkv),
        (shape.num_heads * head, shape.hidden_size),
        (shape.hidden_size, 2 * shape.intermediate_size),
        (shape.intermediate_size, shape.hidden_size),
    ]
    return layer * shape.num_layers + [(shape.hidden_size, shape.vocab_size)]


def bounds_ms(shape: ModelShape, itemsize: int, work: Work, rates: Rates) -> dict[str, float]:
    """The least that each part takes: reading its operands once from memory, or its arithmetic, whichever is longer.

    Other passes read and write activations, which mostly lie in a cache: their bound is that of memory alone.
    """
    *layers, head = linears(shape)
    weights = sum(num_in * num_out for num_in, num_out in layers)
    head_weights = head[0] * head[1]
    head_dim = shape.hidden_size // shape.num_heads
    per_rank = lora_width(shape) * shape.num_layers
    kv_width = 2 * shape.num_kv_heads * head_dim * shape.num_layers
    passes = 8 * shape.hidden_size + 2 * (shape.num_heads * head_dim + 2 * shape.num_kv_heads * head_dim)
    passes += 3 * shape.intermediate_size

    def least(num_bytes: float, flops: float) -> float:
        return 1000 * max(num_bytes / rates.read_bytes_per_s, flops / rates.flops_per_s)

    return {
        PRODUCTS: least(
            (weights + head_weights) * itemsize, 2 * (work.num_tokens * weights + work.num_kept * head_weights)
        ),
        LORA: least(
            sum(work.ranks) * per_rank * itemsize,
            sum(2 * rank * rows * per_rank for rank, rows in zip(work.ranks, work.lora_rows, strict=True)),
        ),
        ATTENTION: least(
            work.num_keys * kv_width * itemsize,
            4 * work.num_scores * shape.num_heads * head_dim * shape.num_layers,
        ),
        OTHER: least(work.num_tokens * passes * shape.num_layers * itemsize, 0),
    }


def lora_width(shape: ModelShape) -> int:
    """Inputs and outputs of the seven linears of a layer: values of an adapter for each rank."""
    kv = shape.num_kv_heads * (shape.hidden_size // shape.num_heads)
    return 4 * shape.hidden_size + 2 * (shape.hidden_size + kv) + 3 * (shape.hidden_size + shape.intermediate_size)


def measure_rates(dtype: torch.dtype) -> Rates:
    """Take the best of a few tries each."""
    num_in, num_out = 1024, 4096
    num_read = READ_BYTES // (num_in * num_out * dtype.itemsize)
    # A product of one row reads its weights; where it is torch's, a sum may be faster.
    read_s = min(_sum_s(), products_s([(num_in, num_out)] * num_read, 1, dtype))
    one = products_s([(num_in, num_out)] * 4, ROWS_OF_PEAK, dtype)
    return Rates(READ_BYTES / read_s, 4 * 2 * ROWS_OF_PEAK * num_in * num_out / one)


def _sum_s() -> float:
    numbers = torch.ones(READ_BYTES // 4)
    return best_s(lambda: float(numbers.sum()))


def products_s(shapes: Sequence[tuple[int, int]], num_rows: int, dtype: torch.dtype) -> float:
    """Seconds of these products (in, out) of so many rows, one after the other and nothing between them."""
    widest_in, widest_out = max(num_in for num_in, _ in shapes), max(num_out for _, num_out in shapes)
    x = torch.randn(num_rows, widest_in).to(dtype)
    y = torch.empty(num_rows, widest_out, dtype=dtype)
    made = ((torch.randn(num_out, num_in) / num_in**0.5).to(dtype) for num_in, num_out in shapes)
    if not has_native(x):
        weights = list(made)
        with torch.inference_mode():
            return best_s(lambda: [torch.nn.functional.linear(x[:, : w.shape[1]], w) for w in weights])
    panels = [to_panels(weight) for weight in made]
    program = Program()
    for (num_in, num_out), packed in zip(shapes, panels, strict=True):
        program.add("linear", native.problem(x[:, :num_in], packed, None, y[:, :num_out]))
    return best_s(lambda: program.run(Step(num_tokens=num_rows)))


def best_s(run: Callable[[], object], tries: int = 7) -> float:
    """The shortest of a few runs after one that warms up, seconds."""
    run()
    times_ns = []
    for _ in range(tries):
        began_ns = clock_ns()
        run()
        times_ns.append(clock_ns() - began_ns)
    return min(times_ns) / 1e9


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine.bounds", description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="205m")
    parser.add_argument("--dtype", help="element type (default: the shape's)")
    parser.add_argument("--rows", default="1,32,1024", help="row counts, separated by commas")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="a count")
    args = parser.parse_args(argv)
    shape = SHAPES[args.shape]
    dtype = getattr(torch, args.dtype or shape.dtype)
    torch.set_num_threads(args.threads)
    set_num_threads(args.threads)
    *layers, head = linears(shape)
    rows = args.rows.split(",")
    products = {
        "layers_s": {count: products_s(layers, int(count), dtype) for count in rows},
        "head_s": {count: products_s([head], int(count), dtype) for count in rows},
    }
    print(json.dumps({**asdict(measure_rates(dtype)), **products}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
