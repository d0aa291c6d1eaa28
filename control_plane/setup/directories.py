"""Adapters that the operator's directories have."""

from __future__ import annotations

import contextlib

from control_plane.adapters.background import begin
from control_plane.adapters.directories.registrar import AdapterNotRegistered, DirectoryRegistrar
from control_plane.adapters.directories.settings import DirectorySettings
from control_plane.adapters.directories.watcher import DirectoryWatcher
from control_plane.adapters.life_cycle import AdapterLifeCycle
from control_plane.audit.audit_log import AuditLog
from control_plane.config import ConfigError
from control_plane.registry.registry import Registry
from control_plane.store_calls import StoreCalls


async def take_in_directories(
    settings: DirectorySettings,
    registry: Registry,
    life_cycle: AdapterLifeCycle,
    audit: AuditLog,
    stack: contextlib.AsyncExitStack,
) -> None:
    """Register what --adapter names, and watch --adapter-dir until `stack` ends. Raises ConfigError."""
    if not settings.adapters and settings.adapter_dir is None:
        return
    calls = StoreCalls(what="the directory of an adapter")
    stack.callback(calls.close)
    registrar = DirectoryRegistrar(registry, life_cycle, audit, calls, owner=settings.adapter_owner)
    try:
        await registrar.register_all(settings.adapters)
    except AdapterNotRegistered as error:
        raise ConfigError(str(error)) from error
    if settings.adapter_dir is not None:
        watcher = DirectoryWatcher(settings.adapter_dir, registrar, interval_s=settings.adapter_dir_interval_s)
        begin(stack, watcher.run())
