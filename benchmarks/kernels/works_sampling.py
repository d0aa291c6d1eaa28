"""Rows of sampling: greedy, the usual limits, penalties, log-probabilities; logits in the model's dtype."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.kernels.measure import Call
from benchmarks.kernels.work import Made, Model, Work, random
from kernels.sampling import IN_COMPLETION, IN_PROMPT, Adjustments, SamplingRows, rows_of, sample, token_logprobs

TOP_K, TOP_P, TEMPERATURE = 50, 0.95, 0.8
NUM_TOP = 5


def works(model: Model, device: torch.device, dtype: torch.dtype, *, is_short: bool) -> Iterator[Work]:
    counts = (64, 256) if device.type == "cuda" else (8, 32)
    for count in counts[1:] if is_short else counts:
        yield _sample(model, count, device, dtype, has_limits=False, has_penalties=False)
        yield _sample(model, count, device, dtype, has_limits=True, has_penalties=False)
        yield _sample(model, count, device, dtype, has_limits=True, has_penalties=True)
        yield _logprobs(model, count, device, dtype)


def _sample(
    model: Model, count: int, device: torch.device, dtype: torch.dtype, *, has_limits: bool, has_penalties: bool
) -> Work:
    """torch's own pipeline sorts the logits; its draws are others, with the same probabilities."""

    def make() -> Made:
        logits = random(count, model.vocab, device=device, dtype=dtype)
        rows = _rows(count, device, has_limits=has_limits)
        adjustments = _penalties(count, model.vocab, device) if has_penalties else None
        peers: dict[str, Call] = (
            {} if has_penalties else {"torch pipeline": partial(_pipeline, logits, has_limits=has_limits)}
        )
        arguments: dict[str, Any] = {"logits": logits, "rows": rows, "adjustments": adjustments}
        return Made(partial(sample, logits, rows, adjustments), arguments, peers)

    kinds = ["top-k, top-p" if has_limits else "no limits"] + ["penalties"] * has_penalties
    num_bytes = count * model.vocab * (dtype.itemsize + 4 * has_penalties)
    return Work("sample", f"{count} rows, {', '.join(kinds)}", num_bytes, 0, make)


def _logprobs(model: Model, count: int, device: torch.device, dtype: torch.dtype) -> Work:
    def make() -> Made:
        logits = random(count, model.vocab, device=device, dtype=dtype)
        token_ids = torch.randint(0, model.vocab, (count,), device=device)

        def peer() -> None:
            torch.log_softmax(logits.float(), dim=-1).topk(NUM_TOP)

        arguments: dict[str, Any] = {"logits": logits, "token_ids": token_ids, "num_top": NUM_TOP}
        return Made(partial(token_logprobs, **arguments), arguments, {"log_softmax, topk": peer})

    return Work("token_logprobs", f"{count} rows, top {NUM_TOP}", count * model.vocab * dtype.itemsize, 0, make)


def _rows(count: int, device: torch.device, *, has_limits: bool) -> SamplingRows:
    limits = {"top_k": TOP_K, "top_p": TOP_P} if has_limits else {}
    return rows_of(count, device, temperature=TEMPERATURE, seed=torch.arange(count), position=7, **limits)


def _penalties(count: int, vocab: int, device: torch.device) -> Adjustments:
    """All three, for every row, over histories in which one token of sixteen was seen."""
    seen = torch.rand(count, vocab, device=device) < 1 / 16
    everyone = torch.arange(count, device=device)
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    return Adjustments(
        rows=everyone,
        repetition=torch.full((count,), 1.1, device=device),
        presence=torch.full((count,), 0.5, device=device),
        frequency=torch.full((count,), 0.2, device=device),
        history_row=everyone,
        history=seen.int() * (IN_PROMPT + 2 * IN_COMPLETION),
        bias_row=nothing,
        bias_token=nothing,
        bias=nothing.float(),
    )


def _pipeline(logits: torch.Tensor, *, has_limits: bool) -> torch.Tensor:
    scaled = logits.float() / TEMPERATURE
    if has_limits:
        ordered, order = scaled.sort(dim=-1, descending=True)
        ordered[:, TOP_K:] = -torch.inf
        probabilities = ordered.softmax(dim=-1)
        probabilities[probabilities.cumsum(dim=-1) - probabilities >= TOP_P] = 0
        return order.gather(1, torch.multinomial(probabilities, 1)).squeeze(1)
    return torch.multinomial(scaled.softmax(dim=-1), 1).squeeze(1)
