"""The fleet's record of one request that has not ended: where it is, and what happened to it so far.

The fields of a job are written by its methods; what deaths of workers say about it is written in deaths.py.
"""

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
    accepted_s: float = 0.0  # on the clock that counts only while this process runs
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
    num_failed_loads: int = 0  # of these sessions those where a load failed; at the others pins left no room
    paused_since_s: float | None = None  # when its stream filled up and it was paused

    # ---- where it is ----

    def join(self, session: WorkerSession) -> None:
        """The request is at this worker from now on."""
        self.session, self.num_tokens_here = session, 0

    def leave_worker(self, request: Request | None) -> None:
        """The request is at no worker; `request` has every token accepted so far. None: no scheduler returned it."""
        self.session = None
        if request is not None:
            self.request = request

    def drop_index(self, index: int) -> None:
        """The client cancelled one completion of a request that waits in the fleet."""
        self.request = self.request.without_index(index)

    def pause(self, now_s: float) -> None:
        """Its stream is full."""
        self.paused_since_s = now_s

    def resume(self) -> None:
        """Its reader has read."""
        self.paused_since_s = None

    # ---- what it gained ----

    def start(self) -> None:
        """It is part of a plan."""
        self.has_run = True

    def deliver(self, token_id: int) -> bool:
        """Deliver the next token of completion 0, with nothing beside it. Returns whether the stream is full."""
        self.num_tokens_here += 1
        self.num_generated += 1
        return self.stream.push_token(token_id)

    def count_tokens(self, num_tokens: int) -> None:
        """Count tokens that come with more than themselves."""
        self.num_tokens_here += num_tokens
        self.num_generated += num_tokens

    def note_searched(self, num_tokens: int) -> None:
        """Note the tokens that its beam search has computed in all."""
        self.num_searched = max(self.num_searched, num_tokens)

    # ---- what failed ----

    def note_failed_load(self, epoch: int, *, is_crowded_out: bool = False) -> None:
        """The session of this epoch could not load its adapter, or pinned adapters left no room for it there."""
        self.num_failed_loads += not is_crowded_out and epoch not in self.failed_load_epochs
        self.failed_load_epochs.add(epoch)

    def note_not_finite(self, at: NotFinite) -> None:
        """Its logits were not finite at a worker, and another worker computes it."""
        self.not_finite_at = [*self.not_finite_at, at]

    def take_not_finite(self) -> list[NotFinite]:
        """The workers where its logits were not finite. Forgets them, because the request has gained a token."""
        workers, self.not_finite_at = self.not_finite_at, []
        return workers
