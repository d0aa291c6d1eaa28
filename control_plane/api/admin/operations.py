"""Long-running operations: the book that runs them and the google.longrunning.Operations service over it.

In memory: after a restart a client finds out by reading the adapter itself. Bounded in running and kept ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

# googleapis-common-protos ships no py.typed marker.
from google.longrunning import operations_pb2, operations_pb2_grpc  # type: ignore[import-untyped]
from google.protobuf import empty_pb2
from google.protobuf.message import Message
from motet.v1 import adapters_pb2

from control_plane.api.rpc.error_status import internal_status, status_proto
from control_plane.api.validation import MAX_PAGE_BYTES, page_size_of, quoted, refuse
from control_plane.api.wire import timestamp
from control_plane.errors import Exhausted, MotetError, OperationNotFound

logger = logging.getLogger(__name__)

SERVICE_NAME = operations_pb2.DESCRIPTOR.services_by_name["Operations"].full_name
MAX_WAIT_S = 300.0
_NAME = re.compile(r"operations/[0-9a-f]{32}")
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(slots=True)
class _Operation:
    message: Any  # operations_pb2.Operation
    is_cancellable: bool
    done: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class OperationBook:
    """Runs operations as tasks and remembers how they ended."""

    def __init__(self, *, wall_clock: Callable[[], float] = time.time, max_running: int = 64, max_kept: int = 1000):
        self._wall_clock = wall_clock
        self._max_running = max_running
        self._max_kept = max_kept
        self._operations: dict[str, _Operation] = {}  # by name, oldest first
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_working = 0  # running ones that do not mostly wait

    def start(
        self,
        adapter_id: str,
        verb: str,
        work: Callable[[], Awaitable[Message]],
        *,
        is_cancellable: bool,
        is_waiting: bool = False,
        digest: str = "",
    ) -> Any:
        """Begin; the operation as it stands. `work`'s message becomes its response.

        `is_waiting`: it mostly waits, as a deletion does for streams. Such a one always has room: each name and version
        has at most one, and nobody else's work may stop for them. Raises Exhausted where another one has none.
        """
        if not is_waiting and self._num_working >= self._max_running:
            raise Exhausted(f"{self._num_working} operations are running, at most {self._max_running}; try again")
        message = operations_pb2.Operation(name=f"operations/{secrets.token_hex(16)}")
        metadata = adapters_pb2.AdapterOperationMetadata(
            adapter=f"adapters/{adapter_id}", verb=verb, create_time=timestamp(self._wall_clock()), digest=digest
        )
        message.metadata.Pack(metadata)
        operation = self._operations[message.name] = _Operation(message, is_cancellable)
        operation.task = asyncio.create_task(self._run(operation, work), name=message.name)
        self._tasks.add(operation.task)
        operation.task.add_done_callback(self._tasks.discard)
        operation.task.add_done_callback(lambda _task: _end(operation))
        if not is_waiting:
            self._num_working += 1
            operation.task.add_done_callback(self._count_ended)
        self._forget_oldest()
        return message

    async def _run(self, operation: _Operation, work: Callable[[], Awaitable[Message]]) -> None:
        message = operation.message
        try:
            message.response.Pack(await work())
        except MotetError as error:
            message.error.CopyFrom(status_proto(error))
        except Exception as error:
            correlation_id = secrets.token_hex(8)
            logger.error("operation failed name=%s correlation_id=%s", message.name, correlation_id, exc_info=error)
            message.error.CopyFrom(internal_status(correlation_id))

    def _count_ended(self, _task: asyncio.Task[None]) -> None:
        self._num_working -= 1

    def _forget_oldest(self) -> None:
        num_over = len(self._operations) - self._max_kept
        finished = [name for name, operation in self._operations.items() if operation.message.done]
        for name in finished[: max(num_over, 0)]:
            del self._operations[name]

    def get(self, name: str) -> _Operation:
        """Raises InvalidRequest for what is no name, OperationNotFound for one that is not known."""
        if not _NAME.fullmatch(name):
            raise refuse("name", f"{quoted(name)} is not a resource name of the form operations/{{id}}")
        operation = self._operations.get(name)
        if operation is None:
            raise OperationNotFound(f"{name} is not known; it is too old, or the server restarted since")
        return operation

    def as_it_stands(self, message: Any) -> Any:
        """The operation at present; as it was in `message` where it is not known any more."""
        operation = self._operations.get(message.name)
        return message if operation is None else operation.message

    def forget(self, name: str) -> None:
        """Drop the record; a running one runs on."""
        self.get(name)
        del self._operations[name]

    def page(self, page_size: int, page_token: str) -> tuple[list[Any], str]:
        """Operations, newest first, from the one that the token names."""
        names = list(reversed(self._operations))
        start = 0
        if page_token:
            if page_token not in self._operations:
                raise refuse("page_token", "not a token of this list, or too old; list from the start")
            start = names.index(page_token)
        shown: list[Any] = []
        num_bytes = 0
        for name in names[start:]:
            if len(shown) == page_size or num_bytes >= MAX_PAGE_BYTES:
                return shown, name
            shown.append(self._operations[name].message)
            num_bytes += shown[-1].ByteSize()
        return shown, ""

    async def close(self, *, timeout_s: float) -> None:
        """Let what runs finish for so long, then cancel it."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)


def _end(operation: _Operation) -> None:
    """Mark it done. A task that was cancelled, perhaps before its first line, left neither response nor error."""
    message = operation.message
    if message.WhichOneof("result") is None:
        message.error.code = grpc.StatusCode.CANCELLED.value[0]
        message.error.message = "cancelled before it was done"
    message.done = True
    operation.done.set()


class OperationsService(operations_pb2_grpc.OperationsServicer):  # type: ignore[misc]  # the stub is untyped
    """google.longrunning.Operations over one book."""

    def __init__(self, book: OperationBook) -> None:
        self._book = book

    async def GetOperation(self, request: Any, _context: Context) -> Any:  # noqa: N802
        return self._book.get(request.name).message

    async def ListOperations(self, request: Any, _context: Context) -> Any:  # noqa: N802
        if request.filter:
            raise refuse("filter", "filters are not supported; leave it empty")
        page_size = page_size_of(request.page_size, request.page_token)
        operations, next_token = self._book.page(page_size, request.page_token)
        return operations_pb2.ListOperationsResponse(operations=operations, next_page_token=next_token)

    async def WaitOperation(self, request: Any, _context: Context) -> Any:  # noqa: N802
        """The operation when it is done, or as it stands after the timeout."""
        operation = self._book.get(request.name)
        timeout_s = MAX_WAIT_S
        if request.HasField("timeout"):
            timeout_s = min(request.timeout.ToNanoseconds() / 1e9, MAX_WAIT_S)
            if timeout_s < 0:
                raise refuse("timeout", f"is {timeout_s:g} s; give at least 0 s")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(operation.done.wait(), timeout_s)
        return operation.message

    async def CancelOperation(self, request: Any, _context: Context) -> empty_pb2.Empty:  # noqa: N802
        """Best effort: a deletion has begun already and goes on."""
        operation = self._book.get(request.name)
        if operation.is_cancellable and operation.task is not None:
            operation.task.cancel()
        return empty_pb2.Empty()

    async def DeleteOperation(self, request: Any, _context: Context) -> empty_pb2.Empty:  # noqa: N802
        self._book.forget(request.name)
        return empty_pb2.Empty()
