"""Adapters with rows of their own for embedding and head give the tokens of transformers and PEFT."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from control_plane.registry.model.base_model import BaseModel
from data_plane.engine.build import build_engine
from data_plane.plan import RowSampling
from tests.data_plane.engine.planner import GREEDY, Job, Planner
from tests.data_plane.engine.test_oracle import worker_config
from tests.e2e.scheduled import IngestedAdapter, ingested
from tests.makers import make_adapter, make_checkpoint, make_prompt
from tests.oracle import MIN_GAP

# Of PEFT, for the forms below.
WARNINGS = (
    "ignore:.*save_embedding_layers",
    "ignore:.*ensure_weight_tying",
    "ignore:Model has `tie_word_embeddings=True`",
    "ignore:Model with `tie_word_embeddings=True`",
    "ignore:.*embedding layer has been resized",
)
pytestmark = pytest.mark.filterwarnings(*WARNINGS)
NUM_TOKENS = 6
VOCAB_SIZE = 256
BOTH = ["embed_tokens", "lm_head"]
Form = dict[str, Any]

# As people train them. `resize` is the size of the vocabulary; the rest are fields of LoraConfig.
FORMS: dict[str, Form] = {
    "plain": {},
    "both saved": {"modules_to_save": BOTH},
    "embedding saved": {"modules_to_save": ["embed_tokens"]},
    "head saved": {"modules_to_save": ["lm_head"]},
    "tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "tokens": {"trainable_token_indices": [9, 5, 77]},
    "tokens of each": {"trainable_token_indices": {"embed_tokens": [5, 9], "lm_head": [7]}},
    "tokens of the head": {"trainable_token_indices": {"lm_head": [200, 7]}},
    "resized": {"resize": 259},
    "resized, saved": {"resize": 261, "modules_to_save": BOTH},
    "resized, embedding saved": {"resize": 258, "modules_to_save": ["embed_tokens"]},
    "resized, tokens": {"resize": 260, "trainable_token_indices": [256, 258, 4]},
    "resized, LoRA on both": {"resize": 259, "targets": ["v_proj", *BOTH]},
    "smaller": {"resize": 250},
    "LoRA on one, the other saved": {"targets": ["v_proj", "embed_tokens"], "modules_to_save": ["lm_head"]},
}
TIED_ONLY = {
    "resized, LoRA on the embedding": {"resize": 259, "targets": ["v_proj", "embed_tokens"]},
    "resized, LoRA on the head": {"resize": 257, "targets": ["v_proj", "lm_head"]},
    "tied LoRA": {"targets": ["v_proj", "embed_tokens"], "ensure_weight_tying": True},
}
# Architecture, whether embedding and head are one weight, form.
FORMS_OF_MODELS = [("llama", False, form) for form in FORMS] + [("gemma2", True, form) for form in FORMS | TIED_ONLY]


class PeftModelOf:
    """One adapter on a base model of its own, which PEFT may change."""

    def __init__(self, checkpoint: Path, directory: Path | None, resize: int | None = None) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        base: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
        if resize is not None:
            base.resize_token_embeddings(resize, mean_resizing=False)
        self.peft: Any = (base if directory is None else PeftModel.from_pretrained(base, str(directory))).eval()

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[tokens, vocabulary of the adapter]."""
        logits: torch.Tensor = self.peft(input_ids=torch.tensor([list(token_ids)])).logits[0].float()
        return logits

    @torch.inference_mode()
    def hidden(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[width]: the last hidden state of the last token, as transformers' AutoModel returns it."""
        causal = self.peft.get_base_model() if hasattr(self.peft, "get_base_model") else self.peft
        state: torch.Tensor = causal.base_model(input_ids=torch.tensor([list(token_ids)])).last_hidden_state
        return state[0, -1].float()

    def check(self, prompt: list[int], token_ids: list[int], what: object) -> int:
        """Assert that the tokens are the model's choice, beyond rounding. Returns how many are clear."""
        top = self.logits([*prompt, *token_ids])[len(prompt) - 1 : -1].topk(2)
        clear = (top.values[:, 0] - top.values[:, 1]) >= MIN_GAP
        for position, token_id in enumerate(token_ids):
            assert token_id == int(top.indices[position, 0]) or not clear[position], (what, position)
        return int(clear.sum())


def make_form(directory: Path, checkpoint: Path, *, resize: int | None = None, seed: int = 0, **form: Any) -> Path:
    """An adapter of this form as PEFT writes it, with every trained row and every new row far from the base's."""
    return make_adapter(
        directory, checkpoint, rank=4, seed=seed, resize=resize, **({"targets": ["q_proj", "v_proj"]} | form)
    )


class Served:
    """A checkpoint with adapters of all forms, each with its oracle, and an engine."""

    def __init__(self, directory: Path, arch: str, forms: dict[str, Form], **sizes: Any) -> None:
        self.checkpoint = make_checkpoint(directory / "model", arch, **sizes)
        base_model = BaseModel.load(self.checkpoint)
        self.sizes: dict[str | None, int] = {None: VOCAB_SIZE}
        self.adapters: dict[str, IngestedAdapter] = {}
        self.oracles: dict[str | None, PeftModelOf] = {None: PeftModelOf(self.checkpoint, None)}
        for seed, (name, form) in enumerate(forms.items()):
            path = make_form(directory / f"adapter {seed}", self.checkpoint, seed=seed, **form)
            self.adapters[name] = ingested(path, base_model)
            self.oracles[name] = PeftModelOf(self.checkpoint, path, form.get("resize"))
            self.sizes[name] = form.get("resize", VOCAB_SIZE)
        self.engine = build_engine(worker_config(self.checkpoint, num_slots=len(forms)))
        self.slots: dict[str | None, int | None] = {None: None}

    def load(self, generation: int) -> None:
        """Every adapter into a slot; of a later generation into that of its neighbour."""
        names = list(self.adapters)
        if generation > 1:
            for slot in range(len(names)):
                self.engine.slots.evict(slot, generation - 1)
        assert self.engine.slots.used_bytes() == 0
        for slot, name in enumerate(names[generation - 1 :] + names[: generation - 1]):
            used, adapter = self.engine.slots.used_bytes(), self.adapters[name]
            self.engine.slots.load(slot, generation, adapter.info.digest, adapter)
            assert self.engine.slots.used_bytes() - used == adapter.info.arena_bytes
            self.slots[name] = slot
        self.engine.arena.check_invariants()

    def jobs(self, generation: int, sampling: RowSampling = GREEDY) -> list[tuple[str | None, Job]]:
        """Prompts of three lengths for every adapter, with its own new tokens in them."""
        found = []
        for seed, name in enumerate([None, *self.adapters]):
            for length in (1, 6, 23):
                prompt = make_prompt(seed, length, vocab_size=min(self.sizes[name], 250))
                new = list(range(VOCAB_SIZE, self.sizes[name]))
                prompt[: len(new)] = new[: len(prompt)]
                if length > 1:
                    prompt[-1] = 5  # a trained token
                found.append((name, Job(prompt, NUM_TOKENS, self.slots[name], generation, sampling)))
        return found

    def check(self, jobs: list[tuple[str | None, Job]]) -> None:
        num_clear = sum(self.oracles[name].check(job.prompt, job.tokens, (name, len(job.prompt))) for name, job in jobs)
        assert num_clear >= 0.8 * NUM_TOKENS * len(jobs)


def check_forms(directory: Path, arch: str, forms: dict[str, Form], **sizes: Any) -> None:
    served = Served(directory, arch, forms, **sizes)
    for generation in (1, 2):
        served.load(generation)
        jobs = served.jobs(generation)
        Planner(served.engine, chunk=7, max_running=9).run([job for _, job in jobs])
        served.check(jobs)
    jobs = served.jobs(2)
    Planner(served.engine, chunk=64, max_running=9).run([job for _, job in jobs], preempt_at=3)
    served.check(jobs)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("arch", "is_tied", "lora_form"),
    [("llama", False, "native"), ("llama", True, "torch"), ("gemma2", True, "native"), ("gemma3", True, "torch")],
    indirect=["lora_form"],
)
@pytest.mark.usefixtures("lora_form")
def test_every_form_generates_as_peft_in_one_batch(arch: str, is_tied: bool, tmp_path: Path) -> None:
    """Over reuse of slots and preemption; Gemma multiplies its embeddings and caps its logits."""
    check_forms(tmp_path, arch, FORMS | (TIED_ONLY if is_tied else {}), tie_word_embeddings=is_tied)
