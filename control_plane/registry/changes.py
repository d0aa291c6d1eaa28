"""Runs the registry's changes to their end, also when the callers leave.

A caller leaves when it is cancelled, or when the store hangs. The change goes on, so that memory and store stay the
same. One change of a name runs at a time.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from control_plane.errors import MotetError, StoreUnavailable
from control_plane.registry.keyed_locks import KeyedLocks
from control_plane.store_calls import HANG, StoreCalls

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
_T = TypeVar("_T")


class Abandoned(Exception):
    """The caller left before the change had changed anything."""


class Changes:
    """The changes that are under way."""

    def __init__(self, calls: StoreCalls) -> None:
        self._calls = calls
        self._tasks: set[asyncio.Task[Any]] = set()
        # A name's lock is taken before a blob's. A waiter gives up when the holder waits for a store that hangs.
        self.locks = KeyedLocks(self._refuse_while_hung)

    def __len__(self) -> int:
        return len(self._tasks)

    async def finish(self, change: Coroutine[Any, Any, _T], *, on_cancelled: Callable[[], None] | None = None) -> _T:
        """What the change returns or raises. Raises StoreUnavailable when the store hangs within it: it goes on.

        Cancelled, this returns at once; with `on_cancelled` it calls that and returns when the change has ended.
        """
        hang = asyncio.Event()
        context = contextvars.copy_context()
        context.run(HANG.set, hang)
        task = asyncio.get_running_loop().create_task(change, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        hung = asyncio.ensure_future(hang.wait())
        try:
            await asyncio.wait([task, hung], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if on_cancelled is not None:
                on_cancelled()
                await asyncio.wait([task, hung], return_when=asyncio.FIRST_COMPLETED)
            raise
        finally:
            hung.cancel()
        if not task.done():
            raise StoreUnavailable(
                f"the artifact store did not respond within {self._calls.timeout_s:g} s; the change may still be made: "
                "read the adapter before you try again",
                retry_after_s=5.0,
            )
        return task.result()

    async def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Wait for what is under way, but not for ever. Whether all of it ended."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        if self._tasks:
            logger.error("registry closed although changes hang num_changes=%d", len(self._tasks))
        return not self._tasks

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not isinstance(error, (MotetError, Abandoned)):
            logger.error("registry change failed", exc_info=error)

    def _refuse_while_hung(self) -> None:
        if self._calls.num_hung:
            raise StoreUnavailable(
                "an earlier change waits for the artifact store, which does not respond; try again", retry_after_s=5.0
            )
