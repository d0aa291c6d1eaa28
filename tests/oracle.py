"""The truth that served tokens are compared with: transformers + PEFT, one request at a time, greedy, fp32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

# Top-two logit gaps below this can turn round by rounding alone: sums of another order differ by about 1e-5 here.
MIN_GAP = 1e-3


@dataclass(frozen=True)
class GreedyAnswer:
    """What one request must answer."""

    token_ids: list[int]
    min_gap: float  # smallest difference of the two largest logits over all generated positions

    @property
    def is_decisive(self) -> bool:
        """Whether rounding cannot change the answer. Others are left out of comparisons."""
        return self.min_gap >= MIN_GAP


class Oracle:
    """One checkpoint with some adapters."""

    def __init__(self, checkpoint: Path, adapters: Mapping[str, Path]) -> None:
        self._adapters = adapters
        base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
        self._model: torch.nn.Module = base
        for name, directory in adapters.items():
            if isinstance(self._model, PeftModel):
                self._model.load_adapter(str(directory), adapter_name=name)
            else:
                self._model = PeftModel.from_pretrained(base, str(directory), adapter_name=name)

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], num_tokens: int, adapter: str | None = None) -> GreedyAnswer:
        """`num_tokens` tokens behind `prompt`, end-of-sequence ignored."""
        model = self._model
        if isinstance(model, PeftModel):
            if adapter is None:
                with model.disable_adapter():
                    return _greedy(model, prompt, num_tokens)
            model.set_adapter(adapter)
            return _greedy(model, prompt, num_tokens)
        assert adapter is None, f"no adapter {adapter!r} was given to this oracle"
        return _greedy(model, prompt, num_tokens)


def _greedy(model: torch.nn.Module, prompt: Sequence[int], num_tokens: int) -> GreedyAnswer:
    token_ids: list[int] = []
    gaps: list[float] = []
    step_ids = list(prompt)
    cache = None
    for _ in range(num_tokens):
        output = model(input_ids=torch.tensor([step_ids]), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        top = output.logits[0, -1].float().topk(2)
        gaps.append(float(top.values[0] - top.values[1]))
        token_ids.append(int(top.indices[0]))
        step_ids = token_ids[-1:]
    return GreedyAnswer(token_ids, min(gaps))
