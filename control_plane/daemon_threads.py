"""Threads for blocking calls that may hang: a fixed number of them, and none keeps the process from ending."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

_T = TypeVar("_T")
_Item = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class DaemonThreads:
    """Runs calls in the order in which they come. Threads start on use; Python does not wait for them at its end."""

    def __init__(self, num_threads: int, *, name: str) -> None:
        self._num_threads = num_threads
        self._name = name
        self._items: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._num_started = 0

    async def run(self, call: Callable[..., _T], *arguments: Any) -> _T:
        """What the call returns or raises. Cancelled, a call that has begun goes on, and its result is dropped."""
        future: Future[_T] = Future()
        self._items.put((future, call, arguments))
        if not self._idle.acquire(blocking=False) and self._num_started < self._num_threads:
            self._num_started += 1
            threading.Thread(target=self._work, name=f"{self._name}-{self._num_started}", daemon=True).start()
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Let every thread end once it has done what waits. Does not wait for them; no call may come after this."""
        for _ in range(self._num_started):
            self._items.put(None)

    def _work(self) -> None:
        while (item := self._items.get()) is not None:
            future, call, arguments = item
            if future.set_running_or_notify_cancel():
                _settle(future, call, arguments)
            del item, future, call, arguments  # an idle thread keeps nothing alive
            self._idle.release()


def _settle(future: Future[Any], call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        result = call(*arguments)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
