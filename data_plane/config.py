"""Settings of a worker process: a checked dataclass. Flags, --help and the environment follow from its fields.

Read by worker.py, by the engine's builder, and by the command line for its help. No torch.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from motet.command_line import byte_size
from motet.tls import TlsError, TlsFiles, tls_files

from contract.fingerprint import NOT_QUANTIZED, QUANTIZATIONS
from contract.hello_bounds import MAX_BLOCK_SIZE, MAX_BLOCKS, MAX_ROWS, MAX_SLOTS, MAX_STEP_TOKENS
from contract.ids import WORKER_ID_FORM, is_worker_id
from contract.packed_layout import ITEMSIZE
from contract.plan_stream.plan_bounds import MAX_PLAN_STEPS
from contract.process_log import LOG_FORMATS, LOG_LEVELS, settings_line
from contract.redis_access import PasswordUnreadable, RedisTls, find_url_mistake, read_password
from contract.settings import config_file, flags
from contract.settings.flags import group, optional_path, setting
from data_plane.errors import ConfigError

TLS_FLAGS = ("--control-plane-tls-ca", "--control-plane-tls-cert", "--control-plane-tls-key")
CPU_TOKEN_BUDGET = 1024
DEFAULT_ARENA_BYTES = 1 << 30
CUDA_TOKEN_BUDGET = 8192
# Rows of recorded decode steps, up to --max-rows. A step between two of them computes as many as the larger one.
GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)


def default_worker_id() -> str:
    """The host's name, reduced to what a worker id may hold."""
    return re.sub(r"[^a-z0-9._-]", "-", socket.gethostname().lower())[:63] or "worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Everything that an operator sets about one worker. None means: derived where it is used."""

    control_plane: str = setting(
        "worker port of the control plane", flag_default="127.0.0.1:50052", metavar="HOST:PORT"
    )
    control_plane_tls_ca: Path | None = setting(
        "certificates that sign the control plane's, PEM; turns TLS on",
        None,
        shown_default="no TLS",
        parse=optional_path,
        metavar="FILE",
    )
    control_plane_tls_cert: Path | None = setting(
        "certificate of this worker, PEM, followed by its chain; it names the worker id",
        None,
        shown_default="none",
        parse=optional_path,
        metavar="FILE",
    )
    control_plane_tls_key: Path | None = setting(
        "private key of --control-plane-tls-cert, PEM", None, shown_default="none", parse=optional_path, metavar="FILE"
    )
    model_dir: Path = setting("checkpoint directory", name="--model", metavar="DIR")
    worker_id: str = setting(
        "name of this worker, stable over restarts", factory=default_worker_id, shown_default="the host's name"
    )
    device: str = setting(
        "auto, cpu or cuda", "auto", shown_default="auto, cuda if there is one", choices=("auto", "cpu", "cuda")
    )
    dtype: str = setting(
        "auto, float32, bfloat16 or float16",
        "auto",
        shown_default="auto, the checkpoint's",
        choices=("auto", *ITEMSIZE),
    )
    quantization: str = setting(
        "weights of the linears: none, as --dtype, or fp8 (float8_e4m3fn), the same on every worker",
        NOT_QUANTIZED,
        choices=QUANTIZATIONS,
    )
    kv_cache_dtype: str = setting(
        "auto, fp8 (float8_e4m3fn) or fp8_per_token_head (with scales of its own)",
        "auto",
        shown_default="auto, as --dtype",
        choices=("auto", "fp8", "fp8_per_token_head"),
    )
    num_blocks: int | None = setting(
        "KV blocks",
        None,
        unit="a count",
        shown_default="what is left beside the largest step",
        lowest=1,
        highest=MAX_BLOCKS,
    )
    kv_bytes: int | None = setting(
        "memory for KV blocks, in place of --num-blocks",
        None,
        unit="bytes",
        shown_default="what is left beside the largest step",
        parse=byte_size,
        lowest=1,
    )
    memory_utilization: float | None = setting(
        "share of the device's memory that this worker fills; KV blocks get what is left of it",
        None,
        unit="no unit",
        shown_default="0.9 on CUDA; on the CPU KV blocks get 0.4 of what is left",
        lowest=0.01,
        highest=1.0,
    )
    memory_headroom_bytes: int = setting(
        "memory that is left free beside the KV blocks", 0, unit="bytes", parse=byte_size, lowest=0
    )
    block_size: int = setting("tokens of one KV block", 16, unit="a count", lowest=1, highest=MAX_BLOCK_SIZE)
    host_kv_bytes: int = setting(
        "host memory for KV of swapped-out requests; 0: nothing is swapped", 0, unit="bytes", parse=byte_size, lowest=0
    )
    token_budget: int | None = setting(
        "most tokens of one step",
        None,
        unit="a count",
        shown_default=f"{CPU_TOKEN_BUDGET} on the CPU, {CUDA_TOKEN_BUDGET} on CUDA",
        lowest=1,
        highest=MAX_STEP_TOKENS,
    )
    max_rows: int = setting("most requests on this worker at once", 256, unit="a count", lowest=1, highest=MAX_ROWS)
    arena_bytes: int = setting("memory for adapters", DEFAULT_ARENA_BYTES, unit="bytes", parse=byte_size, lowest=0)
    pinned_bytes: int = setting(
        "host memory for adapters that were loaded lately; 0: they are read from the host cache again",
        0,
        unit="bytes",
        parse=byte_size,
        lowest=0,
    )
    arena_memory_share: float | None = setting(
        "memory for adapters as a share of what is free once the weights are loaded, in place of --arena-bytes",
        None,
        unit="no unit",
        shown_default="none",
        lowest=0.001,
        highest=0.9,
    )
    num_slots: int = setting("adapters in memory at once", 256, unit="a count", lowest=1, highest=MAX_SLOTS)
    max_model_len: int | None = setting(
        "longest context",
        None,
        unit="tokens",
        shown_default="the model's, at most what the KV blocks hold",
        lowest=2,
    )
    max_adapter_model_len: int | None = setting(
        "longest context of adapters that were trained with a rotary embedding of their own",
        None,
        unit="tokens",
        shown_default="--max-model-len",
        lowest=2,
    )
    threads: int | None = setting(
        "compute threads",
        None,
        unit="a count",
        shown_default="the cores this process may use",
        lowest=1,
        highest=1 << 10,
    )
    load_threads: int = setting("threads that load adapters", 2, unit="a count", lowest=1)
    warm_up: str = setting(
        "steps of every kind before attaching: auto, on or off",
        "auto",
        shown_default="auto, on with CUDA",
        choices=("auto", "on", "off"),
    )
    cuda_graphs: str = setting(
        "numbers of rows whose decode steps are recorded as CUDA graphs, such as 1,8,64; auto or off",
        "auto",
        shown_default=f"auto, up to --max-rows and {GRAPH_SIZES[-1]} where the model allows it",
    )
    adapter_stream: str = setting(
        "a stream of its own for the adapters' first products in recorded steps, beside the base model's products: on "
        "or off",
        "on",
        choices=("on", "off"),
    )
    speculative: str = setting(
        "drafts for the later steps of a plan (what followed the same tokens before in the request, or what a grammar "
        "forces): off, ngram wherever there is a draft, or auto where measured times say that drafts are faster",
        "off",
        choices=("off", "ngram", "auto"),
    )
    native_code: str = setting(
        "native code for the CPU, compiled once if gcc or clang is found: on or off", "on", choices=("on", "off")
    )
    native_cache: Path | None = setting(
        "folder for compiled C and for measurements",
        None,
        shown_default="motet/native in the user's cache folder",
        parse=optional_path,
        metavar="DIR",
    )
    worker_redis_url: str | None = setting(
        "where this worker reads the host cache",
        None,
        shown_default="what the control plane says",
        metavar="URL",
        is_secret_url=True,
        password_flag="--worker-redis-password-file",
    )
    worker_redis_password_file: Path | None = setting(
        "file with the password of the Redis user of workers, read again for every connection",
        None,
        shown_default="none",
        parse=optional_path,
        metavar="FILE",
    )
    redis_tls: RedisTls = group(RedisTls)
    exit_when_disconnected_s: float | None = setting(
        "exit after this long without a control plane", None, unit="seconds", shown_default="never", lowest=0
    )
    worker_metrics_listen: str | None = setting(
        "HTTP address of the worker's /metrics, /healthz and /readyz, without TLS; port 0 takes a free one",
        None,
        metavar="HOST:PORT",
        shown_default="none",
    )
    log_level: str = setting("debug, info, warning or error", "info", choices=LOG_LEVELS)
    log_format: str = setting("form of the log: text, or json with an object on each line", "text", choices=LOG_FORMATS)
    profile: int | None = setting(
        "write a trace of this many steps, from the first one with work",
        None,
        unit="a count",
        shown_default="none",
        lowest=1,
        highest=10_000,  # about 40 kB each
    )
    profile_out: Path = setting("file of the trace, for ui.perfetto.dev", Path("motet-profile.json"), metavar="FILE")

    def __post_init__(self) -> None:
        if (mistake := flags.find_mistake(self)) is not None:
            raise ConfigError(mistake)
        if self.profile is not None and not self.profile_out.absolute().parent.is_dir():
            raise ConfigError(
                f"--profile-out: {self.profile_out.parent} is not a directory; create it, or name another"
            )
        if not is_worker_id(self.worker_id):
            raise ConfigError(f"--worker-id: {self.worker_id!r} is not a valid worker id: {WORKER_ID_FORM}")
        if self.arena_memory_share is not None and self.arena_bytes != DEFAULT_ARENA_BYTES:
            raise ConfigError(
                f"--arena-memory-share: {self.arena_memory_share} is given beside --arena-bytes {self.arena_bytes}; "
                "give one of the two"
            )
        self._check_memory()
        host, _, port = self.control_plane.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(f"--control-plane: {self.control_plane!r} is not HOST:PORT with a port of 1 to 65535")
        if self.worker_metrics_listen is not None:
            host, _, port = self.worker_metrics_listen.rpartition(":")
            if not host or not port.isdigit() or int(port) > 65535:
                raise ConfigError(
                    f"--worker-metrics-listen: {self.worker_metrics_listen!r} is not HOST:PORT with a port up to 65535"
                )
        self.graph_sizes("cuda")
        self._check_redis()
        self._check_tls()

    def _check_memory(self) -> None:
        """Raise ConfigError if the KV blocks are sized in two ways."""
        given = [
            f"{flag} {value}"
            for flag, value in (
                ("--num-blocks", self.num_blocks),
                ("--kv-bytes", self.kv_bytes),
                ("--memory-utilization", self.memory_utilization),
            )
            if value is not None
        ]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} are given, and each sizes the KV cache; give one of them")
        if self.memory_headroom_bytes and (self.num_blocks is not None or self.kv_bytes is not None):
            raise ConfigError(
                f"--memory-headroom-bytes: {self.memory_headroom_bytes} is given beside {given[0]}, which sizes the KV "
                "cache alone; give one of the two"
            )

    def _check_redis(self) -> None:
        if self.worker_redis_url and (mistake := find_url_mistake(self.worker_redis_url)) is not None:
            raise ConfigError(f"--worker-redis-url: {mistake}")
        if self.worker_redis_password_file is not None:
            try:
                read_password(self.worker_redis_password_file)
            except PasswordUnreadable as error:
                raise ConfigError(f"--worker-redis-password-file: {error}") from error
        if (mistake := self.redis_tls.find_mistake()) is not None:
            raise ConfigError(mistake)

    def _check_tls(self) -> None:
        try:
            if (files := self.tls_files) is not None:
                files.credentials()
        except TlsError as error:
            raise ConfigError(str(error)) from error

    @property
    def tls_files(self) -> TlsFiles | None:
        """What the connection to the control plane is secured with. Raises TlsError."""
        return tls_files(
            self.control_plane_tls_ca,
            self.control_plane_tls_cert,
            self.control_plane_tls_key,
            names=TLS_FLAGS,
        )

    def step_tokens(self, device_type: str) -> int:
        """The token budget of a step on "cpu" or "cuda"."""
        if self.token_budget is not None:
            return self.token_budget
        return CUDA_TOKEN_BUDGET if device_type == "cuda" else CPU_TOKEN_BUDGET

    def warms_up(self, device_type: str) -> bool:
        """Whether to warm up on "cpu" or "cuda"."""
        return self.warm_up == "on" or (self.warm_up == "auto" and device_type == "cuda")

    def graph_sizes(self, device_type: str) -> tuple[int, ...]:
        """Numbers of rows whose decode steps are recorded on "cpu" or "cuda", ascending. Raises ConfigError.

        A pass with drafts is a step with a row for each token: where rows draft there are graphs for these, too.
        """
        if self.cuda_graphs == "off" or (self.cuda_graphs == "auto" and device_type != "cuda"):
            return ()
        if self.cuda_graphs == "auto":
            most = min(self._most_decodes, GRAPH_SIZES[-1])
            return tuple(sorted({*(size for size in GRAPH_SIZES if size < most), min(self.max_rows, most), most}))
        words = self.cuda_graphs.split(",")
        if not all(word.isdecimal() and 1 <= int(word) <= self._most_decodes for word in words):
            limit = f"--max-rows {self.max_rows}"
            if self.speculative != "off":
                limit = f"{MAX_PLAN_STEPS} times {limit}"
            raise ConfigError(
                f"--cuda-graphs: {self.cuda_graphs!r} is not auto, off or numbers of rows from 1 to {limit} with "
                "commas between them, such as 1,8,64"
            )
        return tuple(sorted({int(word) for word in words}))

    @property
    def _most_decodes(self) -> int:
        """Tokens of a step that decodes, those of drafts included."""
        return self.max_rows * (1 if self.speculative == "off" else MAX_PLAN_STEPS)

    def describe(self, *, only_changed: bool = False) -> str:
        """The settings on one line, for the log, without secrets: all, or those that differ from their defaults."""
        return settings_line(self, only_changed=only_changed)

    @property
    def num_threads(self) -> int:
        """Compute threads to use."""
        return self.threads if self.threads is not None else len(os.sched_getaffinity(0))


def environment(argv: Sequence[str]) -> Mapping[str, str]:
    """The process's environment, over what the file of --config says. Raises ConfigFileError."""
    return config_file.environment(argv, config_file.WORKER, WorkerConfig)


def add_arguments(parser: argparse.ArgumentParser, environ: Mapping[str, str] = os.environ) -> None:
    """Add every flag of a worker. MOTET_<FLAG> in `environ` is a flag's default. Raises ValueError."""
    config_file.add_argument(parser, environ)
    flags.add_arguments(parser, WorkerConfig, environ)


def from_args(namespace: argparse.Namespace) -> WorkerConfig:
    """The checked configuration. Raises ConfigError naming the flag, the value and the limit."""
    config: WorkerConfig = flags.from_args(namespace, WorkerConfig)
    return config
