"""What a steady decode step does, counted, not timed: a regression of its speed shows here on any machine.

The limits are what was counted with Python 3.11 and torch 2.13 and some headroom. One that is exceeded is raised only
with the reason for it; one that a change leaves far behind is lowered.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.engine.driver import Driver, load_adapters, make_engine
from benchmarks.serving.checkpoints import SHAPES, make_adapters, make_base
from kernels.native import recording

SHAPE = SHAPES["tiny"]
MAX_ROWS = 16

NATIVE_CALLS = 3  # all decoder layers, the head, the choice of tokens; counted: 3
PRODUCTS = 4 * SHAPE.num_layers + 1  # fused qkv, output, fused gate and up, down of each layer; the head
NATIVE_OPS = 18 * SHAPE.num_layers + 6  # counted: 40, LoRA's among them, which do nothing in a step without adapters
PYTHON_CALLS = {0: 1150, 1: 1350}  # counted: 1029 without adapters, 1208 with
TORCH_OPS = {0: 72, 1: 90}  # counted: 65 and 82
NEW_TENSORS = 22  # counted: 20
NEW_BYTES_OF_ROW = 8 * SHAPE.vocab_size  # counted: 2970, of which the logits 4 * 512
KEPT_BYTES = 512  # by Python; counted: 150 to 320, fewer with every further step


@dataclass(frozen=True)
class Counts:
    """Of one step."""

    native_calls: int
    ops: Counter[str]
    python_calls: int  # functions of Python and of C that Python called
    torch_ops: int
    new_tensors: int  # with memory of their own
    new_bytes: int


class TorchOps(TorchDispatchMode):
    """Counts what goes through torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.num_ops = self.num_new = self.new_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.num_ops += 1
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if is_tensor(leaf)}
        for leaf in tree_leaves(output):
            if is_tensor(leaf) and leaf.numel() and leaf.untyped_storage().data_ptr() not in given:
                self.num_new += 1
                self.new_bytes += leaf.untyped_storage().nbytes()
        return output


def is_tensor(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor)


def python_calls(step: Callable[[], None]) -> int:
    count = 0

    def profile(_frame: object, event: str, _arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(before)
    return count


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    cache = tmp_path_factory.mktemp("models")
    before = torch.get_num_threads()
    model_dir = make_base("tiny", cache, request.param)
    engine = make_engine(
        model_dir, threads=1, max_rows=MAX_ROWS, tokens_per_row=128, arena_bytes=8 << 20, native_code="on"
    )
    load_adapters(engine, model_dir, make_adapters("tiny", 8, cache))
    yield Driver(engine)
    torch.set_num_threads(before)


@pytest.fixture
def begin(driver: Driver) -> Iterator[Callable[[int, int], None]]:
    """Begins rows that decode, and frees them at the end of the test."""

    def begin(num_rows: int, num_adapters: int) -> None:
        driver.begin_decodes(num_rows, num_adapters, num_context=20, num_steps=104)
        for _ in range(3):
            driver.decode()

    yield begin
    driver.end()


def count(driver: Driver) -> Counts:
    with recording() as runs:
        driver.decode()
    calls = python_calls(driver.decode)
    with TorchOps() as torch_ops:
        driver.decode()
    ops = Counter(name for run in runs for name in run.names)
    return Counts(len(runs), ops, calls, torch_ops.num_ops, torch_ops.num_new, torch_ops.new_bytes)


@pytest.mark.parametrize(("num_rows", "num_adapters"), [(1, 0), (MAX_ROWS, 0), (1, 1), (8, 1), (MAX_ROWS, 8)])
def test_a_steady_step_does_no_more_than_was_counted(
    driver: Driver, begin: Callable[[int, int], None], num_rows: int, num_adapters: int
) -> None:
    begin(num_rows, num_adapters)
    counts = count(driver)
    assert counts.native_calls <= NATIVE_CALLS
    assert counts.ops["linear"] == PRODUCTS
    assert counts.ops.total() <= NATIVE_OPS
    assert counts.python_calls <= PYTHON_CALLS[min(num_adapters, 1)]
    assert counts.torch_ops <= TORCH_OPS[min(num_adapters, 1)]
    assert counts.new_tensors <= NEW_TENSORS
    assert counts.new_bytes <= num_rows * NEW_BYTES_OF_ROW


def test_more_rows_and_more_adapters_are_no_more_work_for_python(
    driver: Driver, begin: Callable[[int, int], None]
) -> None:
    begin(2, 2)
    few = count(driver)
    driver.end()
    begin(MAX_ROWS, 8)
    many = count(driver)
    assert many.python_calls == few.python_calls
    assert many.torch_ops == few.torch_ops
    assert many.native_calls == few.native_calls
    assert many.ops == few.ops


def test_steps_leave_nothing_behind(driver: Driver, begin: Callable[[int, int], None]) -> None:
    begin(MAX_ROWS, 8)
    tracemalloc.start()
    try:
        for _ in range(32):
            driver.decode()
        gc.collect()  # clears the lists of free objects too
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(64):
            driver.decode()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before <= 64 * KEPT_BYTES


def test_a_prefill_computes_each_product_once(driver: Driver) -> None:
    with recording() as runs:
        driver.prefill(64, 0)
    driver.end()
    ops = Counter(name for run in runs for name in run.names)
    assert ops["linear"] == PRODUCTS
    assert ops["attention_prefill"] == SHAPE.num_layers
