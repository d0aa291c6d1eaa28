"""Loads and evictions beside steps change no bit of what the steps return."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import pytest

from data_plane.engine.build import build_engine
from data_plane.engine.engine import TorchEngine
from data_plane.plan import NewRow, RowSampling
from kernels import native
from tests.data_plane.engine.device.reruns import Reruns
from tests.data_plane.engine.packing import PackedAdapter, pack
from tests.data_plane.engine.planner import GREEDY, array, make_plan
from tests.data_plane.engine.test_oracle import worker_config
from tests.makers import make_adapter

PROMPT = [5, 9, 200, 31, 77]
BLOCKS_OF_ROW, NUM_STEPS, NUM_LOADERS = 6, 40, 2
DRAWN = RowSampling(temperature=0.8, top_k=20, top_p=0.9, seed=3)
WAIT_S = 60
Step = list[tuple[int, int, tuple[float, ...]]]  # row, token, log-probabilities


@pytest.fixture(autouse=True)
def _native_settings_of_this_test() -> Iterator[None]:
    usual = native.settings()
    yield
    native.configure(usual)


class Loader(threading.Thread):
    """Loads adapters in turn into one slot, each as soon as the compute thread has evicted the one before."""

    def __init__(
        self, engine: TorchEngine, slot: int, adapters: list[PackedAdapter], ready: SimpleQueue[tuple[Loader, int]]
    ) -> None:
        super().__init__(name=f"loader-{slot}", daemon=True)
        self.slot = slot
        self.is_empty = threading.Semaphore(1)
        self.is_ending = False
        self.error: BaseException | None = None
        self._engine, self._adapters, self._ready = engine, adapters, ready

    def run(self) -> None:
        generation = 0
        try:
            while self.is_empty.acquire(timeout=WAIT_S) and not self.is_ending:
                generation += 1
                packed = self._adapters[generation % len(self._adapters)]
                self._engine.slots.load(self.slot, generation, packed.digest, packed)
                self._ready.put((self, generation))
        except BaseException as error:
            self.error = error


def steps(engine: TorchEngine, adapters: list[PackedAdapter], *, is_quiet: bool) -> list[Step]:
    """What rows with the adapters in slots 0 and 1 and of the base model return, step by step."""
    for slot in (0, 1):
        engine.slots.load(slot, 1, adapters[slot].digest, adapters[slot])
    ready: SimpleQueue[tuple[Loader, int]] = SimpleQueue()
    loaders = [] if is_quiet else [Loader(engine, 2 + index, adapters, ready) for index in range(NUM_LOADERS)]
    for loader in loaders:
        loader.start()
    new = [
        NewRow(
            row=row,
            token_ids=array(PROMPT),
            num_prompt_tokens=len(PROMPT),
            num_computed_tokens=0,
            block_ids=array(range(BLOCKS_OF_ROW * row, BLOCKS_OF_ROW * (row + 1))),
            slot=slot,
            slot_generation=1,
            sampling=replace(sampling, num_logprobs=1),
        )
        for row, (slot, sampling) in enumerate((s, sampling) for s in (0, 1, None) for sampling in (GREEDY, DRAWN))
    ]
    plans = [make_plan(1, new=new, prefills=[(row.row, len(PROMPT)) for row in new])]
    plans += [make_plan(2 + index) for index in range(NUM_STEPS)]
    seen: list[Step] = []
    for plan in plans:
        output = engine.execute(plan)
        logprobs = {part.row: tuple(part.logprobs.tolist()) for part in output.sampled_logprobs}
        seen.append([(row, token, logprobs[row]) for row, token in zip(output.rows, output.token_ids, strict=True)])
        if loaders:
            # One adapter is evicted between two steps; its loader fills the slot again while the next step runs.
            loader, generation = ready.get(timeout=WAIT_S)
            engine.slots.evict(loader.slot, generation)
            loader.is_empty.release()
    for loader in loaders:
        loader.is_ending = True
        loader.is_empty.release()
        loader.join(WAIT_S)
        assert loader.error is None and not loader.is_alive()
    return seen


@pytest.mark.parametrize("way", ["native", "torch", "replayed"])
def test_two_threads_that_load_and_evict_change_no_bit(
    checkpoint: Path, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside steps that are built on the device and replayed from graphs, as on a GPU."""
    recorder = Reruns()
    if way == "replayed":
        monkeypatch.setattr("data_plane.adapters.step.adapter_steps.runs_triton", lambda tensor: True)

    def engine() -> TorchEngine:
        built = build_engine(worker_config(checkpoint, native_code="on" if way == "native" else "off"))
        if way == "replayed":
            parts = built.model, built.kv_cache, built.arena, built.capacities
            built = TorchEngine(*parts, decodes_on_device=True)
            built.decode_steps.record(recorder, (8,), has_adapters=True)
        return built

    fingerprint = engine().capacities.model_fingerprint
    adapters = [
        pack(make_adapter(tmp_path / f"adapter{index}", checkpoint, rank=rank, seed=index), fingerprint)
        for index, rank in enumerate((4, 8, 16, 24))
    ]
    quiet = steps(engine(), adapters, is_quiet=True)
    busy_engine = engine()
    assert steps(busy_engine, adapters, is_quiet=False) == quiet
    busy_engine.arena.check_invariants()
    assert {len(step) for step in quiet} == {6}
    assert len({tuple(token for _, token, _ in step) for step in quiet}) > 5, "the rows do not move"
    assert recorder.num_replays == (2 * NUM_STEPS if way == "replayed" else 0)
