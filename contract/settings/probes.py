"""What the examinations of several parts look at in the same way: ports, connections, folders, ends of certificates."""

from __future__ import annotations

import errno
import secrets
import shutil
import socket
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from contract.settings.findings import Finding, State

CONNECT_TIMEOUT_S = 5.0
EXPIRES_SOON_S = 14 * 86400.0
LITTLE_ROOM_BYTES = 1 << 30  # of a disk that grows with adapters, uploads or lines of an audit log


def examine_port(flag: str, address: str) -> Finding:
    """Whether a server could listen there now."""
    host, port = _split(address)
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        advice = "give another address, or end the process that has it (a server that runs already has its own ports)"
        return Finding(f"{flag} {address}", State.WARNING, str(error.strerror or error), advice)
    return Finding(f"{flag} {address}", State.OK, "free")


def examine_connection(what: str, address: str, advice: str) -> Finding:
    """Whether something accepts connections there; where nothing does, `advice` says what to do."""
    try:
        socket.create_connection(_split(address), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return Finding(what, State.WARNING, str(error.strerror or error), advice)
    return Finding(what, State.OK, "its port is open")


def examine_folder(
    what: str,
    folder: Path,
    advice: str,
    free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
) -> Finding:
    """Whether a file can be written there, and whether its disk has room. Nothing stays.

    A folder that is not there is not made: its nearest parent stands for it. `advice`: what to do where nothing can be
    written, unless the disk is full.
    """
    while not folder.exists():
        folder = folder.parent
    file = folder / f".motet-doctor-{secrets.token_hex(8)}"
    try:
        try:
            file.write_bytes(b"motet doctor")
        finally:
            file.unlink(missing_ok=True)
        num_free = free_bytes(folder)
    except OSError as error:
        return Finding(what, State.WRONG, str(error.strerror or error), advice_about(error, advice))
    detail = f"a file is written and removed, {num_free / 2**30:.1f} GiB are free"
    if num_free < LITTLE_ROOM_BYTES:
        return Finding(what, State.WARNING, detail, "free space on its disk, or use a larger one")
    return Finding(what, State.OK, detail)


def advice_about(error: Exception, advice: str) -> str:
    """`advice`, unless the error is that a disk is full."""
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "free space on its disk, or use a larger one" if is_full else advice


def examine_validity(what: str, file: object, not_after_s: float, now_s: float) -> Finding:
    """How long the certificate in `file` is valid; both times are wall clock."""
    detail = f"{file}: valid until {datetime.fromtimestamp(not_after_s, UTC):%Y-%m-%d %H:%M} UTC"
    if not_after_s <= now_s:
        return Finding(what, State.WRONG, detail, "renew it: it has expired; running servers read it without a restart")
    if not_after_s - now_s < EXPIRES_SOON_S:
        return Finding(what, State.WARNING, detail, "renew it soon")
    return Finding(what, State.OK, detail)


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
