"""Messages to one worker, in order, from the session that makes them to the service that writes them to the stream."""

from __future__ import annotations

import asyncio

from contract.v1 import plan_pb2


class Outbox:
    """Has no bound: what a session sends is bounded by the plans in flight, the slots and its pings."""

    def __init__(self) -> None:
        self._messages: list[plan_pb2.AttachResponse] = []
        self._is_closed = False
        self._wake = asyncio.Event()  # there is a message, or the outbox is closed

    def send(self, message: plan_pb2.AttachResponse) -> None:
        """Append a message."""
        self._messages.append(message)
        self._wake.set()

    def close(self) -> None:
        """Let nothing more out, messages that wait included."""
        self._is_closed = True
        self._wake.set()

    async def wait(self) -> list[plan_pb2.AttachResponse]:
        """Every message so far; waits for at least one. Empty once the outbox is closed."""
        while not self._messages and not self._is_closed:
            self._wake.clear()
            await self._wake.wait()
        return self.take()

    def take(self) -> list[plan_pb2.AttachResponse]:
        """Every message so far, without waiting. Empty once the outbox is closed."""
        messages, self._messages = self._messages, []
        return [] if self._is_closed else messages
