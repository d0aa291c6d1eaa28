"""KV blocks get what is left beside the largest step, within the worker's share and what other processes leave."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contract.hello_bounds import MAX_BLOCKS
from data_plane.config import WorkerConfig
from data_plane.engine.memory.kv_size import CPU_SHARE, Demand, Measured, fitting_blocks, named_blocks
from data_plane.errors import ConfigError

# 1000 bytes, 300 of this worker, 50 of others; the largest step takes 100.
MEASURED = Measured(total=1000, free=650, own=300, step=100)
DEMAND = Demand(bytes_per_block=10, most_blocks=1 << 20)


def config(**settings: Any) -> WorkerConfig:
    return WorkerConfig(control_plane="127.0.0.1:1", model_dir=Path("m"), worker_id="w", **settings)


def test_a_gpu_is_filled_to_nine_tenths_by_default() -> None:
    assert fitting_blocks(MEASURED, DEMAND, config(), is_gpu=True) == (900 - 300 - 100) // 10


@pytest.mark.parametrize("is_gpu", [True, False])
def test_a_named_share_is_of_the_whole_device_and_counts_this_worker_alone(is_gpu: bool) -> None:
    assert fitting_blocks(MEASURED, DEMAND, config(memory_utilization=0.7), is_gpu=is_gpu) == (700 - 300 - 100) // 10
    two = replace(MEASURED, free=550)  # 100 more are another worker's
    assert fitting_blocks(two, DEMAND, config(memory_utilization=0.7), is_gpu=is_gpu) == (700 - 300 - 100) // 10


def test_on_the_cpu_other_processes_get_most_of_what_is_left() -> None:
    assert fitting_blocks(MEASURED, DEMAND, config(), is_gpu=False) == int((650 - 100) * CPU_SHARE) // 10


@pytest.mark.parametrize("settings", [{"memory_utilization": 0.7}, {}])
def test_headroom_host_memory_and_graphs_come_off(settings: dict[str, Any]) -> None:
    without = fitting_blocks(MEASURED, DEMAND, config(**settings), is_gpu=True)
    beside = replace(DEMAND, host_kv_bytes=40, graph_bytes=20, pinned_bytes=30)
    assert fitting_blocks(MEASURED, beside, config(**settings, memory_headroom_bytes=40), is_gpu=True) == without - 13


def test_no_block_beside_adapters_in_the_same_memory_names_their_flag() -> None:
    with pytest.raises(
        ConfigError, match=r"adapters beside the arena 600 B; lower .*, --pinned-bytes or --arena-bytes$"
    ):
        fitting_blocks(MEASURED, replace(DEMAND, pinned_bytes=600), config(), is_gpu=False)


def test_a_share_that_others_hold_is_refused_with_the_share_that_is_free() -> None:
    held = replace(MEASURED, free=200)
    with pytest.raises(ConfigError) as caught:
        fitting_blocks(held, DEMAND, config(memory_utilization=0.9), is_gpu=True)
    assert str(caught.value) == (
        "--memory-utilization: 0.9 of 1000 B is not free: other processes hold 400 B of it; end them, "
        "or give 0.5 or less"
    )
    assert fitting_blocks(held, DEMAND, config(memory_utilization=0.5), is_gpu=True) == 10


def test_without_a_named_share_others_are_worked_around_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert fitting_blocks(replace(MEASURED, free=200), DEMAND, config(), is_gpu=True) == 10
    assert "other processes hold part of the device: the KV cache gets 400 B less" in caplog.text


def test_no_more_blocks_are_made_than_rows_can_use() -> None:
    assert fitting_blocks(MEASURED, replace(DEMAND, most_blocks=7), config(), is_gpu=True) == 7


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"memory_utilization": 0.4},
            r"^--memory-utilization: 0\.4 of 1000 B leaves 0 bytes, and no KV block of 10 .*; lower --token-budget, "
            r"--max-rows or --arena-bytes, or raise --memory-utilization$",
        ),
        (
            {"memory_headroom_bytes": 545},
            r"^--num-blocks: 1000 B of memory .* the headroom 545 B; lower --token-budget, --max-rows, "
            r"--memory-headroom-bytes or --arena-bytes$",
        ),
    ],
)
def test_no_block_that_fits_names_what_takes_the_memory(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        fitting_blocks(MEASURED, DEMAND, config(**settings), is_gpu=True)
    assert "weights and arena take 300 B, the largest step 100 B" in str(caught.value)


def test_named_blocks_need_no_measuring() -> None:
    assert named_blocks(config(), 10) is None
    assert named_blocks(config(num_blocks=5), 10) == 5
    assert named_blocks(config(kv_bytes=59), 10) == 5
    with pytest.raises(ConfigError, match=r"^--kv-bytes: 9 bytes hold no KV block of 10; give more$"):
        named_blocks(config(kv_bytes=9), 10)
    with pytest.raises(ConfigError, match=rf"^--kv-bytes: .* at most {MAX_BLOCKS} may be; give {MAX_BLOCKS * 10} or"):
        named_blocks(config(kv_bytes=(MAX_BLOCKS + 1) * 10), 10)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num_blocks": 4, "kv_bytes": 5}, r"^--num-blocks 4 and --kv-bytes 5 are given, .*; give one of them$"),
        ({"num_blocks": 4, "memory_utilization": 0.5}, r"^--num-blocks 4 and --memory-utilization 0\.5 are given"),
        ({"kv_bytes": 4, "memory_utilization": 0.5}, r"^--kv-bytes 4 and --memory-utilization 0\.5 are given"),
        ({"kv_bytes": 4, "memory_headroom_bytes": 1}, r"^--memory-headroom-bytes: 1 is given beside --kv-bytes 4, "),
        ({"memory_utilization": 1.1}, r"^--memory-utilization: "),
        ({"memory_utilization": 0.0}, r"^--memory-utilization: "),
        ({"kv_bytes": 0}, r"^--kv-bytes: "),
        ({"memory_headroom_bytes": -1}, r"^--memory-headroom-bytes: "),
    ],
)
def test_the_kv_cache_is_sized_in_one_way(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config(**settings)
