"""Settings of the control plane: flags, their MOTET_* environment defaults, and the checked dataclass.

Read by server.py and by the command line for its help. Imports nothing heavy.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from motet.command_line import byte_size

from contract.model_dir import why_no_checkpoint
from contract.process_log import LOG_LEVELS, settings_line
from control_plane.fleet.settings import MIN_WORK_TIMEOUT_S, FleetSettings
from control_plane.fleet.tenants import InvalidTenants, TenantTable, read_tenants
from control_plane.scheduler.settings import DEFAULT_SETTINGS, Policy, SchedulerSettings

DTYPES = ("auto", "float32", "bfloat16", "float16")
HOST_CACHES = ("redis", "memory")
DEFAULT_MAX_CONNECTIONS = 4096  # of clients
POLICIES = tuple(policy.value for policy in Policy)
_ROOT_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_FLEET = FleetSettings()
_LOWEST: dict[str, float] = {
    "store_timeout_s": 0.1,
    "host_cache_bytes": 0,
    "max_waiting_requests": 1,
    "max_waiting_tokens": 1,
    "plan_depth": 1,
    "heartbeat_interval_ms": 1,
    "worker_grace_s": 0,
    "step_timeout_s": MIN_WORK_TIMEOUT_S,
    "first_step_timeout_s": MIN_WORK_TIMEOUT_S,
    "load_timeout_s": MIN_WORK_TIMEOUT_S,
    "max_model_len": 2,
    "max_adapter_bytes": 1,
    "slow_reader_timeout_s": 0,
    "drain_timeout_s": 0,
    "max_streams_per_connection": 1,
    "max_concurrent_rpcs": 1,
    "max_connections": 1,
}


class ConfigError(Exception):
    """A setting that the control plane cannot run with; names flag, value and limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Everything that a control plane is told."""

    model_dir: Path  # Hugging Face checkpoint directory
    data_dir: Path = Path("motet-data")  # store, embedded Redis, uploads under way
    store: str | None = None  # fsspec URL of the artifact store; None: DATA_DIR/store
    store_timeout_s: float = 10.0  # longest time for one call of the store, seconds; large writes have more
    exclusive_store: bool = False  # the operator says that no other control plane uses the store
    listen: str = "127.0.0.1:50051"  # HOST:PORT for clients; port 0 takes a free one
    worker_listen: str = "127.0.0.1:50052"  # HOST:PORT for workers; port 0 takes a free one
    redis_url: str | None = None  # None: an embedded Redis
    worker_redis_url: str | None = None  # told to workers; None: the embedded Redis's read-only user, or nothing
    host_cache: str = "redis"  # redis or memory
    host_cache_bytes: int = 2 << 30  # budget of the host cache, bytes
    dtype: str = "auto"  # auto (the checkpoint's), float32, bfloat16, float16
    max_waiting_requests: int = 1024  # requests waiting over all workers, a count
    max_waiting_tokens: int = 8 << 20  # prompt tokens of requests without a first token, over all workers, a count
    plan_depth: int = 2  # plans sent to a worker and not answered, a count
    heartbeat_interval_ms: int = 500  # milliseconds
    dead_after_ms: int = 2000  # a worker silent for so long is dead, milliseconds
    worker_grace_s: float = 30.0  # how long requests wait for a worker when none is attached, seconds
    # The fields of FleetSettings of these names, where they are explained.
    step_timeout_s: float = _FLEET.step_timeout_s
    first_step_timeout_s: float = _FLEET.first_step_timeout_s
    load_timeout_s: float = _FLEET.load_timeout_s
    tenants: Path | None = None  # JSON file with weights and quotas of tenants; None: all alike, without quotas
    trust_tenant_names: bool = False  # clients cannot invent tenants: each is counted by itself
    # Those that follow are the fields of SchedulerSettings, where they are explained.
    scheduling_policy: str = DEFAULT_SETTINGS.policy.value
    max_step_tokens: int | None = DEFAULT_SETTINGS.max_step_tokens
    max_sequences: int | None = DEFAULT_SETTINGS.max_sequences
    watermark: float = DEFAULT_SETTINGS.watermark
    max_blocked_steps: int = DEFAULT_SETTINGS.max_blocked_steps
    max_partial_prefills: int = DEFAULT_SETTINGS.max_partial_prefills
    max_long_partial_prefills: int = DEFAULT_SETTINGS.max_long_partial_prefills
    long_prefill_tokens: int | None = DEFAULT_SETTINGS.long_prefill_tokens
    prefill_us_per_token: float = DEFAULT_SETTINGS.prefill_us_per_token
    swap_us_per_block: float = DEFAULT_SETTINGS.swap_us_per_block
    adapter_us_per_mib: float = DEFAULT_SETTINGS.adapter_us_per_mib
    step_us: float = DEFAULT_SETTINGS.step_us
    max_model_len: int | None = None  # longest context, tokens; None: the model's
    max_adapter_bytes: int = 1 << 30  # largest adapter, bytes
    adapter_roots: tuple[tuple[str, Path], ...] = ()  # (name, directory) pairs that CreateAdapter may read
    slow_reader_timeout_s: float = 30.0  # how long a full stream may stay unread, seconds
    drain_timeout_s: float = 30.0  # how long running streams may finish at shutdown, seconds
    max_streams_per_connection: int = 100  # requests of one connection at once; more wait at the client, a count
    # Requests at once over all connections, a count; more are taken only of clients below their equal part.
    max_concurrent_rpcs: int = 4096
    max_connections: int | None = None  # of clients, a count; None: what the limit of open files leaves
    no_reflection: bool = False  # leave the gRPC reflection service out
    log_level: str = "info"

    def __post_init__(self) -> None:
        for name, lowest in _LOWEST.items():
            value = getattr(self, name)
            if value is not None and not value >= lowest:  # NaN fails this too
                raise ConfigError(f"{flag_of(name)}: {value} is below {lowest:g}")
        choices = (
            ("dtype", DTYPES),
            ("host_cache", HOST_CACHES),
            ("log_level", LOG_LEVELS),
            ("scheduling_policy", POLICIES),
        )
        for name, allowed in choices:
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{flag_of(name)}: {getattr(self, name)!r} is none of {', '.join(allowed)}")
        for name in ("listen", "worker_listen"):
            host, _, port = getattr(self, name).rpartition(":")
            if not host or not port.isdigit() or int(port) > 65535:
                raise ConfigError(f"{flag_of(name)}: {getattr(self, name)!r} is not HOST:PORT with a port up to 65535")
        if self.listen == self.worker_listen and not self.listen.endswith(":0"):
            raise ConfigError(f"--worker-listen: {self.worker_listen} is --listen too; the two ports must differ")
        if self.dead_after_ms < 2 * self.heartbeat_interval_ms:
            raise ConfigError(
                f"--dead-after-ms: {self.dead_after_ms} is below twice "
                f"--heartbeat-interval-ms {self.heartbeat_interval_ms}"
            )
        if (reason := why_no_checkpoint(self.model_dir)) is not None:
            raise ConfigError(f"--model: {reason}")
        self._check_urls()
        self._check_roots()
        self.scheduler_settings()
        self.tenant_table()

    def scheduler_settings(self) -> SchedulerSettings:
        """How a worker's time and memory are shared out. Raises ConfigError."""
        names = [field.name for field in fields(SchedulerSettings) if field.name != "policy"]
        values = {name: getattr(self, name) for name in names}
        try:
            return SchedulerSettings(policy=Policy(self.scheduling_policy), **values)
        except ValueError as error:
            name, _, rest = str(error).partition(":")
            raise ConfigError(f"{flag_of(name)}:{rest}") from error

    def tenant_table(self) -> TenantTable:
        """Weights and quotas of tenants, read from their file. Raises ConfigError."""
        if self.tenants is None:
            return TenantTable(trusts_names=self.trust_tenant_names)
        try:
            return replace(read_tenants(self.tenants), trusts_names=self.trust_tenant_names)
        except InvalidTenants as error:
            raise ConfigError(f"--tenants: {self.tenants}: {error}") from error

    def _check_urls(self) -> None:
        for name in ("redis_url", "worker_redis_url"):
            url = getattr(self, name)
            if url is not None and urlsplit(url).scheme not in ("redis", "rediss", "unix"):
                raise ConfigError(f"{flag_of(name)}: must begin with redis://, rediss:// or unix://")
            if url is not None and self.host_cache == "memory":
                raise ConfigError(f"{flag_of(name)}: needs --host-cache redis")

    def _check_roots(self) -> None:
        names = [name for name, _ in self.adapter_roots]
        for name, path in self.adapter_roots:
            if not _ROOT_NAME.fullmatch(name):
                raise ConfigError(f"--adapter-root: name {name!r} does not match [a-z0-9][a-z0-9._-]{{0,62}}")
            if names.count(name) > 1:
                raise ConfigError(f"--adapter-root: name {name!r} is given twice")
            if not path.is_dir():
                raise ConfigError(f"--adapter-root: {path} is not a directory")

    @property
    def store_url(self) -> str:
        """Where the artifact store lies."""
        return self.store if self.store is not None else str(self.data_dir.resolve() / "store")

    def describe(self, *, only_changed: bool = False) -> str:
        """The settings on one line, for the log, without secrets: all, or those that differ from their defaults."""
        return settings_line(self, only_changed=only_changed, show=_shown)


