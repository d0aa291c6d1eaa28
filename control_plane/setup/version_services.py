"""Builds the services that take versions from training runs and verify versions; called by server.py."""

from __future__ import annotations

from collections.abc import Callable

import grpc.aio
from motet.v1 import push_pb2_grpc, verify_pb2_grpc

from control_plane.adapters.life_cycle import AdapterLifeCycle
from control_plane.adapters.operations import OperationStore
from control_plane.adapters.pushes import Pushes
from control_plane.adapters.reference_process import ReferenceProcess
from control_plane.adapters.verifier import Verifier
from control_plane.api.admin.push import PushService
from control_plane.api.admin.upload import UploadReceiver
from control_plane.api.admin.verification import VerificationService
from control_plane.api.gate import ShutdownGate
from control_plane.audit.audit_log import AuditLog
from control_plane.config import ServerConfig
from control_plane.fleet.fleet import Fleet
from control_plane.host_cache.weights import AdapterWeights
from control_plane.registry.model.base_model import BaseModel
from control_plane.registry.registry import Registry


def push_part(
    config: ServerConfig,
    base_model: BaseModel,
    registry: Registry,
    life_cycle: AdapterLifeCycle,
    weights: AdapterWeights,
    fleet: Fleet,
    gate: ShutdownGate,
    uploads: UploadReceiver,
    audit: AuditLog,
) -> tuple[Callable[[PushService, grpc.aio.Server], None], PushService]:
    """The service, and the function that adds it to a server."""
    service = PushService(
        pushes=Pushes(base_model=base_model, registry=registry, life_cycle=life_cycle, weights=weights, fleet=fleet),
        gate=gate,
        uploads=uploads,
        max_adapter_bytes=config.max_adapter_bytes,
        audit=audit,
    )
    return push_pb2_grpc.add_PushServiceServicer_to_server, service


def verification_part(
    config: ServerConfig,
    base_model: BaseModel,
    registry: Registry,
    life_cycle: AdapterLifeCycle,
    weights: AdapterWeights,
    fleet: Fleet,
    operations: OperationStore,
    gate: ShutdownGate,
    audit: AuditLog,
) -> tuple[Callable[[VerificationService, grpc.aio.Server], None], VerificationService]:
    """The service, and the function that adds it to a server."""
    reference = ReferenceProcess(config.model_dir, config.data_dir / "verifications", weights, base_model.quantization)
    reference.remove_leftovers()
    verifier = Verifier(
        reference=reference,
        base_model=base_model,
        registry=registry,
        activate=life_cycle.activate,
        fleet=fleet,
        operations=operations,
        audit=audit,
    )
    service = VerificationService(verifier, gate)
    return verify_pb2_grpc.add_VerificationServiceServicer_to_server, service
