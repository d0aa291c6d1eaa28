"""Decode steps of a mixture of experts with adapters on all experts, beside the base alone:
`python -m benchmarks.engine.experts --help`.

Prints one line for each number of rows: milliseconds of the base, of the adapters, and their ratio. Both kinds of steps
take turns, so that another process on the machine disturbs both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.engine.driver import MAX_ADAPTER_BYTES, Driver, Packed, make_engine
from control_plane.fleet.workers.reports import report_of
from control_plane.registry.model.base_model import BaseModel
from control_plane.registry.peft.ingest import ingest
from data_plane.engine.engine import TorchEngine
from data_plane.wire import encode_hello

CONTEXT = 160  # tokens of a row that decodes
ARENA_BYTES = 2 << 30
SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1024,
    "moe_intermediate_size": 384,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "vocab_size": 8192,
    "max_position_embeddings": 2048,
}


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.experts",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = out.add_argument
    add("--rows", default="1,8,32", help="rows that decode, counts separated by commas")
    add("--adapters", type=int, default=8, help="adapters that the rows take in turn, a count")
    add("--rank", type=int, default=8, help="of every expert, a count")
    add("--steps", type=int, default=20, help="steps of each kind whose median is printed, a count")
    add("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the checkpoint")
    add("--threads", type=int, default=os.cpu_count() or 1, help="compute threads, a count")
    return out


def make_checkpoint(directory: Path, dtype: str) -> Path:
    """A random Qwen3-MoE of 134 million parameters, 113 million of them in experts."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", **SHAPE)
    factory: Any = AutoModelForCausalLM
    model = factory.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(directory)
    return directory


def make_adapter(directory: Path, rank: int, seed: int) -> Path:
    """What PEFT writes for the stacked parameters of all experts, with random values."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    rows, hidden, width = SHAPE["num_experts"] * rank, SHAPE["hidden_size"], SHAPE["moe_intermediate_size"]
    for layer in range(SHAPE["num_hidden_layers"]):
        for level, sides in (("base_layer.", (hidden, 2 * width)), ("", (width, hidden))):
            prefix = f"base_model.model.model.layers.{layer}.mlp.experts.{level}lora_"
            tensors[prefix + "A.weight"] = torch.randn(rows, sides[0], generator=generator) * 0.02
            tensors[prefix + "B.weight"] = torch.randn(sides[1], rows, generator=generator) * 0.02
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": []}
    config["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    (directory / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def load_adapters(engine: TorchEngine, model_dir: Path, adapters: Sequence[Path], folder: Path) -> None:
    """Fill the slots from 0 on."""
    base_model = BaseModel.load(model_dir)
    reported = report_of(encode_hello(engine.capacities, "benchmark").hello).modules
    for slot, adapter in enumerate(adapters):
        chunks_dir = folder / f"chunks {slot}"
        chunks_dir.mkdir()
        files = {path.name: path for path in adapter.glob("adapter_*")}
        info = ingest(files, base_model, max_adapter_bytes=MAX_ADAPTER_BYTES, directory=chunks_dir, reported=reported)
        chunks = tuple(chunk.path.read_bytes() for chunk in info.chunks)
        engine.slots.load(slot, 1, info.digest, Packed(info.digest, info.manifest, chunks))


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    counts = [int(count) for count in args.rows.split(",")]
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as name:
        folder = Path(name)
        model_dir = make_checkpoint(folder / "model", args.dtype)
        room = CONTEXT + 2 * args.steps + 16
        engine = make_engine(
            model_dir,
            threads=args.threads,
            max_rows=max(counts),
            tokens_per_row=room,
            arena_bytes=ARENA_BYTES if args.adapters else 0,
            native_code="on",
        )
        adapters = [make_adapter(folder / f"adapter {seed}", args.rank, seed) for seed in range(args.adapters)]
        load_adapters(engine, model_dir, adapters, folder)
        driver = Driver(engine)
        for num_rows in counts:
            times: dict[int, list[float]] = {0: [], args.adapters: []}
            for _ in range(3):
                for num_adapters, found in times.items():
                    driver.begin_decodes(num_rows, num_adapters, num_context=CONTEXT, num_steps=args.steps)
                    for _ in range(args.steps):
                        began_s = time.perf_counter()
                        driver.decode()
                        found.append(time.perf_counter() - began_s)
                    driver.end()
            base, ours = (statistics.median(times[count]) * 1e3 for count in (0, args.adapters))
            print(
                f"rows={num_rows} adapters={args.adapters} rank={args.rank} dtype={args.dtype} "
                f"base_ms={base:.2f} adapters_ms={ours:.2f} ratio={ours / base:.2f}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
