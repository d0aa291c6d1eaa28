"""A graph of decode steps launches the same kernels over the same memory at every replay, for any rows and adapters.

What a graph launched when it was recorded is all that it ever launches: what depended on the rows of that step, or lay
in memory that was replaced since, would be wrong at a replay and raise nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from data_plane.plan import RowSampling
from kernels import native
from tests.data_plane.engine.device.launch_traces import Trace, Traces
from tests.data_plane.engine.device.recorded_rig import RECORDED_ARCHS, Rig

pytestmark = pytest.mark.filterwarnings("ignore:.*target_parameters", "ignore:.*did not match any targeted")

DRAWN = RowSampling(temperature=0.8, top_k=0, top_p=1.0, seed=3)


@pytest.fixture(autouse=True)
def _native_settings_of_this_test() -> Iterator[None]:
    usual = native.settings()
    yield
    native.configure(usual)


def first_difference(traces: Sequence[Trace]) -> str:
    """Where a replay departs from what was recorded; empty: nowhere."""
    recorded = traces[0]
    for number, replay in enumerate(traces[1:], 1):
        for index, pair in enumerate(zip(recorded, replay, strict=False)):
            if pair[0] != pair[1]:
                return f"replay {number}, entry {index}: recorded {pair[0]}, replayed {pair[1]}"
        if len(recorded) != len(replay):
            return f"replay {number} has {len(replay)} entries, recorded were {len(recorded)}"
    return ""


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"factor": 3.0}, "recorded ('aten.mul.Tensor'"),
        ({"memory": torch.ones(4)}, "recorded ('aten.mul.Tensor'"),
        ({"is_longer": True}, "replay 2 has 2 entries, recorded were 1"),
    ],
    ids=["number", "memory", "operation"],
)
def test_what_a_replay_does_otherwise_is_found(changed: dict[str, Any], difference: str) -> None:
    state: dict[str, Any] = {"factor": 2.0, "memory": torch.zeros(4), "is_longer": False}

    def body() -> tuple[torch.Tensor, torch.Tensor]:
        product = state["memory"] * state["factor"]
        return product, product + 1 if state["is_longer"] else product

    traces = Traces()
    graph = traces.record(body)
    graph.replay()
    assert first_difference(traces.graphs[0]) == ""
    replaced = state["memory"]  # lives on, so that its address is not given out again
    state.update(changed)
    graph.replay()
    assert difference in first_difference(traces.graphs[0])
    assert replaced.numel() == 4


def test_what_is_recorded_are_the_fused_layers(tmp_path: Path) -> None:
    """Layers that stayed as transformers made them would hide what a GPU launches."""
    traces = Traces()
    rig = Rig("llama", tmp_path, traces)
    rig.load(0, rank=4)
    rig.record(2)
    launched = {str(entry[0]) for graph in traces.graphs for entry in graph[0]}
    fused = {"rms_norm_kernel", "rope_kernel", "gated_activation_kernel"}
    assert fused | {"expand_kernel", "gate_expand_kernel"} <= launched


@pytest.mark.parametrize("arch", RECORDED_ARCHS)
def test_a_graph_launches_the_same_at_every_replay(arch: str, tmp_path: Path) -> None:
    """Rows come and go, adapters are loaded, evicted and replaced by others of their tier."""
    traces = Traces()
    rig = Rig(arch, tmp_path, traces)
    rig.load(0, rank=4)
    rig.load(1, rank=8)
    rig.load(2, rank=4, use_dora=True)
    rig.record(2, 4)
    rig.add(0, None)
    rig.decode()
    rig.add(1, None, sampling=DRAWN)
    rig.decode()
    rig.add(2, 0)
    rig.decode()
    rig.add(3, 1)
    rig.decode()
    rig.load(3, rank=2)
    rig.decode(freed=[0])
    rig.decode(freed=[3])
    rig.engine.slots.evict(1, 1)
    rig.load(1, 2, rank=16)
    rig.add(4, 1, generation=2)
    rig.decode()
    rig.add(5, 2)
    rig.decode(freed=[1])
    rig.decode(freed=[2])
    replayed = [graph for graph in traces.graphs if len(graph) > 1]
    # The base model's of two and four rows, the adapters' of four, with vectors of four and two.
    assert len(replayed) >= 4 and sum(len(graph) - 1 for graph in replayed) == 9
    for graph in traces.graphs:
        assert any(entry[0] == "decode_kernel" for entry in graph[0])
        assert first_difference(graph) == ""
