"""Generations by the engine on the GPU against transformers and PEFT on the CPU. Needs no server packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data_plane.engine.planner import Planner
from tests.data_plane.engine.test_oracle import serve
from tests.makers import ARCHS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("arch", ARCHS)
def test_mixed_batch_gives_the_tokens_of_transformers_and_peft_alone(arch: str, tmp_path: Path) -> None:
    # One architecture as it is served, behind a warm-up; the others compile only what they run.
    served = serve(arch, tmp_path, device="cuda", warm_up="auto" if arch == "llama" else "off")
    for chunk, preempt_at in [(7, -1), (64, 4)]:
        jobs = served.jobs()
        Planner(served.engine, chunk=chunk, max_running=9).run([job for job, _ in jobs], preempt_at=preempt_at)
        served.check(jobs)
