"""How long requests wait while no worker takes any.

Cases: 1. nobody starts workers on demand: all requests wait together, until `worker_grace_s` after the last worker
went, and further ones are refused; 2. an autoscaler starts workers for requests that wait (`worker_start_s`): each
request waits for that long, and none is refused, since the first one is what makes a worker start.
"""

from __future__ import annotations

from collections.abc import Callable

from control_plane.fleet.attach import AttachedWorkers
from control_plane.fleet.settings import FleetSettings

_EVER = float("-inf")  # seconds


class WorkerWaits:
    """Judges requests that wait for a worker."""

    def __init__(self, settings: FleetSettings, workers: AttachedWorkers, awake: Callable[[], float]) -> None:
        """`awake` counts seconds in which this process runs: those of a sleep are held against no request."""
        self._workers = workers
        self._awake = awake
        start_s = settings.worker_start_s
        self.starts_workers = settings.worker_start_s is not None  # an autoscaler does, for requests that wait
        self.limit_s = settings.worker_grace_s if start_s is None else start_s

    @property
    def are_accepted(self) -> bool:
        """Whether a further request may begin to wait, or a worker takes it."""
        return self.starts_workers or not self._is_over(_EVER)

    def now_s(self) -> float:
        """The time that `is_over` compares with."""
        return self._awake()

    def is_over(self, accepted_s: float) -> bool:
        """Whether a request that was accepted at this time has waited for a worker for long enough."""
        return self._is_over(accepted_s if self.starts_workers else _EVER)

    def _is_over(self, not_before_s: float) -> bool:
        since_s = self._workers.no_worker_since_s
        return since_s is not None and self._awake() - max(since_s, not_before_s) >= self.limit_s
