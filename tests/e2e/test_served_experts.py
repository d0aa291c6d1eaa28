"""Adapters on experts from their upload over gRPC to their tokens: real server, packing process and worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data_plane.engine import expert_files
from tests.e2e.harness import System
from tests.makers import make_adapter, make_checkpoint, make_prompt
from tests.oracle import Oracle

pytestmark = pytest.mark.slow
FLAGS = ["--block-size", "4", "--num-blocks", "256", "--max-rows", "16", "--max-model-len", "64"]
FLAGS += ["--num-slots", "8", "--arena-bytes", "64MiB", "--dtype", "float32"]


@pytest.mark.parametrize("is_fused", [False, True])
def test_tokens_and_log_probabilities_are_those_of_peft_and_pass_the_verification(
    is_fused: bool, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", "mixtral")
    path = tmp_path / "experts"
    if is_fused:
        parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        make_adapter(path, checkpoint, rank=3, targets=["q_proj", "v_proj"], target_parameters=parameters)
        truth, known_as = Oracle(checkpoint, {"experts": path}), "experts"
    else:
        expert_files.write_one_by_one(path, checkpoint, linears=["q_proj"])
        truth, known_as = Oracle(expert_files.merged(tmp_path / "merged", checkpoint, path), {}), ""
    base = Oracle(checkpoint, {})
    with System(checkpoint, tmp_path / "system", control_flags=["--dtype", "float32"]) as system:
        system.start_worker(flags=FLAGS)
        client = system.client()
        client.adapters.register("experts", path)
        for seed in range(4):
            prompt = make_prompt(seed, 5 + 6 * seed)
            for adapter, oracle, name in (("experts", truth, known_as), ("", base, "")):
                stream = client.generate(
                    prompt, adapter=adapter, max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=1
                )
                completion = stream.result().completions[0]
                oracle.num_agreed(prompt, completion.token_ids, name)
                rows = oracle.logits([*prompt, *completion.token_ids], name)[len(prompt) - 1 : -1].log_softmax(-1)
                due = [float(row[token]) for row, token in zip(rows, completion.token_ids, strict=True)]
                assert [entry.logprob for entry in completion.logprobs] == pytest.approx(due, abs=1e-4)
        found = client.adapters.verify("experts", timeout_s=300.0).verification
        assert found is not None and found.passed and found.largest_effect > 5 * found.tolerance
