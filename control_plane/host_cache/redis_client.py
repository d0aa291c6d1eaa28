"""Connections to Redis, and what the user of workers is permitted.

Blocks; use threads. Of the control plane this file, redis_cache.py and setup/examination.py import redis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import NoPermissionError
from redis.retry import Retry

from contract.cache_keys import PREFIX
from contract.redaction import redacted
from contract.redis_access import RedisAccess

MARKER_KEY = "motet:cache:marker"  # gone when somebody emptied or restarted Redis


def check_access(access: RedisAccess) -> None:
    """Raise ValueError, without the URL's password, if redis-py cannot make a connection of this URL.

    Options of the URL are checked by `find_url_mistake`, on both sides.
    """
    try:
        make_client(access, 1.0).connection_pool.make_connection()
    except redis.RedisError as error:
        raise ValueError(redacted(str(error))) from error


def make_client(access: RedisAccess, call_timeout_s: float, *, max_connections: int | None = None) -> Any:
    """A client that tries nothing twice and waits for no call longer than its timeout."""
    return redis.Redis.from_url(
        **access.options(),
        socket_timeout=call_timeout_s / 2,
        socket_connect_timeout=call_timeout_s / 2,
        retry=Retry(NoBackoff(), 0),
        max_connections=max_connections,
    )


def find_wrong_permission(access: RedisAccess, timeout_s: float) -> str | None:
    """What the user of workers may do and should not, or may not do and needs; None if all is well, or unknown.

    Tries it out, since a user that only reads may not read its permissions. Writes no key: there is none to replace.
    """
    client = make_client(access, timeout_s)
    try:
        try:
            client.get(f"{PREFIX}permissions:manifest")
        except NoPermissionError:
            return f"the workers' Redis user may not read {PREFIX}*, so that all adapters come through this process"
        if _is_permitted(lambda: client.set(f"{PREFIX}permissions:manifest", b"", xx=True)):
            return f"the workers' Redis user may write {PREFIX}*, and needs to read it only"
        if _is_permitted(lambda: client.get(MARKER_KEY)):
            return f"the workers' Redis user may read other keys than {PREFIX}*, and needs none of them"
    except redis.RedisError:
        return None
    finally:
        client.close()
    return None


def _is_permitted(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except (NoPermissionError, redis.ReadOnlyError):
        return False
    return True
