"""What operators do with workers, with asyncio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from motet.v1.status import WorkerStatus
from motet.workers.calls import drain_call, undrain_call

if TYPE_CHECKING:
    from motet.aio import AsyncClient


class AsyncWorkers:
    """The workers of the server, at `client.workers`. Every method needs the role "admin"."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def list(self) -> tuple[WorkerStatus, ...]:
        """Every attached worker, ordered by id. status() also has the ids of those that are drained."""
        return (await self._client.status()).workers

    async def drain(self, worker_id: str, *, force: bool = False) -> int:
        """Move a worker's requests to others, and give it none until undrain(); how many requests were moved.

        `force`: also if no other worker takes requests, so that they wait for one. Raises NotFound if no such worker is
        attached, FailedPrecondition if it is the last one.
        """
        return await self._client.send(drain_call(worker_id, force))

    async def undrain(self, worker_id: str) -> None:
        """Give a drained worker requests again. Raises NotFound if no such worker is attached or drained."""
        await self._client.send(undrain_call(worker_id))
