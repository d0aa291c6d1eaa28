"""Examines where a control plane would run: Redis, store, audit log, certificates, ports, clock. Nothing stays."""

from __future__ import annotations

import resource
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from contract.redis_access import RedisAccess, reason_of
from contract.settings.findings import Finding, State
from contract.settings.probes import advice_about, examine_folder, examine_port, examine_validity
from control_plane.access.server_certificates import parse
from control_plane.config import DEFAULT_MAX_CONNECTIONS, ServerConfig
from control_plane.errors import MotetError
from control_plane.registry.store.artifact_store import ArtifactStore
from control_plane.registry.store.open_store import open_store
from control_plane.registry.store.store_format import WrongStoreFormat

REDIS_TIMEOUT_S = 5.0
MAX_CLOCK_DIFFERENCE_S = 5.0
SLOW_STORE_S = 1.0
FILES_FOR_CONNECTIONS = 2  # of each connection


def examine(config: ServerConfig, wall_clock: Callable[[], float] = time.time) -> Iterator[Finding]:
    """Everything that can be looked at beside a server that runs. Each look may take some seconds."""
    yield from _host_cache(config, wall_clock)
    yield _store(config)
    yield from _store_format(config)
    if config.access.audit_log not in (None, "-"):
        yield _audit_log(Path(config.access.audit_log))
    for port, cert, key, client_ca in (
        ("clients", config.access.tls_cert, config.access.tls_key, config.access.tls_client_ca),
        ("workers", config.access.worker_tls_cert, config.access.worker_tls_key, config.access.worker_tls_client_ca),
    ):
        if cert is not None and key is not None:
            yield _certificate(f"certificate of the {port}' port", cert, key, client_ca, wall_clock)
    for flag, address in (
        ("--listen", config.listen),
        ("--worker-listen", config.worker_listen),
        ("--metrics-listen", config.metrics_listen),
        ("--scaler-listen", config.scaler_listen),
    ):
        if address is not None:
            yield examine_port(flag, address)
    yield _open_files(config)


def _host_cache(config: ServerConfig, wall_clock: Callable[[], float]) -> Iterator[Finding]:
    if config.host_cache == "memory":
        yield Finding("host cache", State.OK, "in this process's memory")
        return
    access = config.redis
    if access is not None:
        yield from _redis(access, wall_clock)
        return
    from control_plane.host_cache.embedded import RedisNotFound, find_redis_server

    try:
        yield Finding("host cache", State.OK, f"embedded Redis, {find_redis_server()}")
    except RedisNotFound as error:
        yield Finding("host cache", State.WRONG, str(error), "install one of them, or give --redis-url")


def _redis(access: RedisAccess, wall_clock: Callable[[], float]) -> Iterator[Finding]:
    import redis

    from control_plane.host_cache.redis_client import make_client

    name = f"Redis at {access}"
    try:
        with closing(make_client(access, REDIS_TIMEOUT_S)) as client:
            begun_s = time.perf_counter()
            client.ping()
            took_s = time.perf_counter() - begun_s
            redis_clock_s = _clock_s(client)
            policy = _policy(client)
    except (redis.RedisError, OSError, ValueError) as error:
        said = str(error) if isinstance(error, ValueError) else reason_of(error)
        yield Finding(name, State.WRONG, said, "check address, user, password and TLS of --redis-url")
        return
    yield Finding(name, State.OK, f"responds in {1000 * took_s:.1f} ms")
    if policy not in ("", "noeviction"):
        advice = "set maxmemory-policy noeviction: Motet removes what it does not need, and pinned adapters must stay"
        yield Finding(f"{name}: maxmemory-policy", State.WARNING, policy, advice)
    if redis_clock_s is None:
        return
    difference_s = wall_clock() - redis_clock_s
    is_near = abs(difference_s) <= MAX_CLOCK_DIFFERENCE_S
    yield Finding(
        "clock",
        State.OK if is_near else State.WARNING,
        f"{difference_s:+.1f} s from that of Redis",
        "" if is_near else "synchronise both machines (NTP): tokens, certificates and expiries go by the clock",
    )


