"""Requests with LoRA tasks: receives weights that come with a request, and keeps weights while a request uses them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from motet.v1 import generation_pb2

from control_plane.adapters.tasks import LoraTasks, name_of
from control_plane.api.admin.upload import UploadReceiver, check_listed_files
from control_plane.audit import actions
from control_plane.audit.audit_log import AuditLog
from control_plane.caller import current_caller
from control_plane.checks import Violations, refuse
from control_plane.registry.records import ResolvedAdapter


class TaskRequests:
    """What GenerationService needs of LoRA tasks: a TaskSource."""

    def __init__(
        self, tasks: LoraTasks, uploads: UploadReceiver, *, max_adapter_bytes: int, audit: AuditLog | None = None
    ) -> None:
        """`uploads`: those of AdapterService; the weights of tasks and uploads share one limit."""
        self._tasks = tasks
        self._uploads = uploads
        self._max_adapter_bytes = max_adapter_bytes
        self._audit = audit or AuditLog()

    def resolve(self, task_id: int, digest: str) -> ResolvedAdapter:
        """See LoraTasks.resolve."""
        return self._tasks.resolve(task_id, digest)

    async def kept(
        self, task_id: int, responses: AsyncGenerator[generation_pb2.GenerateResponse, None]
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """The responses; the task's weights stay until their end."""
        with self._tasks.lease(task_id):
            async with contextlib.aclosing(responses):
                async for response in responses:
                    yield response

    @contextlib.asynccontextmanager
    async def received(self, stream: AsyncIterator[Any]) -> AsyncIterator[generation_pb2.GenerateRequest]:
        """The request of a stream whose weights have come and are cached. They stay until the block ends."""
        with contextlib.ExitStack() as held:
            async with (
                self._audit.change(actions.SEND_TASK) as change,
                self._uploads.open(stream, current_caller().holder, self._check) as upload,
            ):
                request: generation_pb2.GenerateRequest = upload.header.request
                change.resource, change.request_id = name_of(request.lora_task_id), request.request_id
                files = await upload.receive()
                change.digest = await self._tasks.add(request.lora_task_id, files)
                held.enter_context(self._tasks.lease(request.lora_task_id))
            yield request

    def _check(self, header: generation_pb2.GenerateWithTaskHeader) -> str:
        if not header.request.HasField("lora_task_id"):
            raise refuse("header.request.lora_task_id", "is missing; give the number that later requests will name")
        self._tasks.check_usable(header.request.lora_task_id)
        violations = Violations()
        check_listed_files(header.files, self._max_adapter_bytes, violations)
        violations.raise_if_any()
        return ""  # sent again from its beginning
