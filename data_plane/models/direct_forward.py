"""The forward pass of a stacked model without transformers' code around the layers: the modules called one by one.

Transformers' code takes a twentieth of a step's time for one request. In some models it also scales values between the
modules, so that a DirectForward is used only if its logits have the same bits as the model's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel

from data_plane.layers.decoder_stack import DecoderStack
from data_plane.layers.rms_norm import RmsNorm


class DirectForward:
    """Embedding, tables, stack, norm and head of one model."""

    def __init__(
        self,
        embedding: nn.Module,
        tables: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
        stack: DecoderStack,
        norm: RmsNorm,
        head: nn.Module,
    ) -> None:
        self._embedding = embedding
        self._tables = tables
        self._stack = stack
        self._norm = norm
        self._head = head
        self.is_proven = False

    @classmethod
    def of(cls, model: PreTrainedModel, stack: DecoderStack) -> DirectForward | None:
        """The direct pass of a model, or None if it lacks such a module. Its head and embedding must be in place."""
        decoder = model.base_model
        parts = (model.get_input_embeddings(), getattr(decoder, "rotary_emb", None), model.get_output_embeddings())  # type: ignore[no-untyped-call]
        embedding, tables, head = parts
        if embedding is None or tables is None or head is None:
            return None
        return cls(embedding, tables, stack, stack.last_norm, head)

    def logits(self, input_ids: torch.Tensor, position_ids: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """See LoadedModel.logits."""
        hidden = self._embedding(input_ids.unsqueeze(0))
        tables = self._tables(hidden, position_ids.unsqueeze(0))
        stream = self._stack(hidden, position_embeddings=tables)
        logits: torch.Tensor = self._head(self._norm(stream)[0, kept])
        return logits
