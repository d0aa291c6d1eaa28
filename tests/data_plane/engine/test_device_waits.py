"""What a step moves between host and device, and where: nothing waits for a device outside the named places.

On a GPU `Tensor.to(device)` of pageable memory, `.cpu()`, `.item()`, `bool(tensor)` and searches for non-zero values
wait until the device has caught up. Here they are found on the CPU, with the layers that a GPU would run.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from data_plane.engine.build import build_engine
from data_plane.engine.engine import TorchEngine
from data_plane.plan import NewRow, RowSampling
from kernels import native
from kernels.lora import AdapterSegments, adapter_segments
from tests.data_plane.engine.device.reruns import Reruns
from tests.data_plane.engine.packing import pack
from tests.data_plane.engine.planner import GREEDY, array, make_plan
from tests.data_plane.engine.test_oracle import worker_config
from tests.makers import make_adapter

ROOT = Path(__file__).parents[3]
UPLOAD = "kernels/devices.py:upload"
# Only in steps with rows that request log-probabilities.
LOGPROBS = {f"data_plane/engine/sampling/logprobs.py:{name}" for name in ("compute_logprobs", "<genexpr>")}
# Definitions of the kernels and their forms for the CPU: no GPU runs them.
CPU_ONLY = ("cpu.py", "native.py", "native_step.py", "reference.py")
# Calls whose tensor is where it should be already, on a GPU too, and torch's form of attention on a CPU.
HARMLESS = {
    "data_plane/models/slot_rotary.py:forward",  # transformers moves its frequencies to the device that they are on
    "kernels/sampling/__init__.py:sample_and_check",  # looks whether logits are finite on a CPU alone
    *(
        f"kernels/paged_attention/batch.py:{name}"
        for name in ("on_host", "build", "_keys", "_decode", "_prefill", "_mask")
    ),
}
# In inference mode, in which steps run, `item` and `is_nonzero` are seen in the place of `_local_scalar_dense`.
WAITING_OPS = {"_local_scalar_dense", "item", "is_nonzero", "nonzero", "nonzero_numpy", "argwhere", "masked_select"}
WAITING_OPS |= {"unique", "unique2", "_unique2", "unique_consecutive", "equal", "allclose"}
# A mask among the indices of these is searched for non-zero values, below what is seen here.
INDEXING_OPS = ("index", "index_put", "index_put_", "_index_put_impl_")
ROWS, PROMPT = 6, [5, 9, 200, 31, 77]
DRAWN = RowSampling(temperature=0.8, top_k=20, top_p=0.9, seed=3)


@dataclass
class Moves(TorchDispatchMode):
    """The calls that may wait for a device, by the function of this repository that makes them."""

    places: Counter[str] = field(default_factory=Counter)
    upload_bytes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        is_search = (name in INDEXING_OPS and _has_mask(args[1])) or (name == "where" and len(args) == 1)
        if is_search or name in WAITING_OPS:
            self.count()
        return func(*args, **(kwargs or {}))

    def count(self, size_bytes: int = 0) -> None:
        place = _place()
        if place is None:
            return
        self.places[place] += 1
        if place == UPLOAD:
            self.upload_bytes.append(size_bytes)


def _place() -> str | None:
    """The innermost function of data_plane or kernels on the stack; None for one that runs on a CPU only."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT / "data_plane") or path.is_relative_to(ROOT / "kernels"):
            name = f"{path.relative_to(ROOT)}:{frame.f_code.co_name}"
            return None if path.name in CPU_ONLY or name in HARMLESS else name
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    return None


