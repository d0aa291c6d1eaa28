"""What an operator may choose about scheduling, one frozen value for all workers.

Token counts are tokens of one step, costs are microseconds. What the worker measures of itself takes the place of
prefill_us_per_token, swap_us_per_block and step_us; adapter_us_per_mib stays what it is set to.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from control_plane.scheduler.types import WorkerLimits


class Policy(enum.Enum):
    """The order in which a step is filled."""

    # Decodes, then unfinished prefills (those about to finish first), then swapped, then waiting, all in one step.
    CHUNKED_PREFILL = "chunked_prefill"
    # Whole prompts of waiting requests as long as there are any, else decodes, then swapped.
    PREFILL_FIRST = "prefill_first"
    # PREFILL_FIRST, strictly by arrival over tenants, priorities and adapters: the first request holds up all others.
    # Preempts by recompute alone. It is what small engines do; it is here to compare with.
    FCFS = "fcfs"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """How one worker's time and memory are shared out."""

    policy: Policy = Policy.CHUNKED_PREFILL
    max_step_tokens: int | None = None  # token budget of one step, tokens; None: the worker's own, its upper bound
    max_sequences: int | None = None  # sequences that hold a row at once; None: the worker's rows, its upper bound
    # Blocks that an admission leaves free while others run, as a share of the pool: their next decodes need them, and
    # an admission that is preempted at once is wasted work.
    watermark: float = 0.01
    # Steps for which the next request holds up others while it lacks rows or blocks. Then others pass it, and later it
    # holds them up for as many steps once more (backfill.py). 64 steps are 1.3 s if a step takes 20 ms.
    max_blocked_steps: int = 64
    # For CHUNKED_PREFILL. Unfinished prefills at once, and of those the long ones: further long prompts wait, short
    # ones pass them.
    max_partial_prefills: int = 4
    max_long_partial_prefills: int = 1
    long_prefill_tokens: int | None = None  # a longer prefill is a long one, tokens; None: half the token budget
    # A victim is swapped out where moving its blocks out and in costs less than computing its tokens once more.
    # Defaults: an 8B model on an H200 computes 40 000 prompt tokens a second, and a block of 2 MiB takes 40 us over
    # PCIe 5.
    prefill_us_per_token: float = 25.0
    swap_us_per_block: float = 40.0  # one way
    # What one more adapter costs a step: its bytes are read once. Defaults: 4.2 TB/s, and a step of that 8B model.
    adapter_us_per_mib: float = 0.25
    step_us: float = 5000.0

    def bound(self, limits: WorkerLimits) -> WorkerLimits:
        """The worker's limits, less where a setting is below them."""
        max_step_tokens = min(limits.max_step_tokens, self.max_step_tokens or limits.max_step_tokens)
        max_rows = min(limits.max_rows, self.max_sequences or limits.max_rows)
        return replace(limits, max_step_tokens=max_step_tokens, max_rows=max_rows)

    def long_tokens(self, limits: WorkerLimits) -> int:
        """Tokens beyond which a prefill is a long one."""
        return self.long_prefill_tokens or max(1, self.bound(limits).max_step_tokens // 2)

    def __post_init__(self) -> None:
        for name in ("max_step_tokens", "max_sequences", "long_prefill_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: {value} is below 1; leave it out for the worker's own")
        for name in ("max_blocked_steps", "max_partial_prefills", "max_long_partial_prefills"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is below 1")
        if self.max_long_partial_prefills > self.max_partial_prefills:
            raise ValueError(
                f"max_long_partial_prefills: {self.max_long_partial_prefills} is above max_partial_prefills of "
                f"{self.max_partial_prefills}"
            )
        if not 0 <= self.watermark < 1:
            raise ValueError(
                f"watermark: {self.watermark} is not a share of the blocks; give 0 or more, and less than 1"
            )
        for name in ("prefill_us_per_token", "swap_us_per_block", "adapter_us_per_mib", "step_us"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(
                    f"{name}: {getattr(self, name)} is not a cost in microseconds; give a finite number of 0 or more"
                )


DEFAULT_SETTINGS = SchedulerSettings()
