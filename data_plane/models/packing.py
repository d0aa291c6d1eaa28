"""Refuses a model that computes several packed requests differently from each request alone.

Only attention may look at other tokens, and its batch says at which. Under the probe's attention (probe.py) every token
is alone: its queries, keys, values and logits must follow from its id and its position. One batch of tokens is compared
with four others. Its positions go from the first to the longest, beyond every threshold of the configuration.
1. The same batch in another order, as if it began elsewhere (moved_places.py). This finds convolutions, recurrent
   states and token shifts, and what is made from the place in the batch instead of from position_ids.
2. The beginning of a request alone, with positions that the model makes. This finds values that depend on the other
   tokens or their number, such as rotary frequencies chosen by the longest position, and positions not counted from 0.
3. One token alone, as when a request decodes.
4. A batch of more tokens than any number of the configuration, if a step may have so many. This finds code that
   depends on a number of tokens: mixers over chunks, and experts with a capacity.

Both passes of a comparison give a decoder layer the same input (layer_inputs.py), so that rounding does not add up over
the layers, and a difference is reported where it begins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from data_plane.errors import ConfigError, UnsupportedModel
from data_plane.models.layer_inputs import LayerInputs, Source
from data_plane.models.moved_places import MovedPlaces
from data_plane.models.probe import COMPUTED, Call, Recorder, run_probe

_LEAST_REQUEST_TOKENS = 8
_KEPT = torch.tensor([3, 6])  # tokens of a request whose logits are kept
_NUM_THRESHOLDS = 4  # of the largest, among the positions: every token costs time at the start
_LEAST_LARGE_TOKENS = 256  # of the large batch, for numbers that no configuration names
_WINDOW = 16  # tokens of the large batch that are compared before and after each number of the configuration
# Keys for widths, not for tokens. They are mostly the largest numbers that a step may have as many tokens as.
_WIDTHS = frozenset({"hidden_size", "intermediate_size", "vocab_size"})
_LEAST_SHIFT = 1 << 20  # places: beyond the thresholds of models whose context is short
# Largest relative error of a token within one layer. In float32 no token may be above it. In the short types most may
# not: rounding chooses another expert for some, so that a few tokens show only what is quite different. Measured in
# bfloat16 with 0.4% of noise on every product, 48 layers: most tokens below 0.015, single ones at 0.14 where there are
# experts; a state-space mixer, a token shift, a scale or frequencies of the batch: 0.28 to 1 for most.
_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}
_ERROR_OF_FEW = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.3}
_FEW, _MANY = 8, 32  # tokens
_SHARE_OF_MANY = 1 / 8  # of which fewer may be as much apart as few may


@dataclass(frozen=True, slots=True)
class ProbePass:
    """One forward pass: its tokens, and what the model did with them."""

    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    kept: torch.Tensor  # int64 [n]: tokens whose logits these are
    logits: torch.Tensor  # [n, vocab]
    recorder: Recorder
    layer_inputs: LayerInputs
    same: SameTokens | None  # what it was compared with


@dataclass(frozen=True, slots=True)
class SameTokens:
    """Tokens that two passes have in common: token here[i] of the one is token there[i] of the other."""

    other: ProbePass
    here: torch.Tensor  # int64 [n]
    there: torch.Tensor  # int64 [n]
    window: int = 0  # neighbours that are also compared by themselves; 0: only all tokens


@dataclass(frozen=True, slots=True)
class PackedPasses:
    """Passes over many positions, which show what the model's parts receive."""

    packed: ProbePass
    reordered: ProbePass  # the same tokens
    single: ProbePass  # one of them
    large: ProbePass | None  # they and many others; None: a step has no more tokens than `packed`


def begin_request(model: PreTrainedModel, max_model_len: int) -> ProbePass:
    """A pass of the first tokens of one request that keeps the logits of some of them."""
    num_tokens = _free_number(model, _LEAST_REQUEST_TOKENS)
    positions = torch.arange(num_tokens).clamp(max=max_model_len - 1)
    return _run(model, _random_ids(model, num_tokens), positions, kept=_KEPT)


