"""What begins behind a number of tokens is refused, wherever the configuration names that number."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from data_plane.errors import UnsupportedModel
from data_plane.models.model_probe import probe_model
from tests.data_plane.models.models import MAX_STEP_TOKENS, changed, in_dtype

CHUNK = 300  # tokens
Change = Callable[[torch.Tensor], torch.Tensor]


def add_the_chunk_before(x: torch.Tensor) -> torch.Tensor:
    """Nothing in a batch of up to CHUNK tokens."""
    return x + nn.functional.pad(x, (0, 0, CHUNK, 0))[:, : x.shape[1]]


def mean_of_whole_chunks(x: torch.Tensor) -> torch.Tensor:
    num_whole = x.shape[1] // CHUNK * CHUNK
    chunks = x[:, :num_whole].unflatten(1, (-1, CHUNK))
    return torch.cat([(chunks + 0.5 * chunks.roll(1, dims=2)).flatten(1, 2), x[:, num_whole:]], dim=1)


def drop_beyond_capacity(x: torch.Tensor) -> torch.Tensor:
    """A router whose two experts take a quarter of the batch each, and at least 48 tokens."""
    is_first, capacity, kept = x[0].sum(-1) > 0, max(48, x.shape[1] // 4), x.clone()
    for chosen in (is_first, ~is_first):
        kept[:, chosen.nonzero()[capacity:, 0]] = 0
    return kept


def scale_a_slice(x: torch.Tensor) -> torch.Tensor:
    """A scale by place without a tensor of places."""
    return torch.cat([x[:, :CHUNK], 2 * x[:, CHUNK:]], dim=1)


def scale_by_numpy(x: torch.Tensor) -> torch.Tensor:
    factors = 1 + np.floor(np.arange(x.shape[1]) / CHUNK)
    return x * torch.from_numpy(factors)[None, :, None].to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "change", [add_the_chunk_before, mean_of_whole_chunks, drop_beyond_capacity, scale_a_slice, scale_by_numpy]
)
@pytest.mark.parametrize("layer", [0, 1])  # of the last layer only the logits tell
def test_what_begins_behind_a_number_of_tokens_is_refused(layer: int, change: Change, dtype: torch.dtype) -> None:
    model = in_dtype(changed(f"model.layers.{layer}.mlp", change, at_input=True), dtype)
    model.config.mixer = {"stages": [{"chunk": float(CHUNK)}]}
    with pytest.raises(UnsupportedModel, match=r"changes where the batch has \d+ tokens instead of \d+"):
        probe_model(model, 256, MAX_STEP_TOKENS)


def test_a_number_that_no_step_reaches_is_not_tried() -> None:
    """The batch is as long as the longest step at most, and the model is served."""
    seen: list[int] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.shape[1])
        return x

    model = changed("model.layers.0.mlp", note, at_input=True)
    model.config.mixer = {"chunk": 5000}
    model.config.intermediate_size = 7000  # a width, of which tokens know nothing
    probe_model(model, 256, 100)
    assert 50 < max(seen) <= 110
    seen.clear()
    probe_model(model, 256, 8192)
    assert 5000 < max(seen) < 5100
