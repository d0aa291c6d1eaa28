"""The numbers of one scheduler at one moment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counts of one worker's scheduler; totals count from its beginning."""

    num_waiting: int  # requests that hold no row, preempted and paused ones included
    num_running: int  # requests that hold a row
    num_paused: int  # requests whose reader is slow, waiting or running
    num_blocks: int  # KV blocks of the worker
    num_blocks_held: int  # blocks in some request's table
    num_blocks_cached: int  # blocks in the prefix cache that nobody holds
    num_plans_in_flight: int  # plans not answered
    arena_used_bytes: int  # slots that load, hold or give up an adapter
    num_adapters_loaded: int  # slots ready for use
    prefix_query_tokens: int  # total of tokens looked up at first admissions
    prefix_hit_tokens: int  # total of those found in the prefix cache
    num_preemptions: int  # total
    num_tokens_sampled: int  # total of accepted tokens