def check_packing(model: PreTrainedModel, request: ProbePass, max_model_len: int, max_step_tokens: int) -> PackedPasses:
    """Run the other passes and compare them. Raises UnsupportedModel naming what differs and where.

    Contexts have at most max_model_len tokens, batches at most max_step_tokens.
    """
    if len(request.logits) != len(_KEPT):
        raise UnsupportedModel(
            f"model type {model.config.model_type}: its forward pass returned the logits of {len(request.logits)} "
            f"tokens where {len(_KEPT)} were requested (logits_to_keep); it is not served"
        )
    thresholds = thresholds_of(model.config, max_model_len)[-_NUM_THRESHOLDS:]
    known = torch.cat([request.positions, torch.tensor([*thresholds, max_model_len - 1])])
    num_tokens = _free_number(model, len(known))
    at = torch.randperm(num_tokens, generator=torch.Generator().manual_seed(0))  # where each token is in the batch
    positions, token_ids = torch.empty_like(at), torch.empty_like(at)
    positions[at] = known[torch.arange(num_tokens) % len(known)]
    token_ids[at] = _random_ids(model, num_tokens)
    packed = _run(model, token_ids, positions)
    if not packed.logits.isfinite().all():
        raise ConfigError(
            f"model type {model.config.model_type}: the logits of random tokens are not finite in {model.dtype}; "
            "choose another --dtype, or fetch the checkpoint again, a shard of which may be damaged"
        )
    reordered = _check_order(model, packed, max_model_len)
    _check_request(
        model, request, SameTokens(packed, torch.arange(len(request.positions)), at[: len(request.positions)])
    )
    last = at[len(known) - 1 : len(known)]
    single = _run(model, token_ids[last], positions[last], same=SameTokens(packed, torch.arange(1), last))
    _check(model, single, "changes where the token is alone in its batch")
    large = _check_large_batch(model, packed, max_step_tokens)
    return PackedPasses(packed, reordered, single, large)


def thresholds_of(config: PretrainedConfig, num_places: int, *, without: frozenset[str] = frozenset()) -> list[int]:
    """Numbers of the configuration that a token's index below num_places may be compared with, ascending.

    Those of the keys `without` are left out.
    """
    return sorted({number for number in _integers(config.to_dict(), without) if 1 < number < num_places})


