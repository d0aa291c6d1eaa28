"""Sampling parameters as callers give them, and as the server reports them.

Written by protos/generate.py from protos/motet/v1/types.proto: change that file instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict


class SamplingOptions(TypedDict, total=False):
    """Left out or None: the server's default."""

    temperature: float | None  # softmax temperature, no unit, in [0, 100]; 0 is greedy (default: 0)
    top_k: int | None  # keep this many of the most likely tokens (default: all)
    top_p: float | None  # keep the most likely tokens that together reach this probability, in (0, 1] (default: 1)
    seed: int | None  # same seed, same tokens, whatever else is in the batch (default: drawn)
    min_p: float | None  # keep tokens at least this many times as likely as the most likely one, in [0, 1] (default: 0)
    repetition_penalty: float | None  # above 1 repeats prompt and completion less, no unit, in [0.01, 10] (default: 1)
    presence_penalty: float | None  # subtracted from the logits of tokens that were generated, in [-2, 2] (default: 0)
    frequency_penalty: float | None  # the same for each time that a token was generated, in [-2, 2] (default: 0)
    logit_bias: Mapping[int, float]  # added to the logits of these tokens, in [-100, 100] (default: none)
    logprobs: int | None  # report log-probabilities of the tokens, and of this many most likely ones, at most 20 (default: none)
    prompt_logprobs: int | None  # the same for the tokens of the prompt from the second on, at most 20 (default: none)
    logprobs_mode: str | None  # distribution of the log-probabilities of generated tokens, raw or processed; processed is after bias, penalties, temperature and filters (default: raw)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingInEffect:
    """Sampling parameters with the values that the server used."""

    temperature: float = 0.0  # softmax temperature, no unit, in [0, 100]; 0 is greedy (default: 0)
    top_k: int | None = None  # keep this many of the most likely tokens (default: all)
    top_p: float = 1.0  # keep the most likely tokens that together reach this probability, in (0, 1] (default: 1)
    seed: int = 0  # same seed, same tokens, whatever else is in the batch (default: drawn)
    min_p: float = 0.0  # keep tokens at least this many times as likely as the most likely one, in [0, 1] (default: 0)
    repetition_penalty: float = 1.0  # above 1 repeats prompt and completion less, no unit, in [0.01, 10] (default: 1)
    presence_penalty: float = 0.0  # subtracted from the logits of tokens that were generated, in [-2, 2] (default: 0)
    frequency_penalty: float = 0.0  # the same for each time that a token was generated, in [-2, 2] (default: 0)
    logprobs_mode: str = "raw"  # distribution of the log-probabilities of generated tokens, raw or processed; processed is after bias, penalties, temperature and filters (default: raw)


# By name: what a parameter does, its bounds and its default.
DESCRIPTIONS = {
    "temperature": "softmax temperature, no unit, in [0, 100]; 0 is greedy (default: 0)",
    "top_k": "keep this many of the most likely tokens (default: all)",
    "top_p": "keep the most likely tokens that together reach this probability, in (0, 1] (default: 1)",
    "seed": "same seed, same tokens, whatever else is in the batch (default: drawn)",
    "min_p": "keep tokens at least this many times as likely as the most likely one, in [0, 1] (default: 0)",
    "repetition_penalty": "above 1 repeats prompt and completion less, no unit, in [0.01, 10] (default: 1)",
    "presence_penalty": "subtracted from the logits of tokens that were generated, in [-2, 2] (default: 0)",
    "frequency_penalty": "the same for each time that a token was generated, in [-2, 2] (default: 0)",
    "logit_bias": "added to the logits of these tokens, in [-100, 100] (default: none)",
    "logprobs": "report log-probabilities of the tokens, and of this many most likely ones, at most 20 (default: none)",
    "prompt_logprobs": "the same for the tokens of the prompt from the second on, at most 20 (default: none)",
    "logprobs_mode": "distribution of the log-probabilities of generated tokens, raw or processed; processed is after bias, penalties, temperature and filters (default: raw)",
}
