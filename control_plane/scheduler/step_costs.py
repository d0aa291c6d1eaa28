"""What one worker's time goes to, in microseconds: the settings' figures at the start, then what the worker timed.

Prices two choices: whether a victim's tokens are cheaper to compute once more than to move, and whether one more
adapter in the step costs more than it gives. Placement takes step times, and times of loads, from here.
"""

from __future__ import annotations

from collections import deque

from control_plane.scheduler.settings import SchedulerSettings

SMOOTHING = 1 / 16  # share of the newest measurement in the running mean
MIN_PREFILL_TOKENS = 64  # fewer in a step say little about the price of one
# Moves of so many blocks count as much as what is known before them: 32 MiB of a 8B model's, where starting a copy is
# no longer most of its time. One step's moves are never more than a quarter of what is known.
USUAL_MOVED_BLOCKS = 16
MOST_OF_MOVES = 1 / 4
# The load cost is the median of the last NUM_LOADS loads; it is unknown until then. With fewer, one slow load would
# keep adapters away from a worker, and with them the loads that could correct the cost.
NUM_LOADS = 9


class StepCosts:
    """Prices for one worker."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.prefill_us_per_token = settings.prefill_us_per_token
        self.swap_us_per_block = settings.swap_us_per_block  # one way
        self.decode_step_us = settings.step_us
        self.load_us = self.load_bytes = 0.0  # median of the latest loads from the host cache; 0: unknown
        self._loads: deque[tuple[int, int]] = deque(maxlen=NUM_LOADS)  # (microseconds, bytes)
        self._adapter_us_per_byte = settings.adapter_us_per_mib / 2**20
        self._has_measured_prefill = self._has_measured_decode = False

    def observe(self, step_time_us: int, num_decodes: int, num_prefill_tokens: int) -> None:
        """Learn from a step that the worker timed; a step that mixes both kinds about evenly is ignored."""
        if num_prefill_tokens == 0 and num_decodes > 0:
            share = SMOOTHING if self._has_measured_decode else 1.0
            self.decode_step_us += share * (step_time_us - self.decode_step_us)
            self._has_measured_decode = True
        elif num_prefill_tokens >= max(MIN_PREFILL_TOKENS, 8 * num_decodes):
            share = SMOOTHING if self._has_measured_prefill else 1.0
            self.prefill_us_per_token += share * (step_time_us / num_prefill_tokens - self.prefill_us_per_token)
            self._has_measured_prefill = True

    def observe_moves(self, num_blocks: int, time_us: int) -> None:
        """Learn from moves to or from host memory that the worker timed; a few blocks say little about many."""
        share = min(MOST_OF_MOVES, num_blocks / (num_blocks + USUAL_MOVED_BLOCKS))
        self.swap_us_per_block += share * (time_us / num_blocks - self.swap_us_per_block)

    def observe_load(self, num_bytes: int, time_us: int) -> None:
        """Learn from the load of an adapter that was in the host cache, which the worker timed."""
        self._loads.append((time_us, num_bytes))
        if len(self._loads) == NUM_LOADS:
            self.load_us, self.load_bytes = sorted(self._loads)[NUM_LOADS // 2]

    def is_swap_cheaper(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether moving the blocks out and in again costs less than computing the tokens once more."""
        return 2 * num_blocks * self.swap_us_per_block < num_tokens * self.prefill_us_per_token

    def is_expensive(self, arena_bytes: int, num_running: int) -> bool:
        """Whether one more row with an adapter that no row uses yet lowers the throughput of the step.

        A step of n rows and time T gives n/T tokens per microsecond, with the row (n + 1)/(T + d), where d is the time
        to read the adapter once: less if n x d > T.
        """
        return num_running * arena_bytes * self._adapter_us_per_byte > self.decode_step_us
