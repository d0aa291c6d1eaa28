"""The inputs of one call as requests to the fleet: as many at once as it takes, and their vectors in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from control_plane.errors import Exhausted, MotetError
from control_plane.fleet.fleet import Fleet
from control_plane.fleet.requests.streams import JobStream
from control_plane.scheduler.types import Request, Vector


@dataclass(frozen=True, slots=True)
class PooledInput:
    """What one input got."""

    vector: Vector
    num_tokens: int
    num_cached_tokens: int


class PooledInputs:
    """The requests of one call. `close` cancels what has not ended."""

    def __init__(self, fleet: Fleet, requests: Sequence[Request]) -> None:
        self._fleet = fleet
        self._requests = requests
        self.streams: list[JobStream] = []  # of the requests that the fleet took on, in order
        self.num_ended = 0

    async def next(self) -> PooledInput:
        """The next input's vector. Raises the error that ended its request, or why the fleet takes it not on.

        A full queue or a quota only delays an input while others of the call are computed.
        """
        index = self.num_ended
        while len(self.streams) < len(self._requests):
            try:
                self.streams.append(self._fleet.submit(self._requests[len(self.streams)]))
            except Exhausted:
                if len(self.streams) == index:
                    raise
                break
        request = self._requests[index]
        async for event in self.streams[index]:
            if event.pooled is not None:
                self.num_ended += 1
                return PooledInput(event.pooled, len(request.prompt_token_ids), event.num_cached_tokens)
        raise MotetError(f"the stream of request {request.request_id} ended without a vector")

    def close(self) -> None:
        """Cancel every request that has not ended."""
        for stream in self.streams:
            stream.cancel()
