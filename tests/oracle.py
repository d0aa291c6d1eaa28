"""The truth that served tokens are compared with: transformers + PEFT, one request at a time, fp32."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

# Logits and scores that differ by less can turn round by rounding alone: sums of another order differ by about 1e-5.
MIN_GAP = 1e-3
_PAD = 1_000_000  # no token: it only fills up what transformers returns

Hypothesis = tuple[list[int], float]  # generated tokens and their score


@dataclass(frozen=True)
class GreedyCompletion:
    """What one request must generate."""

    token_ids: list[int]
    min_gap: float  # smallest difference of the two largest logits over all generated positions

    @property
    def is_decisive(self) -> bool:
        """Whether rounding cannot change the completion. Others are left out of comparisons."""
        return self.min_gap >= MIN_GAP


class Oracle:
    """One checkpoint with some adapters; the adapter "" is the base model. Logits and beams are computed once."""

    def __init__(
        self,
        checkpoint: Path,
        adapters: Mapping[str, Path],
        *,
        prepare: Callable[[torch.nn.Module], None] = lambda _: None,
    ) -> None:
        """`prepare` changes the base model before adapters wrap it."""
        self._adapters = adapters
        self._lock = threading.Lock()  # PEFT switches adapters one module after the other
        self._logits: dict[tuple[object, ...], torch.Tensor] = {}
        self._beams: dict[tuple[object, ...], list[Hypothesis]] = {}
        base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
        prepare(base)
        self._model: torch.nn.Module = base
        for name, directory in adapters.items():
            if isinstance(self._model, PeftModel):
                self._model.load_adapter(str(directory), adapter_name=name)
            else:
                self._model = PeftModel.from_pretrained(base, str(directory), adapter_name=name)

    def combine(self, name: str, scales: Mapping[str, float], combination: str) -> None:
        """Add PEFT's combination, "cat" or "linear", of some of the adapters as a further adapter."""
        assert isinstance(self._model, PeftModel), "no adapters to combine"
        self._model.add_weighted_adapter(list(scales), list(scales.values()), name, combination_type=combination)
        # The scalings are in A and B. If the first adapter is an rsLoRA, PEFT 0.21 multiplies by
        # sqrt(rank) once more.
        for module in self._model.modules():
            scaling = getattr(module, "scaling", None)
            if isinstance(scaling, dict) and name in scaling:
                scaling[name] = 1.0

    def greedy(self, prompt: Sequence[int], num_tokens: int, adapter: str | None = None) -> GreedyCompletion:
        """`num_tokens` tokens behind `prompt`, end-of-sequence ignored."""
        with self._at(adapter) as model:
            return _greedy(model, prompt, num_tokens)

    def logits(self, token_ids: Sequence[int], adapter: str | None = None) -> torch.Tensor:
        """[len(token_ids), vocabulary], float32: what follows each of the tokens."""
        key = (*token_ids, adapter or "")
        if key not in self._logits:
            with self._at(adapter) as model:
                self._logits[key] = model(input_ids=torch.tensor([list(token_ids)])).logits[0].float()
        return self._logits[key].clone()  # outside inference mode, so that it may be changed

    def hidden(self, token_ids: Sequence[int], adapter: str | None = None) -> torch.Tensor:
        """[len(token_ids), width], float32: what transformers' AutoModel returns as the last hidden state."""
        with self._at(adapter) as model:
            causal = model.get_base_model() if isinstance(model, PeftModel) else model
            body = causal.base_model
            assert isinstance(body, torch.nn.Module) and body is not causal, "the model has no body of its own"
            return body(input_ids=torch.tensor([list(token_ids)])).last_hidden_state[0].float()

    def num_agreed(self, prompt: Sequence[int], token_ids: Sequence[int], adapter: str | None = None) -> int:
        """How many tokens of a greedy completion are the model's choice after those before, beyond rounding.

        Raises AssertionError at a token that the model would not choose.
        """
        top = self.logits([*prompt, *token_ids], adapter)[len(prompt) - 1 : -1].topk(2)
        is_clear = (top.values[:, 0] - top.values[:, 1]) >= MIN_GAP
        for position, token_id in enumerate(token_ids):
            chosen = int(top.indices[position, 0])
            assert token_id == chosen or not is_clear[position], (
                f"token {position} behind {len(prompt)} of the prompt, adapter {adapter!r}: {token_id}, not {chosen}"
            )
        return int(is_clear.sum())

    def beams(
        self,
        prompt: Sequence[int],
        adapter: str,
        width: int,
        length_penalty: float,
        early_stopping: bool,
        *,
        max_tokens: int,
        stop_token_ids: Sequence[int],
        min_tokens: int = 0,
    ) -> list[Hypothesis]:
        """The `width` hypotheses that transformers' beam search finds, the best first."""
        key = (*prompt, adapter, width, length_penalty, early_stopping, max_tokens, *stop_token_ids, min_tokens)
        if key not in self._beams:
            with self._at(adapter) as model:
                output = model.generate(  # type: ignore[operator]  # every model has it
                    input_ids=torch.tensor([list(prompt)]),
                    attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                    num_beams=width,
                    num_return_sequences=width,
                    length_penalty=length_penalty,
                    early_stopping=early_stopping,
                    do_sample=False,
                    max_new_tokens=max_tokens,
                    min_new_tokens=min_tokens or None,
                    eos_token_id=list(stop_token_ids),
                    pad_token_id=_PAD,
                    return_dict_in_generate=True,
                    output_scores=True,
                )
            rows = output.sequences[:, len(prompt) :].tolist()
            tokens = [[token_id for token_id in row if token_id != _PAD] for row in rows]
            self._beams[key] = list(zip(tokens, output.sequences_scores.tolist(), strict=True))
        return self._beams[key]

    @contextmanager
    def _at(self, adapter: str | None) -> Iterator[torch.nn.Module]:
        """The model with this adapter alone."""
        model = self._model
        with self._lock, torch.inference_mode():
            if not adapter:
                if isinstance(model, PeftModel):
                    with model.disable_adapter():
                        yield model
                else:
                    yield model
                return
            assert isinstance(model, PeftModel), f"no adapter {adapter!r} was given to this oracle"
            if model.active_adapter != adapter:
                model.set_adapter(adapter)
            yield model


def _greedy(model: torch.nn.Module, prompt: Sequence[int], num_tokens: int) -> GreedyCompletion:
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
    return GreedyCompletion(token_ids, min(gaps))
