"""Makes the host cache that the settings ask for: an embedded Redis, the operator's, or this process's memory."""

from __future__ import annotations

import contextlib
import logging

from motet.command_line import size

from contract.process_log import shown
from contract.redaction import without_password
from contract.redis_access import RedisAccess
from control_plane.config import ConfigError, ServerConfig
from control_plane.host_cache.base import CacheAddress, HostCache
from control_plane.observers.timings import Timings

logger = logging.getLogger(__name__)


async def open_host_cache(config: ServerConfig, timings: Timings, stack: contextlib.AsyncExitStack) -> HostCache:
    """The cache, which `stack` closes. Raises ConfigError."""
    # Imported here: a machine without redis-py serves with --host-cache memory.
    if config.host_cache == "memory":
        from control_plane.host_cache.memory_cache import MemoryHostCache

        _log_host_cache("memory", "this process's memory", config.host_cache_bytes)
        return MemoryHostCache(budget_bytes=config.host_cache_bytes)
    try:
        from control_plane.host_cache.embedded import EmbeddedRedis, RedisNotFound, RedisNotStarted
        from control_plane.host_cache.redis_cache import RedisHostCache
        from control_plane.host_cache.redis_client import check_access
    except ModuleNotFoundError as error:
        raise ConfigError(f"--host-cache redis: {error}; install it or take --host-cache memory") from error
    for flag, given in (("--redis-url", config.redis), ("--worker-redis-url", config.worker_redis)):
        try:
            if given is not None:
                check_access(given)
        except ValueError as error:
            raise ConfigError(f"{flag}: {error}") from error
    access, address = config.redis, _address_for_workers(config)
    if access is None:
        try:
            redis = await stack.enter_async_context(EmbeddedRedis(config.data_dir / "redis"))
        except (RedisNotFound, RedisNotStarted) as error:
            raise ConfigError(f"--host-cache redis: {error}") from error
        access = RedisAccess(url=redis.url)
        address = address if address.url else CacheAddress(redis.worker_url)
    where = "embedded Redis" if config.redis is None else f"Redis at {access}"
    _log_host_cache(str(access), where, config.host_cache_bytes)
    cache = RedisHostCache(
        access,
        worker_address=address,
        worker_access=config.worker_redis,
        budget_bytes=config.host_cache_bytes,
        timings=timings,
    )
    stack.push_async_callback(cache.close)
    return cache


def _address_for_workers(config: ServerConfig) -> CacheAddress:
    """What Welcome says of an external Redis: its password only where nobody else can read the message."""
    access = config.worker_redis
    if access is None:
        return CacheAddress()
    if not access.has_password:
        return CacheAddress(access.url)
    if config.access.worker_port_is_private:
        return CacheAddress(access.with_password())
    logger.info(
        "workers are not sent the password of Redis: their port has no TLS with client certificates",
        extra=shown(
            "the worker port has no TLS with client certificates, so workers are not sent the password of Redis: each "
            "needs --worker-redis-password-file"
        ),
    )
    return CacheAddress(without_password(access.url), needs_password=True)


def _log_host_cache(url: str, where: str, budget_bytes: int) -> None:
    sentence = f"host cache for adapters: {where}, up to {size(budget_bytes)}"
    logger.info("host cache url=%s budget_bytes=%d", url, budget_bytes, extra=shown(sentence))
