"""Every kind of adapter with Triton's kernels, in batches with all other kinds and base rows, as PEFT has them.

One layer and two tokens, since an interpreter takes milliseconds for each program. tests/e2e/test_every_kind.py has the
rest of what may happen to a request.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from control_plane.scheduler.settings import SchedulerSettings
from tests.adapter_kinds import Kind, kinds_of
from tests.e2e import test_every_kind as every_kind
from tests.e2e.scheduled import serve

pytestmark = every_kind.pytestmark

# The modules of kernels that adapters go through. Attention, sampling and the base's own layers are as on a CPU.
TRITON = (
    "kernels.lora.ops",
    "kernels.token_rows",
    "kernels.rope",
    "data_plane.adapters.step.adapter_steps",
)


@pytest.mark.parametrize("arch", every_kind.ARCHS)
def test_every_kind_has_the_distributions_of_peft_with_triton(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All kinds in one step of prompts and one that decodes, through the kernels that adapters use.

    Of the mixture the kinds that the other model does not have, and two others: programs of experts take long.
    """
    torch.set_num_threads(1)
    world = every_kind.make_world(tmp_path, arch, num_hidden_layers=1)
    engine = world.engine(num_adapters=len(world.adapters), max_rows=64, num_blocks=600)
    for module in TRITON:
        monkeypatch.setattr(f"{module}.runs_triton", lambda tensor: True)
    monkeypatch.setattr("data_plane.layers.recorded_layers.has_native", lambda *tensors: False)
    names = world.names
    if arch == "mixtral":
        names = [every_kind.BASE, "lora", "dora", *(world.kinds.keys() - kinds_of("llama").keys() - {"same rank"})]
    jobs = {
        number: (name, world.prompt(name, number, 3 if world.kinds.get(name, Kind("")).invocation else 2))
        for number, name in enumerate(sorted(names))
    }
    requests = [world.request(number, *job, arrival_s=0.0, max_tokens=2) for number, job in jobs.items()]
    served, _ = serve(engine, requests, list(world.adapters.values()), SchedulerSettings(max_step_tokens=200))
    world.check_all(jobs, served)
