"""Other ways to run the same model on the same device, with the same random weights and prompts.

transformers' continuous batching without adapters beside ours without, and PEFT's mixed batch beside ours with as many
adapters. Rates of decoding come from two runs of different lengths, so that prompts do not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import peft
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from benchmarks.engine.driver import Driver
from benchmarks.engine.random_model import SEED
from benchmarks.engine.step_times import RANK
from benchmarks.gpu_targets.engines import Setup, free_memory
from benchmarks.serving.checkpoints import LINEARS, SHAPES, llama_config
from benchmarks.serving.peers import generate_static

NUM_ADAPTERS = 8
SHORT_TOKENS = 2  # of the shorter run
CB_BLOCK = 256  # tokens of a KV block of transformers, by default
CB_BUDGET = 8192  # tokens of a step of transformers, by default

# Completions of the prompts, of so many tokens.
Generate = Callable[[int], list[list[int]]]


@dataclass(frozen=True)
class Rate:
    """What one engine reached."""

    per_s: float  # tokens, over the whole run
    decoded_per_s: float  # those after the first ones, over the time that they added
    tokens: list[list[int]]


def measure(setup: Setup, driver: Driver, prompt_tokens: int, num_tokens: int) -> None:
    """Print a line for each engine, with what ours is over it. Ours has NUM_ADAPTERS in its first slots."""
    rng = np.random.default_rng(0)
    shape = (setup.num_rows, prompt_tokens)
    prompts: list[list[int]] = rng.integers(8, SHAPES[setup.shape].vocab_size, shape).tolist()
    print(
        f"{setup.num_rows} prompts of {prompt_tokens} tokens, {num_tokens} tokens each; transformers "
        f"{transformers.__version__}, peft {peft.__version__}",
        flush=True,
    )
    base, mixed = (
        _measure(f"ours, {count} adapters", partial(driver.generate, prompts, count), num_tokens)
        for count in (0, NUM_ADAPTERS)
    )
    model = _model(setup)
    _compare_continuous(setup, model, prompts, num_tokens, base, "its defaults", {})
    model.set_attn_implementation("sdpa")
    _compare(base, _measure("static batch of generate()", _static(model, prompts), num_tokens), target=None)
    mixed_model = _with_adapters(model, NUM_ADAPTERS)
    names = [f"adapter-{row % NUM_ADAPTERS}" for row in range(setup.num_rows)]
    peer = _measure(f"PEFT, {NUM_ADAPTERS} adapters", _static(mixed_model, prompts, adapter_names=names), num_tokens)
    _compare(mixed, peer, target=10.0)
    model = mixed_model.unload()
    # Last: which settings help depends on the machine, and on what attention is installed.
    _compare_continuous(setup, model, prompts, num_tokens, base, "CUDA graphs", {"use_cuda_graph": True})


def _compare_continuous(
    setup: Setup,
    model: Any,
    prompts: list[list[int]],
    num_tokens: int,
    ours: Rate,
    name: str,
    settings: dict[str, Any],
) -> None:
    """Print what continuous batching reaches with these settings of its own."""
    try:
        with _continuous(model, prompts, num_tokens, settings) as generate:
            peer = _measure(f"continuous batching, {name}", generate, num_tokens)
    except RuntimeError as error:  # such settings may not be for this machine
        print(f"  continuous batching, {name}: failed: {str(error)[:300]}", flush=True)
    else:
        _compare(ours, peer, target=3.0)
    free_memory(setup.device)


def _measure(name: str, generate: Generate, num_tokens: int) -> Rate:
    """Print what `generate` reaches, by a short run and a long one. The first run is not timed."""
    generate(SHORT_TOKENS)
    times_s = []
    tokens: list[list[int]] = []
    for count in (SHORT_TOKENS, num_tokens):
        began_s = time.perf_counter()
        tokens = generate(count)
        times_s.append(time.perf_counter() - began_s)
        assert {len(completion) for completion in tokens} == {count}, f"{name}: completions are not of {count} tokens"
    decoded = len(tokens) * (num_tokens - SHORT_TOKENS)
    rate = Rate(len(tokens) * num_tokens / times_s[1], decoded / (times_s[1] - times_s[0]), tokens)
    print(f"  {name}: {rate.per_s:.0f} tokens/s in all, decoding alone {rate.decoded_per_s:.0f}", flush=True)
    return rate


def _compare(ours: Rate, peer: Rate, target: float | None) -> None:
    """Print ours over the peer, and how many first tokens are equal, where both compute the same.

    Random weights in bfloat16: after the first rounding difference two completions part for good.
    """
    ratio = ours.decoded_per_s / peer.decoded_per_s
    verdict = "" if target is None else f", target {target:g}: {'met' if ratio >= target else 'MISSED'}"
    equal = sum(own[0] == theirs[0] for own, theirs in zip(ours.tokens, peer.tokens, strict=True))
    print(
        f"    ours over it: {ours.per_s / peer.per_s:.2f} in all, decoding alone {ratio:.2f}{verdict}; "
        f"{equal} of {len(peer.tokens)} first tokens are equal",
        flush=True,
    )


def _model(setup: Setup) -> Any:
    """transformers' own, of the weights that our engine has."""
    torch.manual_seed(SEED)
    with torch.device(setup.device):
        auto: Any = AutoModelForCausalLM
        config = llama_config(SHAPES[setup.shape])
        model = auto.from_config(config, dtype=getattr(torch, setup.dtype), attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


@contextmanager
def _continuous(model: Any, prompts: list[list[int]], num_tokens: int, settings: dict[str, Any]) -> Iterator[Generate]:
    """Its manager runs meanwhile, so that neither its start nor its end is timed."""
    config = ContinuousBatchingConfig(
        num_blocks=len(prompts) * (-(-(len(prompts[0]) + num_tokens) // CB_BLOCK) + 1),
        max_batch_tokens=CB_BUDGET,
        max_requests_per_batch=len(prompts),
        **settings,
    )
    settings_of: Any = GenerationConfig
    greedy = settings_of(max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1)
    manager_of = model.continuous_batching_context_manager
    with manager_of(generation_config=greedy, continuous_batching_config=config) as manager:

        def generate(count: int) -> list[list[int]]:
            wanted = manager.add_requests(inputs=prompts, max_new_tokens=count)
            found: dict[str, list[int]] = {}
            while len(found) < len(wanted):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    found[result.request_id] = result.generated_tokens
                elif result is None and not manager.is_running():
                    raise RuntimeError("its thread ended")
            return [found[request_id] for request_id in wanted]

        yield generate


def _static(model: Any, prompts: list[list[int]], **more: Any) -> Generate:
    return lambda num_tokens: generate_static(model, prompts, num_tokens, **more)


def _with_adapters(model: Any, count: int) -> Any:
    """PEFT's model with adapters in the weights' dtype, which add nothing yet, as those of ours."""
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=list(LINEARS), task_type="CAUSAL_LM")
    with torch.device(model.device):
        mixed = get_peft_model(model, config, adapter_name="adapter-0", autocast_adapter_dtype=False)
        for index in range(1, count):
            mixed.add_adapter(f"adapter-{index}", config, autocast_adapter_dtype=False)
    return mixed.eval()
