"""The control plane's process: builds the parts, joins them, serves until a signal stops it.

The only place that knows all parts. Whatever was started is ended in reverse order on every exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import uvloop

# googleapis-common-protos ships no py.typed marker.
from google.longrunning import operations_pb2_grpc
from grpc_health.v1 import health_pb2_grpc
from motet.command_line import WRONG_COMMAND_LINE, Parser
from motet.v1 import adapters_pb2_grpc, generation_pb2_grpc, pooling_pb2_grpc, status_pb2_grpc
from motet.v1.status import LimitStatus

from contract.process_log import configure_logging, shown
from contract.ready_lines import control_plane_ready
from contract.redaction import redacted
from contract.v1 import plan_pb2_grpc
from control_plane import descriptors
from control_plane.access.authentication.assembly import open_authenticator
from control_plane.access.authenticator import Authenticator
from control_plane.access.settings import AccessSettings
from control_plane.access.transport import Transport, open_transport
from control_plane.access.watched_files import FileWatcher
from control_plane.adapters.background import begin
from control_plane.adapters.keeper import Keeper
from control_plane.adapters.life_cycle import AdapterLifeCycle
from control_plane.adapters.open_roots import open_roots
from control_plane.adapters.operations import OperationStore
from control_plane.adapters.roots import AdapterRoots
from control_plane.api import health, status
from control_plane.api.admin import adapters, operations, push, residency, verification, worker_drains
from control_plane.api.admin.idempotency_cache import IdempotencyCache
from control_plane.api.admin.upload import MAX_CHUNK_BYTES, UploadReceiver
from control_plane.api.gate import ShutdownGate
from control_plane.api.generation import service as generation
from control_plane.api.model import service as model
from control_plane.api.pooling import service as pooling
from control_plane.api.rpc import listeners, reflection
from control_plane.api.rpc.callers import Callers
from control_plane.api.rpc.rpc_server import RpcServer
from control_plane.audit.audit_log import AuditLog, open_audit_log
from control_plane.caller import log_context
from control_plane.config import ConfigError, ServerConfig, add_arguments, environment, from_args
from control_plane.directory_lock import DirectoryInUse, DirectoryLock
from control_plane.errors import MotetError
from control_plane.fleet.assembly import assemble
from control_plane.fleet.fleet import Fleet
from control_plane.fleet.service import WorkerService
from control_plane.fleet.settings import FleetSettings
from control_plane.frontends.assembly import ClientPort, bind_clients, client_port
from control_plane.host_cache.task_cache import TaskCache
from control_plane.host_cache.weights import AdapterWeights
from control_plane.registry.model.base_model import BaseModel, BaseModelError
from control_plane.registry.model.worker_reports import WorkerReports
from control_plane.registry.registry import Registry
from control_plane.scaler.port import open_port
from control_plane.setup.base_model import read_base_model
from control_plane.setup.directories import take_in_directories
from control_plane.setup.garbage import collect_rarely
from control_plane.setup.metrics import ControlPlaneMetrics, open_tracing
from control_plane.setup.storage import open_storage, uploads_in
from control_plane.setup.tasks import open_tasks
from control_plane.setup.texts import adapter_texts, open_constraints, start_codec
from control_plane.setup.version_services import push_part, verification_part
from control_plane.signatures.verifier import SignatureVerifier, open_verifier

logger = logging.getLogger(__name__)

T = TypeVar("T")

# How long the last messages of ended streams may take to leave, after the shutdown.
CLOSE_GRACE_S = 1.0
_REFLECTED = (
    *(generation, model, pooling, adapters, push, residency, verification),
    *(worker_drains, status, operations, health),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a control plane until SIGTERM or SIGINT; the exit status."""
    parser = Parser(
        prog="motet control-plane", description="Motet's control plane: serves clients and workers.", allow_abbrev=False
    )
    parser.add_version()
    try:
        add_arguments(parser, environment(sys.argv[1:] if argv is None else argv))
        config = from_args(parser.parse_args(argv))
    except (ConfigError, ValueError) as error:
        parser.refuse(str(error))
    configure_logging(config.log_level, log_format=config.log_format, process="control plane", context=log_context)
    logger.info("settings %s", config.describe(only_changed=True))
    logger.debug("all settings %s", config.describe())
    try:
        return uvloop.run(serve(config))
    except (ConfigError, MotetError, OSError, ValueError) as error:
        # What an operator can mend needs one line; anything else is our mistake and shows its traceback.
        print(f"{parser.prog}: {redacted(str(error))}", file=sys.stderr)
        return WRONG_COMMAND_LINE if isinstance(error, (ConfigError, BaseModelError)) else 1


