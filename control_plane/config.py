"""Settings of the control plane: a checked dataclass. Flags, --help and the environment follow from its fields.

Read by server.py and by the command line for its help. Imports nothing heavy.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from motet.command_line import byte_size

from contract.fingerprint import NOT_QUANTIZED, QUANTIZATIONS
from contract.model_dir import why_no_checkpoint
from contract.packed_layout import ITEMSIZE
from contract.plan_stream.plan_bounds import MAX_PLAN_STEPS
from contract.process_log import LOG_FORMATS, LOG_LEVELS, settings_line, shown_value
from contract.redaction import has_password
from contract.redis_access import PasswordUnreadable, RedisAccess, RedisTls, find_url_mistake, read_password
from contract.settings import config_file, flags
from contract.settings.flags import group, optional_path, setting
from control_plane.access.settings import AccessSettings
from control_plane.adapters.directories.settings import DirectorySettings
from control_plane.adapters.sources.locations import remote_root
from control_plane.fleet.settings import FleetSettings
from control_plane.fleet.tenants import InvalidTenants, TenantTable, read_tenants
from control_plane.scheduler.settings import Policy, SchedulerSettings

DTYPES = ("auto", *ITEMSIZE)
HOST_CACHES = ("redis", "memory")
DEFAULT_WORKER_START_S = 900.0  # with an autoscaler: what loading a model may take, beside the time for a machine
DEFAULT_MAX_CONNECTIONS = 4096  # of clients
POLICIES = tuple(policy.value for policy in Policy)
_Settings = TypeVar("_Settings", FleetSettings, SchedulerSettings)
_ROOT_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_FLEET, _SCHEDULER = FleetSettings(), SchedulerSettings()


class ConfigError(Exception):
    """A setting that the control plane cannot run with; names flag, value and limit."""


def _adapter_root(text: str) -> tuple[str, Path | str]:
    name, sign, path = text.partition("=")
    if not (name and sign and path):
        raise ConfigError(f"--adapter-root: {text!r} is not NAME=DIR or NAME=URL")
    return name, path if "://" in path else Path(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Everything that an operator sets about a control plane."""

    model_dir: Path = setting("checkpoint directory", name="--model", metavar="DIR")
    data_dir: Path = setting("state of this server", Path("motet-data"), shown_default="./motet-data", metavar="DIR")
    store: str | None = setting(
        "artifact store, a directory or a URL of s3://, gs:// or az://",
        None,
        shown_default="DATA_DIR/store",
        metavar="URL",
        is_secret_url=True,
    )
    store_timeout_s: float = setting(
        "longest time for one call of the artifact store; large writes have more", 10.0, unit="seconds", lowest=0.1
    )
    exclusive_store: bool = setting("no other control plane uses the remote store: wait for no lease", False)
    listen: str = setting("clients' address; port 0 takes a free one", "127.0.0.1:50051", metavar="HOST:PORT")
    worker_listen: str = setting("workers' address; port 0 takes a free one", "127.0.0.1:50052", metavar="HOST:PORT")
    redis_url: str | None = setting(
        "host cache",
        None,
        shown_default="an embedded Redis",
        metavar="URL",
        is_secret_url=True,
        password_flag="--redis-password-file",
    )
    redis_password_file: Path | None = setting(
        "file with the password of --redis-url, read again for every connection",
        None,
        shown_default="none",
        parse=optional_path,
        metavar="FILE",
    )
    worker_redis_url: str | None = setting(
        "where workers read the host cache",
        None,
        shown_default="the embedded Redis's read-only user; none with --redis-url",
        metavar="URL",
        is_secret_url=True,
        password_flag="--worker-redis-password-file",
    )
    worker_redis_password_file: Path | None = setting(
        "file with the password of --worker-redis-url", None, shown_default="none", parse=optional_path, metavar="FILE"
    )
    redis_tls: RedisTls = group(RedisTls)
    host_cache: str = setting("redis, or memory for machines without redis-py", "redis", choices=HOST_CACHES)
    host_cache_bytes: int = setting("budget of the host cache", 2 << 30, unit="bytes", parse=byte_size, lowest=0)
    task_cache_bytes: int = setting(
        "weights of LoRA tasks in this process's memory; 0 turns task ids off",
        256 << 20,
        unit="bytes",
        parse=byte_size,
        lowest=0,
    )
    task_cache_memory_share: float | None = setting(
        "instead of --task-cache-bytes: part of the memory that is free at the start, up to 1",
        None,
        unit="a share",
        shown_default="none",
        lowest=0.0,
    )
    dtype: str = setting(
        "element type of weights, the same on every worker: auto, float32, bfloat16 or float16",
        "auto",
        shown_default="auto, the checkpoint's",
        choices=DTYPES,
    )
    quantization: str = setting(
        "how workers hold the weights of the linears: none, as --dtype, or fp8; the same on every worker",
        NOT_QUANTIZED,
        choices=QUANTIZATIONS,
    )
    max_model_len: int | None = setting("longest context", None, unit="tokens", shown_default="the model's", lowest=2)
    # Bounds of those from here to the slow reader's timeout are in FleetSettings, where they are explained.
    max_waiting_requests: int = setting(
        "requests that may wait over all workers; more are refused", _FLEET.max_waiting_requests, unit="a count"
    )
    max_waiting_tokens: int = setting(
        "prompt tokens of requests that may wait; more are refused", _FLEET.max_waiting_tokens, unit="a count"
    )
    plan_depth: int = setting("plans in flight to a worker", _FLEET.plan_depth, unit="a count")
    min_plan_steps: int = setting(
        f"decode steps of a plan, at least, where nothing could be decided between them; "
        f"use {MAX_PLAN_STEPS} for workers with --speculative",
        _FLEET.min_plan_steps,
        unit="a count",
        lowest=1,
        highest=MAX_PLAN_STEPS,
    )
    heartbeat_interval_ms: int = setting("time between heartbeats", _FLEET.heartbeat_interval_ms, unit="milliseconds")
    dead_after_ms: int = setting(
        "a worker that is silent for this long is dead", _FLEET.dead_after_ms, unit="milliseconds"
    )
    worker_grace_s: float = setting(
        "how long requests wait for a worker when none is attached", _FLEET.worker_grace_s, unit="seconds"
    )
    worker_start_s: float | None = setting(
        "how long each request waits for a worker that an autoscaler starts; none is refused before",
        None,
        unit="seconds",
        shown_default=f"not set: as --worker-grace-s; {DEFAULT_WORKER_START_S:g} with --scaler-listen",
    )
    step_timeout_s: float = setting(
        "a step that takes longer than this, and than 20 times the latest steps, hangs",
        _FLEET.step_timeout_s,
        unit="seconds",
    )
    first_step_timeout_s: float = setting(
        "one of the first steps of a worker hangs if it takes longer", _FLEET.first_step_timeout_s, unit="seconds"
    )
    load_timeout_s: float = setting(
        "a load of an adapter that takes longer than this and 1 s for each 4 MiB hangs",
        _FLEET.load_timeout_s,
        unit="seconds",
    )
    slow_reader_timeout_s: float = setting(
        "end a stream whose client reads nothing for this long", _FLEET.slow_reader_timeout_s, unit="seconds"
    )
    tenants: Path | None = setting(
        "JSON file with weights and quotas of tenants", None, shown_default="all alike, no quotas", metavar="FILE"
    )
    trust_tenant_names: bool = setting(
        "clients cannot invent tenant names: charge every tenant by itself, not its host", False
    )
    # Bounds of those from here to the step's cost are in SchedulerSettings, where they are explained.
    scheduling_policy: str = setting(
        f"order in which a step is filled: {', '.join(POLICIES)}", _SCHEDULER.policy.value, choices=POLICIES
    )
    max_step_tokens: int | None = setting(
        "tokens of one step", None, unit="a count", shown_default="the worker's --token-budget"
    )
    max_sequences: int | None = setting(
        "sequences computed at once", None, unit="a count", shown_default="the worker's --max-rows"
    )
    watermark: float = setting(
        "KV blocks that an admission leaves free while others run", _SCHEDULER.watermark, unit="a share"
    )
    max_blocked_steps: int = setting(
        "how long a request that lacks rows or blocks holds up others", _SCHEDULER.max_blocked_steps, unit="steps"
    )
    max_partial_prefills: int = setting("unfinished prompts at once", _SCHEDULER.max_partial_prefills, unit="a count")
    max_long_partial_prefills: int = setting(
        "long prompts among the unfinished ones", _SCHEDULER.max_long_partial_prefills, unit="a count"
    )
    long_prefill_tokens: int | None = setting(
        "prompts above this length are long", None, unit="tokens", shown_default="half of a step's tokens"
    )
    prefill_us_per_token: float = setting(
        "cost of computing a prompt token again", _SCHEDULER.prefill_us_per_token, unit="microseconds"
    )
    swap_us_per_block: float = setting(
        "cost of moving a KV block to or from host memory", _SCHEDULER.swap_us_per_block, unit="microseconds"
    )
    adapter_us_per_mib: float = setting(
        "cost of one more adapter in a step, by its size", _SCHEDULER.adapter_us_per_mib, unit="microseconds per MiB"
    )
    step_us: float = setting(
        "cost of a step; the cost of one more adapter is compared with it", _SCHEDULER.step_us, unit="microseconds"
    )
    max_adapter_bytes: int = setting(
        "largest adapter that is registered", 1 << 30, unit="bytes", parse=byte_size, lowest=1
    )
    adapter_roots: tuple[tuple[str, Path | str], ...] = setting(
        "what CreateAdapter may read, by name: a directory, or a URL of hf://, s3://, gs:// or az://",
        (),
        name="--adapter-root",
        metavar="NAME=PLACE",
        shown_default="none",
        parse=_adapter_root,
        is_repeatable=True,
    )
    hub_hosts: tuple[str, ...] = setting(
        "HOST[:PORT] that the Hub of HF_ENDPOINT may redirect downloads to; .HOST for all hosts below it",
        (),
        name="--hub-host",
        metavar="HOST",
        shown_default=".huggingface.co and .hf.co for huggingface.co, none for others",
        parse=str,
        is_repeatable=True,
    )
    drain_timeout_s: float = setting("how long running streams may finish at shutdown", 30.0, unit="seconds", lowest=0)
    max_streams_per_connection: int = setting(
        "requests of one connection at once; more wait at the client", 100, unit="a count", lowest=1
    )
    adaptive_windows: bool = setting(
        "faster uploads over long distances; clients can then fill more memory, up to 1 MiB for each request", False
    )
    max_concurrent_rpcs: int = setting(
        "requests of all connections at once; more only for clients below their equal part",
        4096,
        unit="a count",
        lowest=1,
    )
    max_connections: int | None = setting(
        "connections of clients; more are closed",
        None,
        unit="a count",
        shown_default=f"{DEFAULT_MAX_CONNECTIONS}, or what the limit of open files leaves",
        lowest=1,
    )
    frontends: int = setting(
        "processes that hold the connections of clients; 0: this process does", 0, unit="a count", lowest=0, highest=64
    )
    no_reflection: bool = setting("leave the gRPC reflection service out", False, shown_default="the service is there")
    metrics_listen: str | None = setting(
        "HTTP address of /metrics for Prometheus, /healthz and /readyz, without TLS; port 0 takes a free one",
        None,
        metavar="HOST:PORT",
        shown_default="none",
    )
    scaler_listen: str | None = setting(
        "address where KEDA learns how many workers are needed; requests then wait for workers that it starts",
        None,
        metavar="HOST:PORT",
        shown_default="none",
    )
    otlp_traces_endpoint: str | None = setting(
        "URL of an OpenTelemetry collector that gets a span of each request, by OTLP over gRPC",
        None,
        metavar="URL",
        shown_default="none",
        is_secret_url=True,
    )
    log_level: str = setting("debug, info, warning or error", "info", choices=LOG_LEVELS)
    log_format: str = setting("form of the log: text, or json with an object on each line", "text", choices=LOG_FORMATS)
    directories: DirectorySettings = group(DirectorySettings)
    access: AccessSettings = group(AccessSettings)

    def __post_init__(self) -> None:
        if (mistake := flags.find_mistake(self)) is not None:
            raise ConfigError(mistake)
        for name in ("listen", "worker_listen", "metrics_listen", "scaler_listen"):
            if (address := getattr(self, name)) is None:
                continue
            host, _, port = address.rpartition(":")
            if not host or not port.isdigit() or int(port) > 65535:
                raise ConfigError(f"{_flag_of(name)}: {address!r} is not HOST:PORT with a port up to 65535")
        if self.listen == self.worker_listen and not self.listen.endswith(":0"):
            raise ConfigError(f"--worker-listen: {self.worker_listen} is --listen too; the two ports must differ")
        try:
            self.access.check_addresses(self.listen, self.worker_listen, self.scaler_listen)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if self.access.scaler_tls_client_ca is not None and self.scaler_listen is None:
            raise ConfigError("--scaler-tls-client-ca: needs --scaler-listen; else nobody presents a certificate")
        if (reason := why_no_checkpoint(self.model_dir)) is not None:
            raise ConfigError(f"--model: {reason}")
        if (self.task_cache_memory_share or 0.0) > 1.0:
            raise ConfigError(
                f"--task-cache-memory-share: is {self.task_cache_memory_share:g}; give a value from 0 to 1"
            )
        self._check_urls()
        self._check_roots()
        self.fleet_settings()

    def fleet_settings(self) -> FleetSettings:
        """Bounds and times of the fleet. Raises ConfigError."""
        scheduler = self.scheduler_settings()
        start_s = self.worker_start_s
        if start_s is None and self.scaler_listen is not None:
            start_s = DEFAULT_WORKER_START_S
        given: Any = {"scheduler": scheduler, "tenants": self.tenant_table(), "worker_start_s": start_s}
        return self._settings_of(FleetSettings, **given)

    def scheduler_settings(self) -> SchedulerSettings:
        """How a worker's time and memory are shared out. Raises ConfigError."""
        return self._settings_of(SchedulerSettings, policy=Policy(self.scheduling_policy))

    def _settings_of(self, kind: type[_Settings], **given: Any) -> _Settings:
        """Settings whose fields have the names of flags. Raises ConfigError where they refuse a value."""
        named = {field.name for field in fields(kind)} & {field.name for field in fields(self)}
        try:
            return kind(**{name: getattr(self, name) for name in named - given.keys()}, **given)
        except ValueError as error:
            name, _, rest = str(error).partition(":")
            raise ConfigError(f"{_flag_of(name)}:{rest}") from error

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
            url, password_file = getattr(self, name), getattr(self, name.removesuffix("url") + "password_file")
            if password_file is not None:
                self._check_password_file(name, password_file)
            if url is None:
                continue
            if (mistake := find_url_mistake(url)) is not None:
                raise ConfigError(f"{_flag_of(name)}: {mistake}")
            if self.host_cache == "memory":
                raise ConfigError(f"{_flag_of(name)}: needs --host-cache redis")
        urls = (self.redis_url or "", self.worker_redis_url or "")
        if self.redis_tls != RedisTls() and not any(url.startswith("rediss://") for url in urls):
            raise ConfigError("--redis-tls-ca, -cert and -key: need a --redis-url that begins with rediss://")
        if (mistake := self.redis_tls.find_mistake()) is not None:
            raise ConfigError(mistake)

    def _check_password_file(self, name: str, path: Path) -> None:
        flag = _flag_of(name.removesuffix("url") + "password_file")
        url = getattr(self, name)
        if url is None:
            raise ConfigError(f"{flag}: needs {_flag_of(name)}")
        if has_password(url):
            raise ConfigError(f"{flag}: the URL of {_flag_of(name)} has a password too; give one of the two")
        try:
            read_password(path)
        except PasswordUnreadable as error:
            raise ConfigError(f"{flag}: {error}") from error

    @property
    def redis(self) -> RedisAccess | None:
        """The Redis of the operator, as this process uses it. None: an embedded one."""
        if self.redis_url is None:
            return None
        return RedisAccess(url=self.redis_url, password_file=self.redis_password_file, tls=self.redis_tls)

    @property
    def worker_redis(self) -> RedisAccess | None:
        """The Redis of the operator, as workers use it. None: not named."""
        if self.worker_redis_url is None:
            return None
        return RedisAccess(url=self.worker_redis_url, password_file=self.worker_redis_password_file, tls=self.redis_tls)

    def _check_roots(self) -> None:
        names = [name for name, _ in self.adapter_roots]
        for name, path in self.adapter_roots:
            if not _ROOT_NAME.fullmatch(name):
                raise ConfigError(f"--adapter-root: name {name!r} does not match {_ROOT_NAME.pattern}")
            if names.count(name) > 1:
                raise ConfigError(f"--adapter-root: name {name!r} is given twice")
            if isinstance(path, str):
                try:
                    remote_root(name, path)
                except ValueError as error:
                    raise ConfigError(f"--adapter-root: {name}: {error}") from error
            elif not path.is_dir():
                raise ConfigError(f"--adapter-root: {path} is not a directory")

    @property
    def store_url(self) -> str:
        """Where the artifact store lies."""
        return self.store if self.store is not None else str(self.data_dir.resolve() / "store")

    def describe(self, *, only_changed: bool = False) -> str:
        """The settings on one line, for the log, without secrets: all, or those that differ from their defaults."""
        return settings_line(self, only_changed=only_changed, show=_shown)


def _flag_of(name: str) -> str:
    return flags.flag_of(ServerConfig, name)


def environment(argv: Sequence[str]) -> Mapping[str, str]:
    """The process's environment, over what the file of --config says. Raises ConfigFileError."""
    return config_file.environment(argv, config_file.CONTROL_PLANE, ServerConfig)


def add_arguments(parser: argparse.ArgumentParser, environ: Mapping[str, str] = os.environ) -> None:
    """Add every flag of the control plane. MOTET_<FLAG> in `environ` is a flag's default. Raises ValueError."""
    config_file.add_argument(parser, environ)
    flags.add_arguments(parser, ServerConfig, environ)


def from_args(namespace: argparse.Namespace) -> ServerConfig:
    """The checked configuration. Raises ConfigError naming the flag, the value and the limit."""
    try:
        config: ServerConfig = flags.from_args(namespace, ServerConfig)
    except ValueError as error:  # of a group of settings
        raise ConfigError(str(error)) from error
    return config


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(part if isinstance(part, str) else "=".join(map(str, part)) for part in value) or "none"
    return shown_value(value)
