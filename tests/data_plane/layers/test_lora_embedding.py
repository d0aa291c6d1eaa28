"""The embedding that takes adapters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from data_plane.adapters.step.lora_step import LoraStep
from data_plane.layers.context import StepContext
from data_plane.layers.lora_embedding import LoraEmbedding
from data_plane.plan import TargetKind


class AddIds(LoraStep):
    """Adds multiplier * token id, and keeps what it was given."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, list[int], tuple[int, ...]]] = []

    def apply(self, target_name: str, x: torch.Tensor, y: torch.Tensor) -> None:
        raise AssertionError(f"{target_name} is an embedding")

    def apply_group(self, target_names: tuple[str, ...], x: torch.Tensor, y: torch.Tensor) -> None:
        raise AssertionError(f"{target_names} are embeddings")

    def embed(self, target_name: str, token_ids: torch.Tensor, y: torch.Tensor, multiplier: float) -> None:
        self.seen.append((target_name, token_ids.tolist(), tuple(y.shape)))
        y += multiplier * token_ids[:, None]


class Scaled(nn.Embedding):
    """As Gemma's: what is looked up is multiplied."""

    embed_scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__(9, 4)
        self.register_buffer("embed_scale", torch.tensor(8.0))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * self.embed_scale


@pytest.mark.parametrize(
    ("embedding", "multiplier"), [(nn.Embedding(9, 4), 1.0), (Scaled(), 8.0)], ids=["plain", "scaled"]
)
def test_an_embedding_adds_the_steps_adapters(embedding: nn.Embedding, multiplier: float) -> None:
    embedding.requires_grad_(False)
    context = StepContext()
    wrapped = LoraEmbedding(embedding, "model.embed", context)
    (target,) = wrapped.targets
    assert (target.name, target.in_features, target.out_features, target.kind) == (
        "model.embed",
        9,
        4,
        TargetKind.EMBEDDING,
    )
    ids = torch.tensor([[3, 8, 3]])
    plain = wrapped(ids)
    assert torch.equal(plain, embedding(ids))
    context.lora = lora = AddIds()
    assert torch.equal(wrapped(ids), plain + multiplier * ids[..., None])
    assert lora.seen == [("model.embed", [3, 8, 3], (3, 4))]
    context.end()
    assert torch.equal(wrapped(ids), plain)
    assert wrapped.weight is embedding.weight
