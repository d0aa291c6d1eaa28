"""The line with which a server process says on standard output that it is ready, and how its parent reads it."""

from __future__ import annotations

import re

CONTROL_PLANE_READY = re.compile(r"motet control-plane ready clients=(?P<clients>\S+) workers=(?P<workers>\S+)")
WORKER_READY = re.compile(r"motet worker ready worker_id=(?P<worker_id>\S+) epoch=(?P<epoch>\d+)")
GATEWAY_READY = re.compile(r"motet gateway ready listen=(?P<listen>\S+)")


def control_plane_ready(clients: str, workers: str) -> str:
    """What CONTROL_PLANE_READY matches. Both are HOST:PORT, of the port for clients and of the one for workers."""
    return f"motet control-plane ready clients={clients} workers={workers}"


def worker_ready(worker_id: str, epoch: int) -> str:
    """What WORKER_READY matches. `epoch` is the number of the worker's session, unique over all workers."""
    return f"motet worker ready worker_id={worker_id} epoch={epoch}"


def gateway_ready(listen: str) -> str:
    """What GATEWAY_READY matches: HOST:PORT of the HTTP port."""
    return f"motet gateway ready listen={listen}"
