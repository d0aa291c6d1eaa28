"""Records the inputs of a model's decoder layers in one pass, and gives the layers the same inputs in another pass.

So two passes are compared layer by layer, and rounding does not add up over the layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

_Hook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]] | None]


@dataclass(frozen=True, slots=True)
class Source:
    """Tokens that two passes share: token here[i] of this pass is token there[i] of the other."""

    inputs: LayerInputs
    here: torch.Tensor  # int64 [n]
    there: torch.Tensor  # int64 [n]


@dataclass(slots=True)
class LayerInputs:
    """The hidden states that the layers of one pass of num_tokens tokens receive, in the order of their calls.

    With a source, tokens that the source has get their hidden states from there, not from this pass. Only a pass
    without a source keeps its hidden states, to be the source of other passes.
    """

    num_tokens: int
    source: Source | None = None
    # Name, what was computed for the source's tokens, and what they had there.
    replaced: list[tuple[str, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    _given: dict[str, tuple[torch.Tensor, int]] = field(default_factory=dict)  # by layer; which size is the tokens'

    def hook(self, name: str) -> _Hook:
        """A forward pre-hook, with keywords, for the layer of this name."""

        def hook(
            _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            hidden = args[0] if args else kwargs.get("hidden_states")
            if not isinstance(hidden, torch.Tensor) or self.num_tokens not in hidden.shape:
                return None
            given = self._give(name, hidden)
            return ((given, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": given})

        return hook

    def _give(self, name: str, hidden: torch.Tensor) -> torch.Tensor:
        source = self.source
        if source is None:
            self._given[name] = hidden.clone(), list(hidden.shape).index(self.num_tokens)
            return hidden
        if name not in source.inputs._given:
            return hidden
        given, dim = source.inputs._given[name]
        here, there = source.here.to(hidden.device), source.there.to(hidden.device)
        before = given.index_select(dim, there)
        self.replaced.append((name, _rows(hidden.index_select(dim, here), dim), _rows(before, dim)))
        return hidden.index_copy(dim, here, before)


def layer_names(model: nn.Module) -> list[str]:
    """The modules in the outermost lists of the model: its decoder layers."""
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    return [f"{name}.{index}" for name in outermost for index, _ in enumerate(model.get_submodule(name).children())]


def _rows(hidden: torch.Tensor, dim: int) -> torch.Tensor:
    """[tokens, the rest]"""
    return hidden.movedim(dim, 0).flatten(1)
