"""One line of the process log for each request that ended."""

from __future__ import annotations

import logging

from contract.process_log import printable
from control_plane.observers.ended_request import EndedRequest

logger = logging.getLogger(__name__)

BASE_MODEL = "_base"


class RequestLog:
    """Writes the lines, at the level info. No text of a prompt or a completion is in them."""

    @property
    def is_on(self) -> bool:
        """Whether lines of this level are written."""
        return logger.isEnabledFor(logging.INFO)

    def ended(self, request: EndedRequest) -> None:
        """Write one."""
        logger.info(
            "request ended request_id=%s action=%s tenant=%s adapter=%s digest=%s worker=%s reason=%s prompt_tokens=%d "
            "cached_tokens=%d generated_tokens=%d queue_s=%s adapter_wait_s=%s first_token_s=%s total_s=%.6f",
            printable(request.request_id),
            request.action,
            printable(request.tenant),
            ",".join(request.adapters) or BASE_MODEL,
            ",".join(digest[:12] for digest in request.digests) or "-",
            ",".join(request.workers) or "-",
            ",".join(request.reasons) or "-",
            request.num_prompt_tokens,
            request.num_cached_tokens,
            request.num_generated_tokens,
            _seconds(request.queue_s),
            _seconds(request.adapter_wait_s),
            _seconds(request.first_token_s),
            request.total_s,
        )

    def refused(self, reason: str) -> None:
        """Refusals are in the audit log, and at the level debug."""


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.6f}"
