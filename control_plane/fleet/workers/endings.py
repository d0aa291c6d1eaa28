"""Why sessions end, and whom that speaks against."""

from __future__ import annotations

import enum

import grpc


class EndCause(enum.Enum):
    """Why a session ended."""

    LEFT = "left"  # the worker said that it leaves
    CLOSED = "closed"  # the control plane shuts down, or the same process attached anew
    LOST = "lost"  # its stream broke or ended without a word, or it fell silent: its process may be dead
    FAULT = "fault"  # the worker said that it cannot go on
    HUNG_STEP = "hung step"  # a step does not end
    HUNG_LOAD = "hung load"  # the load of an adapter does not end
    GARBAGE = "garbage"  # nothing that the worker says can be trusted
    SICK = "sick"  # its logits are not finite where another worker's are
    INTERNAL_ERROR = "broken books"  # a mistake of the control plane's own

    @property
    def is_death(self) -> bool:
        """Whether a request that was being computed may be the reason."""
        return self not in (EndCause.LEFT, EndCause.CLOSED, EndCause.HUNG_LOAD, EndCause.SICK)

    @property
    def blames_worker(self) -> bool:
        """Whether the worker may be the reason."""
        return self not in (EndCause.LEFT, EndCause.CLOSED, EndCause.INTERNAL_ERROR)

    @property
    def code(self) -> grpc.StatusCode | None:
        """What the worker is told; None: the stream ends in order, since the worker ended it.

        DEADLINE_EXCEEDED: a thread of it hangs, and it exits if that goes on. DATA_LOSS: it computes wrongly, and
        checks itself.
        """
        return _CODES[self]


_CODES: dict[EndCause, grpc.StatusCode | None] = {
    EndCause.LEFT: None,
    EndCause.CLOSED: grpc.StatusCode.UNAVAILABLE,
    EndCause.LOST: grpc.StatusCode.UNAVAILABLE,
    EndCause.FAULT: None,
    EndCause.HUNG_STEP: grpc.StatusCode.DEADLINE_EXCEEDED,
    EndCause.HUNG_LOAD: grpc.StatusCode.DEADLINE_EXCEEDED,
    EndCause.GARBAGE: grpc.StatusCode.ABORTED,
    EndCause.SICK: grpc.StatusCode.DATA_LOSS,
    EndCause.INTERNAL_ERROR: grpc.StatusCode.ABORTED,
}
