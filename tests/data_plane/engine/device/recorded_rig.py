"""An engine whose decode steps are recorded with a recorder of the test, on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from control_plane.registry.model.base_model import BaseModel
from data_plane.adapters.step.side_stream import SideStream
from data_plane.engine.build import build_engine
from data_plane.engine.device.step_graphs import Recorder
from data_plane.engine.engine import TorchEngine
from data_plane.plan import NewRow, RowSampling
from kernels.linear.choice import Form
from tests.data_plane.engine.device.launch_traces import TRITON_BRANCHES, launches_noted
from tests.data_plane.engine.planner import GREEDY, array, make_plan
from tests.data_plane.engine.test_oracle import worker_config
from tests.e2e.scheduled import ingested, reported_by
from tests.makers import ARCHS, make_adapter, make_checkpoint

MIXTURES = ("mixtral", "qwen3_moe", "qwen2_moe", "gpt_oss", "olmoe")
RECORDED_ARCHS = tuple(dict.fromkeys((*ARCHS, *MIXTURES, "gpt2")))  # those of the oracle
BLOCKS = 4  # of a row
PROMPT = [5, 9, 200, 31, 77]
ATTENTION = {"phi3": ["qkv_proj"], "gpt_neox": ["query_key_value"], "gpt2": ["c_attn"]}


def experts_of(arch: str, slot: int) -> dict[str, Any]:
    """What the adapter of this slot changes beside linears: of a mixture, that of slot 0 its experts and routers."""
    if arch not in MIXTURES or slot:
        return {}
    router = "router.weight" if arch == "gpt_oss" else "gate.weight"
    return {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", router]}


class Rig:
    """Builds the engine without native code: restore the settings of native code behind it."""

    def __init__(self, arch: str, folder: Path, recorder: Recorder, *, side: SideStream | None = None) -> None:
        self._recorder = recorder
        self._folder, self._step_id = folder, 0
        self._arch, self._targets = arch, ATTENTION.get(arch, ["q_proj", "o_proj"])
        self._checkpoint = make_checkpoint(folder / "model", arch)
        with pytest.MonkeyPatch.context() as patched:
            # The proof of fused layers computes. Weights are as in the checkpoint, as on a GPU, whatever was measured
            # fastest on this CPU.
            patched.setattr(TRITON_BRANCHES[-1], lambda tensor: True)
            for choice in ("fastest_form", "fastest_unpacked_form"):
                patched.setattr(f"data_plane.layers.packed_weight.{choice}", lambda *_: Form.PLAIN)
            plain = build_engine(worker_config(self._checkpoint, native_code="off", num_blocks=64))
            self.engine = TorchEngine(
                plain.model, plain.kv_cache, plain.arena, plain.capacities, decodes_on_device=True, side=side
            )

    def load(self, slot: int, generation: int = 1, **form: Any) -> None:
        """An adapter of its own into a slot."""
        folder = self._folder / f"adapter{slot}.{generation}"
        form |= {"targets": self._targets, "seed": 10 * slot + generation}
        adapter = make_adapter(folder, self._checkpoint, **experts_of(self._arch, slot), **form)
        packed = ingested(adapter, BaseModel.load(self._checkpoint), reported_by(self.engine))
        self.engine.slots.load(slot, generation, packed.info.digest, packed)

    def record(self, *sizes: int) -> None:
        with launches_noted(None):
            self.engine.decode_steps.record(self._recorder, sizes, has_adapters=True)

    def add(self, row: int, slot: int | None, *, generation: int = 1, sampling: RowSampling = GREEDY) -> None:
        """A row whose prompt is computed. This step is not recorded."""
        new = NewRow(
            row=row,
            token_ids=array(PROMPT),
            num_prompt_tokens=len(PROMPT),
            num_computed_tokens=0,
            block_ids=array(range(BLOCKS * row, BLOCKS * (row + 1))),
            slot=slot,
            slot_generation=generation,
            sampling=sampling,
        )
        self._execute(new=[new], prefills=[(row, len(PROMPT))])

    def decode(self, *, freed: Sequence[int] = ()) -> None:
        """A step of all rows but these, which end."""
        with launches_noted(None):
            self._execute(freed=list(freed))

    def _execute(self, **plan: Any) -> None:
        self._step_id += 1
        self.engine.execute(make_plan(self._step_id, **plan))
