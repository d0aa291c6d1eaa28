"""All decoder layers of a model as one module, which a CPU computes by one native call."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from data_plane.layers.context import StepContext
from data_plane.layers.decoder_layer import DecoderLayer
from data_plane.layers.recorded_layers import AdapterTables, CannotRecord, RecordedLayers
from data_plane.layers.rms_norm import RmsNorm

logger = logging.getLogger(__name__)


class DecoderStack(nn.Module):
    """The layers one after the other. Replaces a model's first layer; a SkippedLayer replaces each other one.

    `record` makes it native. Steps that the recorded program does not serve run the modules.
    """

    def __init__(self, layers: Sequence[DecoderLayer], last_norm: RmsNorm, context: StepContext) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._last_norm = [last_norm]  # a list, since it is a part of another module
        self._context = context
        self._recorded: RecordedLayers | None = None

    def record(self, tables: AdapterTables, *, max_tokens: int, rotary_half: int) -> None:
        """Compute steps of up to max_tokens by one native call, if the layers' parts allow it.

        The caches must have been attached.
        """
        layers: Any = list(self.layers)
        try:
            self._recorded = RecordedLayers(
                layers, self._last_norm[0], self._context, tables, max_tokens=max_tokens, rotary_half=rotary_half
            )
        except CannotRecord as error:
            logger.info("layers run as modules reason=%s", error)

    @property
    def last_norm(self) -> RmsNorm:
        """The norm whose result is computed with the layers."""
        return self._last_norm[0]

    @property
    def is_recorded(self) -> bool:
        return self._recorded is not None

    @contextlib.contextmanager
    def as_modules(self) -> Iterator[None]:
        """Run the modules meanwhile."""
        recorded, self._recorded = self._recorded, None
        try:
            yield
        finally:
            self._recorded = recorded

    def forget(self) -> None:
        """Run the modules again."""
        self._recorded = None

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], **kwargs: Any
    ) -> torch.Tensor:
        """[1, T, hidden] for hidden_states [1, T, hidden]; the last norm's result for it is ready."""
        if self._recorded is None or not self._recorded.can_run(hidden_states.shape[1]):
            for layer in self.layers:
                hidden_states = layer(hidden_states, position_embeddings=position_embeddings, **kwargs)
            return hidden_states
        half = position_embeddings[0].shape[-1] // 2
        cos, sin = (table[0, :, :half] for table in position_embeddings)
        rows, normed = self._recorded.run(hidden_states[0], cos, sin)
        stream = rows.unsqueeze(0)
        self._last_norm[0].keep(stream, normed)
        return stream


class SkippedLayer(nn.Module):
    """Takes the place of a layer that a DecoderStack computes."""

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        """hidden_states itself."""
        return hidden_states
