"""Compares whole next-token distributions of mixed batches with the oracle's, token by token.

Greedy tokens hide small differences. Here every token of the vocabulary is compared, behind every generated one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count, product

import torch

from control_plane.scheduler.settings import SchedulerSettings
from control_plane.scheduler.types import Request, RequestId, Sampling
from data_plane.engine.engine import TorchEngine
from tests.e2e.scheduled import IngestedAdapter, serve

# Of log-probabilities in float32, against transformers and PEFT in float32: sums of another order over two layers, with
# logits of order 10. The largest difference of all kinds and architectures was 4e-5.
TOLERANCE = 2e-4
OracleLogits = Callable[[str | None, list[int]], torch.Tensor]  # adapter and tokens; [tokens, vocabulary]


def check_distributions(
    engine: TorchEngine,
    adapters: Mapping[str, IngestedAdapter],
    oracle_logits: OracleLogits,
    prompts: Sequence[Sequence[int]],
    *,
    num_tokens: int = 4,
    settings: SchedulerSettings | None = None,
) -> float:
    """Each prompt with the base model and each adapter, all at once. The largest difference, which is in TOLERANCE."""
    vocab_size = engine.capacities.vocab_size
    ids = count(1)
    wanted = {next(ids): pair for pair in product([None, *adapters], range(len(prompts)))}
    requests = [
        Request(
            request_id=RequestId(request_id),
            prompt_token_ids=tuple(prompts[index]),
            max_tokens=num_tokens,
            adapter=None if name is None else adapters[name].ref,
            sampling=Sampling(temperature=0.0, num_logprobs=vocab_size),
        )
        for request_id, (name, index) in wanted.items()
    ]
    completions, _ = serve(engine, requests, list(adapters.values()), settings or SchedulerSettings())
    largest = 0.0
    for request_id, (name, index) in wanted.items():
        served = completions[request_id, 0]
        assert len(served.token_ids) == num_tokens
        known = [*prompts[index], *served.token_ids]
        expected = oracle_logits(name, known)[len(prompts[index]) - 1 : -1].double().log_softmax(dim=-1)
        for position, logprobs in enumerate(served.logprobs):
            found = torch.full((vocab_size,), float("nan"), dtype=torch.float64)
            for token_id, logprob in logprobs.top:
                found[token_id] = logprob
            difference = float((found - expected[position]).abs().max())
            assert difference <= TOLERANCE, f"adapter {name!r}, prompt {index}, token {position}: {difference:.2e} off"
            largest = max(largest, difference)
    return largest