def _has_mask(indices: Any) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _moves_device(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the call names a device. A conversion to another type stays where it is."""
    if name != "to":
        return True
    return "device" in kwargs or any(isinstance(value, torch.device | str | torch.Tensor) for value in args)


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> Iterator[Moves]:
    found = Moves()

    def spied(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if _moves_device(name, args, kwargs):
                found.count(tensor.nbytes)
            return original(tensor, *args, **kwargs)

        return call

    for name in ("to", "cpu", "cuda", "item", "tolist", "pin_memory"):
        monkeypatch.setattr(torch.Tensor, name, spied(name, getattr(torch.Tensor, name)))
    yield found


@pytest.fixture(autouse=True)
def _native_settings_of_this_test() -> Iterator[None]:
    usual = native.settings()
    yield
    native.configure(usual)


@pytest.fixture
def engine(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TorchEngine:
    """With the layers and the segments that a GPU runs, and adapters of two ranks in slots 0 and 1."""
    monkeypatch.setattr("data_plane.adapters.step.adapter_steps.runs_triton", lambda tensor: True)
    engine = build_engine(worker_config(checkpoint, native_code="off"))
    for slot, rank in enumerate((4, 8)):
        packed = pack(
            make_adapter(tmp_path / f"adapter{slot}", checkpoint, rank=rank, seed=slot),
            engine.capacities.model_fingerprint,
        )
        engine.slots.load(slot, 1, packed.digest, packed)
    return engine


@pytest.fixture(params=["off", "auto"])
def on_device(engine: TorchEngine, request: pytest.FixtureRequest) -> TorchEngine:
    """The same, with decode steps that are built from the rows' state on the device, as a GPU builds them. With
    speculation, in steps that leave no room for drafts."""
    return TorchEngine(
        engine.model,
        engine.kv_cache,
        engine.arena,
        engine.capacities,
        decodes_on_device=True,
        speculative=request.param,
    )


def prefill(engine: TorchEngine, sampling: RowSampling, slots: list[int | None]) -> None:
    new = [
        NewRow(
            row=row,
            token_ids=array(PROMPT),
            num_prompt_tokens=len(PROMPT),
            num_computed_tokens=0,
            block_ids=array([2 * row, 2 * row + 1]),
            slot=slot,
            slot_generation=1,
            sampling=sampling,
        )
        for row, slot in enumerate(slots)
    ]
    engine.execute(make_plan(1, new=new, prefills=[(row, len(PROMPT)) for row in range(len(slots))]))


@pytest.mark.parametrize("slots", [[None] * ROWS, [0, 1, None, 0, 1, None]], ids=["base", "adapters"])
@pytest.mark.parametrize(
    ("sampling", "most_uploads"),
    [(GREEDY, 6), (replace(DRAWN, repetition_penalty=1.2), 7)],
    ids=["greedy", "drawn"],
)
def test_a_steady_step_waits_for_nothing(
    engine: TorchEngine, moves: Moves, sampling: RowSampling, most_uploads: int, slots: list[int | None]
) -> None:
    """And uploads no more than it did, besides the tables of attention, which a CPU does not upload."""
    prefill(engine, sampling, slots)
    engine.execute(make_plan(2))
    moves.places.clear()
    moves.upload_bytes.clear()
    with moves:
        pending = engine.submit(make_plan(3))
    assert len(pending.wait().rows) == ROWS
    assert set(moves.places) == {UPLOAD}
    assert moves.places[UPLOAD] <= most_uploads - (slots[0] is None)
    assert sum(moves.upload_bytes) <= 96 * ROWS, "bytes"


@pytest.mark.parametrize("slots", [[None] * ROWS, [0, 1, None, 0, 1, None]], ids=["base", "adapters"])
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_steady_step_built_on_the_device_uploads_nothing(
    on_device: TorchEngine, moves: Moves, sampling: RowSampling, slots: list[int | None]
) -> None:
    prefill(on_device, sampling, slots)
    on_device.execute(make_plan(2))
    moves.places.clear()
    with moves:
        pending = [on_device.submit(make_plan(step)) for step in (3, 4)]
        assert not moves.places
        on_device.submit(make_plan(5, appended=[(1, 40)]))
        assert moves.places == {UPLOAD: 1} and moves.upload_bytes[-1] == 8, "a place and a block"
    assert [len(step.wait().rows) for step in pending] == [ROWS, ROWS]


@pytest.mark.parametrize("is_replayed", [False, True], ids=["eager", "replayed"])
@pytest.mark.parametrize(
    "sampling",
    [
        replace(DRAWN, repetition_penalty=1.2, presence_penalty=0.3),
        replace(GREEDY, biased_token_ids=array([7]), biases=np.ones(1, dtype=np.float32)),
        replace(GREEDY, min_tokens=50, banned_token_ids=array([0])),
    ],
    ids=["penalties", "biases", "minimum"],
)
def test_a_steady_step_built_on_the_device_uploads_nothing_whatever_is_sampled(
    on_device: TorchEngine, moves: Moves, sampling: RowSampling, is_replayed: bool
) -> None:
    """With and without a graph."""
    recorder = Reruns()
    if is_replayed:
        on_device.decode_steps.record(recorder, (ROWS,), has_adapters=True)
    prefill(on_device, sampling, [0, 1, None, 0, 1, None])
    on_device.execute(make_plan(2))
    moves.places.clear()
    with moves:
        pending = on_device.submit(make_plan(3))
    assert len(pending.wait().rows) == ROWS
    assert not moves.places
    assert recorder.num_replays == (2 if is_replayed else 0)


def test_what_rows_sample_by_goes_up_once_for_each_change(
    on_device: TorchEngine, moves: Moves, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that ends, and one that has min_tokens behind it: on a GPU one copy each for rows, settings, penalties."""
    monkeypatch.setattr("kernels.devices.packs_uploads", lambda device: True)
    sampling = replace(
        DRAWN, repetition_penalty=1.2, min_tokens=5, banned_token_ids=array([0]), biased_token_ids=array([7])
    )
    prefill(on_device, replace(sampling, biases=np.ones(1, dtype=np.float32)), [None] * ROWS)
    on_device.execute(make_plan(2))
    on_device.execute(make_plan(3))
    moves.places.clear()
    with moves:
        on_device.submit(make_plan(4, freed=[0]))
        assert moves.places == {UPLOAD: 4}, "rows, settings, places of histories, penalties and biases"
        on_device.submit(make_plan(5))
        assert moves.places == {UPLOAD: 4}
        on_device.submit(make_plan(6))
        assert moves.places == {UPLOAD: 5}, "biases without the ban"
        on_device.submit(make_plan(7))
        assert moves.places == {UPLOAD: 5}


@pytest.mark.parametrize(("slots", "num_blocks"), [([0] * ROWS, 1), ([0, 1, None, 0, 1, None], 2)])
def test_programs_of_a_step_follow_its_adapters(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch, slots: list[int | None], num_blocks: int
) -> None:
    """Not the slots of the arena, of which there are 8."""
    seen: list[int] = []

    def kept(*args: Any, **named: Any) -> AdapterSegments:
        segments = adapter_segments(*args, **named)
        seen.append(segments.num_blocks)
        return segments

    monkeypatch.setattr("data_plane.adapters.step.adapter_steps.adapter_segments", kept)
    prefill(engine, GREEDY, slots)
    seen.clear()
    engine.execute(make_plan(2))
    assert seen and set(seen) == {num_blocks}


def test_log_probabilities_wait_in_their_own_place(engine: TorchEngine, moves: Moves) -> None:
    prefill(engine, replace(GREEDY, num_logprobs=2), [None, 0])
    moves.places.clear()
    with moves:
        engine.execute(make_plan(2))
    assert set(moves.places) == {UPLOAD} | LOGPROBS


def test_a_prefill_with_adapters_waits_for_nothing(engine: TorchEngine, moves: Moves) -> None:
    with moves:
        prefill(engine, GREEDY, [0, 1, None])
    assert set(moves.places) == {UPLOAD}


@pytest.mark.parametrize("is_inference", [False, True])
def test_the_spy_finds_every_kind_of_wait(moves: Moves, monkeypatch: pytest.MonkeyPatch, is_inference: bool) -> None:
    """Proves that the tests above can fail. Steps run in inference mode."""
    monkeypatch.setattr(sys.modules[__name__], "_place", lambda: "here")
    tensor = torch.ones(3)
    calls: list[Callable[[], object]] = [
        lambda: tensor.to("cpu"),
        lambda: tensor.to(device="cpu"),
        lambda: tensor.cpu(),
        lambda: tensor[0].item(),
        lambda: bool(tensor.all()),
        lambda: tensor.nonzero(),
        lambda: tensor.tolist(),
        lambda: int(tensor[0]),
        lambda: float(tensor[0]),
        lambda: 1 if tensor[0] else 2,
        lambda: "abc"[tensor.long()[0]],
        lambda: tensor[tensor > 0],
        lambda: tensor.index_put_((tensor > 0,), tensor[0]),
        lambda: torch.where(tensor > 0),
        lambda: torch.equal(tensor, tensor),
        lambda: tensor.unique(),
        lambda: tensor.masked_select(tensor > 0),
    ]
    with moves, torch.inference_mode(is_inference):
        for number, call in enumerate(calls):
            moves.places.clear()
            call()
            assert moves.places["here"] > 0, f"call {number} is not seen"
        moves.places.clear()
        assert tensor.to(torch.float64).sum() is not None
        assert not moves.places
