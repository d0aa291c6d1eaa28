"""The connection to Motet: one channel for all requests, each with its own key."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from motet import AsyncClient, MotetError, RetryPolicy, Unauthenticated, Unavailable

from gateway.http.keys import current_key, current_owner
from gateway.http.settings import HttpSettings

JUDGED_S = 600.0  # so long a key that Motet accepted is one whose bodies are read
PROBE_S = 2.0  # in which the server responds to a probe
MAX_JUDGED = 4096  # keys; the oldest are judged again


class Upstream:
    """Motet as the handlers of requests see it. Make it inside the loop, and close it."""

    def __init__(self, settings: HttpSettings, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises InvalidArgument if keys would be sent in plaintext to another machine."""
        self._clock = clock
        self._judged: dict[str, float] = {}  # owner -> when Motet accepted its key, oldest first
        absence_s = settings.server_absence_s
        arguments: dict[str, Any] = {
            "tls_ca": settings.server_tls_ca,
            "tls_cert": settings.server_tls_cert,
            "tls_key": settings.server_tls_key,
            "retry": RetryPolicy(max_absence_s=absence_s, connect_timeout_s=absence_s),
            "timeout_s": absence_s + 10.0,
        }
        self._with_key = AsyncClient(
            settings.server, api_key=current_key, allow_plaintext_key=settings.insecure, **arguments
        )
        self._without_key = AsyncClient(settings.server, api_key="", **arguments)
        # To Motet a call without a key is one of whoever the certificate names.
        self._needs_key = settings.server_tls_cert is not None and not settings.allow_keyless

    @property
    def client(self) -> AsyncClient:
        """Sends the key of the request that this task handles. Raises Unauthenticated where one is missing."""
        if current_key():
            return self._with_key
        if self._needs_key:
            raise Unauthenticated("authorization: is missing; send 'Authorization: Bearer KEY'")
        return self._without_key

    async def check_key(self) -> None:
        """Raise what Motet refuses the current key with, so that nothing is kept for a caller that it does not know.

        Every call to Motet is judged there anew, whatever this found.
        """
        owner, now_s = current_owner(), self._clock()
        judged_s = self._judged.get(owner)
        if judged_s is not None and now_s - judged_s < JUDGED_S:
            return
        await self.client.status()
        self._judged.pop(owner, None)
        self._judged[owner] = now_s
        if len(self._judged) > MAX_JUDGED:
            del self._judged[next(iter(self._judged))]

    async def is_reachable(self) -> bool:
        """Whether Motet responds within PROBE_S, be it with a refusal."""
        try:
            async with asyncio.timeout(PROBE_S):
                await self._without_key.status()
        except (Unavailable, TimeoutError):
            return False
        except MotetError:
            return True
        return True

    async def close(self) -> None:
        """End every call and the connections."""
        await self._with_key.close()
        await self._without_key.close()
