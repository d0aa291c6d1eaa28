"""ModelService: every field with values around its limits, and values that mean nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
from motet.v1 import model_pb2

from tests.hostile.bad_inputs import conversations, names
from tests.hostile.bad_inputs.case import OK, Case, short
from tests.hostile.bad_inputs.facts import VOCAB_SIZE, Facts

GET, TOKENIZE, DETOKENIZE = (f"/motet.v1.ModelService/{name}" for name in ("GetModel", "Tokenize", "Detokenize"))
KINDS: dict[str, Any] = {
    GET: model_pb2.GetModelRequest,
    TOKENIZE: model_pb2.TokenizeRequest,
    DETOKENIZE: model_pb2.DetokenizeRequest,
}
MIB = 1 << 20
U32 = 2**32 - 1
WHOLE: dict[str, dict[str, Any]] = {GET: {}, TOKENIZE: {"text": "Hello"}, DETOKENIZE: {"token_ids": {"ids": [9]}}}

# Method; fields; the field at fault, empty for what is taken; what the message says.
ROWS: list[tuple[str, dict[str, Any], str, str]] = [
    (TOKENIZE, {}, "input", "text and chat"),
    (TOKENIZE, {"text": "x" * (MIB + 1)}, "text", str(MIB)),
    (TOKENIZE, {"chat": {"messages": [{"role": "user", "content": "x" * MIB}]}}, "chat", str(MIB)),
    (TOKENIZE, {"chat": {}}, "chat.messages", "at least one"),
    (TOKENIZE, {"text": ""}, "", ""),
    (TOKENIZE, {"text": "\0", "return_tokens": True}, "", ""),
    (TOKENIZE, {"text": "x" * MIB}, "", ""),
    (TOKENIZE, {"text": "x" * (MIB // 2), "return_tokens": True}, "", ""),
    (TOKENIZE, {"text": "x", "add_special_tokens": False}, "", ""),
    (DETOKENIZE, {"token_ids": {"ids": [VOCAB_SIZE]}}, "token_ids.ids[0]", str(VOCAB_SIZE)),
    (DETOKENIZE, {"token_ids": {"ids": [1, U32]}}, "token_ids.ids[1]", str(VOCAB_SIZE)),
    (DETOKENIZE, {"token_ids": {"ids": [9] * (2**18 + 1)}}, "token_ids.ids", str(2**18)),
    (DETOKENIZE, {"token_ids": {"ids": [9] * 2**18}}, "", ""),
    (DETOKENIZE, {}, "", ""),
    (DETOKENIZE, {"token_ids": {"ids": [VOCAB_SIZE - 1]}, "skip_special_tokens": True}, "", ""),
]


def cases(facts: Facts) -> Iterator[Case]:
    """All of them."""
    for method, fields, field, says in ROWS:
        message = KINDS[method](**fields)
        yield _case(method, str(fields), message, (field,) if field else (), says)
    for method, whole in WHOLE.items():
        for name in [name for name in names.BAD_IDS if name]:
            yield _case(method, f"adapter={name}", KINDS[method](**whole, adapter=name), ("adapter",), "")
        for digest in names.BAD_DIGESTS:
            message = KINDS[method](**whole, adapter="good", adapter_digest=digest)
            yield _case(method, f"adapter_digest={digest}", message, ("adapter_digest",), "")
        alone = KINDS[method](**whole, adapter_digest=names.UNKNOWN_DIGEST)
        yield _case(method, "a digest alone", alone, ("adapter_digest",), "adapter")
        unknown = KINDS[method](**whole, adapter="nobody")
        yield Case(
            name=f"{method.rpartition('/')[2]} with an unknown adapter",
            method=method,
            messages=(unknown.SerializeToString(),),
            code=grpc.StatusCode.NOT_FOUND,
        )
    yield from conversations.cases(
        TOKENIZE,
        lambda chat: model_pb2.TokenizeRequest(chat=chat),
        without=["arguments of more than 1 MiB"],  # too long in all
    )


def _case(method: str, name: str, message: Any, fields: tuple[str, ...], says: str) -> Case:
    name = f"{method.rpartition('/')[2]} {short(name)}"
    if not fields:
        return Case(name=name, method=method, messages=(message.SerializeToString(),), code=OK)
    return Case(name=name, method=method, messages=(message.SerializeToString(),), fields=fields, says=says)