def flag_of(field_name: str) -> str:
    """The flag that sets a field of ServerConfig."""
    special = {"model_dir": "--model", "adapter_roots": "--adapter-root"}
    return special.get(field_name, "--" + field_name.replace("_", "-"))


def redacted_url(url: str) -> str:
    """The URL with user, password and query hidden. A path stays as it is."""
    if "://" not in url:
        return url
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{'***@' if '@' in parts.netloc else ''}{host}{parts.path}{'?***' if parts.query else ''}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every flag of the control plane. MOTET_<FLAG> in the environment is a flag's default."""

    def add(flag: str, kind: Callable[[str], Any], default: str | None, text: str, **more: Any) -> None:
        value = os.environ.get("MOTET_" + flag.strip("-").upper().replace("-", "_"), default)
        required = bool(more.pop("required", False)) and value is None
        parser.add_argument(flag, type=kind, default=value, required=required, help=text, **more)

    add("--model", Path, None, "checkpoint directory (required)", metavar="DIR", dest="model_dir", required=True)
    add("--data-dir", Path, "motet-data", "state of this server (default ./motet-data)", metavar="DIR")
    add("--store", str, None, "artifact store, a directory or fsspec URL (default DATA_DIR/store)", metavar="URL")
    add("--store-timeout-s", float, "10", "longest time for one call of the artifact store, seconds (default 10)")
    add("--listen", str, "127.0.0.1:50051", "clients' address (default 127.0.0.1:50051)", metavar="HOST:PORT")
    add("--worker-listen", str, "127.0.0.1:50052", "workers' address (default 127.0.0.1:50052)", metavar="HOST:PORT")
    add("--redis-url", str, None, "host cache (default: an embedded Redis)", metavar="URL")
    add(
        "--worker-redis-url",
        str,
        None,
        "where workers read the host cache (default: the embedded Redis's read-only user; none with --redis-url)",
        metavar="URL",
    )
    add("--host-cache", str, "redis", "redis or memory, for machines without redis-py (default redis)")
    add("--host-cache-bytes", byte_size, "2GiB", "budget of the host cache, bytes with KiB/MiB/GiB (default 2GiB)")
    add("--dtype", str, "auto", "auto, float32, bfloat16 or float16 (default auto: the checkpoint's)")
    add("--max-waiting-requests", int, "1024", "requests that may wait, a count; more are refused (default 1024)")
    add(
        "--max-waiting-tokens",
        int,
        "8388608",
        "prompt tokens of requests that may wait, a count; more are refused (default 8388608)",
    )
    add("--plan-depth", int, "2", "plans sent to a worker and not answered, a count (default 2)")
    add("--heartbeat-interval-ms", int, "500", "time between heartbeats, milliseconds (default 500)")
    add("--dead-after-ms", int, "2000", "a worker silent for so long is dead, milliseconds (default 2000)")
    add("--worker-grace-s", float, "30", "how long requests wait when no worker is attached, seconds (default 30)")
    _add_work_timeouts(add)
    add(
        "--tenants",
        Path,
        None,
        "JSON file with weights and quotas of tenants (default: all alike, no quotas)",
        metavar="FILE",
    )
    _add_scheduling(add)
    add("--max-model-len", int, None, "longest context, tokens (default: the model's)")
    add("--max-adapter-bytes", byte_size, "1GiB", "largest adapter, bytes with KiB/MiB/GiB (default 1GiB)")
    add(
        "--slow-reader-timeout-s",
        float,
        "30",
        "end a stream whose client reads nothing for so long, seconds (default 30)",
    )
    add("--drain-timeout-s", float, "30", "how long running streams may finish at shutdown, seconds (default 30)")
    add(
        "--max-streams-per-connection",
        int,
        "100",
        "requests of one connection at once, a count; more wait at the client (default 100)",
    )
    add(
        "--max-concurrent-rpcs",
        int,
        "4096",
        "requests of all connections at once, a count; more only for clients below their equal part (default 4096)",
    )
    add(
        "--max-connections",
        int,
        None,
        f"connections of clients, a count; more are closed (default {DEFAULT_MAX_CONNECTIONS}, or what the limit of "
        "open files leaves)",
    )
    add("--log-level", str, "info", "debug, info, warning or error (default info)")
    roots = os.environ.get("MOTET_ADAPTER_ROOT", "")
    parser.add_argument(
        "--adapter-root",
        dest="adapter_roots",
        action="append",
        metavar="NAME=DIR",
        default=[item for item in roots.split(",") if item],
        help="directory that CreateAdapter may read, by name; repeatable, in the environment separated by commas "
        "(default none)",
    )
    switches = (
        ("--exclusive-store", "no other control plane uses the remote store: wait for no lease (default: off)"),
        ("--trust-tenant-names", "clients cannot invent tenants: count each by itself (default: see --tenants)"),
        ("--no-reflection", "leave the gRPC reflection service out (default: it is there)"),
    )
    for flag, text in switches:
        variable = "MOTET_" + flag.strip("-").upper().replace("-", "_")
        is_set = os.environ.get(variable, "").lower() in ("1", "true", "yes")
        parser.add_argument(flag, action="store_true", default=is_set, help=text)


