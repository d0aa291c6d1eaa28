"""Embeddings and classes: the calls as data, what callers give and what they get."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict

from motet.calls import UnaryCall
from motet.errors import invalid_field
from motet.inputs.scalars import text_of, uint_of
from motet.v1 import pooling_pb2

PoolingInput: TypeAlias = str | Sequence[int]  # text, or token ids

_UINT32_MAX = 2**32 - 1
_SERVICE = "/motet.v1.PoolingService/"


class Pooling(enum.StrEnum):
    """Which last hidden state stands for an input."""

    UNSPECIFIED = "unspecified"  # one that this SDK does not know
    LAST = "last"  # of the last token, as decoder models are trained
    MEAN = "mean"  # the mean over all tokens
    FIRST = "first"  # of the first token


class ProblemType(enum.StrEnum):
    """What the logits of a score head mean."""

    UNSPECIFIED = "unspecified"  # one that this SDK does not know
    SINGLE_LABEL = "single_label"  # one label holds: probabilities are a softmax
    MULTI_LABEL = "multi_label"  # each label holds or not: probabilities are sigmoids
    REGRESSION = "regression"  # values, such as a reward: no probabilities


_POOLINGS = {
    Pooling.LAST: pooling_pb2.POOLING_LAST,
    Pooling.MEAN: pooling_pb2.POOLING_MEAN,
    Pooling.FIRST: pooling_pb2.POOLING_FIRST,
}
_PROBLEM_TYPES = {
    ProblemType.SINGLE_LABEL: pooling_pb2.PROBLEM_TYPE_SINGLE_LABEL,
    ProblemType.MULTI_LABEL: pooling_pb2.PROBLEM_TYPE_MULTI_LABEL,
    ProblemType.REGRESSION: pooling_pb2.PROBLEM_TYPE_REGRESSION,
}


class PoolingOptions(TypedDict, total=False):
    """Keyword arguments of embed() and classify(). Left out or None: the server's default."""

    adapter_digest: str  # pins one version of the adapter; empty for the active one
    cache_salt: str  # requests of one tenant share cached prompts only when this is equal
    request_id: str  # label of your own for logs, at most 128 printable ASCII characters
    priority: int | None  # among the requests of your tenant, higher ones run first; from -100 to 100
    model_fingerprint: str  # the model that you rely on, as in status(); another one refuses the request


