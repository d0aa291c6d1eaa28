"""Long-running operations on adapters: runs them as tasks and remembers how they ended.

In memory: after a restart a client learns the result by reading the adapter itself. The number of running operations
and the number of remembered ones are bounded. An operation belongs to the owner of its adapter: for other callers,
admins excepted, it does not exist.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable

from control_plane.access.visibility import Ownership, may_see
from control_plane.adapters.sources.progress import Progress
from control_plane.caller import current_caller
from control_plane.checks import bad_page_token
from control_plane.errors import Exhausted, MotetError, OperationNotFound, correlation_id_of
from control_plane.registry.records import Registered
from control_plane.waits import is_set_within

logger = logging.getLogger(__name__)

Work = Callable[[], Awaitable[Registered | None]]


class Operation:
    """One change of an adapter, and its result once it is done."""

    def __init__(
        self,
        adapter_id: str,
        verb: str,
        *,
        owner: str,
        digest: str,
        create_time_s: float,
        is_cancellable: bool,
        work: Work,
        progress: Progress,
    ) -> None:
        """Starts `work`. Called by OperationStore."""
        self.operation_id = secrets.token_hex(16)
        self.adapter_id = adapter_id
        self.verb = verb
        self.owner = owner  # tenant that the adapter belongs to; empty: no tenant's
        self.digest = digest  # of the version; empty where the operation is about the whole adapter
        self.progress = progress
        self.create_time_s = create_time_s  # wall clock, seconds since 1970
        # The result, meaningful once `is_done`. At most one of these is set; none is set by a deletion that succeeded.
        self.registered: Registered | None = None
        self.error: MotetError | None = None
        self.correlation_id = ""  # names the line of the log that has our own mistake
        self.is_cancelled = False
        self._is_cancellable = is_cancellable
        self._done = asyncio.Event()
        self._task = asyncio.create_task(self._run(work), name=f"operation {self.operation_id}")
        self._task.add_done_callback(self._end)

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def is_visible(self) -> bool:
        """Whether it exists for the caller."""
        caller = current_caller()
        return may_see(caller.principal, caller.tenant, Ownership(self.owner), self.adapter_id)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is done, for `timeout_s` at most. Returns whether it is done."""
        return await is_set_within(self._done, timeout_s)

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call this once it is done, soon if it is done already."""
        self._task.add_done_callback(lambda _task: callback())

    def cancel(self) -> None:
        """Ask it to end. A deletion goes on: it has begun already, and new requests are refused."""
        if self._is_cancellable:
            self._task.cancel()

    async def _run(self, work: Work) -> None:
        try:
            self.registered = await work()
        except MotetError as error:
            # Kept for long, so without the frames of the stack.
            error.__traceback__ = error.__cause__ = error.__context__ = None
            self.error = error
        except Exception as error:
            self.correlation_id = correlation_id_of(error)
            logger.error(
                "operation failed operation_id=%s correlation_id=%s",
                self.operation_id,
                self.correlation_id,
                exc_info=error,
            )

    def _end(self, task: asyncio.Task[None]) -> None:
        self.is_cancelled = task.cancelled()  # perhaps before its first line ran
        self._done.set()


class OperationStore:
    """All operations of one server. Used from one event loop."""

    def __init__(self, *, wall_clock: Callable[[], float] = time.time, max_running: int = 64, max_kept: int = 1000):
        self._wall_clock = wall_clock
        self._max_running = max_running
        self._max_kept = max_kept
        self._operations: dict[str, Operation] = {}  # by id, oldest first
        self._running: set[Operation] = set()
        self._num_working = 0  # running ones that do not mostly wait

    def start(
        self,
        adapter_id: str,
        verb: str,
        work: Work,
        *,
        owner: str,
        is_cancellable: bool,
        is_waiting: bool = False,
        digest: str = "",
        progress: Progress | None = None,
    ) -> Operation:
        """Begin an operation, whose result is what `work` returns, on an adapter of this owner.

        `is_waiting`: the operation mostly waits, as a deletion waits for streams. There is always room for such an
        operation: each adapter and version has at most one, and it must not keep others from working. Raises Exhausted
        where there is no room for another one.
        """
        if not is_waiting and self._num_working >= self._max_running:
            raise Exhausted(f"{self._num_working} operations are running, at most {self._max_running}; try again")
        operation = Operation(
            adapter_id,
            verb,
            owner=owner,
            digest=digest,
            create_time_s=self._wall_clock(),
            is_cancellable=is_cancellable,
            work=work,
            progress=progress or Progress(),
        )
        self._operations[operation.operation_id] = operation
        self._running.add(operation)
        self._num_working += not is_waiting

        def on_end(_task: asyncio.Task[None]) -> None:
            self._running.discard(operation)
            self._num_working -= not is_waiting

        operation._task.add_done_callback(on_end)
        self._forget_oldest()
        return operation

    def _forget_oldest(self) -> None:
        """Forget finished ones above the limit, of the owner that has most: nobody drives out those of others."""
        finished: dict[str, list[str]] = {}
        for key, operation in self._operations.items():
            if operation.is_done:
                finished.setdefault(operation.owner, []).append(key)
        for _ in range(len(self._operations) - self._max_kept):
            most = max(finished.values(), key=len, default=[])
            if not most:
                return
            del self._operations[most.pop(0)]

    def find(self, operation_id: str) -> Operation | None:
        """The operation, or None where it is not known any more, or not for the caller to see."""
        operation = self._operations.get(operation_id)
        return operation if operation is not None and operation.is_visible() else None

    def get(self, operation_id: str) -> Operation:
        """The operation. Raises OperationNotFound."""
        operation = self.find(operation_id)
        if operation is None:
            raise OperationNotFound(f"operations/{operation_id} is not known: it is too old, or the server restarted")
        return operation

    def forget(self, operation_id: str) -> None:
        """Remove the record. An operation that is running goes on. Raises OperationNotFound."""
        self.get(operation_id)
        del self._operations[operation_id]

    def page(self, page_size: int, page_token: str) -> tuple[list[Operation], str]:
        """Operations that the caller sees, newest first, and the token of the next page ("": none).

        A token is the id of an operation that the caller sees.
        """
        ids = [key for key, operation in reversed(self._operations.items()) if operation.is_visible()]
        start = 0
        if page_token:
            if page_token not in ids:
                raise bad_page_token()
            start = ids.index(page_token)
        end = start + page_size
        return [self._operations[key] for key in ids[start:end]], ids[end] if end < len(ids) else ""

    async def close(self, *, timeout_s: float) -> None:
        """Let running operations finish for `timeout_s`, then cancel them, deletions too: the next start ends those."""
        if self._running:
            await asyncio.wait([operation._task for operation in self._running], timeout=timeout_s)
        left = [operation._task for operation in self._running]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
