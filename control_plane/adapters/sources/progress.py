"""How far a registration has come: written by the task that runs it, read by requests for its operation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Progress:
    """How far one operation has come. Plain values, so that a thread may write them while the event loop reads them."""

    phase: str = ""  # "resolve", "download", "check"; empty before the first
    bytes_done: int = 0  # of the download
    bytes_total: int = 0  # 0 until it is known
