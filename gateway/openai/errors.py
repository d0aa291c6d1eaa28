"""Refusals as OpenAI's clients read them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from motet import MotetError

from gateway.http.errors import Refusal, refusal_from

_CODES: Mapping[int, str] = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}
# LiteLLM takes every "invalid_request_error" for a 400, whatever the status is.
_TYPES: Mapping[int, str] = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
# What a field of Motet's request is called here. Others have the last part of their path.
_FIELDS: Mapping[str, str] = {
    "adapter": "model",
    "adapter_digest": "model",
    "chat": "messages",
    "constraint": "response_format",
    "constraint.choices": "structured_outputs",
    "constraint.choices.texts": "structured_outputs",
    "constraint.json_object": "response_format",
    "constraint.json_schema": "response_format",
    "constraint.lark": "structured_outputs",
    "constraint.regex": "structured_outputs",
    "constraint.structural_tags": "structured_outputs",
    "chat.template_kwargs": "chat_template_kwargs",
    "inputs": "input",
    "template_kwargs": "chat_template_kwargs",
    "text": "prompt",
    "token_ids": "prompt",
    "token_ids.ids": "prompt",
}
# A message of a conversation, as the SDK names it and as the server does.
_MESSAGE = re.compile(r"(?:prompt|chat\.messages)(\[\d+\].*)")
# Groups of Motet's fields, which bodies do not have.
_GROUP = re.compile(r"\b(?:chat|decoding|sampling|stopping)\.(?=[a-z])")
_LONGEST_RETRY_S = 120.0  # clients give up on more
_FIELD_IN_MESSAGE = re.compile(r"unknown field `([^`]{1,100})`|required field `([^`]{1,100})`|at `\$\.([a-z_]{1,100})")


class FieldRefusal(Refusal):
    """A refusal that names a field of the body, or has a code of its own."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(status, message)
        self.param = param
        self.code = code


class Problem(msgspec.Struct):
    """What was wrong."""

    message: str
    type: str
    param: str | None  # the field that it is about
    code: str | None


class ErrorBody(msgspec.Struct):
    """The body of every refusal."""

    error: Problem


def refused(param: str, what: str) -> FieldRefusal:
    """One that names a field."""
    return FieldRefusal(f"{param}: {what}", param=param)


def unknown_model(
    model: str, hint: str = "GET /v1/models lists what there is", *, param: str = "model"
) -> FieldRefusal:
    """Nothing here has this name. The base model never responds in its place."""
    return FieldRefusal(
        f"the model {model[:200]!r} does not exist; {hint}", param=param, status=404, code="model_not_found"
    )


def undecodable(problem: Exception) -> FieldRefusal:
    """A body that is not what it should be. The message names the field, never its value."""
    found = _FIELD_IN_MESSAGE.search(str(problem))
    param = next((name for name in found.groups() if name), None) if found else None
    return FieldRefusal(f"the body is not valid: {problem}", param=param)


def refusal_of(error: MotetError | Refusal) -> Refusal:
    """An error of the SDK, with the field and the code that OpenAI's clients know."""
    if isinstance(error, Refusal):
        return error
    plain = refusal_from(error)
    param = None if plain.status == 401 else _param_of(error)
    code = _CODES.get(plain.status)
    if plain.status == 404:
        param = "model"
    if error.reason == "CONTEXT_TOO_LONG":
        code = "context_length_exceeded"
    refusal = FieldRefusal(_with_param(plain.message, error, param), param=param, status=plain.status, code=code)
    refusal.headers = dict(plain.headers)
    if plain.status == 503 and "retry-after" not in plain.headers:
        refusal.headers = {**plain.headers, "retry-after": "1"}
    if error.retry_after_s is not None and error.retry_after_s > _LONGEST_RETRY_S:
        refusal.headers = {**plain.headers, "x-should-retry": "false"}
    return refusal


def problem_of(refusal: Refusal) -> Problem:
    """What a refusal says."""
    kind = _TYPES.get(refusal.status, "invalid_request_error" if refusal.status < 429 else "server_error")
    param, code = getattr(refusal, "param", None), getattr(refusal, "code", None)
    if code is None and refusal.status != 404:
        code = _CODES.get(refusal.status)
    return Problem(refusal.message, kind, param, code)


def error_body(refusal: Refusal) -> dict[str, Any]:
    """The body of a refusal."""
    body: dict[str, Any] = msgspec.to_builtins(ErrorBody(problem_of(refusal)))
    return body


def renamed(refusal: Refusal, name: str) -> Refusal:
    """The same refusal, of the field `name`: what its message is about has this name in the request."""
    if isinstance(refusal, FieldRefusal) and refusal.param is not None:
        if refusal.message.startswith(refusal.param):
            refusal.message = name + refusal.message.removeprefix(refusal.param)
        refusal.param = name
    return refusal


def _param_of(error: MotetError) -> str | None:
    if not error.field_violations:
        return None
    path = error.field_violations[0].field
    if found := _MESSAGE.fullmatch(path):
        return f"messages{found[1]}"
    return _names_of(path)[0] or None


def _names_of(path: str) -> tuple[str, str]:
    """What the body calls a field of Motet's request, and the place in it that the path names, such as "[3]"."""
    head, bracket, place = path.partition("[")
    return _FIELDS.get(head, head.rpartition(".")[2]), bracket + place


def _with_param(message: str, error: MotetError, param: str | None) -> str:
    """The message with the name of its field as the body has it: "temperature: ..." and "messages[1].role: ..."."""
    path = error.field_violations[0].field if error.field_violations else ""
    if param is None or not message.startswith(f"{path}:"):
        return message
    name = param if _MESSAGE.fullmatch(path) else "".join(_names_of(path))
    return name + _GROUP.sub("", message.removeprefix(path))
