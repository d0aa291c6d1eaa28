"""What a recorded step queues, as plain data: a recorder of step graphs that notes it at every replay instead of in a
graph. Triton launches are noted and not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map

from data_plane.engine.device.step_graphs import Graph
from tests.data_plane.engine.device.reruns import Body
from tests.kernels.replaced_launches import replace_launches

# One entry: what is queued, and its arguments. A tensor is its memory, type, sizes and strides.
Trace = list[tuple[object, ...]]

TRITON_BRANCHES = [
    f"{module}.runs_triton"
    for module in (
        "kernels.rms_norm",
        "kernels.rope",
        "kernels.store_kv",
        "kernels.paged_attention",
        "kernels.gated_activation",
        "kernels.fp8_rows",
        "kernels.linear",
        "kernels.lora.ops",
        "kernels.row_state",
        "kernels.sampling",
        "data_plane.adapters.step.adapter_steps",
    )
]
# Results of launches that torch's operations or the engine read.
READ = ("longs_ptr", "tokens_ptr", "is_finite_ptr")


class Tracer(TorchDispatchMode):
    """Notes operations and launches. Memory that was there before has its address; memory of the step is numbered in
    the order in which it is taken, as a pool of graphs gives it out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trace: Trace = []
        self._own: dict[int, int] = {}  # number by address
        self._kept: list[torch.Tensor] = []  # so that no address is given out twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        known = {_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and _address(leaf) not in known:
                self._own[_address(leaf)] = len(self._own)
                self._kept.append(leaf)
        self.trace.append((str(func), self._plain(args), self._plain(kwargs)))
        return result

    def note_launch(self, name: str, grid: object, arguments: dict[str, Any]) -> None:
        self.trace.append((name, grid, *((key, self._plain(value)) for key, value in arguments.items())))

    def _plain(self, value: Any) -> Any:
        return tree_map(self._described, value)

    def _described(self, leaf: Any) -> object:
        if not isinstance(leaf, torch.Tensor):
            return repr(leaf)
        address = _address(leaf)
        memory = f"own {self._own[address]}" if address in self._own else f"at {address:#x}"
        if leaf.numel() == 0:
            memory = "empty"
        return memory, str(leaf.dtype), tuple(leaf.shape), leaf.stride(), leaf.storage_offset()


@dataclass
class Traces:
    """Recorder (see step_graphs). Of each graph: its trace when it was recorded, then those of its replays."""

    graphs: list[list[Trace]] = field(default_factory=list)

    def record(self, body: Body) -> Graph:
        traces: list[Trace] = []
        self.graphs.append(traces)
        with launches_noted(None):
            body()  # as CUDA's recorder does
        graph = Traced(traces, body)
        graph.replay()
        return graph


class NotedSide:
    """Side stream (see side_stream) of a traced step: forks and joins are entries of the trace.

    What is forked must be joined before anything else is: another fork may not be under way.
    """

    def __init__(self) -> None:
        self._is_under_way = False

    @contextmanager
    def forked(self) -> Iterator[None]:
        assert not self._is_under_way, "a fork was not joined"
        _note("fork")
        yield
        _note("end of fork")
        self._is_under_way = True

    def join(self) -> None:
        assert self._is_under_way, "there is nothing to join"
        self._is_under_way = False
        _note("join")


def _note(name: str) -> None:
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, Tracer):
            mode.trace.append((name,))


class Traced:
    """One recorded step."""

    def __init__(self, traces: list[Trace], body: Body) -> None:
        self._traces, self._body = traces, body
        self.outputs: tuple[torch.Tensor, torch.Tensor]

    def replay(self) -> None:
        with Tracer() as tracer, launches_noted(tracer):
            self.outputs = self._body()
        self._traces.append(tracer.trace)


@contextmanager
def launches_noted(tracer: Tracer | None) -> Iterator[None]:
    """The layers take a GPU's branches. Launches go to the tracer; None: they are not noted. What the engine reads of a
    launch's results is 1.
    """

    def launcher(kernel: Any, grid: Sequence[int]) -> Callable[..., None]:
        def launch(*positional: Any, **named: Any) -> None:
            arguments = dict(zip(kernel.arg_names, positional, strict=False)) | named
            if tracer is not None:
                tracer.note_launch(kernel.fn.__name__, grid, arguments)
            for name in READ:
                if name in arguments:
                    arguments[name].fill_(1)

        return launch

    with pytest.MonkeyPatch.context() as patched:
        replace_launches(patched, launcher)
        for branch in TRITON_BRANCHES:
            patched.setattr(branch, lambda tensor: True)
        patched.setattr("kernels.devices.packs_uploads", lambda device: True)
        yield


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
