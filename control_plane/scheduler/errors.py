"""What the scheduler refuses: requests that can never run here, and reports that contradict its state.

Plain ValueErrors without gRPC in sight; the fleet turns them into what a client may see or ends the session.
"""

from __future__ import annotations


class RequestNeverFits(ValueError):
    """The request would not fit this worker even if it were alone on it."""

    def __init__(self, num_blocks_needed: int, num_blocks: int, message: str = "") -> None:
        super().__init__(
            message
            or f"the request needs {num_blocks_needed} KV blocks, the worker has {num_blocks}; "
            "shorten the prompt or lower max_tokens"
        )
        self.num_blocks_needed = num_blocks_needed
        self.num_blocks = num_blocks


class ContextNeverFits(RequestNeverFits):
    """The tokens given fill the context already: nothing can be generated."""


class PlanNeverFits(RequestNeverFits):
    """The request's tokens and block table are more than one plan carries."""


class AdapterNeverFits(RequestNeverFits):
    """The adapter is larger than the whole arena."""


class RowsNeverFit(RequestNeverFits):
    """The request has more sequences than the worker has rows."""


class PoolingNeverFits(RequestNeverFits):
    """The worker returns no vectors."""


class ResultMismatch(ValueError):
    """A step result that is not that of the oldest step in flight: the worker or the wire is wrong."""


class SlotReportMismatch(ValueError):
    """A slot report that contradicts the slot's state or generation: the worker or the wire is wrong."""
