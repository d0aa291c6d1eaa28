"""The fleet's record of one request that has not ended: where it is, and what happened to it so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from control_plane.fleet.requests.quotas import Charge
from control_plane.fleet.requests.streams import JobStream
from control_plane.scheduler.types import Request

if TYPE_CHECKING:
    from control_plane.fleet.workers.session import WorkerSession


@dataclass(slots=True)
class Death:
    """One death of a worker that was computing a request."""

    epoch: int  # of the session that ended by it
    worker_id: str
    is_loss: bool  # only its stream was lost: the process may have outlived that
    is_cleared: bool = False  # the request survived elsewhere: the death no longer counts against it


@dataclass(frozen=True, slots=True)
class NotFinite:
    """A worker whose logits were not finite for a request."""

    worker_id: str
    epoch: int  # of its session
    gave_tokens: bool  # lately, to this request or others


@dataclass(slots=True)
class Job:
    """The fleet's record of one request that has not ended."""

    request: Request  # with every token accepted before its last placement
    stream: JobStream = field(repr=False)
    charge: Charge  # what its tenant is charged
    session: WorkerSession | None = None  # None: waits in the fleet
    has_run: bool = False  # it was part of a plan at least once
    num_losses: int = 0  # deaths of workers that computed it, and that it may have caused
    num_fruitless_losses: int = 0  # the latest of these in a row in which it had gained no token
    deaths: list[Death] = field(default_factory=list)  # those of them that nothing else explains
    not_finite_at: list[NotFinite] = field(default_factory=list)  # workers since its last token; it moved on from each
    had_fleet_loss: bool = False  # the loss of a whole fleet was discounted, which happens once
    num_tokens_here: int = 0  # accepted since its last placement
    num_generated: int = 0  # tokens delivered to its stream, over all its indices
    num_searched: int = 0  # tokens that its beam search computed, known at its end
    failed_load_epochs: set[int] = field(default_factory=set)  # sessions that could not load its adapter
    paused_since_s: float | None = None  # when its stream filled up and it was paused
