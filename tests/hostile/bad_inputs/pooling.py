"""PoolingService: every field of Embed and Classify with values around its limits, and values that mean nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf.message import Message
from motet.v1 import pooling_pb2

from tests.hostile.bad_inputs import names
from tests.hostile.bad_inputs.case import INVALID, OK, Case, short
from tests.hostile.bad_inputs.facts import MAX_MODEL_LEN, VOCAB_SIZE, Facts

EMBED, CLASSIFY = "/motet.v1.PoolingService/Embed", "/motet.v1.PoolingService/Classify"
U32 = 2**32 - 1
WIDTH = 8  # of the hash worker's vectors
INPUT = {"token_ids": {"ids": [9, 10, 11]}}
UNKNOWN_MODEL = "f" * 64

# Of both calls. Field; values that are refused in its name; values that are taken.
COMMON: list[tuple[str, list[Any], list[Any]]] = [
    ("request_id", names.BAD_REQUEST_IDS, ["", *names.GOOD_REQUEST_IDS]),
    ("cache_salt", ["s" * 129, "€" * 43, "s" * 100_000], ["", "s" * 128, "\0"]),
    ("priority", [-101, 101, 2**31 - 1, -(2**31)], [-100, 0, 100]),
    ("model_fingerprint", names.BAD_DIGESTS, [""]),
    ("inputs", [[], [INPUT] * 65], [[INPUT], [INPUT] * 64]),
    ("adapter", [name for name in names.BAD_IDS if name], []),
]
OF_EMBED: list[tuple[str, list[Any], list[Any]]] = [
    ("pooling", [4, -1, 2**31 - 1], [0, 1, 2, 3]),
    ("normalize", [], [True, False]),
    ("dimensions", [0, WIDTH + 1, U32], [1, WIDTH]),
    ("adapter", [], [""]),
]
OF_CLASSIFY: list[tuple[str, list[Any]]] = [("problem_type", [4, -1, 2**31 - 1]), ("adapter", [""])]
# Inputs; the field at fault; what the message says.
INPUTS: list[tuple[list[dict[str, Any]], str, str]] = [
    ([{}], "inputs[0]", "text and token_ids"),
    ([INPUT, {}], "inputs[1]", "text and token_ids"),
    ([{"text": ""}], "inputs[0].text", "empty"),
    ([{"token_ids": {}}], "inputs[0].token_ids.ids", "empty"),
    ([{"token_ids": {"ids": [VOCAB_SIZE]}}], "inputs[0].token_ids.ids[0]", str(VOCAB_SIZE)),
    ([INPUT, {"token_ids": {"ids": [1, U32]}}], "inputs[1].token_ids.ids[1]", str(VOCAB_SIZE)),
    ([{"token_ids": {"ids": [9] * MAX_MODEL_LEN}}], "inputs[0].token_ids", str(MAX_MODEL_LEN)),
    ([INPUT, {"text": "word " * 10 * MAX_MODEL_LEN}], "inputs[1].text", str(MAX_MODEL_LEN)),
]


def cases(facts: Facts) -> Iterator[Case]:
    """All of them."""
    good: dict[str, dict[str, Any]] = {EMBED: {"inputs": [INPUT]}, CLASSIFY: {"inputs": [INPUT], "adapter": "good"}}
    for method, whole in good.items():
        for field, bad, taken in COMMON:
            yield from (_case(method, whole | {field: value}, fields=(field,)) for value in bad)
            if method == EMBED:
                yield from (_case(method, whole | {field: value}, code=OK) for value in taken)
        for inputs, field, says in INPUTS if method == EMBED else INPUTS[:-1]:  # tokenised once the adapter is known
            yield _case(method, whole | {"inputs": inputs}, fields=(field,), says=says)
        digest = whole | {"adapter_digest": "0" * 64}
        unknown: dict[str, Any] = {"code": grpc.StatusCode.NOT_FOUND, "reason": "ADAPTER_NOT_FOUND"}
        yield _case(method, digest | {"adapter": "good"}, **unknown)
        yield _case(method, whole | {"adapter": "nobody"}, **unknown)
        yield from (
            _case(method, whole | {"adapter": "good", "adapter_digest": value}, fields=("adapter_digest",))
            for value in names.BAD_DIGESTS
        )
        yield _case(
            method,
            whole | {"model_fingerprint": UNKNOWN_MODEL},
            code=grpc.StatusCode.FAILED_PRECONDITION,
            reason="PRECONDITION_FAILED",
        )
    for field, bad, taken in OF_EMBED:
        yield from (_case(EMBED, good[EMBED] | {field: value}, fields=(field,)) for value in bad)
        yield from (_case(EMBED, good[EMBED] | {field: value}, code=OK) for value in taken)
    yield _case(EMBED, good[EMBED] | {"adapter": "good", "adapter_digest": facts.good_digest}, code=OK)
    for field, bad in OF_CLASSIFY:
        yield from (_case(CLASSIFY, good[CLASSIFY] | {field: value}, fields=(field,)) for value in bad)
    yield _case(
        CLASSIFY,
        good[CLASSIFY],
        code=grpc.StatusCode.FAILED_PRECONDITION,
        reason="POOLING_NOT_SERVED",
        says="has no score head",
    )


def _case(method: str, given: dict[str, Any], **due: Any) -> Case:
    kind: type[Message] = pooling_pb2.EmbedRequest if method == EMBED else pooling_pb2.ClassifyRequest
    what = ", ".join(f"{name} = {short(value)}" for name, value in given.items())
    return Case(
        name=f"{method.rpartition('/')[2]}: {what}",
        method=method,
        messages=(kind(**given).SerializeToString(),),
        **{"code": INVALID, **due},
    )
