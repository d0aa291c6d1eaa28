"""What each version of each adapter generates, by transformers and PEFT; and which kinds of adapters there are."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.makers import make_adapter, make_prompt
from tests.oracle import MIN_GAP, Oracle

NUM_TOKENS = 10
NUM_PROMPTS = 3
VOCAB_SIZE = 256
SOME = ["q_proj", "v_proj", "down_proj"]
BOTH = ["embed_tokens", "lm_head"]

# Fields of LoraConfig and of make_adapter. `resize`: the size of the vocabulary that it was trained with.
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"rank": 8, "targets": SOME},
    "all linears": {"rank": 3},
    "rslora": {"rank": 5, "targets": SOME, "rslora": True},
    "dora": {"rank": 4, "targets": SOME, "use_dora": True},
    "lora bias": {"rank": 4, "targets": ["q_proj", "v_proj"], "lora_bias": True},
    "embedding and head": {"rank": 4, "targets": ["v_proj", *BOTH]},
    "head saved": {"rank": 4, "targets": SOME, "modules_to_save": ["lm_head"]},
    "both saved": {"rank": 2, "targets": SOME, "modules_to_save": BOTH},
    "trained tokens": {"rank": 4, "targets": SOME, "trainable_token_indices": [9, 5, 77]},
    "added tokens": {"rank": 4, "targets": SOME, "resize": 260},
    "one layer": {"rank": 6, "targets": SOME, "layers_to_transform": [1]},
    "ranks": {"rank": 4, "targets": SOME, "rank_pattern": {"q_proj": 9}, "alpha_pattern": {"v_proj": 3}},
    "activated": {"rank": 4, "targets": SOME, "alora_invocation_tokens": [201, 17, 202]},
}


@dataclass(frozen=True)
class Known:
    """One request whose greedy completion is known, beyond rounding."""

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass
class Version:
    """One version of an adapter: files, and what it generates."""

    kind: str
    directory: Path
    known: list[Known] = field(default_factory=list)
    digest: str = ""  # once it is registered


@dataclass(frozen=True)
class Combined:
    """Adapters that act together, by their versions, and what they generate."""

    scales: Mapping[str, float]  # by digest
    combination: str
    known: Known


def make_version(directory: Path, checkpoint: Path, kind: str, seed: int) -> Version:
    """A version with random weights, and its completions of a few prompts."""
    form = dict(KINDS[kind])
    version = Version(kind, make_adapter(directory, checkpoint, seed=seed, **form))
    version.known = complete(checkpoint, version.directory, kind, seed)
    assert version.known, f"no prompt of {kind!r} has a completion that rounding cannot change"
    return version


def complete(checkpoint: Path, directory: Path | None, kind: str, seed: int) -> list[Known]:
    """Greedy completions of random prompts that hold what the kind reacts to; none for the base model's kind, ""."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    form = KINDS.get(kind, {})
    size = form.get("resize", VOCAB_SIZE)
    base: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    if size != VOCAB_SIZE:
        base.resize_token_embeddings(size, mean_resizing=False)
    model: Any = (base if directory is None else PeftModel.from_pretrained(base, str(directory))).eval()
    draw, found = random.Random(seed), []
    for _ in range(4 * NUM_PROMPTS):
        prompt = prompt_of(kind, draw.randrange(1 << 30), draw.choice((3, 9, 24)))
        inputs = torch.tensor([prompt])
        with torch.no_grad():
            output = model.generate(
                input_ids=inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        top = torch.stack(output.logits).squeeze(1).topk(2).values
        if float((top[:, 0] - top[:, 1]).min()) >= MIN_GAP:
            found.append(Known(tuple(prompt), tuple(output.sequences[0, len(prompt) :].tolist())))
        if len(found) == NUM_PROMPTS:
            break
    return found


def prompt_of(kind: str, seed: int, length: int) -> list[int]:
    """With tokens that the kind changes, or that it alone has."""
    form = KINDS.get(kind, {})
    prompt = make_prompt(seed, length, vocab_size=250)
    prompt[0], prompt[-1] = 9, 5
    if (size := form.get("resize", VOCAB_SIZE)) > VOCAB_SIZE:
        prompt[1] = size - 1
    return [*prompt, *form.get("alora_invocation_tokens", []), 7]


def combine(checkpoint: Path, versions: Sequence[Version], seed: int) -> list[Combined]:
    """Combinations of two to four of these versions, and of one with a scale."""
    draw, found = random.Random(seed), []
    oracle = Oracle(checkpoint, {version.digest[:16]: version.directory for version in versions})
    for number in range(8):
        some = draw.sample(list(versions), 1 + number % 4)
        scales = {version.digest: draw.choice((-0.8, 0.5, 0.7, 1.0)) for version in some}
        combination = "cat" if number % 2 or len(some) == 1 else "linear"
        name = f"combined{number}"
        oracle.combine(name, {digest[:16]: scale for digest, scale in scales.items()}, combination)
        for _ in range(10):
            prompt = make_prompt(draw.randrange(1 << 30), 8)
            completion = oracle.greedy(prompt, NUM_TOKENS, name)
            if completion.is_decisive:
                found.append(Combined(scales, combination, Known(tuple(prompt), tuple(completion.token_ids))))
                break
    return found
