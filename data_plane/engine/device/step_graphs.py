"""Decode steps as graphs: their launches are recorded once for each key and replayed as one.

What is launched, with which sizes and over which memory, follows from the key alone. A graph reads the numbers of its
rows from a tensor that stays, and everything else from the rows' state on the device. Rows after those of the step are
-1 and change nothing, so that a graph serves any smaller step. A pass that verifies drafts is a step with a row for
each token: drafts lie beside the numbers of their rows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from data_plane.adapters.step.adapter_steps import AdapterSteps
from data_plane.adapters.step.lora_step import LoraStep, LoraTier
from data_plane.engine.device.device_rows import DeviceRows
from data_plane.engine.rows import Int64Array
from data_plane.plan import Int32Array
from kernels.row_state import DecodeInputs, DraftTokens, decode_inputs

logger = logging.getLogger(__name__)

# What a step's adapters may be for a graph to serve it. The greatest rank decides how the kernels are tiled.
TIERS = (LoraTier(16, 16), LoraTier(16, 64), LoraTier(64, 16), LoraTier(64, 64))


@dataclass(frozen=True, slots=True)
class GraphKey:
    """Which graph."""

    num_rows: int  # the most that a step may have
    tier: LoraTier | None  # None: the base model


Forward = Callable[[torch.Tensor, DecodeInputs, LoraStep | None], torch.Tensor]


class Graph(Protocol):
    """One recorded step."""

    @property
    def outputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [num_rows, vocab] and completion_index int64 [num_rows], of the last replay."""
        ...

    def replay(self) -> None:
        """Queue the launches again."""
        ...


