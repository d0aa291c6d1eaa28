"""Adapter loads at one worker: from the command that is sent to the report that the scheduler gets."""

from __future__ import annotations

import logging
from collections.abc import Callable

from contract.process_log import printable
from contract.v1 import plan_pb2
from control_plane.fleet.workers.errors import GarbageResult
from control_plane.fleet.workers.overdue import WorkWatch
from control_plane.observers.timings import FROM_CACHE, FROM_STORE, NO_TIMINGS, Timings
from control_plane.scheduler.types import LoadSlot, SlotEmptied, SlotLoadFailed, SlotReady, SlotReport

logger = logging.getLogger(__name__)

_State = plan_pb2.SlotState.State


class AdapterLoads:
    """The loads of one session that have no report yet."""

    def __init__(
        self, worker_id: str, work: WorkWatch, on_load: Callable[[str], bool], timings: Timings = NO_TIMINGS
    ) -> None:
        """`on_load`: called with the digest of every load; whether the host cache has the adapter."""
        self._worker_id = worker_id
        self._work = work
        self._on_load = on_load
        self._timings = timings
        self._from_cache: set[tuple[int, int]] = set()  # (slot, generation)
        self._sizes_bytes: dict[tuple[int, int], int] = {}  # (slot, generation) -> what the load takes of the arena

    def sent(self, command: LoadSlot) -> None:
        """The worker is sent a load."""
        self._work.load_sent(command.slot_idx, command.generation, command.digest, command.arena_bytes)
        self._sizes_bytes[command.slot_idx, command.generation] = command.arena_bytes
        if self._on_load(command.digest):
            self._from_cache.add((command.slot_idx, command.generation))

    def report_of(self, message: plan_pb2.SlotState) -> SlotReport:
        """What the worker reports about a slot. Raises GarbageResult.

        Only a load from the host cache measures how long loads take: other loads wait for the store.
        """
        slot, generation = message.slot, message.generation
        is_from_cache = (slot, generation) in self._from_cache
        self._from_cache.discard((slot, generation))
        size_bytes = self._sizes_bytes.pop((slot, generation), 0)
        self._work.load_finished(slot, generation)
        if message.state == _State.STATE_READY:
            source = FROM_CACHE if is_from_cache else FROM_STORE
            self._timings.slot_loaded(source, message.load_time_us / 1e6, size_bytes)
            return SlotReady(slot, generation, message.load_time_us if is_from_cache else 0)
        if message.state == _State.STATE_EMPTY:
            self._timings.slot_evicted()
            return SlotEmptied(slot, generation)
        if message.state == _State.STATE_FAILED:
            self._timings.slot_load_failed()
            reason = printable(message.reason)
            logger.warning("adapter load failed worker_id=%s slot=%d: %s", self._worker_id, slot, reason)
            return SlotLoadFailed(
                slot, generation, reason, is_retryable=message.retryable, is_mismatch=message.mismatch
            )
        raise GarbageResult(f"slot {slot}: state {message.state}")
