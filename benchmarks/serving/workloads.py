"""Seeded workloads: which request arrives when, with which adapter, prompt length and output length. numpy only.

Sources: S-LoRA's synthetic trace (benchmarks/trace.py of that project: power-law adapters, gamma arrivals), Punica's
adapter popularities (identical, uniform, skewed, distinct), and an offline batch where everything arrives at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

POPULARITIES = ("identical", "uniform", "skewed", "distinct")


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a workload."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int  # generated in full: end-of-sequence is ignored
    adapter: int | None  # index of the adapter; None: the base model
    arrival_s: float = 0.0  # after the start of the run


def offline(
    num_requests: int, prompt_tokens: int, output_tokens: int, num_adapters: int, vocab_size: int, seed: int
) -> list[Job]:
    """Everything at once; adapters in turn, none if there are none."""
    rng = np.random.default_rng(seed)
    return [
        Job(_prompt(rng, prompt_tokens, vocab_size), output_tokens, index % num_adapters if num_adapters else None)
        for index in range(num_requests)
    ]


def punica(
    popularity: str, num_requests: int, prompt_tokens: int, output_tokens: int, vocab_size: int, seed: int
) -> list[Job]:
    """Everything at once; adapters as popular as Punica's four cases say. Needs `punica_num_adapters` adapters."""
    rng = np.random.default_rng(seed)
    owners = [adapter for adapter, size in enumerate(group_sizes(popularity, num_requests)) for _ in range(size)]
    rng.shuffle(owners)
    return [Job(_prompt(rng, prompt_tokens, vocab_size), output_tokens, owner) for owner in owners]


def group_sizes(popularity: str, num_requests: int) -> list[int]:
    """How many requests each adapter gets, largest first.

    skewed is Zipf-1.5: group sizes floor(1.5^k) until the requests are used up, the last takes the rest.
    """
    if popularity == "identical":
        return [num_requests]
    if popularity == "distinct":
        return [1] * num_requests
    if popularity == "uniform":
        num_groups = math.ceil(math.sqrt(num_requests))
        return [num_requests // num_groups + (group < num_requests % num_groups) for group in range(num_groups)]
    if popularity != "skewed":
        raise ValueError(f"popularity {popularity!r} is not one of {', '.join(POPULARITIES)}")
    sizes: list[int] = []
    left = num_requests
    while left:
        size = min(math.floor(1.5 ** len(sizes)), left)
        sizes.append(size)
        left -= size
    return sorted(sizes, reverse=True)


def s_lora_trace(
    *,
    rate_per_s: float,
    duration_s: float,
    num_adapters: int,
    alpha: float,
    cv: float,
    prompt_range: tuple[int, int],
    output_range: tuple[int, int],
    vocab_size: int,
    seed: int = 42,
) -> list[Job]:
    """S-LoRA's trace: `rate_per_s * duration_s` requests.

    Adapter popularity has density alpha * x^(alpha - 1): alpha 1 is uniform, smaller is more skewed. Times between
    arrivals are gamma with coefficient of variation `cv`, 1 being Poisson. Lengths are uniform in [low, high).
    """
    rng = np.random.default_rng(seed)
    num_requests = int(rate_per_s * duration_s)
    adapters = (rng.power(alpha, num_requests) * num_adapters).astype(int)
    gaps_s = rng.gamma(1 / cv**2, cv**2 / rate_per_s, num_requests)
    arrivals_s = np.cumsum(gaps_s)
    prompts = rng.integers(*prompt_range, num_requests)
    outputs = rng.integers(*output_range, num_requests)
    return [
        Job(
            _prompt(rng, int(prompts[index]), vocab_size),
            int(outputs[index]),
            int(adapters[index]) if num_adapters else None,
            float(arrivals_s[index]),
        )
        for index in range(num_requests)
    ]


def num_adapters_of(jobs: list[Job]) -> int:
    """One more than the largest adapter index in use."""
    return max((job.adapter + 1 for job in jobs if job.adapter is not None), default=0)


def _prompt(rng: np.random.Generator, num_tokens: int, vocab_size: int) -> tuple[int, ...]:
    # Random ids, so that no prefix is shared by chance. The lowest ids are special tokens.
    return tuple(int(token_id) for token_id in rng.integers(8, vocab_size, num_tokens))
