"""LoRA tasks over every tier: packs what clients send, and takes forgotten weights out of slots and host cache.

A task has no name and no record, and is gone after a restart. Only requests of the tenant that sent it can use it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from control_plane.adapters.life_cycle import AdapterLifeCycle
from control_plane.caller import current_caller
from control_plane.checks import refuse
from control_plane.errors import AdapterNotServed, LoraTaskNotCached, MotetError, PermissionDenied
from control_plane.fleet.fleet import Fleet
from control_plane.host_cache.task_cache import FLAGS, TaskBlob, TaskCache, TaskKey
from control_plane.registry.model.base_model import BaseModel
from control_plane.registry.model.worker_reports import WorkerReports
from control_plane.registry.new_version import version_of_packed
from control_plane.registry.records import AdapterVersion, ResolvedAdapter

logger = logging.getLogger(__name__)


class LoraTasks:
    """The tasks of all tenants. Used from one event loop."""

    def __init__(
        self,
        *,
        cache: TaskCache,
        life_cycle: AdapterLifeCycle,
        fleet: Fleet,
        reports: WorkerReports,
        base_model: BaseModel,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._cache = cache
        self._life_cycle = life_cycle
        self._fleet = fleet
        self._reports = reports
        self._base_model = base_model
        self._wall_clock = wall_clock
        self._versions: dict[str, AdapterVersion] = {}  # by the digests that the cache has
        self._clearing = set[asyncio.Task[None]]()
        cache.on_forgotten = self._forgotten

    def resolve(self, task_id: int, digest: str = "") -> ResolvedAdapter:
        """What a new request of the caller gets. With a digest: these weights and no others.

        Raises LoraTaskNotCached, and never returns another adapter.
        """
        self.check_usable(task_id)
        cached = self._cache.digest_of(_key(task_id))
        if cached is None or (digest and cached != digest):
            what = "is not cached" if cached is None else f"is not cached with the weights of digest {digest}"
            raise LoraTaskNotCached(
                f"LoRA task {task_id} {what}; send the weights again (GenerateWithTask, "
                f"LoraTask({task_id}, directory), motet generate --lora-task {task_id} --lora-weights DIR)",
                resource=name_of(task_id),
            )
        version = self._versions[cached]
        if reason := self._reports.module_error(version.target_modules):
            raise AdapterNotServed(f"LoRA task {task_id}: {reason}")
        return ResolvedAdapter(name_of(task_id), version, version.ref)

    def check_usable(self, task_id: int) -> None:
        """Raise InvalidRequest where task ids are off, PermissionDenied where the credential allows none."""
        if not self._cache.budget_bytes:
            raise refuse("lora_task_id", f"is set, and this server caches no LoRA tasks ({FLAGS}); name an adapter")
        if not current_caller().principal.may_use(name_of(task_id)):
            raise PermissionDenied(
                "lora_task_id: this credential may use the adapters of its list only; name one of them"
            )

    @contextlib.contextmanager
    def lease(self, task_id: int) -> Iterator[None]:
        """Keep the weights of the caller's task until the block ends, if the task is cached."""
        digest = self._cache.digest_of(_key(task_id))
        with contextlib.nullcontext() if digest is None else self._cache.lease(digest):
            yield

    async def add(self, task_id: int, files: Mapping[str, Path]) -> str:
        """Check and pack the files and cache them as the caller's task; their digest. The caller writes the audit log.

        Raises what registering such files raises, and what TaskCache.add does.
        """
        self.check_usable(task_id)
        async with self._life_cycle.packed(files) as packed:
            self._cache.check_fits(packed.size_bytes)  # before it is read into memory
            chunks = await asyncio.to_thread(lambda: [chunk.path.read_bytes() for chunk in packed.chunks])
            version = version_of_packed(packed, self._base_model, 0, self._wall_clock())
        self._cache.add(_key(task_id), TaskBlob(packed.digest, packed.manifest, chunks))
        self._versions[packed.digest] = version
        self._fleet.cancel_unload(packed.digest)
        logger.info("LoRA task cached task_id=%d digest=%s bytes=%d", task_id, packed.digest, packed.size_bytes)
        return packed.digest

    def _forgotten(self, digest: str) -> None:
        del self._versions[digest]
        task = asyncio.get_running_loop().create_task(self._clear(digest))
        self._clearing.add(task)
        task.add_done_callback(self._clearing.discard)

    async def _clear(self, digest: str) -> None:
        try:
            await self._life_cycle.clear_digest(digest)
        except MotetError as error:
            logger.warning("LoRA task not cleared digest=%s error=%s", digest, error)


def name_of(task_id: int) -> str:
    """What a task is called where adapters are named. No adapter has such a name: it has a slash."""
    return f"lora_tasks/{task_id}"


def _key(task_id: int) -> TaskKey:
    return TaskKey(current_caller().tenant, task_id)
