"""When decode steps are recorded as graphs, and what is said where they cannot be."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from data_plane.config import GRAPH_SIZES
from data_plane.engine.build import build_engine
from data_plane.engine.device.recording import experts_against, record_graphs
from data_plane.engine.device.step_graphs import Graph
from data_plane.engine.engine import TorchEngine
from data_plane.errors import ConfigError
from tests.data_plane.engine.device.reruns import Reruns
from tests.data_plane.engine.test_oracle import worker_config


class Failing:
    """A recorder that fails."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def record(self, body: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> Graph:
        raise self._error


def fresh(engine: TorchEngine) -> TorchEngine:
    return TorchEngine(engine.model, engine.kv_cache, engine.arena, engine.capacities, decodes_on_device=True)


def test_graphs_are_recorded_for_the_rows_that_are_named(
    engine: TorchEngine, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_plane.adapters.step.adapter_steps.runs_triton", lambda tensor: True)
    there = fresh(engine)
    config = worker_config(checkpoint, cuda_graphs="4,1", arena_bytes=0)
    assert record_graphs(there, config, Reruns())
    assert there.decode_steps.graphs is not None
    assert [(key.num_rows, key.tier) for key in there.decode_steps.graphs.keys] == [(4, None), (1, None)]


def test_a_cpu_records_nothing_and_refuses_numbers_of_rows(engine: TorchEngine, checkpoint: Path) -> None:
    for value in ("auto", "off"):
        assert not record_graphs(engine, worker_config(checkpoint, cuda_graphs=value))
    assert engine.decode_steps.graphs is None
    with pytest.raises(ConfigError, match="--cuda-graphs 8: there is no CUDA device; give --cuda-graphs off"):
        record_graphs(engine, worker_config(checkpoint, cuda_graphs="8"))


def test_numbers_of_rows_are_refused_before_weights_are_read(checkpoint: Path) -> None:
    def read_weights(*_: object) -> NoReturn:
        raise AssertionError("weights are read")

    config = worker_config(checkpoint, cuda_graphs="8", device="cpu")
    with pytest.raises(ConfigError, match="--cuda-graphs 8: there is no CUDA device; give --cuda-graphs off"):
        build_engine(config, read_weights=read_weights)


def test_a_step_that_cannot_be_recorded_is_served_without_a_graph(
    engine: TorchEngine, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing(RuntimeError("operation not permitted when stream is capturing"))
    with caplog.at_level(logging.WARNING):
        assert not record_graphs(engine, worker_config(checkpoint), failing)
    assert "not recorded as CUDA graphs: a step of this model cannot be recorded: operation not" in caplog.text
    assert engine.decode_steps.graphs is None
    with pytest.raises(ConfigError, match="--cuda-graphs 8: a step of this model cannot be recorded"):
        record_graphs(engine, worker_config(checkpoint, cuda_graphs="8"), failing)
    with pytest.raises(ConfigError, match="no memory to record them; lower --memory-utilization"):
        record_graphs(engine, worker_config(checkpoint), Failing(torch.OutOfMemoryError("40 GiB")))


@pytest.mark.parametrize(
    ("dtype", "capability", "is_recorded"),
    [
        (torch.bfloat16, (9, 0), True),
        (torch.bfloat16, (10, 0), True),
        (torch.float16, (9, 0), False),
        (torch.bfloat16, (8, 9), False),
        (torch.bfloat16, (12, 0), False),
    ],
)
def test_experts_are_recorded_where_their_products_need_no_host(
    dtype: torch.dtype, capability: tuple[int, int], is_recorded: bool
) -> None:
    reason = experts_against(dtype, capability)
    assert (reason is None) == is_recorded
    assert is_recorded or f"of compute capability {capability[0]}.{capability[1]}" in str(reason)


@pytest.mark.parametrize("value", ["on", "0", "8,", "1,300", "-1", "1.5"])
def test_other_values_are_refused(checkpoint: Path, value: str) -> None:
    with pytest.raises(ConfigError, match="is not auto, off or numbers of rows from 1 to --max-rows 256"):
        worker_config(checkpoint, cuda_graphs=value, max_rows=256)


def test_sizes_end_with_the_rows_that_a_worker_has(checkpoint: Path) -> None:
    assert worker_config(checkpoint, max_rows=256).graph_sizes("cuda") == GRAPH_SIZES
    assert worker_config(checkpoint, max_rows=20).graph_sizes("cuda") == (1, 2, 4, 8, 16, 20)
    assert worker_config(checkpoint, max_rows=1).graph_sizes("cuda") == (1,)
    assert worker_config(checkpoint, max_rows=512).graph_sizes("cuda")[-1] == 256
    assert worker_config(checkpoint, cuda_graphs="8,1,8").graph_sizes("cuda") == (1, 8)
    assert worker_config(checkpoint).graph_sizes("cpu") == ()
    for mode, sizes in (("off", (1, 2, 3)), ("auto", (1, 2, 3, 4, 8, 12))):  # three rows, each with three drafts
        assert worker_config(checkpoint, max_rows=3, speculative=mode).graph_sizes("cuda") == sizes
    assert worker_config(checkpoint, max_rows=512, speculative="auto").graph_sizes("cuda")[-1] == 256
    assert worker_config(checkpoint, max_rows=3, speculative="ngram", cuda_graphs="12").graph_sizes("cuda") == (12,)
    with pytest.raises(ConfigError, match="numbers of rows from 1 to --max-rows 3 with"):
        worker_config(checkpoint, max_rows=3, cuda_graphs="12")
    with pytest.raises(ConfigError, match="numbers of rows from 1 to 4 times --max-rows 3 with"):
        worker_config(checkpoint, max_rows=3, speculative="ngram", cuda_graphs="13")