@dataclass(frozen=True, slots=True)
class Embedding:
    """The embedding of one input."""

    values: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int  # prompt tokens whose KV came from the prefix cache


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The embeddings of one call."""

    embeddings: tuple[Embedding, ...]  # one for each input, in order
    request_id: str
    adapter: str  # "adapters/{id}"; empty for the base model
    adapter_digest: str  # version that was used; empty for the base model
    model_fingerprint: str  # base model that was used
    tenant: str  # who the call is counted for
    pooling: Pooling  # in effect
    normalized: bool  # whether each embedding was divided by its length


@dataclass(frozen=True, slots=True)
class Classification:
    """The classes of one input."""

    label: str  # the likeliest; of a regression, the label of the largest value
    logits: tuple[float, ...]  # one for each label
    probabilities: tuple[float, ...]  # one for each label; empty for a regression
    prompt_tokens: int
    cached_tokens: int  # prompt tokens whose KV came from the prefix cache


@dataclass(frozen=True, slots=True)
class Classifications:
    """The classes of all inputs of one call."""

    classifications: tuple[Classification, ...]  # one for each input, in order
    labels: tuple[str, ...]  # in the order of the logits
    problem_type: ProblemType
    request_id: str
    adapter: str  # "adapters/{id}"
    adapter_digest: str  # version that was used
    model_fingerprint: str  # base model that was used
    tenant: str  # who the call is counted for


def embed_call(
    inputs: PoolingInput | Sequence[PoolingInput],
    *,
    adapter: str,
    pooling: Pooling | str | None,
    normalize: bool | None,
    dimensions: int | None,
    options: PoolingOptions,
) -> UnaryCall[Embeddings]:
    """One call. Raises InvalidArgument or TypeError for what the wire cannot carry."""
    request = pooling_pb2.EmbedRequest(**_common(inputs, adapter, options, "embed"))
    if pooling is not None:
        request.pooling = _number("pooling", pooling, Pooling, _POOLINGS)
    if normalize is not None:
        request.normalize = normalize
    if dimensions is not None:
        request.dimensions = uint_of("dimensions", dimensions, _UINT32_MAX)
    return UnaryCall(_SERVICE + "Embed", request, pooling_pb2.EmbedResponse, _embeddings_from, is_repeatable=True)


def classify_call(
    inputs: PoolingInput | Sequence[PoolingInput],
    *,
    adapter: str,
    problem_type: ProblemType | str | None,
    options: PoolingOptions,
) -> UnaryCall[Classifications]:
    """One call. Raises InvalidArgument or TypeError for what the wire cannot carry."""
    request = pooling_pb2.ClassifyRequest(**_common(inputs, adapter, options, "classify"))
    if problem_type is not None:
        request.problem_type = _number("problem_type", problem_type, ProblemType, _PROBLEM_TYPES)
    return UnaryCall(_SERVICE + "Classify", request, pooling_pb2.ClassifyResponse, _classes_from, is_repeatable=True)


def _common(
    inputs: PoolingInput | Sequence[PoolingInput], adapter: str, options: PoolingOptions, method: str
) -> dict[str, Any]:
    unknown = set(options) - PoolingOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"{method}() knows no {', '.join(sorted(unknown))}")
    values: dict[str, Any] = {
        name: text_of(name, options.get(name, ""))
        for name in ("request_id", "adapter_digest", "cache_salt", "model_fingerprint")
    }
    return {
        **values,
        "adapter": text_of("adapter", adapter),
        "priority": options.get("priority"),
        "inputs": [_input(each, f"inputs[{index}]") for index, each in enumerate(_listed(inputs))],
    }


def _listed(inputs: PoolingInput | Sequence[PoolingInput]) -> Sequence[PoolingInput]:
    """Several inputs; a text, or a list of token ids, is one input."""
    if isinstance(inputs, str):
        return [inputs]
    if isinstance(inputs, (bytes, Mapping)) or not isinstance(inputs, Sequence):
        raise TypeError(f"inputs is {type(inputs).__name__}; give a str, a list of token ids or a list of these")
    if inputs and isinstance(inputs[0], int):
        return [inputs]  # type: ignore[list-item]  # its first entry is a token id
    return inputs  # type: ignore[return-value]  # else each entry is an input, which _input checks


def _input(given: object, field: str) -> pooling_pb2.PoolingInput:
    message = pooling_pb2.PoolingInput()
    if isinstance(given, str):
        message.text = text_of(f"{field}.text", given)
        return message
    if isinstance(given, (bytes, Mapping)) or not isinstance(given, Sequence):
        raise TypeError(f"{field} is {type(given).__name__}; give a str or a list of token ids")
    message.token_ids.ids.extend(uint_of(f"{field}.token_ids", token, _UINT32_MAX) for token in given)
    return message


def _number(field: str, value: Any, kind: type[Any], numbers: Mapping[Any, Any]) -> Any:
    choices = ", ".join(numbers)
    if value not in numbers:
        raise invalid_field(field, f"is {value!r}; give one of {choices}")
    return numbers[kind(value)]


def _embeddings_from(response: pooling_pb2.EmbedResponse) -> Embeddings:
    poolings = {number: pooling for pooling, number in _POOLINGS.items()}
    return Embeddings(
        tuple(Embedding(tuple(each.values), each.prompt_tokens, each.cached_tokens) for each in response.embeddings),
        response.request_id,
        response.adapter,
        response.adapter_digest,
        response.model_fingerprint,
        response.tenant,
        poolings.get(response.pooling, Pooling.UNSPECIFIED),
        response.normalized,
    )


def _classes_from(response: pooling_pb2.ClassifyResponse) -> Classifications:
    kinds = {number: kind for kind, number in _PROBLEM_TYPES.items()}
    labels = tuple(response.labels)
    return Classifications(
        tuple(_classification(each, labels) for each in response.classifications),
        labels,
        kinds.get(response.problem_type, ProblemType.UNSPECIFIED),
        response.request_id,
        response.adapter,
        response.adapter_digest,
        response.model_fingerprint,
        response.tenant,
    )


def _classification(message: pooling_pb2.Classification, labels: tuple[str, ...]) -> Classification:
    logits = tuple(message.logits)
    best = max(range(len(logits)), key=logits.__getitem__, default=0)
    return Classification(
        labels[best] if best < len(labels) else "",
        logits,
        tuple(message.probabilities),
        message.prompt_tokens,
        message.cached_tokens,
    )
