"""Makes the gRPC servers with the settings that keep one client from harming the others.

The reasons are measurements: without a bound on streams one connection's rapid resets disable the server, and the
option that allows clients to ping is min_ping_interval_without_data_ms (the often-seen min_recv_ping_... does not
exist and is ignored). RPCs are counted by the interceptor and not by grpc.aio, whose maximum_concurrent_rpcs refuses
everybody alike, status and health included, without saying when to try again.
"""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Sequence
from typing import Any

import grpc.aio

from control_plane.api.rpc.connection_shares import BusyPeers, ConnectionShares
from control_plane.api.rpc.interceptor import (
    REQUEST_TIMEOUT_S,
    WRITE_TIMEOUT_S,
    Guard,
    Identify,
    OnRefused,
    RpcInterceptor,
)
from control_plane.api.rpc.refusal_pace import RefusalPace
from control_plane.api.rpc.rpc_limits import RpcLimits
from control_plane.api.rpc.rpc_server import RpcServer, rpc_server

CLIENT_MESSAGE_BYTES = 2**20 + 64 * 1024  # one upload chunk and its frame
WORKER_MESSAGE_BYTES = 64 * 2**20  # a plan with many long prompts
METADATA_BYTES = 8192
WORKER_CONCURRENT_RPCS = 1024
WORKER_CONNECTIONS = 512
SCALER_MESSAGE_BYTES = 64 * 1024  # the metadata of a trigger
SCALER_CONCURRENT_RPCS = 64  # each ScaledObject holds a stream, and has a few calls in each polling interval
SCALER_CONNECTIONS = 16
# A connection without an RPC is closed after this time; the client opens another one with its next RPC. Connections
# have no greatest age: a stream may run for as long as its request does.
CONNECTION_IDLE_MS = 5 * 60_000
HANDSHAKE_TIMEOUT_MS = 20_000  # how long a peer may take to speak HTTP/2
# RPCs that have arrived and that the event loop has not taken up. Beyond 1000 gRPC would cancel some of them at random,
# which a client cannot distinguish from its own cancellation; our limits refuse with a reason and a time to try again.
PENDING_RPCS = 20_000

Option = tuple[str, int]


def common_options() -> list[Option]:
    """Settings of both ports: notice dead peers, let peers ping, own the port."""
    return [
        ("grpc.max_metadata_size", METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", 2 * METADATA_BYTES),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_connection_idle_ms", CONNECTION_IDLE_MS),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        ("grpc.server.max_pending_requests", PENDING_RPCS),
        ("grpc.server.max_pending_requests_hard_limit", 2 * PENDING_RPCS),
        # A call that waits for its turn in gRPC longer than this is cancelled without a reason. Calls that wait so long
        # had a machine that stood still: with the default of 30 s they would end when it goes on.
        ("grpc.server_max_unrequested_time_in_server", 3600),
        ("grpc.so_reuseport", 0),
    ]


def client_options(
    *, max_streams_per_connection: int, max_connections: int, adaptive_windows: bool = False
) -> list[Option]:
    """Settings of the clients' port, of one process that listens there.

    `adaptive_windows`: gRPC lets clients send ahead by as much as their connection carries, and then holds whole
    messages of calls that nobody has taken up: 4.3 GB of 4,000 calls with 1 MiB each; with the fixed 64 KiB of a call
    0.5 GB. The price is in uploads over long distances: 32 MB at 50 ms took 0.8 s with and 3.8 s without.
    """
    return [
        *common_options(),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.max_concurrent_streams", max_streams_per_connection),
        ("grpc.max_receive_message_length", CLIENT_MESSAGE_BYTES),
        ("grpc.http2.bdp_probe", int(adaptive_windows)),
    ]


def client_interceptor(
    *,
    max_concurrent_rpcs: int,
    write_timeout_s: float,
    request_timeout_s: float = REQUEST_TIMEOUT_S,
    identify: Identify | None = None,
    guard: Guard | None = None,
    on_refused: OnRefused | None = None,
    rng: random.Random | None = None,
    pace: RefusalPace | None = None,
    busy: BusyPeers | None = None,
) -> RpcInterceptor:
    """What every RPC of the clients' port goes through. The arguments but the first are those of RpcInterceptor."""
    return RpcInterceptor(
        RpcLimits(max_concurrent_rpcs),
        write_timeout_s=write_timeout_s,
        request_timeout_s=request_timeout_s,
        identify=identify,
        guard=guard,
        on_refused=on_refused,
        rng=rng,
        pace=pace,
        busy=busy,
    )


