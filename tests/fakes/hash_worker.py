"""A worker process with a hash engine: `python -m tests.fakes.hash_worker --control-plane HOST:PORT --model DIR`.

The real plan client, signals and ready line; only the engine is a fake. No torch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from motet.command_line import byte_size

from contract.fingerprint import checkpoint_fingerprint
from contract.process_log import configure_logging
from control_plane.registry.model.base_model import BaseModel
from data_plane.config import WorkerConfig
from data_plane.plan import Capacities, TargetKind, TargetModule
from data_plane.worker import run_worker
from tests.fakes.delayed_channel import delayed_channel
from tests.fakes.hash_engine import DEFAULT_VOCAB_SIZE, HashEngine, HashEngineFaults

UNSERVED_REASON = "it sees only some of the tokens"


def main(argv: Sequence[str] | None = None) -> int:
    """Run until it is stopped; the exit code."""
    args = _parser().parse_args(argv)
    model = json.loads((args.model / "config.json").read_text(encoding="utf-8")) if args.model else {}
    capacities = Capacities(
        model_fingerprint=args.fingerprint or checkpoint_fingerprint(args.model),
        dtype=args.dtype or model.get("dtype") or model.get("torch_dtype") or "float32",
        device="hash",
        num_blocks=args.num_blocks,
        block_size=args.block_size,
        max_rows=args.max_rows,
        max_step_tokens=args.token_budget,
        arena_bytes=args.arena_bytes,
        num_slots=args.num_slots,
        max_model_len=args.max_model_len or model.get("max_position_embeddings") or 4096,
        vocab_size=args.vocab_size or model.get("vocab_size") or DEFAULT_VOCAB_SIZE,
        num_host_blocks=args.num_host_blocks,
        hidden_width=8,
        target_modules=target_modules(args.model, args.unserved) if args.model else (),
    )
    faults = HashEngineFaults(
        step_time_s=args.step_time_ms / 1000,
        crash_token=args.crash_token,
        hang_token=args.hang_token,
        on_crash=lambda: os._exit(9),
    )
    config = WorkerConfig(
        control_plane=args.control_plane,
        model_dir=args.model or Path(),
        worker_id=args.worker_id,
        load_threads=args.load_threads,
        exit_when_disconnected_s=args.exit_when_disconnected_s,
        log_level=args.log_level,
        worker_redis_password_file=args.worker_redis_password_file,
        profile=args.profile,
        profile_out=args.profile_out,
        control_plane_tls_ca=args.control_plane_tls_ca,
        control_plane_tls_cert=args.control_plane_tls_cert,
        control_plane_tls_key=args.control_plane_tls_key,
    )
    configure_logging(config.log_level, process="worker")
    engine = HashEngine(capacities, faults)
    engine.hash_slots.failing.update(dict.fromkeys(args.fail_digest, False))
    if args.delay_ms:
        return run_worker(engine, config, open_channel=delayed_channel(args.delay_ms / 1000))
    return run_worker(engine, config)


def target_modules(checkpoint: Path, unserved: Sequence[str] = ()) -> tuple[TargetModule, ...]:
    """What a worker reports of a checkpoint, by its headers; modules whose names end in `unserved` take no adapters."""
    base_model = BaseModel.load(checkpoint)
    found = [
        TargetModule(name, TargetKind.LINEAR, in_features, out_features)
        for name, (out_features, in_features) in base_model.linear_shapes.items()
    ]
    for name, module in base_model.embedding_modules.items():
        out_features, in_features = module.linear_shape
        kind = TargetKind.EMBEDDING if module.is_input else TargetKind.HEAD
        found.append(TargetModule(name, kind, in_features, out_features))
    return tuple(
        replace(module, reason=UNSERVED_REASON) if module.name.endswith(tuple(unserved)) else module for module in found
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hash_worker", description=__doc__)
    parser.add_argument("--control-plane", required=True, metavar="HOST:PORT")
    identity = parser.add_mutually_exclusive_group(required=True)
    identity.add_argument(
        "--model", type=Path, metavar="DIR", help="checkpoint whose fingerprint and sizes are claimed"
    )
    identity.add_argument("--fingerprint", default="", metavar="HEX")
    parser.add_argument("--worker-id", default="hash")
    parser.add_argument("--dtype", default="")
    parser.add_argument("--num-blocks", type=int, default=4096)
    parser.add_argument("--num-host-blocks", type=int, default=0)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--token-budget", type=int, default=1024)
    parser.add_argument("--max-rows", type=int, default=256)
    parser.add_argument("--arena-bytes", type=byte_size, default=1 << 30)
    parser.add_argument("--num-slots", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=0, help="tokens (default: the model's, or 4096)")
    parser.add_argument("--vocab-size", type=int, default=0, help="tokens (default: the model's, or 256)")
    parser.add_argument("--load-threads", type=int, default=2)
    parser.add_argument("--step-time-ms", type=float, default=0.0, help="least time of a step")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="on every message of the plan stream, each way")
    parser.add_argument("--crash-token", type=int, default=None, help="feeding this token ends the process at once")
    parser.add_argument("--hang-token", type=int, default=None, help="feeding this token hangs the compute thread")
    parser.add_argument("--fail-digest", action="append", default=[], help="loads of this adapter fail; repeatable")
    parser.add_argument("--unserved", action="append", default=[], help="ends the names of modules without adapters")
    parser.add_argument("--worker-redis-password-file", type=Path)
    parser.add_argument("--exit-when-disconnected-s", type=float, default=None)
    for name in ("ca", "cert", "key"):
        parser.add_argument(f"--control-plane-tls-{name}", type=Path, default=None, metavar="FILE")
    parser.add_argument("--log-level", default="warning")
    parser.add_argument("--profile", type=int)
    parser.add_argument("--profile-out", type=Path, default=Path("motet-profile.json"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
