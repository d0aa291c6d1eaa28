"""Runs a loaded model on a few tokens under an attention of its own, and records what the model did.

That attention returns each token's own value, so that no token may see another. Where a token still does, the model has
code outside of attention that mixes tokens. model_probe.py draws the conclusions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from data_plane.models.layer_inputs import LayerInputs, layer_names
from data_plane.models.mixtures.parts import is_mixture_part

PROBE_NAME = "motet_probe"
NUM_TOKENS = 5  # of a pass that names no token ids
# Arguments beside the tensors that our attention computes with.
COMPUTED = ("scaling", "sliding_window", "softcap", "s_aux")
_NUM_SAMPLED = 16  # columns of a linear's input that are recorded

MaskRule = Callable[[Any, Any, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class Call:
    """One call of attention, in transformers' shapes."""

    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    kwargs: dict[str, Any]


@dataclass(slots=True)
class Recorder:
    """What one forward pass under PROBE_NAME did.

    Of its calls of attention only the tokens `rows` (int64 [n]) are kept; None: all.
    """

    rows: torch.Tensor | None = None
    calls: list[Call] = field(default_factory=list)
    masks: list[tuple[torch.Tensor, MaskRule]] = field(default_factory=list)
    # Of each call of a linear, of a mixture's parts, and of the embedding: the first columns of its rows,
    # [rows, at most _NUM_SAMPLED].
    linear_inputs: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Transformers' attention interface."""
        kept = (query, key, value)
        if self.rows is not None:
            rows = self.rows.to(query.device)
            kept = (query[:, :, rows], key[:, :, rows], value[:, :, rows])
        self.calls.append(Call(module, *kept, attention_mask, kwargs))
        return own_values(query[0].transpose(0, 1), value[0].transpose(0, 1)).unsqueeze(0), None

    def make_mask(self, *, mask_function: MaskRule, q_length: int, kv_length: int, **_: Any) -> torch.Tensor:
        """Transformers' mask interface. The returned mask carries its rule; its values are never read."""
        mask = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool)
        self.masks.append((mask, mask_function))
        return mask

    def rule_of(self, mask: torch.Tensor) -> MaskRule | None:
        """The rule behind a mask that was made here."""
        return next((rule for known, rule in self.masks if known is mask), None)


def own_values(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """What each head of query [T, Hq, D] gets if every token attends to itself alone: [T, Hq, Dv] of value."""
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)


def register_probe(recorder: Recorder) -> None:
    """Make transformers call the recorder under PROBE_NAME."""
    AttentionInterface.register(PROBE_NAME, recorder.attend)
    AttentionMaskInterface.register(PROBE_NAME, recorder.make_mask)


def run_probe(
    model: PreTrainedModel,
    positions: torch.Tensor | None,
    *,
    token_ids: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
    layer_inputs: LayerInputs | None = None,
    recorded: torch.Tensor | None = None,
    within: contextlib.AbstractContextManager[Any] | None = None,
) -> tuple[Recorder, torch.Tensor]:
    """One forward pass of packed tokens at int64 positions [T]: its recorder, and logits [1, T, vocab].

    Without positions the model numbers the tokens itself. token_ids int64 [T]; without them the first ids of the
    vocabulary. `kept` int64 [n]: only the logits of these tokens are computed. `layer_inputs` records what the decoder
    layers receive. `recorded` int64 [n]: only these tokens of the calls of attention are recorded. `within` is entered
    around the pass.
    """
    recorder = Recorder(recorded)
    register_probe(recorder)
    _, embedding = head_and_embedding(model)
    hooks = [
        module.register_forward_pre_hook(_sample_rows(recorder, name))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or name == embedding or is_mixture_part(module)
    ]
    if layer_inputs is not None:
        hooks += [
            model.get_submodule(name).register_forward_pre_hook(layer_inputs.hook(name), with_kwargs=True)
            for name in layer_names(model)
        ]
    if token_ids is None:
        assert positions is not None, "neither tokens nor positions"
        token_ids = torch.arange(len(positions))
    device = model.device
    more: dict[str, Any] = {} if positions is None else {"position_ids": positions.to(device).unsqueeze(0)}
    if kept is not None:
        more["logits_to_keep"] = kept.to(device)
    try:
        with contextlib.nullcontext() if within is None else within:
            output = model(input_ids=token_ids.to(device).unsqueeze(0), use_cache=False, **more)
    finally:
        for hook in hooks:
            hook.remove()
        register_probe(Recorder())
    return recorder, output.logits


def head_and_embedding(model: PreTrainedModel) -> tuple[str | None, str | None]:
    """Names of the two modules; None for an embedding that is more than a look-up."""
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    embedding: Any = model.get_input_embeddings()
    if not isinstance(embedding, nn.Embedding) or embedding.max_norm is not None:
        embedding = None
    names = {id(module): name for name, module in model.named_modules()}
    return names.get(id(head)), names.get(id(embedding))


def _sample_rows(recorder: Recorder, name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
    def hook(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if not args:
            return
        is_ids = not args[0].is_floating_point()
        rows = args[0].reshape(-1, 1) if is_ids else args[0].reshape(-1, args[0].shape[-1])[:, :_NUM_SAMPLED]
        recorder.linear_inputs.setdefault(name, []).append(rows.float())

    return hook
