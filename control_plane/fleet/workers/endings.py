"""Why sessions end, and whether a request or the worker may be the reason."""

from __future__ import annotations

import enum

import grpc


class EndCause(enum.Enum):
    """Why a session ended."""

    LEFT = "left"  # the worker said that it leaves
    CLOSED = "closed"  # the control plane shuts down, or the same process attached again
    DRAINED = "drained"  # an operator takes its requests away; it attaches again
    LOST = "lost"  # its stream broke or ended unannounced, or it fell silent: its process may be dead
    FAULT = "fault"  # the worker said that it cannot go on
    HUNG_STEP = "hung step"  # a step does not end
    HUNG_LOAD = "hung load"  # the load of an adapter does not end
    GARBAGE = "garbage"  # what the worker sends cannot be trusted
    REFUSED = "refused"  # its certificate has expired, or the operator does not allow the worker any more
    SICK = "sick"  # its logits are not finite for requests that another worker computes
    INTERNAL_ERROR = "internal error"  # a mistake of the control plane

    @property
    def is_death(self) -> bool:
        """Whether a request that was being computed may be the reason."""
        return self not in (
            EndCause.LEFT,
            EndCause.CLOSED,
            EndCause.DRAINED,
            EndCause.HUNG_LOAD,
            EndCause.REFUSED,
            EndCause.SICK,
        )

    @property
    def blames_worker(self) -> bool:
        """Whether the worker may be the reason."""
        return self not in (
            EndCause.LEFT,
            EndCause.CLOSED,
            EndCause.DRAINED,
            EndCause.REFUSED,
            EndCause.INTERNAL_ERROR,
        )

    @property
    def code(self) -> grpc.StatusCode | None:
        """The status that the worker gets. None: the stream ends with OK, because the worker ended it.

        DEADLINE_EXCEEDED: a thread of the worker hangs, and the worker exits if that goes on. DATA_LOSS: the worker
        computes wrongly, and checks itself.
        """
        return _CODES[self]


_CODES: dict[EndCause, grpc.StatusCode | None] = {
    EndCause.LEFT: None,
    EndCause.CLOSED: grpc.StatusCode.UNAVAILABLE,
    EndCause.DRAINED: grpc.StatusCode.UNAVAILABLE,
    EndCause.LOST: grpc.StatusCode.UNAVAILABLE,
    EndCause.FAULT: None,
    EndCause.HUNG_STEP: grpc.StatusCode.DEADLINE_EXCEEDED,
    EndCause.HUNG_LOAD: grpc.StatusCode.DEADLINE_EXCEEDED,
    EndCause.GARBAGE: grpc.StatusCode.ABORTED,
    EndCause.REFUSED: grpc.StatusCode.PERMISSION_DENIED,
    EndCause.SICK: grpc.StatusCode.DATA_LOSS,
    EndCause.INTERNAL_ERROR: grpc.StatusCode.ABORTED,
}
