"""Drives an engine in this process with step plans: rows that decode, rows that are prefilled. No server."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from control_plane.registry.model.base_model import BaseModel
from control_plane.registry.peft.ingest import ingest
from data_plane.config import WorkerConfig
from data_plane.engine.build import build_engine
from data_plane.engine.engine import TorchEngine
from data_plane.plan import NewRow, PendingStep, RowSampling, StepOutput, StepPlan

GREEDY = RowSampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)
MAX_ADAPTER_BYTES = 1 << 30
PLAN_DEPTH = 2  # steps under way at once, as by default in a control plane


def make_engine(
    model_dir: Path,
    *,
    threads: int | None,
    max_rows: int,
    tokens_per_row: int,
    arena_bytes: int,
    native_code: str,
    speculative: str = "off",
) -> TorchEngine:
    """An engine with room for `max_rows` rows of that many tokens, and for a prefill of 1024."""
    block_size = 16
    num_tokens = max(max_rows * tokens_per_row, 2048)
    config = WorkerConfig(
        control_plane="127.0.0.1:1",
        model_dir=model_dir,
        worker_id="benchmark",
        device="cpu",
        num_blocks=-(-num_tokens // block_size) + max_rows,
        block_size=block_size,
        max_rows=max_rows,
        arena_bytes=arena_bytes,
        threads=threads,
        native_code=native_code,
        speculative=speculative,
    )
    return build_engine(config)


@dataclass(frozen=True)
class Packed:
    """One packed adapter (data_plane.plan.AdapterSource for its digest)."""

    digest: str
    manifest: bytes
    chunks: tuple[bytes, ...]

    def open(self, digest: str) -> tuple[bytes, Iterator[bytes]]:
        """See AdapterSource."""
        assert digest == self.digest
        return self.manifest, iter(self.chunks)


def load_adapters(engine: TorchEngine, model_dir: Path, adapter_dirs: Sequence[Path]) -> None:
    """Fill the slots from 0 on, as the control plane would have them filled; of generation 1."""
    base_model = BaseModel.load(model_dir)
    for slot, adapter_dir in enumerate(adapter_dirs):
        with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
            files = {path.name: path for path in adapter_dir.glob("adapter_*")}
            info = ingest(files, base_model, max_adapter_bytes=MAX_ADAPTER_BYTES, directory=Path(folder))
            chunks = tuple(chunk.path.read_bytes() for chunk in info.chunks)
        engine.slots.load(slot, 1, info.digest, Packed(info.digest, info.manifest, chunks))


class Driver:
    """Sends plans to one engine. Rows take slots 0 to num_adapters - 1 in turn, none where that is 0."""

    def __init__(self, engine: TorchEngine, seed: int = 0, *, is_checked: bool = True) -> None:
        """Without is_checked logits may be anything: of an engine that computes nothing."""
        self.engine = engine
        self._is_checked = is_checked
        self._rng = np.random.default_rng(seed)
        self._step_id = 0
        self._num_rows = 0

    def begin_decodes(self, num_rows: int, num_adapters: int, *, num_context: int, num_steps: int) -> None:
        """Rows with `num_context` tokens of context each, and room for `num_steps` steps.

        The context's KV is what lies in the cache: what it holds does not change what a step costs.
        """
        size = self.engine.capacities.block_size
        blocks_of_row = -(-(num_context + num_steps + 2) // size)
        rows = [
            self._row(row, num_adapters, num_context + 1, range(row * blocks_of_row, (row + 1) * blocks_of_row), 1)
            for row in range(num_rows)
        ]
        self._begin(rows, num_tokens=1)

    def decode(self) -> None:
        """One step in which every row decodes."""
        self._execute(StepPlan(self._next()))

    def decode_ahead(self, num_steps: int) -> None:
        """Steps in which every row decodes, each submitted while the one before is under way, as a worker does."""
        under_way: deque[PendingStep] = deque()
        for _ in range(num_steps):
            under_way.append(self.engine.submit(StepPlan(self._next())))
            if len(under_way) == PLAN_DEPTH:
                self._check(under_way.popleft().wait())
        while under_way:
            self._check(under_way.popleft().wait())

    def prefill(self, num_tokens: int, num_adapters: int) -> None:
        """One step that computes a prompt of so many tokens; `end` before the next."""
        num_blocks = -(-(num_tokens + 1) // self.engine.capacities.block_size)
        self._begin([self._row(0, num_adapters, num_tokens, range(num_blocks), num_tokens)], num_tokens=num_tokens)

    def end(self) -> None:
        """Free all rows."""
        self._execute(StepPlan(self._next(), freed_rows=np.arange(self._num_rows, dtype=np.int32)))
        self._num_rows = 0

    def _begin(self, rows: list[NewRow], *, num_tokens: int) -> None:
        self._num_rows = len(rows)
        prefills = np.array([(row.row, num_tokens) for row in rows], dtype=np.int32)
        budget = self.engine.capacities.max_step_tokens
        assert len(rows) * num_tokens <= budget, f"{len(rows)} rows of {num_tokens} tokens, a step has {budget}"
        self._execute(StepPlan(self._next(), new_rows=rows, prefills=prefills))

    def _row(self, row: int, num_adapters: int, num_tokens: int, blocks: range, num_left: int) -> NewRow:
        return NewRow(
            row=row,
            token_ids=self._rng.integers(8, self.engine.capacities.vocab_size, num_tokens).astype(np.int32),
            num_prompt_tokens=num_tokens,
            num_computed_tokens=num_tokens - num_left,
            block_ids=np.array(blocks, dtype=np.int32),
            slot=row % num_adapters if num_adapters else None,
            slot_generation=1 if num_adapters else 0,
            sampling=GREEDY,
        )

    def _next(self) -> int:
        self._step_id += 1
        return self._step_id

    def _execute(self, plan: StepPlan) -> None:
        self._check(self.engine.execute(plan))

    def _check(self, output: StepOutput) -> None:
        assert not self._is_checked or len(output.failed_rows) == 0, (
            f"step {output.step_id}: rows whose logits are not finite"
        )
