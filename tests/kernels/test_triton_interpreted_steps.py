"""Steps by the GPU's kernels in Triton's interpreter, engine and layers included: the tokens of the CPU's own forms."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from control_plane.registry.model.base_model import BaseModel
from data_plane.engine.build import build_engine
from data_plane.engine.engine import TorchEngine
from kernels import native
from kernels.gated_activation import triton_folded as gate
from kernels.linear import triton_row
from tests.data_plane.engine.device.launch_traces import TRITON_BRANCHES
from tests.data_plane.engine.device.recorded_rig import RECORDED_ARCHS, experts_of
from tests.data_plane.engine.planner import Job, Planner
from tests.data_plane.engine.test_oracle import worker_config
from tests.e2e.scheduled import ingested, reported_by
from tests.makers import make_adapter, make_checkpoint

# NumPy's, of the interpreter: 1 / (1 + inf) is meant, and what is masked out is summed. PEFT's, of mixtures.
pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered",
    "ignore:invalid value encountered",
    "ignore:.*target_parameters",
    "ignore:.*did not match any targeted",
)

ADAPTERS: tuple[dict[str, Any], ...] = ({"rank": 4}, {"rank": 20, "use_dora": True})
TARGETS: dict[str, dict[str, Any]] = {"olmoe": {"targets": ["q_proj", "o_proj"]}}  # others: all linears
# Whose gate expands what it reads. Of other architectures it follows from the parts that were fused, which other tests
# hold.
FOLDED = ("llama", "phi3", "qwen3")


@pytest.fixture(autouse=True)
def _native_settings_of_this_test() -> Iterator[None]:
    usual = native.settings()
    yield
    native.configure(usual)


def tokens_of(engine: TorchEngine) -> list[list[int]]:
    """Of rows with each adapter and without, prefilled and decoded."""
    jobs = [
        Job([5, 9, 200, 31, 77][: 3 + index], 2, slot=slot, generation=slot is not None)
        for index, slot in enumerate((0, 1, None))
    ]
    Planner(engine, chunk=3).run(jobs)
    return [job.tokens for job in jobs]


@pytest.mark.parametrize("arch", RECORDED_ARCHS)
def test_the_kernels_give_the_tokens_of_the_cpu(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate expands what it reads."""
    checkpoint = make_checkpoint(tmp_path / "model", arch)
    plain = build_engine(worker_config(checkpoint, native_code="off", num_blocks=64))
    base_model = BaseModel.load(checkpoint)
    for slot, form in enumerate(ADAPTERS):
        whole = form | {"seed": slot} | experts_of(arch, slot) | TARGETS.get(arch, {})
        packed = ingested(make_adapter(tmp_path / str(slot), checkpoint, **whole), base_model, reported_by(plain))
        plain.slots.load(slot, 1, packed.info.digest, packed)
    expected = tokens_of(plain)
    folded: list[str] = []
    own = gate.gated_activation

    def noted(*arguments: Any) -> Any:
        found = own(*arguments)
        folded.extend(["gate"] if found is not None else [])
        return found

    monkeypatch.setattr(gate, "gated_activation", noted)
    monkeypatch.setattr(triton_row, "NARROW_TILE", (64, 2048))  # fewer programs to interpret
    for branch in TRITON_BRANCHES:
        monkeypatch.setattr(branch, lambda tensor: True)
    engine = TorchEngine(plain.model, plain.kv_cache, plain.arena, plain.capacities, decodes_on_device=True)
    assert tokens_of(engine) == expected
    assert folded or arch not in FOLDED
