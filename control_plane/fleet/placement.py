"""Which worker a request goes to, and when a request that may be killing workers may run. Policy only, no state.

**Placement.** The worker with the least load, its unfinished requests over its rows; one that holds the request's
adapter (weights or cached KV) counts as a quarter of a batch less loaded. Ties go to the lower worker id.

**Suspicion.** A request that was being computed at two worker deaths is a suspect. At most one suspect at a time is on
trial per worker. It is cleared when it has gained more tokens there than can be in flight: what killed a worker once
does so again at the re-prefill or at the token after it. A worker that dies during a trial convicts the suspect.
"""

from __future__ import annotations

from collections.abc import Iterable

from control_plane.fleet.jobs import Job
from control_plane.fleet.session import WorkerSession

RESIDENT_BONUS = 0.25  # of a full batch
MAX_MIGRATIONS = 3
DEATHS_TO_SUSPECT = 2


def by_preference(sessions: Iterable[WorkerSession], digest: str | None) -> list[WorkerSession]:
    """The sessions, best first, for a request with this adapter (None: base model)."""

    def score(session: WorkerSession) -> tuple[float, str]:
        load = session.scheduler.num_unfinished / session.max_rows
        is_resident = digest is not None and session.scheduler.has_digest(digest)
        return load - (RESIDENT_BONUS if is_resident else 0.0), session.worker_id

    return sorted(sessions, key=score)


def is_suspect(job: Job) -> bool:
    """Whether the request may be what kills workers."""
    return job.num_deaths >= DEATHS_TO_SUSPECT


def is_cleared(job: Job, plan_depth: int) -> bool:
    """Whether a suspect on trial has come past the point where it would have killed its worker."""
    return job.num_tokens_here > plan_depth + 1
