"""Settings of a worker process: flags, their MOTET_* environment defaults, and the checked dataclass. No torch.

Read by worker.py, by the engine's builder, and by the command line for its help.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from motet.command_line import byte_size

from contract.ids import WORKER_ID_FORM, is_worker_id
from contract.process_log import LOG_LEVELS, settings_line
from data_plane.errors import ConfigError

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_per_token_head")
WARM_UPS = ("auto", "on", "off")
NATIVE_CODE = ("on", "off")
CPU_TOKEN_BUDGET = 1024
CUDA_TOKEN_BUDGET = 8192

_LOWEST = {
    "num_blocks": 1,
    "block_size": 1,
    "token_budget": 1,
    "max_rows": 1,
    "host_kv_bytes": 0,
    "arena_bytes": 0,
    "num_slots": 1,
    "max_model_len": 2,
    "threads": 1,
    "load_threads": 1,
    "exit_when_disconnected_s": 0,
    "profile": 1,
}
# What a Hello may say; a control plane refuses more (plan.proto).
HIGHEST = {
    "num_blocks": 1 << 24,
    "block_size": 1 << 16,
    "token_budget": 1 << 20,
    "max_rows": 1 << 16,
    "num_slots": 1 << 16,
}
# Bounds of the worker's own.
_HIGHEST_HERE = {
    "threads": 1 << 10,
    "profile": 10_000,  # about 40 kB each
}
MAX_HOST_BLOCKS = 1 << 21


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Everything one worker process is told. None means: derived where it is used, as the comment says."""

    control_plane: str  # HOST:PORT of the control plane's worker port
    model_dir: Path  # Hugging Face checkpoint directory
    worker_id: str  # stable over restarts, [a-z0-9._-]{1,63}
    device: str = "auto"  # auto (cuda if there is one), cpu, cuda
    dtype: str = "auto"  # auto (the checkpoint's), float32, bfloat16, float16
    # KV cache: auto (the dtype), fp8 (float8_e4m3fn, cut off at 448), fp8_per_token_head (with scales of its own).
    kv_cache_dtype: str = "auto"
    num_blocks: int | None = None  # KV blocks; None: from free memory
    block_size: int = 16  # tokens of one KV block
    host_kv_bytes: int = 0  # host memory for KV blocks of swapped-out requests, bytes; 0: nothing is swapped
    token_budget: int | None = None  # most tokens of one step; None: 1024 on the CPU, 8192 on CUDA
    max_rows: int = 256  # most requests on the worker at once
    arena_bytes: int = 1 << 30  # adapter arena, bytes
    num_slots: int = 256  # adapter slots
    max_model_len: int | None = None  # tokens; None: the model's, at most what num_blocks hold
    threads: int | None = None  # compute threads; None: the cores this process may use
    load_threads: int = 2  # threads that load adapters
    warm_up: str = "auto"  # steps of every kind before attaching: on, off, auto (on with CUDA, which compiles kernels)
    native_code: str = "on"  # C for the CPU, compiled at the start where there is a compiler: on, off
    native_cache: Path | None = None  # folder of compiled C and of measurements; None: the user's cache folder
    exit_when_disconnected_s: float | None = None  # seconds without a session; None: reconnect for ever
    log_level: str = "info"
    profile: int | None = None  # steps with work of which to write a trace; None: no trace
    profile_out: Path = Path("motet-profile.json")  # where to write it

    def __post_init__(self) -> None:
        for name, lowest in _LOWEST.items():
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise ConfigError(f"{flag_of(name)}: {value} is below {lowest}")
        for name, highest in (HIGHEST | _HIGHEST_HERE).items():
            value = getattr(self, name)
            if value is not None and value > highest:
                raise ConfigError(f"{flag_of(name)}: {value} is above {highest}")
        if self.profile is not None and not self.profile_out.absolute().parent.is_dir():
            raise ConfigError(
                f"--profile-out: {self.profile_out.parent} is not a directory; create it, or name another"
            )
        choices_by_name = {
            "device": DEVICES,
            "dtype": DTYPES,
            "kv_cache_dtype": KV_CACHE_DTYPES,
            "warm_up": WARM_UPS,
            "native_code": NATIVE_CODE,
            "log_level": LOG_LEVELS,
        }
        for name, choices in choices_by_name.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{flag_of(name)}: {getattr(self, name)!r} is none of {', '.join(choices)}")
        if not is_worker_id(self.worker_id):
            raise ConfigError(f"--worker-id: {self.worker_id!r} is not a valid worker id: {WORKER_ID_FORM}")
        host, _, port = self.control_plane.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(f"--control-plane: {self.control_plane!r} is not HOST:PORT with a port of 1 to 65535")

    def step_tokens(self, device_type: str) -> int:
        """The token budget of a step on "cpu" or "cuda"."""
        if self.token_budget is not None:
            return self.token_budget
        return CUDA_TOKEN_BUDGET if device_type == "cuda" else CPU_TOKEN_BUDGET

    def warms_up(self, device_type: str) -> bool:
        """Whether to warm up on "cpu" or "cuda"."""
        return self.warm_up == "on" or (self.warm_up == "auto" and device_type == "cuda")

    def describe(self, *, only_changed: bool = False) -> str:
        """The settings on one line, for the log: all, or those that differ from their defaults."""
        return settings_line(self, only_changed=only_changed)

    @property
    def num_threads(self) -> int:
        """Compute threads to use."""
        return self.threads if self.threads is not None else len(os.sched_getaffinity(0))


