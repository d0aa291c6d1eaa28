"""One worker process: settings, engine, signals, and the plan client that feeds the engine until it stops."""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from motet.command_line import WRONG_COMMAND_LINE, Parser

from contract.metrics.port import cannot_listen, check_can_listen
from contract.model_dir import why_no_checkpoint
from contract.process_log import configure_logging, shown
from contract.ready_lines import worker_ready
from contract.redaction import redacted
from contract.redis_access import RedisAccess, RedisTls, find_url_mistake
from contract.settings.addresses import is_loopback
from contract.v1 import plan_pb2
from contract.v1.plan_pb2_grpc import WorkerServiceStub
from data_plane import build_native
from data_plane.config import WorkerConfig, add_arguments, environment, from_args
from data_plane.errors import ConfigError
from data_plane.plan import AdapterSource, Engine, StepOutput, StepPlan
from data_plane.profile import Record, StepProfile
from data_plane.self_check import check_engine
from data_plane.stream.plan_client import ChannelFactory, PlanClient, PlanClientSettings, SourceFactory

if TYPE_CHECKING:
    from data_plane.adapters.format.host_tier import HostTier
    from data_plane.metrics import WorkerMetrics

logger = logging.getLogger(__name__)

# The longest time that a thread which loads adapters keeps the compute thread waiting for Python's lock: Python's 5 ms
# are most of a decode step. Beside two loaders a thread that wakes got the lock after 3.8 ms (p99) with 0.5 ms, after
# 1.5 ms with 0.1 ms; the loads took as long.
SWITCH_INTERVAL_S = 0.0001


def main(argv: Sequence[str] | None = None) -> int:
    """Run a worker with the real engine; the process exit code."""
    argv = sys.argv[1:] if argv is None else argv
    # Nothing is attached while the engine is built: there is nothing to give back, so the process just leaves. Not by
    # SystemExit: whatever is being imported or loaded may catch it, or take its time to unwind.
    with _handling_signals(lambda: os._exit(0)):
        return _build_and_run(argv)


def _build_and_run(argv: Sequence[str]) -> int:
    if build_native.is_requested(argv):
        return build_native.run(argv)
    parser = Parser(
        prog="motet worker",
        description="Compute for a Motet control plane.",
        epilog=build_native.HELP,
        allow_abbrev=False,
    )
    parser.add_version()
    try:
        add_arguments(parser, environment(argv))
    except ValueError as error:
        parser.refuse(str(error))
    arguments = parser.parse_args(argv)
    try:
        config = from_args(arguments)
        if (reason := why_no_checkpoint(config.model_dir)) is not None:
            raise ConfigError(f"--model: {reason}")
        configure_logging(config.log_level, log_format=config.log_format, process="worker")
        refuse_foreign_kernels()
        if config.worker_metrics_listen is not None:
            check_metrics_listen(config.worker_metrics_listen)
        logger.info("settings %s", config.describe(only_changed=True))
        logger.debug("all settings %s", config.describe())
        logger.info("importing torch and transformers", extra=shown("importing torch and transformers"))
        with _without_collections():
            from data_plane.engine.build import build_engine  # torch is imported here and nowhere before
            from kernels.native import recording

        engine = build_engine(config)
        check_engine(engine)
        settle()
        return run_worker(engine, config, record=recording)
    except ConfigError as error:
        print(f"{parser.prog}: {redacted(str(error))}", file=sys.stderr)
        return WRONG_COMMAND_LINE


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Import without the garbage collector, which would walk again and again what all stays: a tenth of the time that
    the import of torch and transformers takes."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def settle() -> None:
    """Keep Python out of the way of the steps. To be called once, when everything that lives long is built."""
    gc.collect()
    gc.freeze()  # the model lives as long as the process: no collection need walk it between two steps
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def run_worker(
    engine: Engine,
    config: WorkerConfig,
    *,
    make_source: SourceFactory | None = None,
    open_channel: ChannelFactory | None = None,
    record: Record = lambda: contextlib.nullcontext([]),
) -> int:
    """Attach `engine` until SIGTERM, SIGINT or a refusal; the process exit code. Main thread only.

    `record` opens the recording of the engine's native runs, for config.profile. Raises ConfigError if
    config.worker_metrics_listen cannot be used.
    """
    settings = PlanClientSettings(
        control_plane=config.control_plane,
        worker_id=config.worker_id,
        load_threads=config.load_threads,
        tls_files=config.tls_files,
        exit_when_disconnected_s=config.exit_when_disconnected_s,
    )
    profile = StepProfile(config.profile, config.profile_out, record) if config.profile is not None else None

    tier = host_tier(config)
    metrics = None if config.worker_metrics_listen is None else _metrics(engine, tier)

    def on_ready(epoch: int) -> None:
        print(worker_ready(config.worker_id, epoch), flush=True)
        if profile is not None:
            profile.start()

    def on_step(plan: StepPlan, output: StepOutput) -> None:
        if metrics is not None:
            metrics.on_step(plan, output)
        if profile is not None:
            profile.end_step(plan, output)

    client = PlanClient(
        engine,
        settings,
        make_source=make_source or source_factory(config, tier),
        open_channel=open_channel,
        check_self=lambda: check_engine(engine),
        on_ready=on_ready,
        on_step=on_step,
        on_load=(lambda _seconds, _is_ready: None) if metrics is None else metrics.on_load,
    )
    with contextlib.ExitStack() as stack:
        if config.worker_metrics_listen is not None and metrics is not None:
            try:
                port = metrics.open_port(config.worker_metrics_listen, lambda: client.is_attached)
            except ValueError as error:
                raise ConfigError(str(error)) from error
            stack.callback(port.close)
        stack.enter_context(_handling_signals(client.stop))
        if profile is not None:
            stack.callback(profile.close)
        return client.run()


