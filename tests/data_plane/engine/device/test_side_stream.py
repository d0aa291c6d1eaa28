"""Shrinks of recorded steps on a stream of their own: what is queued where, and in which order.

Whether the device computes both at once, and what that saves, is for a GPU to show.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels import native
from tests.data_plane.engine.device.launch_traces import NotedSide, Trace, Traces
from tests.data_plane.engine.device.recorded_rig import RECORDED_ARCHS, Rig, experts_of

PRODUCTS = ("aten.mm", "aten.addmm", "aten.linear")


@pytest.fixture(autouse=True)
def _native_settings_of_this_test() -> Iterator[None]:
    usual = native.settings()
    yield
    native.configure(usual)


def recorded(arch: str, folder: Path, side: NotedSide | None) -> list[Trace]:
    """The graphs of one step size: without adapters, and with those of each tier."""
    traces = Traces()
    rig = Rig(arch, folder, traces, side=side)
    rig.record(2)
    return [graph[0] for graph in traces.graphs]


def names(trace: Trace) -> list[str]:
    """What is queued: kernels, products, forks and joins."""
    kept = ("fork", "end of fork", "join")
    return [
        "product" if str(entry[0]).startswith(PRODUCTS) else str(entry[0])
        for entry in trace
        if str(entry[0]).startswith(PRODUCTS) or str(entry[0]).endswith("_kernel") or entry[0] in kept
    ]


@pytest.mark.parametrize("arch", RECORDED_ARCHS)
def test_every_shrink_forks_before_its_product_and_is_joined_behind_it(arch: str, tmp_path: Path) -> None:
    """Nothing between a fork and its join but the product of the same input. A step without adapters forks nothing."""
    base, *tiers = recorded(arch, tmp_path, NotedSide())
    assert "fork" not in names(base)
    assert len(tiers) == 2  # of up to 16 adapters, which are more than the step has rows
    for trace in tiers:
        queued = names(trace)
        forks = [index for index, name in enumerate(queued) if name == "fork"]
        assert forks
        for index in forks:
            end = queued.index("end of fork", index)
            assert set(queued[index + 1 : end]) == {"shrink_kernel"}
            assert queued[end + 1 : end + 3] == ["product", "join"]
        num_forked = sum(queued.index("end of fork", index) - index - 1 for index in forks)
        if not experts_of(arch, 0):  # the shrinks of experts and routers are queued with everything else
            assert queued.count("shrink_kernel") == num_forked


def test_without_the_stream_the_same_launches_are_queued(tmp_path: Path) -> None:
    forked = recorded("llama", tmp_path / "forked", NotedSide())
    plain = recorded("llama", tmp_path / "plain", None)
    for with_forks, without in zip(forked, plain, strict=True):
        assert [name for name in names(with_forks) if name not in ("fork", "end of fork", "join")] == names(without)
