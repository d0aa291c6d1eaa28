"""Drives an engine in this process with step plans: rows that decode, rows that are prefilled. No server."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from control_plane.registry.model.base_model import BaseModel
from control_plane.registry.peft.ingest import ingest
from data_plane.config import WorkerConfig
from data_plane.engine.build import build_engine
from data_plane.engine.engine import TorchEngine
from data_plane.plan import Int32Array, NewRow, PendingStep, RowSampling, StepOutput, StepPlan

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
        self._first_free_block = 0
        self._is_prompt_there = False  # of `prompt_beside`, in the row after the others

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

    def submit(self) -> PendingStep:
        """Queue one step in which every row decodes."""
        return self.engine.submit(StepPlan(self._next()))

    def decode_ahead(self, num_steps: int, on_step: Callable[[], None] = lambda: None) -> None:
        """Steps in which every row decodes, each submitted while the one before is under way, as a worker does.

        `on_step` is called when the results of a step are there.
        """
        under_way: deque[PendingStep] = deque()
        for _ in range(num_steps):
            under_way.append(self.submit())
            if len(under_way) == PLAN_DEPTH:
                self._check(under_way.popleft().wait())
                on_step()
        while under_way:
            self._check(under_way.popleft().wait())
            on_step()

    def prefill(self, num_tokens: int, num_adapters: int) -> StepOutput:
        """One step that computes a prompt of so many tokens; `end` before the next."""
        num_blocks = -(-(num_tokens + 1) // self.engine.capacities.block_size)
        row = self._row(0, num_adapters, num_tokens, range(num_blocks), num_tokens)
        return self._begin([row], num_tokens=num_tokens)

    def prompt_beside(self, num_tokens: int, num_adapters: int) -> PendingStep:
        """Queue a step that computes a prompt of so many tokens, in a row of its own, while every row decodes.

        The prompt of the call before leaves. `end_prompt` before anything else.
        """
        num_blocks = -(-(num_tokens + 1) // self.engine.capacities.block_size)
        blocks = range(self._first_free_block, self._first_free_block + num_blocks)
        row = self._row(self._num_rows, num_adapters, num_tokens, blocks, num_tokens)
        freed = np.arange(self._num_rows, self._num_rows + self._is_prompt_there, dtype=np.int32)
        self._is_prompt_there = True
        prefills = np.array([(row.row, num_tokens)], dtype=np.int32)
        return self.engine.submit(StepPlan(self._next(), freed_rows=freed, new_rows=[row], prefills=prefills))

    def end_prompt(self) -> None:
        """Free the row of the last prompt, in a step in which every other row decodes."""
        freed = np.array([self._num_rows], dtype=np.int32)
        self._is_prompt_there = False
        self._execute(StepPlan(self._next(), freed_rows=freed))

    def generate(self, prompts: Sequence[Sequence[int]], num_adapters: int, num_tokens: int) -> list[list[int]]:
        """The first `num_tokens` tokens of a completion of each prompt, all of which come at once.

        Each step computes as many whole prompts as fit beside the rows that decode.
        """
        size, budget = self.engine.capacities.block_size, self.engine.capacities.max_step_tokens
        found: list[list[int]] = [[] for _ in prompts]
        under_way: deque[PendingStep] = deque()
        begun, first_block = 0, 0

        def collect(step: PendingStep) -> None:
            output = step.wait()
            self._check(output)
            for row, token in zip(output.rows.tolist(), output.token_ids.tolist(), strict=True):
                found[row].append(token)

        # Rows whose completion is long enough decode on until the last one is.
        while begun < len(prompts) or min(map(len, found)) + len(under_way) < num_tokens:
            new_rows, room = [], budget - begun
            while begun < len(prompts) and len(prompts[begun]) <= room:
                # Until the last row has its tokens, others decode on: at most one step for each prompt.
                num_blocks = -(-(len(prompts[begun]) + num_tokens + len(prompts) + 2) // size)
                blocks = range(first_block, first_block + num_blocks)
                token_ids = np.array(prompts[begun], dtype=np.int32)
                new_rows.append(self._row(begun, num_adapters, len(token_ids), blocks, len(token_ids), token_ids))
                first_block, begun, room = first_block + num_blocks, begun + 1, room - len(token_ids)
            prefills = np.array([(row.row, row.num_prompt_tokens) for row in new_rows], dtype=np.int32).reshape(-1, 2)
            under_way.append(self.engine.submit(StepPlan(self._next(), new_rows=new_rows, prefills=prefills)))
            if len(under_way) == PLAN_DEPTH:
                collect(under_way.popleft())
        while under_way:
            collect(under_way.popleft())
        self._num_rows = len(prompts)
        self.end()
        return [tokens[:num_tokens] for tokens in found]

    def end(self) -> None:
        """Free all rows."""
        self._execute(StepPlan(self._next(), freed_rows=np.arange(self._num_rows, dtype=np.int32)))
        self._num_rows = 0

    def _begin(self, rows: list[NewRow], *, num_tokens: int) -> StepOutput:
        self._num_rows = len(rows)
        self._first_free_block = sum(len(row.block_ids) for row in rows)
        prefills = np.array([(row.row, num_tokens) for row in rows], dtype=np.int32)
        budget = self.engine.capacities.max_step_tokens
        assert len(rows) * num_tokens <= budget, f"{len(rows)} rows of {num_tokens} tokens, a step has {budget}"
        return self._execute(StepPlan(self._next(), new_rows=rows, prefills=prefills))

    def _row(
        self,
        row: int,
        num_adapters: int,
        num_tokens: int,
        blocks: range,
        num_left: int,
        token_ids: Int32Array | None = None,
    ) -> NewRow:
        """token_ids: None for random ones."""
        if token_ids is None:
            token_ids = self._rng.integers(8, self.engine.capacities.vocab_size, num_tokens).astype(np.int32)
        return NewRow(
            row=row,
            token_ids=token_ids,
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

    def _execute(self, plan: StepPlan) -> StepOutput:
        output = self.engine.execute(plan)
        self._check(output)
        return output

    def _check(self, output: StepOutput) -> None:
        assert not self._is_checked or len(output.failed_rows) == 0, (
            f"step {output.step_id}: rows whose logits are not finite"
        )
