"""One watch: a snapshot of what the caller sees, then what changes for the caller, in order and without a gap.

A watch holds nothing but its place in the log of changes, so a client that reads slowly costs no memory: once the log
has forgotten changes that it did not read, it gets a snapshot again. Where versions lie is compared with what was sent.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass

from control_plane.adapters.life_cycle import Placements, shown_placements
from control_plane.adapters.watch.change_log import Change, ChangeLog
from control_plane.adapters.watch.tokens import ResumeTokens
from control_plane.caller import current_caller
from control_plane.registry.permissions import is_visible
from control_plane.registry.records import AdapterRecord
from control_plane.registry.registry import Registry
from control_plane.waits import is_set_within

MAX_WATCH_S = 3600.0
IDLE_S = 60.0  # after which a token is sent again, if nothing else was
RESIDENCY_S = 0.25  # between looks at where versions lie
_PART = 256  # adapters of a snapshot before other tasks get a turn of the event loop


class ChangeKind(enum.Enum):
    """What changed about an adapter."""

    PRESENT = "present"
    CREATED = "created"
    VERSION_ADDED = "version added"
    VERSION_ACTIVATED = "version activated"
    VERSION_DELETED = "version deleted"
    UPDATED = "updated"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class Resync:
    """What the client knew is not valid any more."""

    reason: str


@dataclass(frozen=True, slots=True)
class Synced:
    """The snapshot is complete, or nothing happened for a while."""


@dataclass(frozen=True, slots=True)
class Changed:
    """A change as the caller sees it; after DELETED the record is the last one that the caller saw."""

    kind: ChangeKind
    record: AdapterRecord


@dataclass(frozen=True, slots=True)
class Moved:
    """The active version of an adapter is in other places than were reported before."""

    record: AdapterRecord
    placements: Placements

    @property
    def place(self) -> tuple[str, Placements]:
        """What is compared with what was reported before."""
        return self.record.active_digest, self.placements


# By digest: whether the host cache has it, and the workers that have it in a slot.
_Resident = Mapping[str, tuple[bool, tuple[str, ...]]]
Event = Resync | Synced | Changed | Moved


class AdapterWatches:
    """What all watches share. Used from one event loop."""

    def __init__(
        self,
        registry: Registry,
        cached_digests: Callable[[], Collection[str]],
        workers_by_digest: Callable[[], Mapping[str, tuple[str, ...]]],
        *,
        log: ChangeLog | None = None,
    ) -> None:
        """`cached_digests`: in the host cache. `workers_by_digest`: who has each version in a slot."""
        self._registry = registry
        self._log = log or ChangeLog()
        self._tokens = ResumeTokens()
        self._cached_digests = cached_digests
        self._workers_by_digest = workers_by_digest
        self._resident: _Resident = {}
        self._looked_at_s = float("-inf")
        registry.when_changed.append(self._log.add)

    def _look(self, now_s: float) -> _Resident:
        """Where versions lie; the same object until something moved. Looked up once for all watches."""
        if now_s - self._looked_at_s >= RESIDENCY_S / 2:
            self._looked_at_s = now_s
            workers = self._workers_by_digest()
            resident = {digest: (True, workers.get(digest, ())) for digest in self._cached_digests()}
            for digest, worker_ids in workers.items():
                resident.setdefault(digest, (False, worker_ids))
            if resident != self._resident:
                self._resident = resident
        return self._resident

    async def watch(
        self, adapter_id: str, token: str, *, with_residency: bool, loop_time: Callable[[], float] | None = None
    ) -> AsyncGenerator[tuple[str, Event]]:
        """Tokens and events for the current caller. `adapter_id`: only this one; empty: all. Ends after MAX_WATCH_S."""
        now = loop_time or asyncio.get_running_loop().time
        end_s = now() + MAX_WATCH_S
        place = self._tokens.open(token) if token else None
        reason = "" if place is not None else "the watch is new" if not token else "the token is of an earlier server"
        sent: dict[str, Moved] = {}
        looked: _Resident | None = None
        idle_since_s = now()
        while now() < end_s:
            news = self._log.news
            changes = None if place is None else self._log.after(place)
            if changes is None:
                yield "", Resync(reason or "more changed than the server remembers")
                place = self._log.last  # before the snapshot: what changes meanwhile is reported after it
                async for present in self._snapshot(adapter_id):
                    yield "", present
                yield self._tokens.seal(place), Synced()
                sent.clear()
                looked = None
                idle_since_s, reason = now(), ""
                continue
            assert place is not None, "changes are read from a place on"
            for change in changes:
                place += 1
                event = _seen(change, adapter_id)
                if event is not None:
                    idle_since_s = now()
                    yield self._tokens.seal(place), event
            if with_residency and (changes or looked is not self._look(now())):
                looked = self._look(now())
                for moved in self._moved(adapter_id, looked, sent):
                    idle_since_s = now()
                    yield self._tokens.seal(place), moved
            if now() - idle_since_s >= IDLE_S:
                idle_since_s = now()
                yield self._tokens.seal(place), Synced()
            await is_set_within(news, RESIDENCY_S if with_residency else IDLE_S)

    async def _snapshot(self, adapter_id: str) -> AsyncIterator[Changed]:
        if adapter_id:
            record = self._registry.find(adapter_id)
            if record is not None and is_visible(record, current_caller()):
                yield Changed(ChangeKind.PRESENT, record)
            return
        after = ""
        while True:
            records, after = self._registry.list_part(after, _PART)
            for record in records:
                yield Changed(ChangeKind.PRESENT, record)
            if not after:
                return
            await asyncio.sleep(0)

    def _moved(self, adapter_id: str, resident: _Resident, sent: dict[str, Moved]) -> list[Moved]:
        """What differs from `sent`, which is brought up to date."""
        names = set(sent)
        for digest in resident:
            names.update(self._registry.names_of(digest))
        found: list[Moved] = []
        for name in sorted(names if not adapter_id else names & {adapter_id}):
            record = self._registry.find(name)
            if record is None or not is_visible(record, current_caller()):
                sent.pop(name, None)
                continue
            is_cached, worker_ids = resident.get(record.active_digest, (False, ()))
            placements = shown_placements(record, is_cached=is_cached, worker_ids=worker_ids)
            is_anywhere = placements.is_host_cached or bool(placements.worker_ids)
            before = sent.get(name)
            if before is None and not is_anywhere:
                continue
            moved = Moved(record, placements)
            if before is None or before.place != moved.place:
                found.append(moved)
            if is_anywhere:
                sent[name] = moved
            else:
                del sent[name]
        return found


def _seen(change: Change, adapter_id: str) -> Changed | None:
    """The change as the current caller sees it; None if it does not."""
    caller, before, after = current_caller(), change.before, change.after
    named = before or after
    if adapter_id and (named is None or adapter_id != named.adapter_id):
        return None
    saw = before is not None and is_visible(before, caller)
    sees = after is not None and is_visible(after, caller)
    if not sees:
        return Changed(ChangeKind.DELETED, before) if saw and before is not None else None
    assert after is not None, "a record that is seen is there"
    if not saw or before is None or before.uid != after.uid:
        return Changed(ChangeKind.CREATED, after)
    return Changed(_kind(before, after), after)


def _kind(before: AdapterRecord, after: AdapterRecord) -> ChangeKind:
    if before.active_digest != after.active_digest and before.version(after.active_digest) is not None:
        return ChangeKind.VERSION_ACTIVATED
    old = {version.digest for version in before.versions}
    new = {version.digest for version in after.versions}
    if new - old:
        return ChangeKind.VERSION_ADDED
    return ChangeKind.VERSION_DELETED if old - new else ChangeKind.UPDATED
