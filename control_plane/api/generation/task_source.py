"""What the generation service needs of LoRA tasks; api/admin/task_requests.py has it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from motet.v1 import generation_pb2

from control_plane.registry.records import ResolvedAdapter


class TaskSource(Protocol):
    """The tasks of whoever makes the current call."""

    def resolve(self, task_id: int, digest: str) -> ResolvedAdapter:
        """The task's weights; with a digest, these and no others. Raises LoraTaskNotCached."""

    def kept(
        self, task_id: int, responses: AsyncGenerator[generation_pb2.GenerateResponse, None]
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """The responses; the task's weights stay until their end."""

    def received(self, stream: AsyncIterator[Any]) -> AbstractAsyncContextManager[generation_pb2.GenerateRequest]:
        """The request of a stream whose weights have come and are cached. They stay until the block ends."""