def _clock_s(client: object) -> float | None:
    """The clock of Redis; None if this user may not know. Motet itself does not read it."""
    import redis

    try:
        seconds, microseconds = client.time()  # type: ignore[attr-defined]
    except redis.ResponseError:
        return None
    return float(seconds + microseconds / 1e6)


def _policy(client: object) -> str:
    """What Redis does when it is full; empty if this user may not know."""
    import redis

    try:
        found = client.config_get("maxmemory-policy")  # type: ignore[attr-defined]
    except redis.RedisError:
        return ""
    value = next(iter(found.values()), "")
    return value.decode() if isinstance(value, bytes) else str(value)


def _store(config: ServerConfig) -> Finding:
    """Writes something small, and removes it again."""
    name, advice = f"artifact store {config.store_url}", "check --store, its credentials and its permissions"
    begun_s = time.perf_counter()
    if "://" not in config.store_url:
        found = examine_folder(name, Path(config.store_url), advice)
    else:
        try:
            store, key = open_store(config.store_url, is_exclusive=True), f"tmp/doctor-{secrets.token_hex(8)}"
            store.delete(key, store.put_if_absent(key, b"motet doctor"))
        except (OSError, ValueError) as error:
            return Finding(name, State.WRONG, str(error), advice_about(error, advice))
        found = Finding(name, State.OK, "a small file is written and removed")
    took_s = time.perf_counter() - begun_s
    if found.state is not State.OK:
        return found
    detail = f"{found.detail}, in {1000 * took_s:.0f} ms"
    if took_s > SLOW_STORE_S:
        slow = "registering adapters will be slow: use a faster disk, or a bucket that is nearer"
        return Finding(name, State.WARNING, detail, slow)
    return Finding(name, State.OK, detail)


def _audit_log(file: Path) -> Finding:
    name, advice = f"audit log {file}", "let the server's user write there, or name another file with --audit-log"
    if not file.parent.is_dir():
        return Finding(name, State.WRONG, f"{file.parent} is not a folder", "make the folder, or correct --audit-log")
    try:
        if file.exists():
            file.open("ab").close()
    except OSError as error:
        return Finding(name, State.WRONG, str(error.strerror or error), advice)
    return examine_folder(name, file.parent, advice)


def _store_format(config: ServerConfig) -> Iterator[Finding]:
    """Only of a store that is there and can be read."""
    if "://" not in config.store_url and not Path(config.store_url).is_dir():
        return
    try:
        found = ArtifactStore(config.store_url).format.check()
    except WrongStoreFormat as error:
        advice = "install the version of Motet that wrote it, or restore a copy from before"
        yield Finding("format of the artifact store", State.WRONG, str(error), advice)
    except (MotetError, OSError, ValueError):
        return  # the store itself is wrong, which the other finding says
    else:
        yield Finding("format of the artifact store", State.OK, str(found))


def _certificate(name: str, cert: Path, key: Path, client_ca: Path | None, wall_clock: Callable[[], float]) -> Finding:
    try:
        authorities = None if client_ca is None else client_ca.read_bytes()
        found = parse(cert.read_bytes(), key.read_bytes(), authorities, wall_clock=wall_clock)
    except (OSError, ValueError) as error:
        return Finding(name, State.WRONG, f"{cert}: {error}", "renew it; running servers read it without a restart")
    return examine_validity(name, cert, found.not_after_s, wall_clock())


def _open_files(config: ServerConfig) -> Finding:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = FILES_FOR_CONNECTIONS * (config.max_connections or DEFAULT_MAX_CONNECTIONS)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        advice = f"raise it to {wanted} (ulimit -Hn, LimitNOFILE=), or lower --max-connections"
        return Finding("limit of open files", State.WARNING, str(hard), advice)
    return Finding("limit of open files", State.OK, "none" if hard == resource.RLIM_INFINITY else str(hard))
