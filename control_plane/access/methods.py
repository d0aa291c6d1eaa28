"""The one table from a method to what its callers need. A method that is not in the table is refused.

A test walks the descriptors of every service of both ports and fails for a method without an entry.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

# googleapis-common-protos ships no py.typed marker.
from google.longrunning import operations_pb2
from grpc_health.v1 import health_pb2
from motet.v1 import (
    adapters_pb2,
    fleet_pb2,
    generation_pb2,
    model_pb2,
    pooling_pb2,
    push_pb2,
    residency_pb2,
    status_pb2,
    verify_pb2,
)

from contract.v1 import plan_pb2
from control_plane.access.principal import Principal, Role
from control_plane.errors import PermissionDenied


class Anyone(enum.Enum):
    """Who may call a method that needs no role."""

    KNOWN = "known"  # every principal; the handler itself shows each principal what concerns it
    UNKNOWN = "unknown"  # also clients without a credential: probes of a load balancer have none
    WORKER = "worker"  # the worker port proves who calls by its own certificate, not by a role
    SCALER = "scaler"  # so does the port of the autoscaler


Requirement = Role | Anyone

REFLECTION_SERVICES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")


def _of(file: object, service: str, requirements: Mapping[str, Requirement]) -> dict[str, Requirement]:
    full_name = file.DESCRIPTOR.services_by_name[service].full_name  # type: ignore[attr-defined]
    return {f"/{full_name}/{method}": requirement for method, requirement in requirements.items()}


REQUIREMENTS: Mapping[str, Requirement] = {
    **_of(model_pb2, "ModelService", {"GetModel": Role.INFER, "Tokenize": Role.INFER, "Detokenize": Role.INFER}),
    **_of(pooling_pb2, "PoolingService", {"Embed": Role.INFER, "Classify": Role.INFER}),
    **_of(generation_pb2, "GenerationService", {"Generate": Role.INFER, "GenerateWithTask": Role.ADAPTERS_WRITE}),
    **_of(
        adapters_pb2,
        "AdapterService",
        {
            "UploadAdapter": Role.ADAPTERS_WRITE,
            "GetUpload": Role.ADAPTERS_WRITE,
            # It reads files of the server that the operator chose, and not the caller's.
            "CreateAdapter": Role.ADMIN,
            "GetAdapter": Role.ADAPTERS_READ,
            "ListAdapters": Role.ADAPTERS_READ,
            "UpdateAdapter": Role.ADAPTERS_WRITE,
            "ListAdapterVersions": Role.ADAPTERS_READ,
            "ActivateAdapterVersion": Role.ADAPTERS_WRITE,
            "RollbackAdapter": Role.ADAPTERS_WRITE,
            "PinAdapter": Role.ADAPTERS_WRITE,
            "UnpinAdapter": Role.ADAPTERS_WRITE,
            "DeleteAdapter": Role.ADAPTERS_WRITE,
            "DeleteAdapterVersion": Role.ADAPTERS_WRITE,
        },
    ),
    **_of(push_pb2, "PushService", {"PushVersion": Role.ADAPTERS_WRITE}),
    # It costs a process with the whole model.
    **_of(verify_pb2, "VerificationService", {"VerifyVersion": Role.ADAPTERS_WRITE}),
    **_of(
        residency_pb2,
        "AdapterResidencyService",
        {
            "LoadAdapter": Role.ADAPTERS_WRITE,
            # It takes weights from whoever uses them next.
            "UnloadAdapter": Role.ADMIN,
            "WatchAdapters": Role.ADAPTERS_READ,
        },
    ),
    **_of(fleet_pb2, "FleetService", {"DrainWorker": Role.ADMIN, "UndrainWorker": Role.ADMIN}),
    **_of(status_pb2, "StatusService", {"GetStatus": Anyone.KNOWN}),
    **_of(
        operations_pb2,
        "Operations",
        {
            "GetOperation": Role.ADAPTERS_READ,
            "ListOperations": Role.ADAPTERS_READ,
            "WaitOperation": Role.ADAPTERS_READ,
            "CancelOperation": Role.ADAPTERS_WRITE,
            "DeleteOperation": Role.ADAPTERS_WRITE,
        },
    ),
    **_of(health_pb2, "Health", {"Check": Anyone.UNKNOWN, "Watch": Anyone.UNKNOWN, "List": Anyone.UNKNOWN}),
    **{f"/{service}/ServerReflectionInfo": Role.ADMIN for service in REFLECTION_SERVICES},
    **_of(plan_pb2, "WorkerService", {"Attach": Anyone.WORKER, "FetchAdapter": Anyone.WORKER}),
    # KEDA's, which scaler/ serves; access knows no stubs of another part.
    **{
        f"/externalscaler.ExternalScaler/{method}": Anyone.SCALER
        for method in ("IsActive", "StreamIsActive", "GetMetricSpec", "GetMetrics")
    },
}

# Roles that a method needs beside the one in REQUIREMENTS.
ALSO_NEEDED: Mapping[str, Role] = {"/motet.v1.GenerationService/GenerateWithTask": Role.INFER}


def is_open(method: str) -> bool:
    """Whether clients without a credential may call `method`, "/package.Service/Method"."""
    return REQUIREMENTS.get(method) in (Anyone.UNKNOWN, Anyone.WORKER, Anyone.SCALER)


def require_allowed(method: str, principal: Principal) -> None:
    """Raise PermissionDenied unless the principal may call `method`, "/package.Service/Method"."""
    requirement = REQUIREMENTS.get(method)
    if requirement is None:
        raise PermissionDenied(f"no role is allowed to call {method}")
    for role in (requirement, ALSO_NEEDED.get(method)):
        if isinstance(role, Role) and role not in principal.roles:
            raise PermissionDenied(
                f"{method.rpartition('/')[2]} needs the role {role.value!r}, which this credential does not have; "
                "use one that has it, or ask the operator of the server"
            )
