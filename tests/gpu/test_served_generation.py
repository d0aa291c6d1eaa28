"""A small generation on the GPU through the served system, against transformers and PEFT on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from motet import Client, Generation

from benchmarks.system import System
from tests import makers
from tests.oracle import Oracle

pytestmark = pytest.mark.gpu

NUM_TOKENS = 24
ADAPTERS: dict[str, dict[str, Any]] = {
    "small": {"rank": 4, "targets": ["q_proj", "v_proj"]},
    "wide": {"rank": 24},
    "root": {"rslora": True},
}


@pytest.mark.parametrize("arch", ["llama", "gemma2", "qwen3"])
def test_base_and_adapters_in_one_batch_generate_as_alone(
    arch: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    checkpoint = makers.make_checkpoint(tmp_path / "base", arch)
    makers.make_tokenizer(checkpoint)
    adapters = {
        name: makers.make_adapter(tmp_path / name, checkpoint, seed=seed, **settings)
        for seed, (name, settings) in enumerate(ADAPTERS.items(), start=1)
    }
    oracle = Oracle(checkpoint, adapters)
    jobs = [
        (name, makers.make_prompt(seed, 3 + 11 * seed)) for seed, name in enumerate([None, *adapters, None, *adapters])
    ]
    expected = [oracle.greedy(prompt, NUM_TOKENS, name) for name, prompt in jobs]
    assert sum(completion.is_decisive for completion in expected) >= len(jobs) // 2, (
        "too few prompts that rounding cannot turn"
    )
    system = System(
        checkpoint,
        tmp_path / "data",
        control_flags=["--host-cache", "memory"],
        timeout_s=180.0,
    )
    worker_flags = ["--device", "cuda", "--num-blocks", "128", "--arena-bytes", "16MiB", "--token-budget", "64"]
    worker_flags += ["--warm-up", "off"]  # for the time that three small models have
    with system, Client(system.address) as client:
        system.start_worker(flags=worker_flags)
        for name, directory in adapters.items():
            client.adapters.register(name, directory)

        def generate(job: tuple[str | None, list[int]]) -> Generation:
            name, prompt = job
            return client.generate(prompt, adapter=name or "", max_tokens=NUM_TOKENS, ignore_eos=True).result()

        with ThreadPoolExecutor(len(jobs)) as pool:
            begin_s = time.monotonic()
            completions = list(pool.map(generate, jobs))
            record_property("tokens_per_s", f"{len(jobs) * NUM_TOKENS / (time.monotonic() - begin_s):.0f}")
        assert "cpu" not in client.status().workers[0].device.lower()
    for got, truth in zip(completions, expected, strict=True):
        if truth.is_decisive:
            assert list(got.token_ids) == truth.token_ids
    assert system.exit_codes == {"worker": 0, "control plane": 0}
