"""How long a worker stays out after its sessions ended by faults. The pauses double, and end with sound work.

Without this, a sick worker would attach again at once, be the emptiest, get the next requests and fail them, ten times
a second. Faults that suspects may have caused do not count. Neither do the first deaths of a process in a row: its
supervisor starts it again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Set
from dataclasses import dataclass, field

from control_plane.errors import WorkerQuarantined
from control_plane.fleet.settings import FleetSettings
from control_plane.fleet.workers.endings import EndCause

logger = logging.getLogger(__name__)

SOUND_STEPS = 50  # finished in one session: earlier faults are forgotten
SOUND_S = 60.0  # that a session must last if the worker's logits were in doubt: a sick worker finishes steps, too
FREE_DEATHS = 2  # of a process, in a row
FORGOTTEN_S = 3600.0  # after its pause, if the worker did not come back: worker ids have no end


@dataclass(slots=True)
class _Record:
    """Sessions that ended by faults, in a row."""

    until_s: float  # end of the pause; the time of the record if it has no pause
    causes: dict[int, EndCause] = field(default_factory=dict)  # by epoch
    reason: str = ""  # of the latest

    @property
    def num_counted(self) -> int:
        num_losses = sum(cause is EndCause.LOST for cause in self.causes.values())
        return len(self.causes) - min(num_losses, FREE_DEATHS)


class Quarantine:
    """The faults of each worker, by worker id."""

    def __init__(self, settings: FleetSettings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._records: dict[str, _Record] = {}

    def check(self, worker_id: str) -> None:
        """Raise WorkerQuarantined if the worker may not attach yet."""
        record = self._records.get(worker_id)
        if record is not None and (wait_s := record.until_s - self._clock()) > 0:
            raise WorkerQuarantined(
                f"worker {worker_id} may attach in {wait_s:.1f} s: {record.num_counted} of its sessions in a row ended "
                f"by faults, the last one by: {record.reason}",
                retry_after_s=wait_s,
            )

    def note_end(
        self, worker_id: str, epoch: int, cause: EndCause, reason: str, *, num_steps: int, lasted_s: float
    ) -> None:
        """Count the end of a session if its worker may be the reason. A sound session clears the counts before it."""
        record = self._records.get(worker_id, _Record(self._clock()))
        is_in_doubt = EndCause.SICK in (cause, *record.causes.values())
        if lasted_s >= SOUND_S if is_in_doubt else num_steps >= SOUND_STEPS:
            self._records.pop(worker_id, None)
            record = _Record(self._clock())
        if not cause.blames_worker:
            return
        now_s = self._clock()
        self._records = {i: kept for i, kept in self._records.items() if now_s < kept.until_s + FORGOTTEN_S}
        self._records[worker_id] = record
        record.causes[epoch], record.reason = cause, reason
        if record.num_counted > 0:
            doubled_s = self._settings.quarantine_s * 2.0 ** min(record.num_counted - 1, 60)
            pause_s = min(self._settings.max_quarantine_s, doubled_s)
            record.until_s = now_s + pause_s
            logger.warning(
                "worker quarantined worker_id=%s pause_s=%.1f num_faults=%d", worker_id, pause_s, record.num_counted
            )

    def outlived(self, worker_id: str, epoch: int) -> None:
        """The worker's process outlived this session: if the session was lost, the process did not die."""
        record = self._records.get(worker_id)
        if record is not None and record.causes.get(epoch) is EndCause.LOST:
            self.discount({epoch})

    def discount(self, epochs: Set[int]) -> None:
        """Drop the ends of these sessions: the workers did not cause them."""
        for worker_id, record in list(self._records.items()):
            if not epochs.isdisjoint(record.causes):
                record.causes = {epoch: cause for epoch, cause in record.causes.items() if epoch not in epochs}
                record.until_s = self._clock()
                if not record.causes:
                    del self._records[worker_id]
