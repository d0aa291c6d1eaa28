"""Brings adapters into the arenas of workers ahead of requests, takes them out, and keeps pinned ones there.

A load takes room that is free, or that idle adapters have which nobody pinned: what requests use or wait for stays.
Pinned adapters are loaded wherever there is such room, up to a part of each arena, also at workers that attach later.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import Callable, Collection
from dataclasses import dataclass

from control_plane.fleet.adapters.preloads import AdapterPreloads
from control_plane.fleet.workers.session import WorkerSession
from control_plane.fleet.workers.sessions import SessionTable
from control_plane.scheduler.types import AdapterRef

# Of an arena's bytes and slots: what pins may fill ahead of requests. The rest stays for adapters that nobody pins.
PINNED_PART = 0.5
# A pinned adapter that could not be loaded, or left again, is not tried for this time.
PIN_BACKOFF_S = 30.0
POLL_S = 0.05


class Outcome(enum.Enum):
    """What became of one place."""

    LOADED = "loaded"
    WAS_LOADED = "was loaded"
    LOADING = "loading"
    NO_ROOM = "no room"
    FAILED = "failed"
    UNLOADED = "unloaded"
    WAS_ABSENT = "was absent"
    IN_USE = "in use"
    PINNED = "pinned"


@dataclass(frozen=True, slots=True)
class PlaceResult:
    """What became of an adapter at one worker, or in the host cache."""

    outcome: Outcome
    worker_id: str = ""  # empty: the host cache
    missing_bytes: int = 0  # of NO_ROOM
    reason: str = ""  # of FAILED and NO_ROOM, for people


@dataclass(slots=True)
class _PinnedRef:
    ref: AdapterRef
    account: str


class ArenaResidency:
    """Which adapters are brought into arenas. Only reads `sessions`."""

    def __init__(self, sessions: SessionTable, preloads: AdapterPreloads, clock: Callable[[], float]) -> None:
        self._sessions = sessions.by_id
        self._preloads = preloads
        self._clock = clock
        self._pinned: dict[str, _PinnedRef] = {}
        # (epoch, digest) -> when a pinned adapter may be loaded at that worker again. Only of attached workers.
        self._tried_until_s: dict[tuple[int, str], float] = {}

    def __repr__(self) -> str:
        return f"ArenaResidency(pinned={len(self._pinned)})"

    @property
    def worker_ids(self) -> list[str]:
        """The attached workers, in order."""
        return sorted(self._sessions)

    def num_slots(self) -> int:
        """Adapters that may be loaded at once, over all workers."""
        return sum(session.limits.num_slots for session in self._sessions.values())

    def workers_by_digest(self) -> dict[str, tuple[str, ...]]:
        """The workers that have each adapter in a slot, in order."""
        found: dict[str, tuple[str, ...]] = {}
        for worker_id in self.worker_ids:
            for digest in self._sessions[worker_id].scheduler.preloads.ready_digests():
                found[digest] = (*found.get(digest, ()), worker_id)
        return found

    # ---- loads and unloads by operators ----

    async def load(
        self, ref: AdapterRef, account: str, worker_ids: Collection[str], timeout_s: float
    ) -> list[PlaceResult]:
        """Load the adapter at these workers; the results in their order when all loads ended, or the time is over."""
        results: dict[str, PlaceResult] = {}
        loading: list[WorkerSession] = []
        for worker_id in worker_ids:
            session = self._sessions.get(worker_id)
            if session is None:
                results[worker_id] = PlaceResult(Outcome.FAILED, worker_id, reason="the worker is not attached")
            elif session.scheduler.adapter_use(ref.digest).is_ready:
                results[worker_id] = PlaceResult(Outcome.WAS_LOADED, worker_id)
            elif (refused := _refused(session, ref)) is not None:
                results[worker_id] = refused
            else:
                loading.append(session)
        if loading:
            done = await self._preloads.preload(ref, account, loading, timeout_s=timeout_s)
            for session in loading:
                results[session.worker_id] = _loaded(session, ref, is_done=session.worker_id in done)
        return [results[worker_id] for worker_id in worker_ids]

    async def unload(self, digest: str, worker_ids: Collection[str], timeout_s: float) -> list[PlaceResult]:
        """Take the adapter out of these workers as soon as no request uses it; the results in their order."""
        results: dict[str, PlaceResult] = {}
        leaving: list[WorkerSession] = []
        for worker_id in worker_ids:
            session = self._sessions.get(worker_id)
            if session is None:
                results[worker_id] = PlaceResult(Outcome.FAILED, worker_id, reason="the worker is not attached")
            elif digest in self._pinned:
                results[worker_id] = PlaceResult(Outcome.PINNED, worker_id)
            elif not session.scheduler.adapter_use(digest).is_held:
                results[worker_id] = PlaceResult(Outcome.WAS_ABSENT, worker_id)
            else:
                session.purge_digest(digest)
                leaving.append(session)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while any(_is_there(session, digest) for session in leaving):
                    await asyncio.sleep(POLL_S)
        for session in leaving:
            outcome = Outcome.IN_USE if _is_there(session, digest) else Outcome.UNLOADED
            results[session.worker_id] = PlaceResult(outcome, session.worker_id)
        return [results[worker_id] for worker_id in worker_ids]

    # ---- pins ----

    def pin(self, ref: AdapterRef, account: str) -> None:
        """Load the adapter wherever there is room, now and later."""
        self._pinned[ref.digest] = _PinnedRef(ref, account)
        self.load_pinned()

    def unpin(self, digest: str) -> None:
        """Load it no more by itself. It need not be pinned."""
        self._pinned.pop(digest, None)

    def load_pinned(self) -> None:
        """Begin the loads of pinned adapters that are due; call it regularly, and when a worker attached."""
        if not self._pinned:
            return
        now_s = self._clock()
        epochs = {session.epoch for session in self._sessions.values()}
        self._tried_until_s = {
            key: until_s for key, until_s in self._tried_until_s.items() if key[0] in epochs and until_s > now_s
        }
        for session in list(self._sessions.values()):
            for pinned in list(self._pinned.values()):
                key = (session.epoch, pinned.ref.digest)
                if key in self._tried_until_s or session.ended.is_set():
                    continue
                use = session.scheduler.adapter_use(pinned.ref.digest)
                if use.is_ready or session.scheduler.preloads.is_open(pinned.ref.digest):
                    continue
                room = session.scheduler.preloads.room_for(pinned.ref)
                if room.missing_bytes or room.missing_slots or not room.has_pinned_part(pinned.ref, PINNED_PART):
                    continue
                self._tried_until_s[key] = now_s + PIN_BACKOFF_S
                session.preload(pinned.ref, pinned.account)


def _refused(session: WorkerSession, ref: AdapterRef) -> PlaceResult | None:
    """Why the worker cannot load the adapter at present, if it cannot."""
    limits, worker_id = session.limits, session.worker_id
    if ref.arena_bytes > limits.arena_bytes or limits.num_slots == 0:
        return PlaceResult(
            Outcome.NO_ROOM,
            worker_id,
            ref.arena_bytes - limits.arena_bytes if limits.num_slots else ref.arena_bytes,
            f"the adapter takes {ref.arena_bytes} bytes, and the worker's whole arena has {limits.arena_bytes}",
        )
    room = session.scheduler.preloads.room_for(ref)
    if room.missing_bytes or room.missing_slots:
        why = "every slot is used or pinned" if room.missing_slots else "what is used or pinned leaves too little room"
        return PlaceResult(Outcome.NO_ROOM, worker_id, room.missing_bytes, why)
    return None


def _loaded(session: WorkerSession, ref: AdapterRef, *, is_done: bool) -> PlaceResult:
    """What became of a load that ended, or that was given up."""
    worker_id = session.worker_id
    if is_done:
        return PlaceResult(Outcome.LOADED, worker_id)
    if session.ended.is_set():
        return PlaceResult(Outcome.FAILED, worker_id, reason="the worker was lost")
    if session.scheduler.adapter_use(ref.digest).is_held:
        return PlaceResult(Outcome.LOADING, worker_id)
    return _refused(session, ref) or PlaceResult(
        Outcome.FAILED, worker_id, reason="the worker could not load the adapter; its log says why"
    )


def _is_there(session: WorkerSession, digest: str) -> bool:
    return not session.ended.is_set() and session.scheduler.adapter_use(digest).is_held
