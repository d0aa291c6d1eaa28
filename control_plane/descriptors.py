"""The process's limit of open files: raised at the start as far as the connections need it, refused where it cannot be.

Without room for it, accepting clients, Redis and the store would all fail together at the moment of most load.
"""

from __future__ import annotations

import logging
import resource
from dataclasses import dataclass

from control_plane.api.rpc.listeners import WORKER_CONNECTIONS
from control_plane.config import DEFAULT_MAX_CONNECTIONS, ConfigError

logger = logging.getLogger(__name__)

# Kept for everything but connections: store, Redis, uploads, pipes to child processes.
OTHER_FILES = 256
LEAST_CONNECTIONS = 64


@dataclass(frozen=True, slots=True)
class Room:
    """What the limit of open files is set to, and how many connections of clients it then has room for."""

    num_files: int
    max_connections: int


def plan(max_connections: int | None, *, soft: int, hard: int) -> Room:
    """The room under the limits `soft` and `hard` of open files. `max_connections` None takes what fits.

    Raises ConfigError where the hard limit is too low.
    """
    reserved = WORKER_CONNECTIONS + OTHER_FILES
    least = max_connections or LEAST_CONNECTIONS
    highest = _number(hard)
    if highest < reserved + least:
        or_lower = " or lower --max-connections" if max_connections is not None else ""
        raise ConfigError(
            f"--max-connections: {least} connections of clients need a limit of {reserved + least} open files, "
            f"{reserved} of them for workers, Redis and the store; this process may have {highest}: raise its limit "
            f"(ulimit -Hn, LimitNOFILE=, --ulimit nofile=){or_lower}"
        )
    wanted = max_connections or DEFAULT_MAX_CONNECTIONS
    num_files = max(min(reserved + wanted, highest), _number(soft))
    return Room(num_files, min(wanted, num_files - reserved))


def make_room(max_connections: int | None) -> int:
    """Raise this process's limit of open files as far as needed; the connections of clients to allow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = plan(max_connections, soft=soft, hard=hard)
    if room.num_files > _number(soft):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (room.num_files, hard))
        except (OSError, ValueError):  # macOS refuses more than kern.maxfilesperproc, whatever the hard limit says
            room = plan(max_connections, soft=soft, hard=soft)
    if max_connections is None and room.max_connections < DEFAULT_MAX_CONNECTIONS:
        logger.warning(
            "limit of open files is low open_files=%d max_connections=%d", room.num_files, room.max_connections
        )
    logger.debug("open_files=%d max_connections=%d", room.num_files, room.max_connections)
    return room.max_connections


def _number(limit: int) -> int:
    """A limit as a number of files; no limit is more than anybody needs."""
    return 2**31 if limit == resource.RLIM_INFINITY else limit
