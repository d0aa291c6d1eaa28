"""How long a pushed version takes until new requests get it, phase by phase: `python -m benchmarks.push`.

Starts a system with one CPU worker on the loopback interface and pushes versions of one adapter, each with other bytes.
After every push a request for one token shows that the version is there. Times of the server's phases come with the
response; `call` is what the caller waits, until the version is durable.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from motet import Client

from benchmarks.system import System

TARGET_S = 0.1
HIDDEN = 1024
_PHASES = ("receive_s", "pack_s", "cache_s", "load_s", "visible_s", "durable_s")


def make_checkpoint(directory: Path, *, num_layers: int) -> Path:
    """A random Llama checkpoint whose adapters of rank 32 take 2.2 MB in float32 for each layer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        bos_token_id=None,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def make_tensors(num_layers: int, rank: int, seed: int) -> dict[str, Any]:
    """An adapter on every linear, float32, as PEFT names its tensors."""
    rng = np.random.default_rng(seed)
    sizes = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), (HIDDEN, HIDDEN))
    sizes |= {"gate_proj": (HIDDEN, 2 * HIDDEN), "up_proj": (HIDDEN, 2 * HIDDEN), "down_proj": (2 * HIDDEN, HIDDEN)}
    tensors = {}
    for layer in range(num_layers):
        for name, (width_in, width_out) in sizes.items():
            block = "self_attn" if name[0] in "qkvo" else "mlp"
            module = f"base_model.model.model.layers.{layer}.{block}.{name}"
            for part, shape in (("lora_A", (rank, width_in)), ("lora_B", (width_out, rank))):
                tensors[f"{module}.{part}.weight"] = rng.standard_normal(shape, dtype=np.float32) * 0.01
    return tensors


def adapter_config(rank: int) -> dict[str, Any]:
    """Of the tensors of make_tensors."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    }


def measure(client: Client, *, num_layers: int, rank: int, num_pushes: int) -> list[dict[str, float]]:
    """One row of times in seconds for each push, the first ones left out."""
    config, rows = adapter_config(rank), []
    for index in range(num_pushes + 2):
        tensors = make_tensors(num_layers, rank, index)
        begun_s = time.perf_counter()
        pushed = client.adapters.push("policy", config, tensors)
        call_s = time.perf_counter() - begun_s
        stream = client.generate([5, 6, 7], adapter="policy", max_tokens=1)
        completion = stream.result()
        assert stream.started is not None and pushed.adapter.active_version is not None
        assert stream.started.adapter_digest == pushed.adapter.active_version.digest, "a request got another version"
        row = {phase: getattr(pushed, phase) for phase in _PHASES} | {"call_s": call_s}
        row["first_token_s"] = completion.completions[0].finished.timings.time_to_first_token_s
        row["num_workers"] = pushed.num_workers
        if index >= 2:
            rows.append(row)
        client.adapters.delete_version("policy", _oldest(client), wait=True) if index >= 4 else None
    return rows


def _oldest(client: Client) -> str:
    return list(client.adapters.versions("policy"))[-1].digest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=9, help="2.2 MB each at rank 32 (default: 9)")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--pushes", type=int, default=20)
    parser.add_argument("--dtype", default="bfloat16", help="of the base model (default: bfloat16)")
    parser.add_argument("--work-dir", type=Path, help="where checkpoint and store lie (default: a temporary directory)")
    parser.add_argument("--out", type=Path, help="JSON with every push")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.work_dir) as directory:
        checkpoint = make_checkpoint(Path(directory, "model"), num_layers=args.layers)
        with System(checkpoint, Path(directory), control_flags=["--dtype", args.dtype]) as system:
            flags = ["--dtype", args.dtype, "--num-blocks", "64", "--max-model-len", "256", "--arena-bytes", "256MiB"]
            system.start_worker(flags=flags)
            with Client(system.address) as client:
                rows = measure(client, num_layers=args.layers, rank=args.rank, num_pushes=args.pushes)
    size = sum(tensor.nbytes for tensor in make_tensors(args.layers, args.rank, 0).values())
    print(f"{size / 1e6:.1f} MB, {len(rows)} pushes, base in {args.dtype}; milliseconds")
    for name in (*_PHASES, "call_s", "first_token_s"):
        times = sorted(1000 * row[name] for row in rows)
        print(f"{name.removesuffix('_s'):12} median {statistics.median(times):7.1f}  worst {times[-1]:7.1f}")
    if args.out:
        args.out.write_text(json.dumps(rows), encoding="utf-8")
    median_s = statistics.median(row["visible_s"] for row in rows)
    print(f"visible after {1000 * median_s:.0f} ms, target {1000 * TARGET_S:.0f} ms")
    return int(median_s > TARGET_S)


if __name__ == "__main__":
    raise SystemExit(main())
