"""What each version of each adapter generates, embeds and classifies, by transformers and PEFT."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from tests.adapter_kinds import NUM_LABELS, TOOL, Kind, Made, make
from tests.e2e.test_scheduled_pooling import classes_of
from tests.makers import make_prompt
from tests.oracle import MIN_GAP, Oracle

NUM_TOKENS = 10
NUM_PROMPTS = 3
LENGTHS = (3, 9, 24)
BASE = Kind("")  # the model itself
LONG_LENGTHS = (3, 24, 110)  # of adapters for longer contexts than the base model is served with
WORDS = ("the", "in", "an", "over", "note")


@dataclass(frozen=True)
class Known:
    """One request whose greedy completion is known, beyond rounding."""

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str = ""  # if it is not empty: what is sent in place of the token ids

    @property
    def sent(self) -> str | tuple[int, ...]:
        return self.text or self.prompt


@dataclass
class Version:
    """One version of an adapter: files, and what it generates."""

    kind: str
    made: Made
    known: list[Known] = field(default_factory=list)
    classes: dict[tuple[int, ...], tuple[float, ...]] = field(default_factory=dict)  # logits by prompt
    states: dict[tuple[int, ...], tuple[float, ...]] = field(default_factory=dict)  # embeddings by prompt
    digest: str = ""  # once it is registered


@dataclass(frozen=True)
class Combined:
    """Adapters that act together, by their versions, and what they generate."""

    scales: Mapping[str, float]  # by digest
    combination: str
    known: Known


def make_version(directory: Path, checkpoint: Path, name: str, kind: Kind, seed: int) -> Version:
    """A version with random weights, and its completions of a few prompts."""
    version = Version(name, make(kind, directory, checkpoint, seed))
    version.known = complete(version.made.checkpoint, version.made.peft, kind, seed)
    assert version.known, f"no prompt of {name!r} has a completion that rounding cannot change"
    prompts = [tuple(make_prompt(seed + index, length, vocab_size=250)) for index, length in enumerate(LENGTHS)]
    if kind.is_classifier:
        for prompt in prompts:
            logits = classes_of(checkpoint, version.made.served, prompt, NUM_LABELS)
            version.classes[prompt] = tuple(logits.tolist())
    elif kind.is_body:
        assert version.made.peft is not None
        oracle = Oracle(checkpoint, {"own": version.made.peft})
        for prompt in prompts:
            state = oracle.hidden(prompt, "own")[-1]
            version.states[prompt] = tuple((state / state.norm()).tolist())
    return version


def complete(checkpoint: Path, directory: Path | None, kind: Kind, seed: int) -> list[Known]:
    """Greedy completions of random prompts that hold what the kind reacts to; of the model itself without a directory.

    Half of the prompts of an adapter with a tokenizer are texts.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    if "resize" in kind.form:
        base.resize_token_embeddings(kind.vocab_size, mean_resizing=False)
    model: Any = (base if directory is None else PeftModel.from_pretrained(base, str(directory))).eval()
    draw, found = random.Random(seed), list[Known]()
    lengths = LONG_LENGTHS if kind.rope else LENGTHS
    for number in range(4 * NUM_PROMPTS):
        text = ""
        if kind.has_tokenizer and number % 2 == 0:
            assert directory is not None
            text = " ".join(draw.choice((*WORDS, TOOL)) for _ in range(draw.randrange(2, 7))) + TOOL
            prompt = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text).ids
            assert kind.vocab_size - 1 in prompt, "the text has not the adapter's token"
        else:
            prompt = prompt_of(
                kind, draw.randrange(1 << 30), lengths[number % 3] if kind.rope else draw.choice(lengths)
            )
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
            found.append(Known(tuple(prompt), tuple(output.sequences[0, len(prompt) :].tolist()), text))
        if len(found) == NUM_PROMPTS:
            break
    return found


def prompt_of(kind: Kind, seed: int, length: int) -> list[int]:
    """With tokens that the kind changes, or that it alone has."""
    prompt = make_prompt(seed, length, vocab_size=250)
    prompt[0], prompt[-1] = 9, 5
    if "resize" in kind.form:
        prompt[1] = kind.vocab_size - 1
    return [*prompt, *kind.invocation, 7]


def combine(checkpoint: Path, versions: Sequence[Version], seed: int) -> list[Combined]:
    """Combinations of two to four of these versions, and of one with a scale."""
    draw, found = random.Random(seed), []
    paths = {version.digest[:16]: version.made.peft for version in versions}
    oracle = Oracle(checkpoint, {name: path for name, path in paths.items() if path is not None})
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
