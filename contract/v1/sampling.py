"""How tokens are chosen, as the servers carry it; contract/sampling.py converts it.

Written by protos/generate.py from protos/motet/v1/types.proto: change that file instead.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingValues:
    """The numbers of SamplingParams with every value in effect."""

    temperature: float = 0.0  # softmax temperature, no unit, in [0, 100]; 0 is greedy (default: 0)
    top_k: int = 0  # keep this many of the most likely tokens (default: all)
    top_p: float = 1.0  # keep the most likely tokens that together reach this probability, in (0, 1] (default: 1)
    seed: int = 0  # same seed, same tokens, whatever else is in the batch (default: drawn)
    min_p: float = 0.0  # keep tokens at least this many times as likely as the most likely one, in [0, 1] (default: 0)
    repetition_penalty: float = 1.0  # above 1 repeats prompt and completion less, no unit, in [0.01, 10] (default: 1)
    presence_penalty: float = 0.0  # subtracted from the logits of tokens that were generated, in [-2, 2] (default: 0)
    frequency_penalty: float = 0.0  # the same for each time that a token was generated, in [-2, 2] (default: 0)
    num_logprobs: int | None = None  # report log-probabilities of the tokens, and of this many most likely ones, at most 20 (default: none)
    num_prompt_logprobs: int | None = None  # the same for the tokens of the prompt from the second on, at most 20 (default: none)
    logprobs_mode: int = 1  # distribution of the log-probabilities of generated tokens, raw or processed; processed is after bias, penalties, temperature and filters (default: raw)