def client_server(
    *, max_streams_per_connection: int, max_connections: int, adaptive_windows: bool = False, **settings: Any
) -> RpcServer:
    """A server for the clients' port. `settings` are those of client_interceptor."""
    options = client_options(
        max_streams_per_connection=max_streams_per_connection,
        max_connections=max_connections,
        adaptive_windows=adaptive_windows,
    )
    connections = ConnectionShares(max_connections)
    interceptor = client_interceptor(busy=connections.busy, **settings)
    return rpc_server(interceptors=[interceptor], options=options, connections=connections)


def worker_server(
    *, write_timeout_s: float = WRITE_TIMEOUT_S, guard: Guard | None = None, on_refused: OnRefused | None = None
) -> RpcServer:
    """A server for the workers' port."""
    options = [
        *common_options(),
        ("grpc.max_allowed_incoming_connections", WORKER_CONNECTIONS),
        ("grpc.max_concurrent_streams", 100),
        ("grpc.max_receive_message_length", WORKER_MESSAGE_BYTES),
        ("grpc.max_send_message_length", WORKER_MESSAGE_BYTES),
    ]
    limits = RpcLimits(WORKER_CONCURRENT_RPCS)
    return _server(options, RpcInterceptor(limits, write_timeout_s=write_timeout_s, guard=guard, on_refused=on_refused))


def scaler_server(*, guard: Guard | None = None, on_refused: OnRefused | None = None) -> RpcServer:
    """A server for the port that an autoscaler calls: few small calls."""
    options = [
        *common_options(),
        ("grpc.max_allowed_incoming_connections", SCALER_CONNECTIONS),
        ("grpc.max_concurrent_streams", SCALER_CONCURRENT_RPCS),
        ("grpc.max_receive_message_length", SCALER_MESSAGE_BYTES),
    ]
    limits = RpcLimits(SCALER_CONCURRENT_RPCS)
    return _server(options, RpcInterceptor(limits, write_timeout_s=WRITE_TIMEOUT_S, guard=guard, on_refused=on_refused))


def bind(
    server: grpc.aio.Server,
    address: str,
    credentials: grpc.ServerCredentials | None = None,
    *,
    flags: str = "--listen or --worker-listen",
) -> str:
    """Listen there, with TLS if there are credentials; HOST:PORT with the port that was taken.

    Raises OSError with the reason and what to do; `flags` name the address.
    """
    try_to_bind(address, flags)
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise cannot_listen(address, "gRPC gives no reason", flags) from error
    return f"{address.rpartition(':')[0]}:{port}"


def try_to_bind(address: str, flags: str = "--listen or --worker-listen") -> None:
    """Raise OSError where no socket can be bound. gRPC would say so in its own log and not tell the reason."""
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise cannot_listen(address, str(error.strerror), flags) from error
    errors = [failure for failure in map(_bind_error, found) if failure is not None]
    in_use = next((failure for failure in errors if failure.errno == errno.EADDRINUSE), None)
    # One of several addresses of a name may be missing, as that of IPv6 where it is turned off; gRPC takes the others.
    if in_use is not None or len(errors) == len(found):
        worst = in_use or errors[0]
        raise cannot_listen(address, str(worst.strerror), flags) from worst


def _bind_error(entry: tuple[Any, ...]) -> OSError | None:
    family, kind, protocol, _, where = entry
    try:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(where)
    except OSError as error:
        return error
    return None


def cannot_listen(address: str, reason: str, flags: str = "--listen or --worker-listen") -> OSError:
    return OSError(
        f"cannot listen on {address}: {reason}; give another address with {flags}, or end what listens there"
    )


def _server(options: Sequence[tuple[str, Any]], interceptor: RpcInterceptor) -> RpcServer:
    return rpc_server(interceptors=[interceptor], options=options)
