"""The clients' port as the settings say: in this process, or in front ends."""

from __future__ import annotations

from typing import Any, TypeAlias

import grpc

from control_plane.api.rpc import listeners
from control_plane.api.rpc.rpc_server import RpcServer
from control_plane.config import ServerConfig
from control_plane.frontends.port import FrontendPort
from control_plane.frontends.setup import FrontendSetup

REUSE_PORT = "grpc.so_reuseport"
ClientPort: TypeAlias = RpcServer | FrontendPort


def client_port(
    config: ServerConfig, *, max_connections: int, write_timeout_s: float, **interceptor: Any
) -> ClientPort:
    """The port, not yet listening. `interceptor`: further arguments of listeners.client_interceptor."""
    num_frontends = config.frontends
    connection: dict[str, Any] = {
        "max_streams_per_connection": config.max_streams_per_connection,
        "adaptive_windows": config.adaptive_windows,
    }
    interceptor["write_timeout_s"] = write_timeout_s
    if not num_frontends:
        return listeners.client_server(max_connections=max_connections, **connection, **interceptor)
    # Connections come to the front ends by chance; each takes its part, so that all together take no more.
    part = max(max_connections // num_frontends, 1)
    options = listeners.client_options(max_connections=part, **connection)
    access = config.access
    setup = FrontendSetup(
        options=(*((name, value) for name, value in options if name != REUSE_PORT), (REUSE_PORT, 1)),
        max_connections=part,
        write_timeout_s=write_timeout_s,
        tls_cert=None if access.tls_cert is None else str(access.tls_cert.absolute()),
        tls_key=None if access.tls_key is None else str(access.tls_key.absolute()),
        tls_client_ca=None if access.tls_client_ca is None else str(access.tls_client_ca.absolute()),
        log_level=config.log_level,
        log_format=config.log_format,
    )
    return FrontendPort(listeners.client_interceptor(**interceptor), num_frontends, setup)


def bind_clients(port: ClientPort, address: str, credentials: grpc.ServerCredentials | None) -> str:
    """Take the address; HOST:PORT with the port that was taken. Raises OSError."""
    if isinstance(port, FrontendPort):
        return port.bind(address)
    return listeners.bind(port, address, credentials)