class Recorder(Protocol):
    """Makes graphs."""

    def record(self, body: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> Graph:
        """The launches of `body`, whose results lie in the same memory after each replay."""
        ...


class CudaRecorder:
    """CUDA graphs that share one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, body: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> Graph:
        """See Recorder. Runs `body` once before, so that every kernel is compiled and loaded."""
        body()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Loader threads may allocate meanwhile. A capture that fails leaves its stream as the thread's current one.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            outputs = body()
        return _CudaGraph(graph, outputs)


class _CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.outputs = outputs
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()


def _most_adapters(num_rows: int) -> int:
    """Of the tiers that steps of so many rows can need: a row has one adapter at most."""
    counts = sorted({tier.max_adapters for tier in TIERS})
    return next((count for count in counts if count >= num_rows), counts[-1])


class StepGraphs:
    """The graphs of one engine. Belongs to the compute thread."""

    def __init__(
        self, device_rows: DeviceRows, steps: AdapterSteps, forward: Forward, recorder: Recorder, sizes: Sequence[int]
    ) -> None:
        """`forward` computes the logits of a step from the rows (int32 [n]), their inputs and adapters."""
        self._device_rows = device_rows
        self._steps = steps
        self._forward = forward
        self._recorder = recorder
        self._sizes = sorted(sizes)
        self._graphs: dict[GraphKey, Graph] = {}
        self._failed = set[GraphKey]()  # could not be recorded while requests waited
        # What graphs read. Behind the rows of the step there are none.
        device = device_rows.last_tokens.device
        self._row_ids, self._ahead, self._draft_ids = (
            torch.full((self._sizes[-1],), -1, dtype=torch.int32, device=device) for _ in range(3)
        )
        self._has_drafts = False  # whether the last two are of drafts
        # Where every graph leaves its logits. With memory of its own, each graph would keep as much as its step's take.
        self._logits: torch.Tensor | None = None
        self._rows_there: torch.Tensor | None = None  # copied into `_row_ids`

    @property
    def keys(self) -> list[GraphKey]:
        """The keys of the graphs that were recorded."""
        return list(self._graphs)

    def record_all(self, *, has_adapters: bool) -> None:
        """Record the base model's graphs, and those of adapters if there may be any. The largest come first, so that
        smaller ones find room in the memory that they share."""
        started_s = time.perf_counter()
        for size in reversed(self._sizes):
            for tier in (None, *(TIERS if has_adapters else ())):
                if tier is None or tier.max_adapters <= _most_adapters(size):
                    self._record(GraphKey(size, tier))
        logger.info("graphs recorded number=%d time_s=%.1f", len(self._graphs), time.perf_counter() - started_s)

    def find(self, num_rows: int, token_slots: Int32Array, *, may_record: bool = True) -> GraphKey | None:
        """The smallest graph that serves a step of `num_rows` with these adapters; None: none does. In a pass with
        drafts each token counts as a row. `may_record`: one that was not recorded yet may be recorded now.

        token_slots is int32 [num_rows] on the host, -1 for no adapter.
        """
        size = next((size for size in self._sizes if size >= num_rows), None)
        if size is None:
            return None
        slots = np.unique(token_slots[token_slots >= 0]).astype(np.intp)
        if len(slots) == 0:
            key = GraphKey(size, None)
            return key if key in self._graphs else None
        if (needed := self._steps.tier_of(slots)) is None:
            return None
        plain = replace(needed, has_vectors=False, has_experts=False)
        fitting = [tier for tier in TIERS if tier.serves(plain) and GraphKey(size, tier) in self._graphs]
        if not fitting:
            return None
        key = GraphKey(size, replace(fitting[0], has_vectors=needed.has_vectors, has_experts=needed.has_experts))
        # Few adapters have vectors, or change experts: such a graph is recorded when the first of them decodes.
        return key if key in self._graphs or (may_record and self._record_late(key)) else None

    def run(
        self, key: GraphKey, decoding: Int64Array, token_slots: Int32Array
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queue the step of these rows: logits [n, vocab], completion_index int64 [n], and the rows int32 [n]. The
        logits are valid until the next run."""
        count = len(decoding)
        row_ids = self._device_rows.advance(decoding, token_slots)
        if row_ids is not self._rows_there:
            self._row_ids[:count] = row_ids
            self._row_ids[count:] = -1
            self._rows_there = row_ids
        if self._has_drafts:
            self._ahead.fill_(-1)
            self._has_drafts = False
        return *self._replay(key, count), row_ids

    def run_drafts(
        self, key: GraphKey, row_ids: torch.Tensor, drafts: DraftTokens
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queue a pass of these tokens, of DeviceRows.with_drafts: as `run`."""
        count = len(row_ids)
        self._rows_there, self._has_drafts = None, True
        self._row_ids[:count] = row_ids
        self._row_ids[count:] = -1
        self._ahead[:count] = drafts.ahead
        self._draft_ids[:count] = drafts.token_ids
        return self._replay(key, count)

    def _replay(self, key: GraphKey, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        graph = self._graphs[key]
        graph.replay()
        logits, completion_index = graph.outputs
        return logits[:count], completion_index[:count]

    def _record_late(self, key: GraphKey) -> bool:
        """Record a graph while requests wait. False where that fails, now or before: such steps run without one."""
        if key in self._failed:
            return False
        try:
            self._record(key)
        except RuntimeError as error:  # torch.OutOfMemoryError is one, and others have no class of their own
            logger.warning("graph not recorded key=%s: %s", key, error)
            self._failed.add(key)
            return False
        return True

    @torch.inference_mode()
    def _record(self, key: GraphKey) -> None:
        """Record a graph as a step runs, but without a row: nothing is written meanwhile."""
        self._row_ids.fill_(-1)
        self._rows_there = None
        row_ids = self._row_ids[: key.num_rows]
        drafts = DraftTokens(self._ahead[: key.num_rows], self._draft_ids[: key.num_rows])

        def body() -> tuple[torch.Tensor, torch.Tensor]:
            inputs = decode_inputs(self._device_rows.state, row_ids, self._device_rows.block_size, drafts)
            lora = None if key.tier is None else self._steps.begin_tier(inputs.token_slots, key.tier)
            logits = self._forward(row_ids, inputs, lora)
            if self._logits is None:
                self._logits = logits.new_empty(self._sizes[-1], logits.shape[1])
            return self._logits[: len(logits)].copy_(logits), inputs.completion_index

        self._graphs[key] = self._recorder.record(body)
