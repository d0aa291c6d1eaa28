"""Which limit an RPC counts against: one for the work, and small ones of their own for what watches and what probes.

Whoever fills one limit takes nothing from the others, so that status and health work while clients hold every place
for work, and idle watches take no place from requests. With authentication, callers without a credential have
small limits of their own for all of them together: they take no place from callers that the server knows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from google.longrunning import operations_pb2
from grpc_health.v1 import health_pb2
from motet.v1 import residency_pb2, status_pb2

from control_plane.access.principal import Principal
from control_plane.api.rpc.reflection import SERVICE_NAMES as REFLECTION_NAMES
from control_plane.api.rpc.shared_limit import SharedLimit
from control_plane.api.rpc.shared_queue import Holder, SharedQueue

# Counts. A probe is answered at once; the others last as long as the client wants, and each costs one task.
MAX_PROBES = 256
MAX_HEALTH_WATCHES = 1024  # a client that checks health on its own holds one for each connection
MAX_OPERATION_WAITS = 256
MAX_REFLECTIONS = 32
MAX_ADAPTER_WATCHES = 64
MAX_ADAPTER_MOVES = 64  # loads and unloads of adapters that clients wait for
# Requests whose message is being read. gRPC holds up to three times the size of a message that has not arrived whole,
# and a client may send it as slowly as the time limit of a request allows: 128 of the largest size took 0.6 GB.
MAX_ARRIVING = 128
MAX_PROBES_ARRIVING = 32  # of everything but work, in a queue of its own
# Of the messages of all requests that run or wait: a message is in memory for as long as its RPC. Messages of up to
# SMALL_REQUEST_BYTES do not count: with the default limit of requests they are 64 MB.
MAX_REQUESTS_BYTES = 2**30
SMALL_REQUEST_BYTES = 2**14
# Of callers without a credential. Probes and watches apart: a probe of a load balancer must not wait for watches.
MAX_STRANGERS_PROBES = 64
MAX_STRANGERS_WATCHES = 128

_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_WATCH = f"/{_HEALTH}/Watch"
_STATUS = status_pb2.DESCRIPTOR.services_by_name["StatusService"].full_name
_RESIDENCY = residency_pb2.DESCRIPTOR.services_by_name["AdapterResidencyService"].full_name
_OPERATIONS = operations_pb2.DESCRIPTOR.services_by_name["Operations"].full_name


class RpcLimits:
    """The limits of one port."""

    def __init__(self, max_concurrent_rpcs: int) -> None:
        self._arriving = SharedQueue(SharedLimit(MAX_ARRIVING, "requests that are read"))
        self._probes_arriving = SharedQueue(SharedLimit(MAX_PROBES_ARRIVING, "requests that are read"))
        self._content = SharedLimit(MAX_REQUESTS_BYTES, "bytes of requests")
        self._work = SharedLimit(max_concurrent_rpcs, "requests")
        probes = SharedLimit(MAX_PROBES, "status and health requests")
        watches = SharedLimit(MAX_HEALTH_WATCHES, "health watches", retry_after_s=10.0)
        moves = SharedLimit(MAX_ADAPTER_MOVES, "loads and unloads of adapters")
        reflections = SharedLimit(MAX_REFLECTIONS, "reflection streams", retry_after_s=10.0)
        self._by_method: Mapping[str, SharedLimit] = {
            f"/{_STATUS}/GetStatus": probes,
            f"/{_HEALTH}/Check": probes,
            f"/{_HEALTH}/List": probes,
            _WATCH: watches,
            **dict.fromkeys((f"/{_RESIDENCY}/LoadAdapter", f"/{_RESIDENCY}/UnloadAdapter"), moves),
            f"/{_RESIDENCY}/WatchAdapters": SharedLimit(MAX_ADAPTER_WATCHES, "adapter watches", retry_after_s=10.0),
            f"/{_OPERATIONS}/WaitOperation": SharedLimit(MAX_OPERATION_WAITS, "waits for operations"),
            **{f"/{name}/ServerReflectionInfo": reflections for name in REFLECTION_NAMES},
        }
        self._strangers_probes = SharedLimit(MAX_STRANGERS_PROBES, "health requests without a credential")
        self._strangers_watches = SharedLimit(
            MAX_STRANGERS_WATCHES, "health watches without a credential", retry_after_s=10.0
        )

    def of(self, method: str, principal: Principal) -> SharedLimit:
        """The limit that the RPC `method`, "/package.Service/Method", of this principal counts against."""
        if principal.is_stranger:
            return self._strangers_watches if method == _WATCH else self._strangers_probes
        return self._by_method.get(method, self._work)

    def arriving(self, method: str) -> SharedQueue:
        """Who reads the message of a request next, for this RPC."""
        return self._probes_arriving if method in self._by_method else self._arriving

    def content(self, holder: Holder, num_bytes: int) -> contextlib.AbstractContextManager[None]:
        """Hold the bytes of a request's message while the block runs. Raises Exhausted."""
        if num_bytes <= SMALL_REQUEST_BYTES:
            return contextlib.nullcontext()
        return self._content.place(holder, num_bytes)
