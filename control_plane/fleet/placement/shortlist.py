"""Chooses which of many workers are priced for a request: pricing takes 5 to 10 us per worker, too long for a thousand.

We price the workers that recently received this adapter or this prompt prefix, and the next NUM_IN_TURN in round-robin
order. The least busy of those is nearly the least busy of all. The memory is a hint: a worker that has lost the adapter
or the prefix is priced without it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from control_plane.fleet.placement.placement import AnyCandidate
from control_plane.scheduler.types import Request

MAX_PRICED = 32  # up to this many workers, every one is priced
NUM_IN_TURN = 16
MAX_HINTS = 8  # workers remembered for one adapter or prefix
MAX_KEYS = 8192  # adapters and prefixes remembered
PREFIX_TOKENS = 64  # of a prompt that count as its prefix


class Shortlist:
    """Remembers where requests went."""

    def __init__(self) -> None:
        # Hash of an adapter or a prefix -> ids of workers that got it, latest last; least recently used key first.
        # The hash differs between processes: it is a key only, and nothing is ordered by it.
        self._hints: OrderedDict[int, OrderedDict[str, None]] = OrderedDict()
        self._turn = 0

    @property
    def num_keys(self) -> int:
        """Adapters and prefixes that are remembered, at most MAX_KEYS."""
        return len(self._hints)

    def choose(self, sessions: Mapping[str, AnyCandidate], request: Request) -> list[AnyCandidate]:
        """Sessions to be priced, by worker id."""
        everybody = list(sessions.values())
        if len(everybody) <= MAX_PRICED:
            return everybody
        chosen = {}
        for key in _keys(request):
            for worker_id in self._hints.get(key, ()):
                if worker_id in sessions:
                    chosen[worker_id] = sessions[worker_id]
        self._turn = (self._turn + NUM_IN_TURN) % len(everybody)
        for session in (everybody + everybody[:NUM_IN_TURN])[self._turn : self._turn + NUM_IN_TURN]:
            chosen[session.worker_id] = session
        return list(chosen.values())

    def placed(self, request: Request, worker_id: str) -> None:
        """Remember that the request went to this worker."""
        for key in _keys(request):
            workers = self._hints.setdefault(key, OrderedDict())
            workers[worker_id] = None
            workers.move_to_end(worker_id)
            self._hints.move_to_end(key)
            if len(workers) > MAX_HINTS:
                workers.popitem(last=False)
        while len(self._hints) > MAX_KEYS:
            self._hints.popitem(last=False)


def _keys(request: Request) -> list[int]:
    prefix_of = None if request.active_from >= PREFIX_TOKENS else request.adapters_name
    prefix = hash((prefix_of, request.tenant, request.cache_salt, request.prompt_token_ids[:PREFIX_TOKENS]))
    return [prefix, *(hash(ref.digest) for ref in request.adapters)]