def flag_of(field_name: str) -> str:
    """The flag that sets a field of WorkerConfig."""
    return "--model" if field_name == "model_dir" else "--" + field_name.replace("_", "-")


def _folder(text: str) -> Path | None:
    """The argparse type of a folder whose flag or environment may be empty: none is named then."""
    return Path(text) if text else None


def default_worker_id() -> str:
    """The host's name, reduced to what a worker id may hold."""
    return re.sub(r"[^a-z0-9._-]", "-", socket.gethostname().lower())[:63] or "worker"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every flag of a worker. MOTET_<FLAG> in the environment is a flag's default."""

    def add(flag: str, kind: Callable[[str], Any], default: str | None, text: str, **more: Any) -> None:
        variable = "MOTET_" + flag.strip("-").upper().replace("-", "_")
        value = os.environ.get(variable, default)
        required = bool(more.pop("required", False)) and value is None
        parser.add_argument(flag, type=kind, default=value, required=required, help=text, **more)

    address = {"metavar": "HOST:PORT"}
    add(
        "--control-plane",
        str,
        "127.0.0.1:50052",
        "worker port of the control plane (default 127.0.0.1:50052)",
        **address,
    )
    add("--model", Path, None, "checkpoint directory (required)", metavar="DIR", dest="model_dir", required=True)
    add("--worker-id", str, default_worker_id(), "name of this worker, stable over restarts (default: the host's name)")
    add("--device", str, "auto", "auto, cpu or cuda (default auto: cuda if there is one)")
    add("--dtype", str, "auto", "auto, float32, bfloat16 or float16 (default auto: the checkpoint's)")
    add(
        "--kv-cache-dtype",
        str,
        "auto",
        "auto, fp8 or fp8_per_token_head (default auto: as --dtype)",
    )
    add("--num-blocks", int, None, "KV blocks, a count (default: what free memory holds)")
    add("--block-size", int, "16", "tokens of one KV block, a count (default 16)")
    add(
        "--host-kv-bytes",
        byte_size,
        "0",
        "host memory for KV of swapped-out requests, bytes with KiB/MiB/GiB (default 0)",
    )
    add("--token-budget", int, None, "most tokens of one step, a count (default 1024 on the CPU, 8192 on CUDA)")
    add("--max-rows", int, "256", "most requests on this worker at once, a count (default 256)")
    add("--arena-bytes", byte_size, "1GiB", "memory for adapters, bytes with KiB/MiB/GiB (default 1GiB)")
    add("--num-slots", int, "256", "adapters in memory at once, a count (default 256)")
    add("--max-model-len", int, None, "longest context, tokens (default: the model's, at most what the KV blocks hold)")
    add("--threads", int, None, "compute threads, a count (default: the cores this process may use)")
    add("--load-threads", int, "2", "threads that load adapters, a count (default 2)")
    add("--warm-up", str, "auto", "steps of every kind before attaching: auto, on or off (default auto: on with CUDA)")
    add("--native-code", str, "on", "C for the CPU, compiled once where gcc or clang is: on or off (default on)")
    add(
        "--native-cache",
        _folder,
        None,
        "folder for compiled C and for measurements (default: motet/native in the user's cache folder)",
        metavar="DIR",
    )
    add(
        "--exit-when-disconnected-s",
        float,
        None,
        "give up after so many seconds without control plane (default: never)",
    )
    add("--log-level", str, "info", "debug, info, warning or error (default info)")
    add("--profile", int, None, "write a trace of the first so many steps with work, a count (default: none)")
    add(
        "--profile-out",
        Path,
        "motet-profile.json",
        "file of the trace, for ui.perfetto.dev (default motet-profile.json)",
        metavar="FILE",
    )


def from_args(namespace: argparse.Namespace) -> WorkerConfig:
    """The checked configuration. Raises ConfigError naming the flag, the value and the limit."""
    return WorkerConfig(**{field.name: getattr(namespace, field.name) for field in fields(WorkerConfig)})
