"""An embedding that adds the step's adapters. It wraps the embedding of a loaded model."""

from __future__ import annotations

import torch
from torch import nn

from data_plane.layers.context import StepContext
from data_plane.plan import TargetKind, TargetModule


class LoraEmbedding(nn.Module):
    """A loaded embedding, of any class, plus what the step's adapters add.

    If the embedding multiplies what it looks up (Gemma's embed_scale), the adapters' part is multiplied too, as in
    PEFT. Rows that an adapter brings take the place of what is looked up and added.
    """

    def __init__(self, embedding: nn.Embedding, target_name: str, context: StepContext) -> None:
        super().__init__()
        self.embedding = embedding
        self.targets = [
            TargetModule(target_name, TargetKind.EMBEDDING, embedding.num_embeddings, embedding.embedding_dim)
        ]
        self.context = context
        scale = torch.as_tensor(getattr(embedding, "embed_scale", 1.0))
        self.multiplier = float(scale.to(embedding.weight.dtype))

    @property
    def weight(self) -> torch.Tensor:
        """[vocabulary, hidden]; also the head's weight if the model ties them."""
        return self.embedding.weight

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., hidden] for token ids [...]. In a step with adapters the ids are those of the step's tokens."""
        rows, target = self.context.rows, self.targets[0]
        known = input if rows is None else rows.known_ids(input)
        output: torch.Tensor = self.embedding(known)
        y = output.view(-1, target.out_features)
        if self.context.lora is not None:
            self.context.lora.embed(target.name, known.reshape(-1), y, self.multiplier)
        if rows is not None:
            rows.embed(target.name, input.reshape(-1), y, self.multiplier)
        return output
