"""How many KV blocks a worker makes: those that are named, or what is left of its memory beside the largest step.

Called by build.py with what was measured. Arithmetic alone: it reads no memory.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from motet.command_line import size

from contract.hello_bounds import MAX_BLOCKS
from data_plane.config import WorkerConfig
from data_plane.errors import ConfigError

logger = logging.getLogger(__name__)

# The share of a GPU that a worker fills without --memory-utilization; vLLM's default too.
CUDA_UTILIZATION = 0.9
# Without it a worker on the CPU makes KV blocks of so much of what is left. Control plane, host cache and the machine's
# other processes share the memory, and take more of it later than they have when the worker starts.
CPU_SHARE = 0.4


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes of the device's memory while it holds everything but KV blocks, before the largest step."""

    total: int
    free: int  # for this process and all others
    own: int  # taken by this process; the arena counts whole, even where no page backs it yet
    step: int  # what the largest step takes on top, for as long as it runs


@dataclass(frozen=True, slots=True)
class Demand:
    """What is to be held beside what was measured."""

    bytes_per_block: int
    most_blocks: int  # that all rows of the longest context can use
    host_kv_bytes: int = 0  # where host KV lies in the same memory
    pinned_bytes: int = 0  # likewise of adapters that are kept beside the arena
    graph_bytes: int = 0  # for graphs that are captured later


def named_blocks(config: WorkerConfig, bytes_per_block: int) -> int | None:
    """The blocks of --num-blocks or --kv-bytes; None if they follow from the memory."""
    if config.kv_bytes is None:
        return config.num_blocks
    num_blocks = config.kv_bytes // bytes_per_block
    if num_blocks < 1:
        raise ConfigError(f"--kv-bytes: {config.kv_bytes} bytes hold no KV block of {bytes_per_block}; give more")
    if num_blocks > MAX_BLOCKS:
        raise ConfigError(
            f"--kv-bytes: {config.kv_bytes} bytes hold {num_blocks} KV blocks of {bytes_per_block}, at most "
            f"{MAX_BLOCKS} may be; give {MAX_BLOCKS * bytes_per_block} or less, or raise --block-size"
        )
    return num_blocks


def fitting_blocks(measured: Measured, demand: Demand, config: WorkerConfig, *, is_gpu: bool) -> int:
    """The blocks that the memory holds beside the largest step; at most `most_blocks`.

    A worker keeps to its share of the device (`--memory-utilization`), whatever other processes take, and to what they
    leave. Raises ConfigError if not one block fits, or if they leave less than a share that was named.
    """
    beside = measured.step + demand.host_kv_bytes + demand.pinned_bytes + demand.graph_bytes
    beside += config.memory_headroom_bytes
    room = measured.free - beside
    utilization = config.memory_utilization
    if utilization is None and not is_gpu:
        room = int(room * CPU_SHARE)
    else:
        share = int(measured.total * (utilization or CUDA_UTILIZATION)) - measured.own - beside
        if room < share:
            _refuse_or_warn(measured, config, share - room)
        room = min(room, share)
    num_blocks = room // demand.bytes_per_block
    if num_blocks < 1:
        raise ConfigError(_too_small(measured, demand, config, room))
    return min(num_blocks, demand.most_blocks)


def _refuse_or_warn(measured: Measured, config: WorkerConfig, missing: int) -> None:
    if config.memory_utilization is None:
        logger.warning("other processes hold part of the device: the KV cache gets %s less", size(missing))
        return
    most = (measured.total * config.memory_utilization - missing) / measured.total
    raise ConfigError(
        f"--memory-utilization: {config.memory_utilization} of {size(measured.total)} is not free: other processes "
        f"hold {size(missing)} of it; end them, or give {int(most * 100) / 100:g} or less"
    )


def _too_small(measured: Measured, demand: Demand, config: WorkerConfig, room: int) -> str:
    """Why no block fits."""
    if config.memory_utilization is not None:
        flag = f"--memory-utilization: {config.memory_utilization} of {size(measured.total)}"
    else:
        flag = f"--num-blocks: {size(measured.total)} of memory with {size(measured.free)} free"
    taken = {
        "weights and arena take": measured.own,
        "the largest step": measured.step,
        "host KV": demand.host_kv_bytes,
        "adapters beside the arena": demand.pinned_bytes,
        "graphs": demand.graph_bytes,
        "the headroom": config.memory_headroom_bytes,
    }
    parts = ", ".join(f"{name} {size(held)}" for name, held in taken.items() if held)
    flags = "--token-budget, --max-rows" + (", --host-kv-bytes" if demand.host_kv_bytes else "")
    flags += ", --pinned-bytes" if demand.pinned_bytes else ""
    flags += ", --memory-headroom-bytes" if config.memory_headroom_bytes else ""
    raised = ", or raise --memory-utilization" if config.memory_utilization is not None else ""
    return (
        f"{flag} leaves {max(room, 0)} bytes, and no KV block of {demand.bytes_per_block} bytes fits: {parts}; "
        f"lower {flags} or --arena-bytes{raised}"
    )