def _add_work_timeouts(add: Callable[..., None]) -> None:
    texts = {
        "step_timeout_s": "a step hangs that takes longer than this and than 20 times the latest ones, seconds",
        "first_step_timeout_s": "a step hangs that takes longer, of the first ones of a worker, seconds",
        "load_timeout_s": "the load of an adapter hangs that takes longer than this and 1 s for each 4 MiB, seconds",
    }
    for name, text in texts.items():
        value = f"{getattr(_FLEET, name):g}"
        add(flag_of(name), float, value, f"{text} (default {value})")


def _add_scheduling(add: Callable[..., None]) -> None:
    default = DEFAULT_SETTINGS
    add(
        "--scheduling-policy",
        str,
        default.policy.value,
        f"order in which a step is filled: {', '.join(POLICIES)} (default {default.policy.value})",
    )
    add("--max-step-tokens", int, None, "tokens of one step, a count (default: the worker's --token-budget)")
    add("--max-sequences", int, None, "sequences computed at once, a count (default: the worker's --max-rows)")
    numbers: list[tuple[str, type, str]] = [
        ("watermark", float, "share of the KV blocks that an admission leaves free while others run"),
        ("max_blocked_steps", int, "steps for which a request that lacks rows or blocks holds up others, a count"),
        ("max_partial_prefills", int, "prompts that are computed in parts at once, a count"),
        ("max_long_partial_prefills", int, "long ones of those, a count"),
        ("prefill_us_per_token", float, "cost of computing a prompt token again, microseconds"),
        ("swap_us_per_block", float, "cost of moving a KV block to or from host memory, microseconds"),
        ("adapter_us_per_mib", float, "cost of one more adapter in a step by its size, microseconds per MiB"),
        ("step_us", float, "cost of a step, which that of further adapters is compared with, microseconds"),
    ]
    for name, kind, text in numbers:
        value = f"{getattr(default, name):g}"
        add(flag_of(name), kind, value, f"{text} (default {value})")
    add("--long-prefill-tokens", int, None, "a longer prompt is a long one, tokens (default: half of a step's tokens)")


def from_args(namespace: argparse.Namespace) -> ServerConfig:
    """The checked configuration. Raises ConfigError naming the flag, the value and the limit."""
    values = {field.name: getattr(namespace, field.name) for field in fields(ServerConfig)}
    return ServerConfig(**{**values, "adapter_roots": tuple(map(_adapter_root, values["adapter_roots"]))})


def _adapter_root(text: str) -> tuple[str, Path]:
    name, sign, path = text.partition("=")
    if not (name and sign and path):
        raise ConfigError(f"--adapter-root: {text!r} is not NAME=DIR")
    return name, Path(path)


def _shown(value: object) -> str:
    if isinstance(value, str):
        return redacted_url(value)
    if isinstance(value, tuple):
        return ",".join(f"{name}={path}" for name, path in value) or "none"
    return str(value)