async def serve(config: ServerConfig) -> int:
    """Build, announce, wait for a signal, shut down."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    async with contextlib.AsyncExitStack() as stack:
        plane = await _unless(stop, build(config, stack))
        if plane is None:
            logger.info("stopped before it was ready")
            return 0
        collecting = asyncio.create_task(collect_rarely(), name="garbage")
        stack.callback(collecting.cancel)
        print(control_plane_ready(plane.client_address, plane.worker_address), flush=True)
        plane.audit.start()  # on standard output, lines follow the ready line
        logger.info("ready clients=%s workers=%s", plane.client_address, plane.worker_address)
        await stop.wait()
        await plane.shut_down(config.drain_timeout_s)
    logger.info("stopped", extra=shown("stopped"))
    return 0


async def _unless(stop: asyncio.Event, building: Coroutine[Any, Any, ControlPlane]) -> ControlPlane | None:
    """The control plane, or None if it is stopped before: a start may wait for a store that does not respond."""
    built, stopped = asyncio.ensure_future(building), asyncio.ensure_future(stop.wait())
    await asyncio.wait([built, stopped], return_when=asyncio.FIRST_COMPLETED)
    if built.done():
        stopped.cancel()
        return built.result()
    built.cancel()
    await asyncio.wait([built])
    return None


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """A running control plane."""

    client_address: str  # HOST:PORT
    worker_address: str  # HOST:PORT
    fleet: Fleet
    shut_down: Callable[[float], Awaitable[None]]  # no new work; streams may finish for this many seconds
    audit: AuditLog


async def build(config: ServerConfig, stack: contextlib.AsyncExitStack) -> ControlPlane:
    """Everything, started and listening; `stack` ends it in reverse order."""
    max_connections = descriptors.make_room(config.max_connections)
    _lock_data_dir(config.data_dir, stack)
    audit = _open_audit_log(config, stack)

    # The model, its texts, and the adapters.
    base_model = await read_base_model(config)
    codec, base_model = await start_codec(config, base_model, stack)
    reports = await _open_reports(config, base_model, stack)
    settings = config.fleet_settings()
    metrics = ControlPlaneMetrics(config.metrics_listen, open_tracing(config.otlp_traces_endpoint, stack))
    registry, weights, task_cache = await open_storage(
        config, base_model, reports, settings.tenants, metrics.timings, stack
    )

    # The ports, which do not listen yet. They end after the fleet, so that streams end with a reason.
    watcher = FileWatcher(on_read=audit.file_read)
    transport, authenticator = _transport(config, watcher), await _authenticator(config, watcher, stack)
    clients, workers = _make_ports(config, max_connections, authenticator, transport, metrics, audit, stack)

    # The fleet, and the life cycle of adapters over it.
    constraints, vocabulary = await open_constraints(codec, base_model, stack)
    observed: Any = {"audit": audit, "vocabulary": vocabulary, "timings": metrics.timings}
    fleet = Fleet(assemble(settings, base_model, weights, registry.incarnation, **observed))
    stack.push_async_callback(fleet.close)
    operation_store = OperationStore()
    signatures = _open(open_verifier, config, watcher)
    life_cycle = _life_cycle(settings, registry, weights, fleet, operation_store, audit, signatures, task_cache)

    # The services.
    gate, uploads = ShutdownGate(), UploadReceiver(uploads_in(config), max_adapter_bytes=config.max_adapter_bytes)
    adapter_service = adapters.AdapterService(
        registry=registry,
        life_cycle=life_cycle,
        operations=operation_store,
        gate=gate,
        uploads=uploads,
        roots=_roots(config, stack),
        idempotency=IdempotencyCache(),
        audit=audit,
    )
    texts = adapter_texts(codec, weights, stack)
    parts: Any = {"texts": texts, "registry": registry, "fleet": fleet, "gate": gate, "audit": audit}
    parts |= {"observers": metrics.requests, "model": _facts_of(base_model), "served": reports}
    tasks = open_tasks(config, task_cache, life_cycle, fleet, reports, base_model, uploads, audit)
    generation_service = generation.GenerationService(codec=codec, tasks=tasks, constraints=constraints, **parts)
    pooling_service = pooling.PoolingService(**parts)
    status_service = _status_service(config, base_model, reports, fleet, registry, weights, audit)
    health_part, reporter = _report_on(fleet, reports)
    _serve_metrics(metrics, stack, status_service, registry, weights, fleet, gate)
    _offer(
        clients,
        (generation_pb2_grpc.add_GenerationServiceServicer_to_server, generation_service),
        (pooling_pb2_grpc.add_PoolingServiceServicer_to_server, pooling_service),
        model.part(base_model, config.model_dir, reports, texts, registry, fleet, gate),
        (adapters_pb2_grpc.add_AdapterServiceServicer_to_server, adapter_service),
        push_part(config, base_model, registry, life_cycle, weights, fleet, gate, uploads, audit),
        verification_part(config, base_model, registry, life_cycle, weights, fleet, operation_store, gate, audit),
        residency.part(registry, weights, fleet, gate, audit),
        worker_drains.part(fleet.drains, audit),
        (status_pb2_grpc.add_StatusServiceServicer_to_server, status_service),
        (operations_pb2_grpc.add_OperationsServicer_to_server, operations.OperationsService(operation_store, audit)),
        health_part,
    )
    worker_service = WorkerService(fleet, weights, transport.worker_access, audit)
    _offer(workers, (plan_pb2_grpc.add_WorkerServiceServicer_to_server, worker_service), health_part)
    _offer_reflection(config, clients)
    await take_in_directories(config.directories, registry, life_cycle, audit, stack)

    # Now the ports listen.
    _start(watcher, stack)
    client_address = bind_clients(clients, config.listen, transport.client_credentials)
    worker_address = listeners.bind(workers, config.worker_listen, transport.worker_credentials)
    await asyncio.gather(clients.start(), workers.start())
    on_refused, is_known = metrics.counting(audit.refused), _is_known(reports)
    await open_port(config.scaler_listen, transport, fleet.workload, is_known, on_refused, stack)
    begin(stack, _restore(life_cycle), Keeper(registry, life_cycle, fleet.unloads.has_requests).run())
    shut_down = partial(_shut_down, fleet, operation_store, gate, reporter)
    return ControlPlane(client_address, worker_address, fleet, shut_down, audit)


def _life_cycle(
    settings: FleetSettings,
    registry: Registry,
    weights: AdapterWeights,
    fleet: Fleet,
    operation_store: OperationStore,
    audit: AuditLog,
    signatures: SignatureVerifier,
    task_cache: TaskCache,
) -> AdapterLifeCycle:
    return AdapterLifeCycle(
        registry=registry,
        weights=weights,
        fleet=fleet,
        operations=operation_store,
        audit=audit,
        signatures=signatures,
        has_task=task_cache.has_digest,
        max_pinned_bytes=lambda tenant: settings.tenants.limits_of(tenant).max_pinned_bytes,
    )


async def _shut_down(
    fleet: Fleet, operation_store: OperationStore, gate: ShutdownGate, reporter: health.HealthReporter, timeout_s: float
) -> None:
    """No new work from now on; what runs has this long to end."""
    logger.info("shutting down timeout_s=%g", timeout_s, extra=shown(f"stopping: at most {timeout_s:g} s for requests"))
    gate.close()
    reporter.stop()
    await asyncio.gather(fleet.shut_down(timeout_s), operation_store.close(timeout_s=timeout_s))


def _is_known(reports: WorkerReports) -> Callable[[], bool]:
    """Whether requests can be checked: the longest context is known, from the checkpoint or from a worker."""
    return lambda: reports.max_model_len is not None


def _report_on(fleet: Fleet, reports: WorkerReports) -> tuple[tuple[Any, object], health.HealthReporter]:
    """The health of the server, and what workers report, follow the fleet from now on. Returns the service to offer."""
    service = health.HealthService()
    reporter = health.HealthReporter(service, lambda: fleet.workload.is_served)
    reporter.start()
    fleet.on_workers_changed(reporter.on_workers_changed)
    fleet.on_workers_changed(lambda: reports.update(fleet.reports()))
    return (health_pb2_grpc.add_HealthServicer_to_server, service), reporter


def _serve_metrics(metrics: ControlPlaneMetrics, stack: contextlib.AsyncExitStack, *parts: Any) -> None:
    """Raises ConfigError."""
    try:
        metrics.serve(stack, *parts)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _roots(config: ServerConfig, stack: contextlib.AsyncExitStack) -> AdapterRoots:
    """What the operator lists. Raises ConfigError."""
    limits: Any = {"max_adapter_bytes": config.max_adapter_bytes, "hub_hosts": config.hub_hosts}
    try:
        roots = open_roots(config.adapter_roots, config.data_dir / "downloads", **limits)
    except ValueError as error:
        raise ConfigError(f"--adapter-root: {error}") from error
    stack.callback(roots.close)
    return roots


def _start(watcher: FileWatcher, stack: contextlib.AsyncExitStack) -> None:
    watcher.start()
    stack.push_async_callback(watcher.close)


def _offer(server: ClientPort, *services: tuple[Any, object]) -> None:
    """Let a server offer services, each given as the stub's function that adds it, and the servicer."""
    for add, servicer in services:
        add(servicer, server)


