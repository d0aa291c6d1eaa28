"""The same work on other engines, each in a process of its own: `python peers.py ENGINE`, JSON lines in and out.

The first line is what to load; the reply to it says how the engine runs. Every further line is a job, and the reply
has its tokens and time. Runs under whatever interpreter has the engine, so it imports nothing of Motet. Greedy,
end-of-sequence ignored, all prompts of a job of one length and at once: what a static batch does best. Loading is not
counted, and a first run of every size of a job is not either.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

WARMUP_TOKENS = 4

# Token ids of each completion, for a job and a number of tokens to generate.
Generate = Callable[[dict[str, Any], int], list[list[int]]]


def generate_static(model: Any, prompts: list[list[int]], num_tokens: int, **more: Any) -> list[list[int]]:
    """Completions of prompts of one length by one generate() of transformers, which gets `more` too."""
    import torch

    ids = torch.tensor(prompts, device=model.device)
    with torch.inference_mode():
        completions = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            **more,
        )
    token_ids: list[list[int]] = completions[:, ids.shape[1] :].tolist()
    return token_ids


def load_peft(setup: dict[str, Any]) -> tuple[Generate, str]:
    """transformers + PEFT's mixed batch: one generate() with adapter_names, a name per row."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(setup["threads"])
    model: Any = AutoModelForCausalLM.from_pretrained(setup["model_dir"], dtype=getattr(torch, setup["dtype"]))
    for index, path in enumerate(setup["adapter_dirs"]):
        if index == 0:
            model = PeftModel.from_pretrained(model, path, adapter_name="adapter-0")
        else:
            model.load_adapter(path, adapter_name=f"adapter-{index}")
    model.eval()

    def generate(job: dict[str, Any], num_tokens: int) -> list[list[int]]:
        names = ["__base__" if index is None else f"adapter-{index}" for index in job["adapters"]]
        more = {"adapter_names": names} if setup["adapter_dirs"] else {}
        return generate_static(model, job["prompts"], num_tokens, **more)

    return generate, f"PyTorch {torch.__version__}, {torch.get_num_threads()} threads"


def load_vllm_cpu(setup: dict[str, Any]) -> tuple[Generate, str]:
    """vLLM's CPU backend, offline, continuous batching with LoRA; compiled unless it has adapters."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; several engines share the memory
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if setup.get("cpus"):
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = setup["cpus"]
    from vllm import LLM, SamplingParams, TokensPrompt, __version__
    from vllm.lora.request import LoRARequest

    lora = bool(setup["adapter_dirs"])
    settings = {"max_loras": len(setup["adapter_dirs"]), "max_lora_rank": setup["max_rank"]} if lora else {}
    llm = LLM(
        model=setup["model_dir"],
        dtype=setup["dtype"],
        max_model_len=setup["max_model_len"],
        enable_prefix_caching=False,
        enable_lora=lora,
        **settings,
    )

    def generate(job: dict[str, Any], num_tokens: int) -> list[list[int]]:
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in job["prompts"]]
        requests = [
            None if index is None else LoRARequest(f"adapter-{index}", index + 1, setup["adapter_dirs"][index])
            for index in job["adapters"]
        ]
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        completions = llm.generate(prompts, sampling, lora_request=requests if lora else None, use_tqdm=False)
        return [list(completion.outputs[0].token_ids) for completion in completions]

    compilation = llm.llm_engine.vllm_config.compilation_config
    mode = getattr(compilation.mode, "name", compilation.mode)
    cpus = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto")
    return generate, f"vLLM {__version__}, compilation {mode} ({compilation.backend}), CPUs {cpus}"


ENGINES = {"peft": load_peft, "vllm-cpu": load_vllm_cpu}


def serve(generate: Generate, jobs: Any, replies: Any) -> None:
    """Write a reply for every line of `jobs`."""
    sizes: set[tuple[int, int]] = set()
    for line in jobs:
        job = json.loads(line)
        size = (len(job["prompts"]), len(job["prompts"][0]))
        if size not in sizes:
            generate(job, min(WARMUP_TOKENS, job["max_tokens"]))
            sizes.add(size)
        begin_s = time.monotonic()
        token_ids = generate(job, job["max_tokens"])
        print(json.dumps({"duration_s": time.monotonic() - begin_s, "token_ids": token_ids}), file=replies, flush=True)


def main() -> int:
    # Engines and the processes that they start print to stdout as they like; only replies may go there.
    reply_fd = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    generate, mode = ENGINES[sys.argv[1]](json.loads(sys.stdin.readline()))
    with os.fdopen(reply_fd, "w") as replies:
        print(json.dumps({"mode": mode}), file=replies, flush=True)
        serve(generate, sys.stdin, replies)
    return 0


if __name__ == "__main__":
    sys.exit(main())
