"""Shows, by a forward pass of a few tokens, how a loaded model calls attention and its linears; refuses what we would
compute otherwise.

The pass runs under an attention of its own that records every call and answers each token's own values, and under
masks that record the rule each layer is given. A model is refused, by the name of its type, if
1. a decoder layer does not call the attention interface exactly once (other mixers, attention of its own),
2. a layer's mask is not "causal, within the sliding window that attention is told",
3. attention is passed something we do not compute (position bias and the like),
4. position_ids change nothing (positions taken from the place in the batch, ALiBi).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from data_plane.errors import UnsupportedModel

PROBE_NAME = "motet_probe"
NUM_TOKENS = 5
_SHIFT = 11  # distance between the two sets of positions

# What models pass to attention besides the tensors, and that leaves the result as it is at inference.
_HARMLESS = {
    "dropout",
    "position_ids",
    "position_embeddings",
    "cache_position",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "head_mask",
    "layer_idx",
    "num_items_in_batch",
}
_COMPUTED = {"scaling", "sliding_window", "softcap", "s_aux"}

MaskRule = Callable[[Any, Any, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One attention module of a model, as it is called."""

    module: nn.Module
    num_kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class ModelProbe:
    """What the engine needs to know of a model."""

    attention_layers: list[AttentionLayer]
    linear_names: list[str]  # linears that see every token of a step once, in the order of their calls
    vocab_size: int
    head_name: str | None  # the head, if it is a plain linear that sees every token once; None otherwise
    embedding_name: str | None  # the embedding, if every token is looked up in it once; None otherwise


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
    """What one forward pass under PROBE_NAME did."""

    calls: list[Call] = field(default_factory=list)
    masks: list[tuple[torch.Tensor, MaskRule]] = field(default_factory=list)
    linear_rows: dict[str, list[int]] = field(default_factory=dict)  # of each call; the embedding's too

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
        self.calls.append(Call(module, query, key, value, attention_mask, kwargs))
        return own_values(query[0].transpose(0, 1), value[0].transpose(0, 1)).unsqueeze(0), None

    def make_mask(self, *, mask_function: MaskRule, **_: Any) -> torch.Tensor:
        """Transformers' mask interface."""
        mask = torch.ones(1, 1, NUM_TOKENS, NUM_TOKENS, dtype=torch.bool)
        self.masks.append((mask, mask_function))
        return mask

    def rule_of(self, mask: torch.Tensor) -> MaskRule | None:
        """The rule behind a mask that was made here."""
        return next((rule for known, rule in self.masks if known is mask), None)


@torch.inference_mode()
def probe_model(model: PreTrainedModel, max_model_len: int) -> ModelProbe:
    """Run the probe on a model loaded with attention PROBE_NAME. Raises UnsupportedModel.

    The masks' rules are compared at positions up to max_model_len.
    """
    model_type = str(model.config.model_type)
    positions = torch.arange(NUM_TOKENS)
    first, logits = run_probe(model, positions)
    second, _ = run_probe(model, positions + _SHIFT)
    layers = _attention_layers(model_type, model.config.get_text_config().num_hidden_layers, first)
    for call in first.calls:
        _check_arguments(model_type, call)
        _check_mask(model_type, call, first, max_model_len)
    if all(
        torch.equal(a.query, b.query) and torch.equal(a.key, b.key)
        for a, b in zip(first.calls, second.calls, strict=True)
    ):
        raise UnsupportedModel(
            f"model type {model_type}: position_ids change nothing; a model whose positions come from elsewhere "
            "(ALiBi, the place in the batch) cannot run in one batch with others"
        )
    names = [name for name, rows in first.linear_rows.items() if rows == [NUM_TOKENS]]
    head, embedding = _head_and_embedding(model)
    return ModelProbe(
        layers,
        [name for name in names if name not in (head, embedding)],
        logits.shape[-1],
        head_name=head if head in names else None,
        embedding_name=embedding if embedding in names else None,
    )


def own_values(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """What each head of query [T, Hq, D] gets if every token attends to itself alone: [T, Hq, Dv] of value."""
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)


def register_probe(recorder: Recorder) -> None:
    """Make transformers call the recorder under PROBE_NAME."""
    AttentionInterface.register(PROBE_NAME, recorder.attend)
    AttentionMaskInterface.register(PROBE_NAME, recorder.make_mask)


