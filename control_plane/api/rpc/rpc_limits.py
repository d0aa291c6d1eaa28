"""Which limit an RPC counts against: one for the work, and small ones of their own for what watches and what probes.

Whoever fills one limit takes nothing from the others, so that status and health work while clients hold every place
for work, and idle watches take no place from requests.
"""

from __future__ import annotations

from collections.abc import Mapping

from google.longrunning import operations_pb2
from grpc_health.v1 import health_pb2
from motet.v1 import status_pb2

from control_plane.api.rpc.reflection import SERVICE_NAMES as REFLECTION_NAMES
from control_plane.api.rpc.shared_limit import SharedLimit

# Counts. A probe is answered at once; the others last as long as the client wants, and each costs one task.
MAX_PROBES = 256
MAX_HEALTH_WATCHES = 1024  # a client that checks health on its own holds one for each connection
MAX_OPERATION_WAITS = 256
MAX_REFLECTIONS = 32

_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_STATUS = status_pb2.DESCRIPTOR.services_by_name["StatusService"].full_name
_OPERATIONS = operations_pb2.DESCRIPTOR.services_by_name["Operations"].full_name


class RpcLimits:
    """The limits of one port."""

    def __init__(self, max_concurrent_rpcs: int) -> None:
        self._work = SharedLimit(max_concurrent_rpcs, "requests")
        probes = SharedLimit(MAX_PROBES, "status and health requests")
        reflections = SharedLimit(MAX_REFLECTIONS, "reflection streams", retry_after_s=10.0)
        self._by_method: Mapping[str, SharedLimit] = {
            f"/{_STATUS}/GetStatus": probes,
            f"/{_HEALTH}/Check": probes,
            f"/{_HEALTH}/Watch": SharedLimit(MAX_HEALTH_WATCHES, "health watches", retry_after_s=10.0),
            f"/{_OPERATIONS}/WaitOperation": SharedLimit(MAX_OPERATION_WAITS, "waits for operations"),
            **{f"/{name}/ServerReflectionInfo": reflections for name in REFLECTION_NAMES},
        }

    def of(self, method: str) -> SharedLimit:
        """The limit that the RPC `method`, "/package.Service/Method", counts against."""
        return self._by_method.get(method, self._work)
