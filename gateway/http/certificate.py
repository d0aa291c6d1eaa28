"""The certificate of the HTTP port. It is read again when its files change, and new connections get the new one."""

from __future__ import annotations

import asyncio
import errno
import logging
import ssl
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

logger = logging.getLogger(__name__)

INTERVAL_S = 5.0  # between two looks at the files
Signature = tuple[tuple[int, int, int], ...]


class Certificate:
    """Certificate and key as a context of TLS. What cannot be used leaves the former one in place, and is logged."""

    def __init__(self, cert: Path, key: Path) -> None:
        """Raises OSError, of which ssl.SSLError is one."""
        self._cert = cert
        self._key = key
        self._seen = self._signature()
        self._context = _load(cert, key)
        self._failed: tuple[Signature | None, str] | None = None  # the failure that was logged last

    @property
    def context(self) -> ssl.SSLContext:
        """For a connection that begins now."""
        return self._context

    def look(self) -> None:
        """Read the files if they changed. Blocks as long as their file system does."""
        signature = None
        try:
            signature = self._signature()
            if signature == self._seen:
                return
            context = _load(self._cert, self._key)
        except OSError as error:  # half-written, most likely: the next look comes soon
            reason = str(getattr(error, "reason", None) or error.strerror)
            if self._failed != (signature, reason):
                self._failed = signature, reason
                logger.warning("certificate not read again, the former one stays file=%s reason=%s", self._cert, reason)
            return
        self._context, self._seen, self._failed = context, signature, None
        logger.info("certificate read again file=%s", self._cert)

    async def watch(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Look, for ever."""
        while True:
            await sleep(INTERVAL_S)
            await asyncio.to_thread(self.look)

    def _signature(self) -> Signature:
        stats = [path.stat() for path in (self._cert, self._key)]
        if not all(stat.S_ISREG(found.st_mode) for found in stats):
            raise OSError(errno.EINVAL, "not a regular file")  # reading a named pipe would wait for its writer
        return tuple((found.st_mtime_ns, found.st_size, found.st_ino) for found in stats)


def _load(cert: Path, key: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key, password=_no_password)
    context.set_alpn_protocols(["http/1.1"])
    return context


def _no_password() -> str:
    """For an encrypted key, about which OpenSSL would ask the terminal and wait. Such a key cannot be used."""
    return ""
