"""Sample requests between `asample`, which starts one, and `retrieve_future`, which waits for its result.

In memory and short-lived: after a restart an id is unknown, which the SDK takes as the word to send its request again.
An id is one of its owner: two owners may have the same one, and neither notices the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from gateway.tinker.settings import TinkerSettings

Outcome = bytes | BaseException  # an response, or what kept it from coming


class TooManySamples(Exception):
    """No room for a further request at present."""


class UnknownSample(Exception):
    """No request of this id and owner: it was never sent here, was cancelled, or its result is no longer kept."""


@dataclass(slots=True, eq=False)
class _Sample:
    owner: str
    last_seen_s: float  # when its client last polled it, or its result came
    task: asyncio.Task[None] | None = None
    outcome: Outcome | None = None
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)
    num_waiting: int = 0  # polls that wait at present

    @property
    def size_bytes(self) -> int:
        return len(self.outcome) if isinstance(self.outcome, bytes) else 0


class Futures:
    """Every sample request that runs here or whose result is kept. `sweep` has to be called now and then."""

    def __init__(self, settings: TinkerSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._samples: dict[tuple[str, str], _Sample] = {}  # by owner and id, oldest first
        # Invariant: how many of _samples each owner has; nobody has 0.
        self._num_by_owner: Counter[str] = Counter()
        # Invariant: the sum of size_bytes over the _samples of each owner; nobody has 0.
        self._kept_bytes_by_owner: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._samples)

    def start(self, request_id: str, owner: str, work: Callable[[], Awaitable[bytes]]) -> None:
        """Begin a request, unless it has begun: a client that did not get the response of `asample` sends it again.

        Raises TooManySamples.
        """
        if (owner, request_id) in self._samples:
            return
        if len(self._samples) >= self._settings.max_samples:
            # Only a key with less than its equal part gets one more: no key shuts the others out.
            num_owners = len(self._num_by_owner.keys() | {owner})
            if self._num_by_owner.get(owner, 0) >= max(1, self._settings.max_samples // num_owners):
                raise TooManySamples
        sample = self._samples[owner, request_id] = _Sample(owner, self._clock())
        self._num_by_owner[owner] += 1
        # The task inherits the context of this request, and with it the key.
        sample.task = asyncio.ensure_future(self._run(sample, work))

    async def wait(self, request_id: str, owner: str, timeout_s: float) -> Outcome | None:
        """The outcome of a request; None if it has none after `timeout_s`. Raises UnknownSample."""
        sample = self._find(request_id, owner)
        sample.last_seen_s = self._clock()
        sample.num_waiting += 1
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await sample.has_ended.wait()
        finally:
            sample.num_waiting -= 1
            sample.last_seen_s = self._clock()
        return sample.outcome

    def cancel(self, request_id: str, owner: str) -> None:
        """End a request, if it runs, and forget it. An unknown one is ignored."""
        with contextlib.suppress(UnknownSample):
            self._drop(self._find(request_id, owner).owner, request_id)

    def sweep(self) -> None:
        """Cancel requests that nobody polls any more, and forget results whose time is over."""
        now_s, settings = self._clock(), self._settings
        for (owner, request_id), sample in list(self._samples.items()):
            limit_s = settings.abandoned_s if sample.outcome is None else settings.result_ttl_s
            if not sample.num_waiting and now_s - sample.last_seen_s > limit_s:
                self._drop(owner, request_id)

    async def close(self) -> None:
        """End every request."""
        tasks = [sample.task for sample in self._samples.values() if sample.task is not None]
        for owner, request_id in list(self._samples):
            self._drop(owner, request_id)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, sample: _Sample, work: Callable[[], Awaitable[bytes]]) -> None:
        try:
            outcome: Outcome = await work()
        except Exception as error:  # the client gets it from `retrieve_future`
            outcome = error
        sample.outcome, sample.last_seen_s = outcome, self._clock()
        sample.has_ended.set()
        self._kept_bytes_by_owner += Counter({sample.owner: sample.size_bytes})
        self._make_room(sample)

    def _make_room(self, newest: _Sample) -> None:
        """Drop the oldest results of whoever keeps the most, so that no key drops those of another one."""
        kept = self._kept_bytes_by_owner
        while kept.total() > self._settings.max_result_bytes:
            owner = max(kept, key=lambda owner: kept[owner])
            oldest = next((key for key, each in self._samples.items() if _is_dropped(each, owner, newest)), None)
            if oldest is None:
                return
            self._drop(*oldest)

    def _find(self, request_id: str, owner: str) -> _Sample:
        sample = self._samples.get((owner, request_id))
        if sample is None:
            raise UnknownSample(request_id)
        return sample

    def _drop(self, owner: str, request_id: str) -> None:
        sample = self._samples.pop((owner, request_id))
        self._num_by_owner -= Counter((owner,))
        self._kept_bytes_by_owner -= Counter({owner: sample.size_bytes})
        if sample.task is not None:
            sample.task.cancel()
        if not sample.has_ended.is_set():
            sample.outcome = UnknownSample(request_id)
            sample.has_ended.set()


def _is_dropped(sample: _Sample, owner: str, newest: _Sample) -> bool:
    """Whether a sample has a result of this owner that may go."""
    return sample.owner == owner and sample is not newest and sample.size_bytes > 0
