"""Many requests at once from blocking code: an event loop in a thread of its own, and a bounded number under way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future, wait
from typing import Any, TypeVar

from motet.errors import MotetError

T = TypeVar("T")
R = TypeVar("R")


class LoopThread:
    """An event loop that blocking code uses, also where the caller's thread has a running loop, as in a notebook."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        # A program that never closes its LLM ends all the same.
        self._thread = threading.Thread(target=self._loop.run_forever, name="motet-llm", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result. An interrupt of the caller cancels it, and what it has under way has ended when this returns."""
        future = Future[T]()
        task: list[asyncio.Task[T]] = []

        def begin() -> None:
            task.append(self._loop.create_task(work))
            task[0].add_done_callback(lambda done: _hand_over(done, future))

        def cancel() -> None:
            if task:
                task[0].cancel()
            else:  # the interrupt was before the beginning
                work.close()
                future.set_exception(CancelledError())

        try:
            self._loop.call_soon_threadsafe(begin)
            return future.result()
        except BaseException:
            if not future.done():
                self._loop.call_soon_threadsafe(cancel)
                wait((future,))
            raise

    def stop(self) -> None:
        """End the thread. Nothing may run any more."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _hand_over(task: asyncio.Task[T], future: Future[T]) -> None:
    if task.cancelled():
        future.set_exception(CancelledError())
    elif (error := task.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(task.result())


async def run_all(
    items: Sequence[T],
    send: Callable[[T], Awaitable[R]],
    *,
    max_in_flight: int,
    ended: asyncio.Future[MotetError],
    on_done: Callable[[R | MotetError], None],
    stops_at_error: bool,
) -> list[R | MotetError]:
    """The result of each item, in the order of `items`, or its error.

    `ended`: done when the server is gone; its error is raised. With `stops_at_error`, the first error of an item is
    raised, with the item's index, and what is under way is cancelled.
    """
    results: list[Any] = [None] * len(items)
    waiting = iter(enumerate(items))

    async def work() -> None:
        for index, item in waiting:
            try:
                result: R | MotetError = await send(item)
            except MotetError as error:
                if stops_at_error:
                    if len(items) > 1:
                        error.add_note(f"this was input {index} of {len(items)}; the others were cancelled")
                    raise
                result = error
            results[index] = result
            on_done(result)

    tasks = [asyncio.create_task(work()) for _ in range(min(max_in_flight, len(items)))]
    whole = asyncio.gather(*tasks)
    try:
        await asyncio.wait((whole, ended), return_when=asyncio.FIRST_COMPLETED)
        if not whole.done():
            raise ended.result()
        await whole
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(whole, *tasks, return_exceptions=True)
    return results
