"""What a decode step launches on a GPU, counted on the CPU: the layers take the GPU's branches, and launches of Triton
kernels are recorded instead of run. Neither rows nor adapters add a launch.

Products are counted apart from the other launches: of one row a Triton kernel computes them, of a few rows of 16-bit
values another one, else torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from data_plane.engine.build import build_engine
from data_plane.engine.engine import TorchEngine
from data_plane.plan import NewRow, RowSampling
from kernels import native
from kernels.linear import MAX_ROWS
from kernels.linear.choice import Form
from kernels.linear.rows_launch import RowsLaunch
from tests.data_plane.engine.device.launch_traces import TRITON_BRANCHES
from tests.data_plane.engine.packing import pack
from tests.data_plane.engine.planner import GREEDY, array, make_plan
from tests.data_plane.engine.test_oracle import worker_config
from tests.kernels.replaced_launches import replace_launches
from tests.makers import make_adapter, make_checkpoint

NUM_LAYERS = 2  # of the checkpoint
# Of one layer: norms with the residual sums, rotation with the cache write, attention, the gate.
LAYER = {"rms_norm_kernel": 2, "rope_kernel": 1, "decode_kernel": 1, "gated_activation_kernel": 1}
# A shrink for q k v, the output, gate and up, down. The gate expands what it reads.
WITH_ADAPTERS = {
    "rms_norm_kernel": 2,
    "rope_kernel": 1,
    "decode_kernel": 1,
    "gate_expand_kernel": 1,
    "shrink_kernel": 4,
    "expand_kernel": 3,
}
# With FP8 weights norms and gates write the inputs of products. The input of the output projection takes a launch.
IN_FP8 = {"rms_norm_kernel": 2, "rope_kernel": 1, "decode_kernel": 1, "gated_activation_fp8_kernel": 1}
IN_FP8 |= {"quantize_rows_kernel": 1}
PRODUCTS = 4 * NUM_LAYERS + 1
BY = ("row_linear_kernel", "rows_linear_kernel", "torch")
# The first norm, the list of decode's programs, and the choice of tokens in two launches.
STEP = {"rms_norm_kernel": 1, "list_kernel": 1, "best_kernel": 1, "pick_kernel": 1}
ROWS, MANY_ROWS, PROMPT = 6, 65, [5, 9, 200, 31, 77]
VALUES: list[bool] = []  # of each gate that writes FP8 inputs in the last step: whether it writes the others too


class Products(TorchDispatchMode):
    """Counts matrix products, by the names that they have on a CPU too."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in ("mm", "addmm", "linear", "_linear_pointwise")
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _native_settings_of_this_test() -> Iterator[None]:
    usual = native.settings()
    yield
    native.configure(usual)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def engine(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TorchEngine:
    return make_engine(checkpoint, tmp_path, monkeypatch)


def make_engine(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **settings: object) -> TorchEngine:
    """With the layers of a GPU, and adapters of two ranks in slots 0 and 1."""
    monkeypatch.setattr(TRITON_BRANCHES[-1], lambda tensor: True)
    for choice in ("fastest_form", "fastest_unpacked_form"):  # weights are as in the checkpoint, as on a GPU
        monkeypatch.setattr(f"data_plane.layers.packed_weight.{choice}", lambda *_: Form.PLAIN)
    engine = build_engine(worker_config(checkpoint, native_code="off", max_rows=MANY_ROWS, **settings))
    for slot, rank in enumerate((4, 8)):
        adapter = make_adapter(tmp_path / f"adapter{slot}", checkpoint, rank=rank, seed=slot)
        packed = pack(adapter, engine.capacities.model_fingerprint, getattr(torch, engine.capacities.dtype))
        engine.slots.load(slot, 1, packed.digest, packed)
    return engine


def all_launched(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch, slots: Sequence[int | None], sampling: RowSampling
) -> Counter[str]:
    """Launches by kernel of a decode step of rows with these slots, and torch's matrix products."""
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
    recorded: Counter[str] = Counter()
    VALUES.clear()

    def launcher(kernel: Any, _grid: Sequence[int]) -> Callable[..., None]:
        def launch(*positional: Any, **named: Any) -> None:
            recorded[kernel.fn.__name__] += 1
            arguments = dict(zip(kernel.arg_names, positional, strict=False)) | named
            if "HAS_VALUES" in arguments:
                VALUES.append(arguments["HAS_VALUES"])
            for name in ("tokens_ptr", "is_finite_ptr"):  # what the engine reads
                if name in arguments:
                    arguments[name].fill_(1)

        return launch

    with monkeypatch.context() as patched, Products() as products:
        for branch in TRITON_BRANCHES:
            patched.setattr(branch, lambda tensor: True)
        replace_launches(patched, launcher)
        output = engine.execute(make_plan(2))
    assert output.token_ids.tolist() == [1] * len(slots)
    recorded["torch"] = products.count
    return recorded


def launched(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch, slots: Sequence[int | None], sampling: RowSampling = GREEDY
) -> tuple[Counter[str], int]:
    """Launches by kernel beside the products, and products, of a decode step of rows with these slots."""
    recorded = all_launched(engine, monkeypatch, slots, sampling)
    products = [recorded.pop(name, 0) for name in BY]
    assert products.count(0) == len(BY) - 1, "all of them by one"
    return recorded, sum(products)


def step_of(*layer: dict[str, int], own: dict[str, int] | None = None) -> Counter[str]:
    """Launches of a step by those of a layer."""
    expected = Counter(STEP if own is None else own)
    for kernels in layer:
        expected.update({name: NUM_LAYERS * count for name, count in kernels.items()})
    return expected


@pytest.mark.parametrize("num_rows", [1, ROWS])
def test_launches_of_a_step_without_adapters(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch, num_rows: int
) -> None:
    assert launched(engine, monkeypatch, [None] * num_rows) == (step_of(LAYER), PRODUCTS)
    assert sum(LAYER.values()) == 5


@pytest.mark.parametrize("slots", [[0], [0] * ROWS, [0, 1, None, 0, 1, None]], ids=["one", "one slot", "mixed"])
def test_launches_of_a_step_with_adapters(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch, slots: list[int | None]
) -> None:
    """Grouping the tokens by slot adds two launches on a GPU; a CPU groups them with torch's operations."""
    assert launched(engine, monkeypatch, slots) == (step_of(WITH_ADAPTERS), PRODUCTS)
    assert sum(WITH_ADAPTERS.values()) == 12


def test_launches_of_a_step_of_more_rows(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = [row % 2 for row in range(MANY_ROWS)]
    assert launched(engine, monkeypatch, slots) == (step_of(WITH_ADAPTERS), PRODUCTS)


@pytest.mark.parametrize("slots", [[None] * ROWS, [0, 1, None] * 2], ids=["base", "adapters"])
def test_launches_of_a_step_with_fp8_weights(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slots: list[int | None]
) -> None:
    monkeypatch.setattr("data_plane.engine.build.check_device", lambda *_: None)
    engine = make_engine(checkpoint, tmp_path, monkeypatch, quantization="fp8")
    expected = step_of(IN_FP8)
    if slots[0] is not None:
        # The input behind a gate that expands what it reads takes a launch, too.
        expected = step_of(WITH_ADAPTERS, {"quantize_rows_kernel": 2})
    assert launched(engine, monkeypatch, slots) == (expected, PRODUCTS)
    assert ([False] * NUM_LAYERS if slots[0] is None else []) == VALUES, "nobody reads them but adapters"
    assert sum(IN_FP8.values()) == 6


@pytest.mark.parametrize("num_rows", [1, 2, MAX_ROWS, MAX_ROWS + 1])
@pytest.mark.parametrize("slots", [[None], [0, 1, None]], ids=["base", "adapters"])
def test_launches_of_a_step_of_16_bit_values(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slots: list[int | None], num_rows: int
) -> None:
    """A launch for each product, of as many rows as it takes, and none that joins its parts."""
    launch = RowsLaunch(block_out=64, block_in=128, programs=2, most_rows=MAX_ROWS)
    monkeypatch.setattr("kernels.linear.launch_of", lambda *sizes: launch)
    engine = make_engine(checkpoint, tmp_path, monkeypatch, dtype="bfloat16")
    of_rows = [slots[row % len(slots)] for row in range(num_rows)]
    has_adapters = any(slot is not None for slot in of_rows)
    by = BY[0] if num_rows == 1 else BY[1] if num_rows <= MAX_ROWS else BY[2]
    expected = step_of(WITH_ADAPTERS if has_adapters else LAYER) + Counter({by: PRODUCTS})
    assert +all_launched(engine, monkeypatch, of_rows, GREEDY) == expected


def test_rows_that_draw_launch_no_more_than_greedy_ones(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = RowSampling(temperature=0.8, top_k=0, top_p=1.0, seed=3)
    assert launched(engine, monkeypatch, [None] * ROWS, drawn) == (step_of(LAYER), PRODUCTS)
