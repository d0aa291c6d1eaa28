"""What tokenizer files say of conversations: the template and the special tokens that it may write.

Reads JSON only and compiles nothing. Used for the checkpoint and for adapters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CONFIG = "tokenizer_config.json"
_TOKENS = "special_tokens_map.json"
_TEMPLATE = "chat_template.jinja"
MAX_RESPONSE_TEMPLATE_BYTES = 1 << 16


class ChatFilesError(ValueError):
    """A file is not what transformers writes; the message names it, for the operator."""


@dataclass(frozen=True, slots=True)
class ChatFiles:
    """The template of a checkpoint, if it has one that can be chosen."""

    template: str | None
    special_tokens: Mapping[str, str]  # bos_token and the like -> its text
    reason: str = ""  # why there is no template, for clients
    response_template: Mapping[str, Any] | None = None  # how the text of a completion is read


def read_chat_files(model_dir: Path) -> ChatFiles:
    """Read them: chat_template.jinja comes before tokenizer_config.json. Raises ChatFilesError."""
    config = _read_object(model_dir / _CONFIG)
    tokens = special_tokens({**_read_object(model_dir / _TOKENS), **config})
    file = model_dir / _TEMPLATE
    try:
        response = response_template(config)
        if file.is_file():
            return ChatFiles(_read_text(file), tokens, response_template=response)
        templates = named_templates(config.get("chat_template"))
    except ValueError as error:
        raise ChatFilesError(f"{model_dir / _CONFIG}: {error}") from error
    if "default" in templates:
        return ChatFiles(templates["default"], tokens, response_template=response)
    reason = "the checkpoint has no chat template"
    if templates:
        reason = "the checkpoint has several chat templates, and none of them is named default"
    return ChatFiles(None, tokens, reason, response)


def named_templates(value: object) -> dict[str, str]:
    """The value of chat_template: one template is the default, a list names each of them. Raises ValueError."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, dict):
        value = [{"name": name, "template": template} for name, template in value.items()]
    if not isinstance(value, list):
        raise ValueError(f"chat_template is of type {type(value).__name__}; it must be a string or a list")
    templates: dict[str, str] = {}
    for index, entry in enumerate(value):
        for key in ("name", "template"):
            if not (isinstance(entry, dict) and isinstance(entry.get(key), str)):
                raise ValueError(
                    f'chat_template[{index}] has no string "{key}"; each entry of the list must be '
                    '{"name": ..., "template": ...}'
                )
        templates[entry["name"]] = entry["template"]
    return templates


def response_template(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """How the text of a completion is read, as tokenizer_config.json says; None if it says nothing. Raises ValueError.

    Its meaning is its reader's: servers hand it on as it is.
    """
    value = config.get("response_template")
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"response_template is of type {type(value).__name__}; it must be an object")
    if value and (size := len(json.dumps(value, ensure_ascii=False).encode())) > MAX_RESPONSE_TEMPLATE_BYTES:
        raise ValueError(f"response_template has {size} bytes as JSON; at most {MAX_RESPONSE_TEMPLATE_BYTES}")
    return value or None


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Texts of bos_token and the like. Entries may be strings or {"content": ...}."""
    tokens = {}
    for key, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            tokens[key] = content
    return tokens


def _read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is no file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(_read_text(file))
    except (ValueError, RecursionError) as error:
        raise ChatFilesError(
            f"{file}: not valid JSON: {error}; take the file from the checkpoint's source again"
        ) from error
    if not isinstance(content, dict):
        raise ChatFilesError(f"{file}: holds a value of type {type(content).__name__}; it must hold a JSON object")
    return content


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ChatFilesError(f"{file}: cannot be read: {error}") from error
