"""Makes the two gRPC servers with the settings that keep one client from harming the others.

The reasons are measurements: without a bound on streams one connection's rapid resets disable the server, and the
option that allows clients to ping is min_ping_interval_without_data_ms (the often-seen min_recv_ping_... does not
exist and is ignored).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc.aio

from control_plane.api.interceptor import ErrorInterceptor

CLIENT_MESSAGE_BYTES = 2**20 + 64 * 1024  # one upload chunk and its frame
WORKER_MESSAGE_BYTES = 64 * 2**20  # a plan with many long prompts
METADATA_BYTES = 8192
WORKER_CONCURRENT_RPCS = 1024

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
        ("grpc.so_reuseport", 0),
    ]


def client_server(
    *, max_streams_per_connection: int, max_concurrent_rpcs: int, write_timeout_s: float
) -> grpc.aio.Server:
    """A server for the clients' port."""
    options = [
        *common_options(),
        ("grpc.max_concurrent_streams", max_streams_per_connection),
        ("grpc.max_receive_message_length", CLIENT_MESSAGE_BYTES),
    ]
    return _server(options, max_concurrent_rpcs, ErrorInterceptor(write_timeout_s=write_timeout_s))


def worker_server() -> grpc.aio.Server:
    """A server for the workers' port."""
    options = [
        *common_options(),
        ("grpc.max_concurrent_streams", 100),
        ("grpc.max_receive_message_length", WORKER_MESSAGE_BYTES),
        ("grpc.max_send_message_length", WORKER_MESSAGE_BYTES),
    ]
    return _server(options, WORKER_CONCURRENT_RPCS, ErrorInterceptor())


def bind(server: grpc.aio.Server, address: str) -> str:
    """Listen there; HOST:PORT with the port that was taken. Raises OSError where the port is in use."""
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}; is the port in use?") from error
    return f"{address.rpartition(':')[0]}:{port}"


def _server(
    options: Sequence[tuple[str, Any]], max_concurrent_rpcs: int, interceptor: ErrorInterceptor
) -> grpc.aio.Server:
    return grpc.aio.server(interceptors=[interceptor], options=options, maximum_concurrent_rpcs=max_concurrent_rpcs)
