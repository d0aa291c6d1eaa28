"""The waits between the attempts of a client's calls. Closing a stream or the client ends them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable


class Pauses:
    """Waits of the blocking client, which its `close` ends. Thread-safe."""

    def __init__(self, sleep: Callable[[float], None] | None) -> None:
        """`sleep`: for tests, in place of a wait that can be ended."""
        self.is_closed = False  # the client is
        self._sleep = sleep
        self._changed = threading.Condition()

    def wait(self, seconds: float, is_over: Callable[[], bool]) -> None:
        """Wait for `seconds`, or until the client is closed or `is_over`, which is called after every `wake`."""
        if self._sleep is not None:
            self._sleep(seconds)
            return
        with self._changed:
            self._changed.wait_for(lambda: self.is_closed or is_over(), seconds)

    def wake(self) -> None:
        """Something changed that a wait may end for."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """The client is closed: no wait lasts any longer."""
        self.is_closed = True
        self.wake()


class AsyncPauses:
    """Waits of the asyncio client, which its `close` ends. For one event loop."""

    def __init__(self, sleep: Callable[[float], Awaitable[None]]) -> None:
        self.is_closed = False  # the client is
        self._sleep = sleep
        self._sleepers: dict[object, asyncio.Future[None]] = {}  # by who waits

    async def wait(self, seconds: float, owner: object) -> None:
        """Wait for `seconds`, or until the client is closed or `wake(owner)` is called."""
        if self.is_closed:
            return
        sleeper = self._sleepers[owner] = asyncio.ensure_future(self._sleep(seconds))
        try:
            await asyncio.wait({sleeper})
            if not sleeper.cancelled():
                sleeper.result()
        finally:
            sleeper.cancel()
            del self._sleepers[owner]

    def wake(self, owner: object) -> None:
        """End the wait of `owner`, if it waits."""
        if owner in self._sleepers:
            self._sleepers[owner].cancel()

    def close(self) -> None:
        """The client is closed: no wait lasts any longer."""
        self.is_closed = True
        for sleeper in self._sleepers.values():
            sleeper.cancel()


def is_cancelled() -> bool:
    """Whether somebody cancelled the task that runs."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
