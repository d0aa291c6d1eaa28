"""A step's sampling is queued behind its forward pass without a wait for the device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from data_plane.engine.sampling.sampler import Sampler
from data_plane.plan import NewRow, RowSampling

pytestmark = pytest.mark.gpu

VOCAB = 1000
SAMPLINGS = (
    RowSampling(temperature=0.8, top_k=20, top_p=0.9, seed=3, min_p=0.01),
    RowSampling(temperature=0.0, top_k=0, top_p=1.0, seed=0, repetition_penalty=1.2, frequency_penalty=0.5),
    RowSampling(
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        seed=1,
        biased_token_ids=np.arange(3, dtype=np.int32),
        biases=np.ones(3, dtype=np.float32),
    ),
)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_sampling_waits_for_nothing_once_its_kernels_are_compiled() -> None:
    """Not for settings of new rows either: the second call has others than the first."""
    device = torch.device("cuda")
    sampler = Sampler(max_rows=6, vocab_size=VOCAB, device=device)
    for row, sampling in enumerate([*SAMPLINGS, *(replace(sampling, seed=9) for sampling in SAMPLINGS)]):
        prompt = np.arange(5, dtype=np.int32)
        sampler.add(NewRow(row, prompt, 5, 0, np.zeros(1, dtype=np.int32), None, 0, sampling))
    logits = torch.randn(3, VOCAB, device=device)
    positions = np.zeros(3, dtype=np.int64)
    sampler.sample(logits, np.arange(3), positions)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tokens, _ = sampler.sample(logits, np.arange(3, 6), positions)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert ((tokens >= 0) & (tokens < VOCAB)).all()