def _offer_reflection(config: ServerConfig, server: ClientPort) -> None:
    if not config.no_reflection:
        reflection.add_to_server([part.SERVICE_NAME for part in _REFLECTED], server)


def _facts_of(base_model: BaseModel) -> generation.ModelFacts:
    return generation.ModelFacts(base_model.vocab_size, base_model.eos_token_ids, base_model.served_fingerprint)


def _status_service(
    config: ServerConfig,
    base_model: BaseModel,
    reports: WorkerReports,
    fleet: Fleet,
    registry: Registry,
    weights: AdapterWeights,
    audit: AuditLog,
) -> status.StatusService:
    return status.StatusService(
        model=status.ModelIdentity(
            base_model.name,
            base_model.served_fingerprint,
            base_model.vocab_size,
            base_model.dtype,
        ),
        served=reports,
        limits=LimitStatus(
            max_waiting_requests=config.max_waiting_requests,
            max_adapter_bytes=config.max_adapter_bytes,
            max_chunk_bytes=MAX_CHUNK_BYTES,
        ),
        fleet=fleet,
        registry=registry,
        weights=weights,
        audit=audit,
    )


def _open(make: Callable[[AccessSettings, FileWatcher], T], config: ServerConfig, watcher: FileWatcher) -> T:
    """A part that the settings of access describe. Raises ConfigError."""
    try:
        return make(config.access, watcher)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _transport(config: ServerConfig, watcher: FileWatcher) -> Transport:
    """Raises ConfigError."""
    return _open(partial(open_transport, has_scaler=config.scaler_listen is not None), config, watcher)


