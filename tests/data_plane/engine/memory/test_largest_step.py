"""What is measured of the largest step: nothing of its KV blocks, and all of the arena, whatever pages back them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from data_plane.engine.memory.kv_size import Measured
from data_plane.engine.memory.largest_step import blocks_of_largest_step, measure_largest_step
from data_plane.errors import ConfigError


class LazyMemory:
    """1000 bytes, of which this process takes 300 and others 150. Zeros take memory once they are written."""

    def __init__(self, cache: torch.Tensor) -> None:
        self._cache = cache
        self.has_begun = False

    def _cache_bytes(self) -> int:
        return self._cache.nbytes if bool((self._cache == 0).all()) else 0

    def total_bytes(self) -> int:
        return 1000

    def free_bytes(self) -> int:
        return 550 - self._cache_bytes()

    def release(self) -> None:
        raise AssertionError("the step's measurement begins with begin_peak")

    def own_bytes(self) -> int:
        return 300 + self._cache_bytes()

    def begin_peak(self) -> None:
        self.has_begun = True

    def peak_bytes(self) -> int:
        assert self.has_begun, "the peak is that of loading"
        return self.own_bytes() + 40


def measure(monkeypatch: pytest.MonkeyPatch, cache: torch.Tensor, step: Any, unused_bytes: int = 50) -> Measured:
    """Of an engine with this KV cache, whose largest steps are what is given."""
    monkeypatch.setattr("data_plane.engine.memory.largest_step.run_largest_steps", step)
    made: list[int] = []

    def make_engine(num_blocks: int) -> Any:
        made.append(num_blocks)
        return SimpleNamespace(kv_cache=SimpleNamespace(tensors=[cache[:1], cache[1:]]), reset=lambda: None)

    measured = measure_largest_step(make_engine, 9, LazyMemory(cache), unused_bytes)
    assert made == [9]
    return measured


def test_the_step_s_own_blocks_do_not_count_and_all_of_the_arena_does(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = torch.full((4, 2), 7.0)
    assert measure(monkeypatch, cache, lambda engine: 5) == Measured(total=1000, free=550 - 50, own=300 + 50, step=40)


def test_too_little_memory_for_the_step_names_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_engine: object) -> int:
        raise torch.OutOfMemoryError("3 GiB were wanted")

    with pytest.raises(ConfigError, match=r"^no memory for the largest step .*; lower --token-budget, .*: 3 GiB were"):
        measure(monkeypatch, torch.zeros(2), fail)


@pytest.mark.parametrize(
    ("max_rows", "tokens", "block_size", "blocks"), [(1, 1, 1, 5), (256, 8192, 16, 1025), (3, 10, 1, 20)]
)
def test_every_row_has_room_for_its_share_and_one_token_more(
    max_rows: int, tokens: int, block_size: int, blocks: int
) -> None:
    assert blocks_of_largest_step(max_rows, tokens, block_size) == blocks
