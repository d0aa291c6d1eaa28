"""Opens what keeps adapters: the artifact store with its registry, the host cache, and the cache of LoRA tasks."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from pathlib import Path

from contract.process_log import shown
from contract.redaction import redacted_url
from control_plane.api.text.adapter_texts import check_template
from control_plane.config import ConfigError, ServerConfig
from control_plane.directory_lock import PRIVATE
from control_plane.fleet.tenants import TenantTable
from control_plane.host_cache.task_cache import TaskCache
from control_plane.host_cache.weights import AdapterWeights
from control_plane.observers.timings import Timings
from control_plane.registry.model.base_model import BaseModel
from control_plane.registry.model.worker_reports import WorkerReports
from control_plane.registry.packing.ingest_pool import IngestPool
from control_plane.registry.registry import Registry
from control_plane.registry.snapshot.known_documents import KnownDocuments
from control_plane.registry.store.artifact_store import ArtifactStore
from control_plane.registry.store.store import StoreUrlError
from control_plane.setup.host_cache import open_host_cache
from control_plane.store_calls import StoreCalls

logger = logging.getLogger(__name__)


def uploads_in(config: ServerConfig) -> Path:
    """The directory of the files that clients are sending."""
    return config.data_dir / "uploads"


async def open_storage(
    config: ServerConfig,
    base_model: BaseModel,
    reports: WorkerReports,
    tenants: TenantTable,
    timings: Timings,
    stack: contextlib.AsyncExitStack,
) -> tuple[Registry, AdapterWeights, TaskCache]:
    """The store with its registry, locked for this server, and the caches in front of it. Uploads are emptied.

    Raises ConfigError.
    """
    try:
        store = ArtifactStore(config.store_url, is_exclusive=config.exclusive_store)
    except StoreUrlError as error:
        raise ConfigError(f"--store: {error}") from error
    calls = StoreCalls(timeout_s=config.store_timeout_s, timings=timings)
    stack.callback(calls.close)
    scratch_dir = config.data_dir / "scratch"
    registry = await Registry.open(
        store=store,
        base_model=base_model,
        calls=calls,
        max_adapter_bytes=config.max_adapter_bytes,
        reports=reports,
        scratch_dir=scratch_dir,
        prefixes=tenants.name_prefixes,
        pool=IngestPool(),
        check_template=check_template,
        known=KnownDocuments(config.data_dir / "registry.snapshot", config.store_url),
    )
    stack.push_async_callback(registry.close)
    num_adapters = registry.stats().num_registered
    store_url = redacted_url(config.store_url)
    sentence = f"{num_adapters} adapter{'' if num_adapters == 1 else 's'} registered in {store_url}"
    logger.info("store url=%s num_adapters=%d", store_url, num_adapters, extra=shown(sentence))
    for directory in (uploads_in(config), scratch_dir):
        shutil.rmtree(directory, ignore_errors=True)  # what a killed server left
        directory.mkdir(mode=PRIVATE)
    cache = await open_host_cache(config, timings, stack)
    task_cache = TaskCache(store, budget_bytes=_task_cache_bytes(config))

    def is_wanted(digest: str) -> bool:
        return registry.is_named(digest) or task_cache.has_digest(digest)

    return registry, AdapterWeights(cache, task_cache, calls, is_wanted=is_wanted), task_cache


def _task_cache_bytes(config: ServerConfig) -> int:
    if config.task_cache_memory_share is None:
        return config.task_cache_bytes
    budget_bytes = int(config.task_cache_memory_share * _free_memory_bytes())
    logger.info("task cache budget_bytes=%d", budget_bytes)
    return budget_bytes


def _free_memory_bytes() -> int:
    """What the kernel says that programs can still take. Raises OSError where it does not say so."""
    with Path("/proc/meminfo").open(encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
