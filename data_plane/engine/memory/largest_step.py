"""What the largest step takes: it is run once, before the KV blocks are made, on a few blocks of its own.

Called by build.py. The engine that it runs is thrown away.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch
from motet.command_line import size

from contract.process_log import shown
from data_plane.engine.engine import TorchEngine
from data_plane.engine.memory.device_memory import DeviceMemory
from data_plane.engine.memory.kv_size import Measured
from data_plane.engine.warm_up import run_largest_steps
from data_plane.errors import ConfigError

logger = logging.getLogger(__name__)


def blocks_of_largest_step(max_rows: int, max_step_tokens: int, block_size: int) -> int:
    """KV blocks for which a step of the most rows and tokens has room, whichever of its rows the tokens belong to."""
    return max_rows * -(-2 // block_size) + -(-max_step_tokens // block_size) + max_rows + 1


def measure_largest_step(
    make_engine: Callable[[int], TorchEngine], num_blocks: int, memory: DeviceMemory, unused_bytes: int
) -> Measured:
    """Build an engine of so many blocks, run the largest steps, and say what they took. The engine is gone then.

    unused_bytes: of the arena, what no page backs yet. Raises ConfigError if the memory is not enough.
    """
    began_s = time.perf_counter()
    try:
        engine = make_engine(num_blocks)
        kv_bytes = sum(tensor.zero_().nbytes for tensor in engine.kv_cache.tensors)  # zeros take no memory till written
        memory.begin_peak()
        free, own = memory.free_bytes(), memory.own_bytes()
        num_tokens = run_largest_steps(engine)
        step_bytes = max(memory.peak_bytes() - own, 0)
        engine.reset()
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"no memory for the largest step beside weights and arena; lower --token-budget, --max-rows or "
            f"--arena-bytes: {error}"
        ) from error
    time_s = time.perf_counter() - began_s
    sentence = f"the largest step, of {num_tokens} tokens, takes {size(step_bytes)} (measured in {time_s:.1f} s)"
    logger.info("largest step tokens=%d bytes=%d time_s=%.1f", num_tokens, step_bytes, time_s, extra=shown(sentence))
    return Measured(
        total=memory.total_bytes(),
        free=free + kv_bytes - unused_bytes,
        own=max(own - kv_bytes, 0) + unused_bytes,
        step=step_bytes,
    )