def differs(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether rows [n, ...] of two passes differ by more than rounding in this dtype."""
    actual, expected = actual.flatten(1).float(), expected.flatten(1).float()
    errors = (actual - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-30)
    is_other = ~(errors <= (_ERROR if len(errors) >= _FEW else _ERROR_OF_FEW)[dtype])
    if dtype == torch.float32:
        return bool(is_other.any())
    is_quite_other = ~(errors <= _ERROR_OF_FEW[dtype])
    return bool(
        is_other.float().mean() > 0.5 or (len(errors) >= _MANY and is_quite_other.float().mean() > _SHARE_OF_MANY)
    )


def _run(
    model: PreTrainedModel,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    *,
    names_positions: bool = True,
    kept: torch.Tensor | None = None,
    same: SameTokens | None = None,
    recorded: torch.Tensor | None = None,
    within: contextlib.AbstractContextManager[Any] | None = None,
) -> ProbePass:
    source = None if same is None else Source(same.other.layer_inputs, same.here, same.there)
    inputs = LayerInputs(len(positions), source)
    given = positions if names_positions else None
    recorder, logits = run_probe(
        model, given, token_ids=token_ids, kept=kept, layer_inputs=inputs, recorded=recorded, within=within
    )
    kept = torch.arange(len(positions)) if kept is None else kept
    return ProbePass(token_ids, positions, kept, logits[0], recorder, inputs, same)


def _check_order(model: PreTrainedModel, packed: ProbePass, max_model_len: int) -> ProbePass:
    num_tokens = len(packed.positions)
    order = torch.randperm(num_tokens, generator=torch.Generator().manual_seed(2))
    token_ids, positions = packed.token_ids[order], packed.positions[order]
    same = SameTokens(packed, torch.arange(num_tokens), order)
    moved = MovedPlaces(num_tokens, max(_LEAST_SHIFT, 2 * max_model_len))
    reordered = _run(model, token_ids, positions, same=same, within=moved)
    if _difference(model, reordered):
        _check(
            model,
            _run(model, token_ids, positions, same=same),
            "changes with the order of the tokens in the batch: beside attention the model mixes neighbouring tokens "
            "(a convolution, a recurrent state, a token shift), or it uses their place in the batch",
        )
    _check(model, reordered, "is computed with the token's place in the batch instead of position_ids")
    return reordered


def _check_request(model: PreTrainedModel, request: ProbePass, same: SameTokens) -> None:
    token_ids, positions = request.token_ids, request.positions
    # A model may know fewer positions than the request has tokens.
    counts_itself = torch.equal(positions, torch.arange(len(positions)))
    alone = _run(model, token_ids, positions, names_positions=not counts_itself, kept=_KEPT, same=same)
    if _difference(model, alone):
        _check(
            model,
            _run(model, token_ids, positions, kept=_KEPT, same=same),
            "changes with the other tokens of the batch or their number",
        )
    _check(model, alone, "changes where positions are given: the model does not number a request's tokens from 0 on")


def _check_large_batch(model: PreTrainedModel, packed: ProbePass, max_step_tokens: int) -> ProbePass | None:
    """Compare tokens of `packed` with the same among many others, if a step may have so many."""
    numbers = thresholds_of(model.config, max_step_tokens, without=_WIDTHS)
    thresholds = [number for number in numbers if number >= len(packed.positions)]
    num_tokens = min(max_step_tokens, max([_LEAST_LARGE_TOKENS, *thresholds]) + _WINDOW)
    if num_tokens <= len(packed.positions) + _WINDOW:
        return None
    num_tokens = _free_number(model, num_tokens)
    origin = torch.randint(0, len(packed.positions), (num_tokens,), generator=torch.Generator().manual_seed(3))
    token_ids, positions = _random_ids(model, num_tokens), packed.positions[origin]
    begins = {begin for number in thresholds for begin in (number - _WINDOW, number)} | {num_tokens - _WINDOW}
    compared = torch.cat(
        [torch.arange(begin, begin + _WINDOW) for begin in sorted(begins) if 0 <= begin <= num_tokens - _WINDOW]
    )
    token_ids[compared] = packed.token_ids[origin[compared]]
    large = _run(
        model,
        token_ids,
        positions,
        kept=compared,
        same=SameTokens(packed, compared, origin[compared], _WINDOW),
        recorded=compared,
    )
    _check(model, large, f"changes where the batch has {num_tokens} tokens instead of {len(packed.positions)}")
    return large


def _check(model: PreTrainedModel, tried: ProbePass, reason: str) -> None:
    found = _difference(model, tried)
    if found:
        raise UnsupportedModel(
            f"model type {model.config.model_type}: {found} {reason}. Requests that share a batch would get "
            "wrong tokens: it is not served"
        )


def _difference(model: PreTrainedModel, tried: ProbePass) -> str:
    """The first difference for the tokens that two passes have in common; empty if there is none."""
    same, names = tried.same, {id(module): name for name, module in model.named_modules()}
    assert same is not None, "a pass that has no tokens in common with another"
    calls = list(zip(tried.recorder.calls, same.other.recorder.calls, strict=True))
    for layer, actual, expected in tried.layer_inputs.replaced:
        if _differs(actual, expected, same, model.dtype):
            return f"the input of {layer}"
        while calls and names[id(calls[0][0].module)].startswith(f"{layer}."):
            if found := _difference_of_calls(*calls.pop(0), tried, model.dtype):
                return f"{found} of {layer}"
    for call, other in calls:
        if found := _difference_of_calls(call, other, tried, model.dtype):
            return f"{found} of {names[id(call.module)]}"
    # Of one pass logits of some tokens only.
    kept = {int(token): row for row, token in enumerate(tried.kept)}
    kept_there = {int(token): row for row, token in enumerate(same.other.kept)}
    pairs = [
        (kept[here], kept_there[there])
        for here, there in zip(same.here.tolist(), same.there.tolist(), strict=True)
        if here in kept and there in kept_there
    ]
    rows, rows_there = torch.tensor(pairs).T
    is_other = _differs(tried.logits[rows], same.other.logits[rows_there], same, model.dtype)
    return "the vector of a token's logits" if is_other else ""


def _difference_of_calls(call: Call, other: Call, tried: ProbePass, dtype: torch.dtype) -> str:
    same = tried.same
    assert same is not None, "a pass that has no tokens in common with another"
    recorded = tried.recorder.rows
    assert recorded is None or recorded is same.here, "other tokens are recorded than are compared"
    here = same.here if recorded is None else torch.arange(len(recorded))
    for name in COMPUTED:
        value, value_there = call.kwargs.get(name), other.kwargs.get(name)
        if isinstance(value, torch.Tensor) and isinstance(value_there, torch.Tensor):
            is_same = torch.equal(value, value_there)
        else:
            is_same = value == value_there
        if not is_same:
            return f"the {name} of attention"
    for part in ("query", "key", "value"):
        actual, expected = (getattr(tensors, part)[0].transpose(0, 1) for tensors in (call, other))
        if _differs(actual[here], expected[same.there], same, dtype):
            return f"the {part}"
    return ""


def _differs(actual: torch.Tensor, expected: torch.Tensor, same: SameTokens, dtype: torch.dtype) -> bool:
    window = same.window or len(actual)
    windows = zip(torch.split(actual, window), torch.split(expected, window), strict=True)
    return differs(actual, expected, dtype) or any(differs(*rows, dtype) for rows in windows)


def _random_ids(model: PreTrainedModel, count: int) -> torch.Tensor:
    """int64 [count], the same in every call; a shorter result is the beginning of a longer one."""
    embedding: Any = model.get_input_embeddings()
    vocab_size = embedding.weight.shape[0]
    return torch.randint(0, vocab_size, (count,), generator=torch.Generator().manual_seed(1))


def _free_number(model: PreTrainedModel, least: int) -> int:
    """A number from `least` on that is not a size of this model, so that tokens are recognised by their number."""
    numbers = {size for parameter in model.parameters() for size in parameter.shape}
    numbers |= set(_integers(model.config.to_dict()))
    taken = numbers | {2 * number for number in numbers} | {number // 2 for number in numbers}
    return next(number for number in range(least, least + len(taken) + 1) if number not in taken)


def _integers(value: Any, without: frozenset[str] = frozenset()) -> Iterator[int]:
    """Every whole number in a nested value, 8192.0 among them, but for those below the keys `without`."""
    if isinstance(value, dict):
        value = [item for key, item in value.items() if key not in without]
    if isinstance(value, list | tuple):
        for item in value:
            yield from _integers(item, without)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value
    elif isinstance(value, float) and value.is_integer():
        yield int(value)
