"""The port that KEDA's operator calls: one of its own, since KEDA sends no key and proves itself by a certificate."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

from control_plane.access.transport import Transport
from control_plane.api.rpc import listeners
from control_plane.api.rpc.interceptor import OnRefused
from control_plane.fleet.workload import FleetWorkload
from control_plane.scaler.service import ScalerService
from control_plane.scaler.v1.externalscaler_pb2_grpc import add_ExternalScalerServicer_to_server

logger = logging.getLogger(__name__)

CLOSE_GRACE_S = 0.5


async def open_port(
    address: str | None,
    transport: Transport,
    workload: FleetWorkload,
    is_model_known: Callable[[], bool],
    on_refused: OnRefused,
    stack: contextlib.AsyncExitStack,
) -> None:
    """Serve the scaler at HOST:PORT until `stack` ends; None: nowhere. Raises OSError."""
    if address is None:
        return
    server = listeners.scaler_server(guard=transport.scaler_guard, on_refused=on_refused)
    stack.push_async_callback(server.stop, CLOSE_GRACE_S)
    add_to: Any = add_ExternalScalerServicer_to_server  # the stub is untyped
    add_to(ScalerService(workload, is_model_known), server)
    bound = listeners.bind(server, address, transport.scaler_credentials, flags="--scaler-listen")
    await server.start()
    logger.info("scaler listens address=%s", bound)