def _metrics(engine: Engine, tier: HostTier | None) -> WorkerMetrics:
    """Raises ConfigError without their library, which only this flag needs."""
    try:
        from data_plane.metrics import WorkerMetrics
    except ModuleNotFoundError as error:
        raise ConfigError(f"--worker-metrics-listen: needs the Python package {error.name}; install it") from error
    return WorkerMetrics(engine, None if tier is None else tier.stats)


@contextlib.contextmanager
def _handling_signals(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` on SIGTERM and SIGINT while the block runs. Main thread only."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    previous = {number: signal.signal(number, lambda *_: act()) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def host_tier(config: WorkerConfig) -> HostTier | None:
    """Where adapters are kept beside the arena, in pinned memory beside a GPU. None without --pinned-bytes.

    Raises ConfigError where so much cannot be pinned.
    """
    if not config.pinned_bytes:
        return None
    from data_plane.adapters.format.host_tier import HostTier

    if config.device == "cpu":
        return HostTier(config.pinned_bytes)
    import torch

    if not torch.cuda.is_available():
        return HostTier(config.pinned_bytes)
    from data_plane.adapters.format.chunk_memory import ChunkMemory
    from data_plane.engine.memory.pinned import pinned_bytes

    return HostTier(config.pinned_bytes, ChunkMemory(pinned_bytes(config.pinned_bytes, "--pinned-bytes").numpy()))


def source_factory(config: WorkerConfig, tier: HostTier | None = None) -> SourceFactory:
    """Adapters come from the host cache if this worker can read it; what it lacks comes through the control plane.

    `tier`: what is read is kept there, and read from there first.
    """
    reasons: set[str] = set()  # why the host cache is not read, each logged once

    def make_source(stub: WorkerServiceStub, welcome: plan_pb2.Welcome) -> AdapterSource:
        source = open_source(stub, welcome)
        return source if tier is None else tier.over(source)

    def open_source(stub: WorkerServiceStub, welcome: plan_pb2.Welcome) -> AdapterSource:
        from data_plane.adapters.format.sources import ControlPlaneSource, FallbackSource, HostCacheSource

        direct = ControlPlaneSource(stub, config.worker_id, reads_files=is_loopback(config.control_plane))
        access, reason = host_cache_access(config, welcome)
        if access is not None:
            try:
                return FallbackSource(HostCacheSource(access), direct)
            except ImportError:
                reason = "no redis client is installed"
        if reason and reason not in reasons:
            reasons.add(reason)
            logger.warning("%s: adapters come through the control plane, which is slower", reason)
        return direct

    return make_source


def host_cache_access(config: WorkerConfig, welcome: plan_pb2.Welcome) -> tuple[RedisAccess | None, str]:
    """How to read the host cache, or None and why not. The reason is empty if there is no host cache."""
    url = config.worker_redis_url or welcome.host_cache_url
    if not url:
        return None, ""
    if (mistake := find_url_mistake(url)) is not None:
        return None, f"the URL of the host cache {mistake}"
    access = RedisAccess(url=url, password_file=config.worker_redis_password_file, tls=config.redis_tls)
    if welcome.host_cache_needs_password and not access.has_password:
        return None, (
            "the host cache needs a password, which the control plane sends by TLS only; give "
            "--worker-redis-password-file, or MOTET_WORKER_REDIS_URL with the password"
        )
    if url.startswith("redis://") and config.redis_tls != RedisTls():
        return None, "--redis-tls-ca, -cert and -key are given, and the host cache's URL is not one of rediss://"
    return access, ""


def check_metrics_listen(address: str) -> None:
    """Raise ConfigError if it cannot be listened on: before the weights are read, which takes minutes."""
    try:
        check_can_listen(address)
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(cannot_listen("--worker-metrics-listen", address, error)) from error


def refuse_foreign_kernels() -> None:
    """Raise ConfigError if the unrelated distribution `kernels` is installed: it would hide our package."""
    try:
        version = importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        return
    raise ConfigError(
        f"the distribution 'kernels' {version} is installed and is not Motet's package of that name; "
        "uninstall it (pip uninstall kernels) or give the worker an environment of its own"
    )