def run_probe(model: PreTrainedModel, positions: torch.Tensor) -> tuple[Recorder, torch.Tensor]:
    """One forward pass of a few tokens at int64 positions [NUM_TOKENS], their recorder and logits [1, T, vocab]."""
    recorder = Recorder()
    register_probe(recorder)
    _, embedding = _head_and_embedding(model)
    hooks = [
        module.register_forward_pre_hook(_count_rows(recorder, name))
        for name, module in model.named_modules()
        if type(module) is nn.Linear or name == embedding  # a subclass, as some routers are, computes more
    ]
    device = model.device
    input_ids = torch.arange(NUM_TOKENS, device=device).unsqueeze(0)
    try:
        output = model(input_ids=input_ids, position_ids=positions.to(device).unsqueeze(0), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
        register_probe(Recorder())
    return recorder, output.logits


def _head_and_embedding(model: PreTrainedModel) -> tuple[str | None, str | None]:
    """Names of the two modules; None for an embedding that is not looked up plainly."""
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    embedding: Any = model.get_input_embeddings()
    if not isinstance(embedding, nn.Embedding) or embedding.max_norm is not None:
        embedding = None
    names = {id(module): name for name, module in model.named_modules()}
    return names.get(id(head)), names.get(id(embedding))


def _count_rows(recorder: Recorder, name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
    def hook(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        is_ids = not args[0].is_floating_point()
        num_rows = args[0].numel() if is_ids else args[0].numel() // args[0].shape[-1]
        recorder.linear_rows.setdefault(name, []).append(num_rows)

    return hook


def _attention_layers(model_type: str, num_layers: int, recorder: Recorder) -> list[AttentionLayer]:
    """Case 1: as many calls as layers, each from a module of its own."""
    modules = {id(call.module) for call in recorder.calls}
    if len(recorder.calls) != num_layers or len(modules) != num_layers:
        raise UnsupportedModel(
            f"model type {model_type}: {len(modules)} of {num_layers} layers call transformers' attention interface "
            f"({len(recorder.calls)} calls); models with attention of their own or other mixers are not served"
        )
    layers = []
    for call in recorder.calls:
        tokens = (call.query.shape[2], call.key.shape[2], call.value.shape[2])
        if tokens != (NUM_TOKENS,) * 3:
            raise UnsupportedModel(
                f"model type {model_type}: attention got {tokens} tokens of query, key, value for {NUM_TOKENS}"
            )
        layers.append(AttentionLayer(call.module, call.key.shape[1], call.key.shape[3], call.value.shape[3]))
    return layers


def _check_arguments(model_type: str, call: Call) -> None:
    """Case 3."""
    for name, value in call.kwargs.items():
        if name in _HARMLESS or name in _COMPUTED or value is None or value is False:
            continue
        if name == "is_causal" and value is True:
            continue
        raise UnsupportedModel(f"model type {model_type}: attention is passed {name!r}, which is not computed here")
    if call.kwargs.get("is_causal", getattr(call.module, "is_causal", True)) is False:
        raise UnsupportedModel(f"model type {model_type}: a layer's attention is not causal")


def _check_mask(model_type: str, call: Call, recorder: Recorder, max_model_len: int) -> None:
    """Case 2: the rule is compared with ours on a grid of distances and positions."""
    if call.mask is None:
        return
    rule = recorder.rule_of(call.mask)
    if rule is None:
        raise UnsupportedModel(f"model type {model_type}: a layer makes an attention mask of its own")
    window = call.kwargs.get("sliding_window")
    points = {0, 1, 2, 3, 5, max_model_len - 1}
    points |= {1 << power for power in range(max_model_len.bit_length()) if 1 << power < max_model_len}
    if window is not None:
        points |= {window - 1, window, window + 1}
    edges = torch.tensor(sorted(p for p in points if 0 <= p < max_model_len))
    query = edges.repeat_interleave(len(edges))
    # Keys at the edges themselves, and at the edges' distances before the query.
    key = torch.cat([edges.repeat(len(edges)), query - edges.repeat(len(edges))]).clamp_(min=0)
    query = query.repeat(2)
    expected = key <= query
    if window is not None:
        expected &= query - key < window
    zero = torch.zeros((), dtype=torch.int64)
    actual = rule(zero, zero, query, key)
    actual = torch.as_tensor(actual).expand_as(expected)
    if not torch.equal(actual.cpu(), expected):
        at = int((actual.cpu() != expected).nonzero()[0])
        raise UnsupportedModel(
            f"model type {model_type}: a layer's mask lets position {int(query[at])} "
            f"{'see' if actual[at] else 'not see'} position {int(key[at])}, which a causal window of {window} does "
            "otherwise; lower --max-model-len if the mask is chunked"
        )
