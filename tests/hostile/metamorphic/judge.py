"""Whether two completions of a real model differ by more than rounding.

Sums in another order differ by about 1e-6; where two tokens are that close, either is right. The judge looks at the
first token that differs: transformers and PEFT compute the logits, the sampler's definition the scores.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kernels.sampling import reference
from tests.oracle import Oracle

_ADJUSTED = {"logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty"}
CLOSE = 1e-4  # scores that differ by less may come out either way


class Judge:
    """Of one checkpoint and its adapters, by name."""

    def __init__(self, model_dir: Path, adapter_dirs: Mapping[str, Path], *, close: float = CLOSE) -> None:
        self._close = close
        # Made when two completions differ for the first time: that takes a while, and most runs never need it.
        self._oracle = functools.cache(lambda: Oracle(model_dir, dict(adapter_dirs)))

    def is_close_call(
        self, prompt: Sequence[int], before: Sequence[int], tokens: tuple[int, int], options: Mapping[str, Any]
    ) -> bool:
        """Whether both tokens could follow `before` with these sampling options of a request for one completion."""
        if _ADJUSTED & options.keys():
            return False  # nothing but an equal completion will do
        best = self.scores(prompt, before, options)[0].topk(2)
        return set(tokens) == set(best.indices.tolist()) and float(best.values[0] - best.values[1]) < self._close

    def scores(self, prompt: Sequence[int], before: Sequence[int], options: Mapping[str, Any]) -> torch.Tensor:
        """[1, vocabulary], float64: of which the sampler takes the highest."""
        logits = self._oracle().logits([*prompt, *before], options.get("adapter", ""))[-1:]
        temperature = options.get("temperature") or 0.0
        if temperature == 0:
            return logits.double()
        names = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
        top_k, top_p, min_p = (torch.tensor([options.get(name) or default]) for name, default in names.items())
        # A token at the edge of a filter may be kept or dropped: the filters are a little wider here.
        top_p, min_p = torch.clamp(top_p + CLOSE, max=1.0), min_p * (1 - CLOSE)
        kept = reference.kept_scores(logits, torch.tensor([float(temperature)]), top_k, top_p, min_p)
        seed = options["seed"] - (1 << 64) if options["seed"] >= 1 << 63 else options["seed"]
        ids = torch.arange(logits.shape[1])
        return kept + reference.gumbel(torch.tensor([seed]), torch.tensor([len(before)]), ids)