async def _authenticator(config: ServerConfig, watcher: FileWatcher, stack: contextlib.AsyncExitStack) -> Authenticator:
    """What the operator has set up for clients to prove who they are. Raises ConfigError."""
    try:
        return await open_authenticator(config.access, watcher, stack)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _make_ports(
    config: ServerConfig,
    max_connections: int,
    authenticator: Authenticator,
    transport: Transport,
    metrics: ControlPlaneMetrics,
    audit: AuditLog,
    stack: contextlib.AsyncExitStack,
) -> tuple[ClientPort, RpcServer]:
    """The server of the clients' port and that of the workers' port, neither listening yet."""
    on_refused = metrics.counting(audit.refused)
    clients = client_port(
        config,
        max_connections=max_connections,
        max_concurrent_rpcs=config.max_concurrent_rpcs,
        # A response is written in a moment where the client reads; that moment it gets in any case.
        write_timeout_s=max(config.slow_reader_timeout_s, 1.0),
        identify=Callers(authenticator),
        guard=transport.client_guard,
        on_refused=on_refused,
    )
    stack.push_async_callback(clients.stop, CLOSE_GRACE_S)
    workers = listeners.worker_server(guard=transport.worker_guard, on_refused=on_refused)
    stack.push_async_callback(workers.stop, CLOSE_GRACE_S)
    return clients, workers


def _open_audit_log(config: ServerConfig, stack: contextlib.AsyncExitStack) -> AuditLog:
    """The audit log with the line of this start; the line of its end comes last. Raises ConfigError."""
    try:
        audit = open_audit_log(config.access, settings=config.describe())
    except ValueError as error:
        raise ConfigError(str(error)) from error
    stack.push_async_callback(audit.close)
    if config.access.audit_log != "-":
        audit.start()
    return audit


def _lock_data_dir(directory: Path, stack: contextlib.AsyncExitStack) -> None:
    """Before anything in it is touched: another server may be running on it. Raises ConfigError."""
    lock = DirectoryLock(directory, "server.lock")
    try:
        lock.acquire()
    except DirectoryInUse as error:
        raise ConfigError(f"--data-dir: {error}") from error
    except OSError as error:
        raise ConfigError(
            f"--data-dir: {directory} cannot be made or locked: {error.strerror}; give a directory that this "
            "user may write"
        ) from error
    stack.callback(lock.release)


async def _open_reports(config: ServerConfig, base_model: BaseModel, stack: contextlib.AsyncExitStack) -> WorkerReports:
    file = config.data_dir / "workers" / f"{base_model.fingerprint}-{base_model.dtype}.json"
    reports = await asyncio.to_thread(WorkerReports, file, limit=base_model.max_model_len)
    stack.push_async_callback(reports.close)
    return reports


async def _restore(life_cycle: AdapterLifeCycle) -> None:
    """Pin what the registry says is pinned. Runs after a start, beside serving."""
    try:
        await life_cycle.restore_pins()
    except Exception:
        logger.exception("pins were not restored")
