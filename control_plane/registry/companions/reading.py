"""Reads the companion files of an adapter and makes the documents that its version keeps.

What says the same as the base checkpoint's files is dropped, so a directory that repeats the base model's tokenizer is
the same version as one without it. Runs in the process that packs the adapter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from control_plane.registry.adapter_files import (
    ADDED_TOKENS_FILE,
    COMPANION_LIMITS,
    GENERATION_FILE,
    SPECIAL_TOKENS_FILE,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG,
    TOKENIZER_FILE,
)
from control_plane.registry.companions.chat_files import (
    ChatFiles,
    named_templates,
    read_chat_files,
    response_template,
    special_tokens,
)
from control_plane.registry.companions.documents import CHAT, GENERATION, TOKENIZER, encode, encode_defaults
from control_plane.registry.companions.generation_config import read_defaults
from control_plane.registry.companions.tokenizer import TokenizerFiles, tokenizer_document
from control_plane.registry.model.base_model import BaseModel
from control_plane.registry.peft.problems import Problems
from control_plane.registry.peft.safetensors_header import refuse


def read_companions(files: Mapping[str, Path], base_model: BaseModel, num_tokens: int | None) -> dict[str, bytes]:
    """Documents by name, those only that differ from the base checkpoint's. Raises InvalidAdapter with all problems.

    `num_tokens`: of the adapter's own vocabulary; None: the base model's.
    """
    given = {name: files[name] for name in COMPANION_LIMITS if name in files}
    if not given:
        return {}
    problems, documents = Problems(), dict[str, bytes | None]()
    vocab_size = base_model.vocab_size if num_tokens is None else num_tokens
    objects: dict[str, dict[str, Any]] = {}
    for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS_FILE, ADDED_TOKENS_FILE, GENERATION_FILE):
        if name in given:
            with problems.collected():
                objects[name] = _read_object(given[name], name)
    problems.raise_all()
    with problems.collected():
        documents[CHAT] = _chat_document(given, objects, base_model)
    with problems.collected():
        own = _read_bytes(given[TOKENIZER_FILE], TOKENIZER_FILE) if TOKENIZER_FILE in given else None
        tokens = TokenizerFiles(own, objects.get(TOKENIZER_CONFIG, {}), objects.get(ADDED_TOKENS_FILE, {}))
        documents[TOKENIZER] = tokenizer_document(tokens, base_model.tokenizer_file, vocab_size)
    with problems.collected():
        if GENERATION_FILE in objects:
            defaults = read_defaults(objects[GENERATION_FILE], vocab_size)
            if defaults != _defaults_of_base(base_model):
                documents[GENERATION] = encode_defaults(defaults)
    problems.raise_all()
    return {name: document for name, document in documents.items() if document is not None}


def _chat_document(
    given: Mapping[str, Path], objects: Mapping[str, dict[str, Any]], base_model: BaseModel
) -> bytes | None:
    """Chat template, special tokens that it names, own response template; None if all are the base checkpoint's."""
    base = read_chat_files(base_model.model_dir)
    config = objects.get(TOKENIZER_CONFIG, {})
    tokens = {**base.special_tokens, **special_tokens({**objects.get(SPECIAL_TOKENS_FILE, {}), **config})}
    template = base.template
    if TEMPLATE_FILE in given:
        try:
            template = _read_bytes(given[TEMPLATE_FILE], TEMPLATE_FILE).decode()
        except UnicodeDecodeError as error:
            raise refuse(TEMPLATE_FILE, "is not UTF-8; save it as UTF-8") from error
    elif config.get("chat_template") is not None:
        try:
            templates = named_templates(config["chat_template"])
        except ValueError as error:
            raise refuse(TOKENIZER_CONFIG, str(error)) from error
        if "default" not in templates:
            raise refuse(TOKENIZER_CONFIG, 'chat_template has no template named "default"; name the one to use so')
        template = templates["default"]
    if template is None:
        return None
    own_response = _own_response_template(config, base)
    named = {key: text for key, text in tokens.items() if key in template}
    is_base = template == base.template and not own_response
    if is_base and named == {key: text for key, text in base.special_tokens.items() if key in named}:
        return None
    return encode({"template": template, "special_tokens": named, **own_response})


def _own_response_template(config: Mapping[str, Any], base: ChatFiles) -> dict[str, Any]:
    """The template as a document has it; nothing if the adapter has none, or the base checkpoint's."""
    try:
        template = response_template(config)
    except ValueError as error:
        raise refuse(TOKENIZER_CONFIG, str(error)) from error
    return {} if template in (None, base.response_template) else {"response_template": template}


def _defaults_of_base(base_model: BaseModel) -> object:
    """What the adapter's file would mean if it were the base checkpoint's; None if that has none, or no good one."""
    try:
        values = json.loads((base_model.model_dir / GENERATION_FILE).read_bytes())
        return read_defaults(values, base_model.vocab_size)
    except (OSError, ValueError, RecursionError, AttributeError, TypeError):
        return None
    except Exception as error:
        if isinstance(error, MemoryError):
            raise
        return None  # values that an adapter may not have


def _read_bytes(path: Path, name: str) -> bytes:
    limit = COMPANION_LIMITS[name]
    with path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise refuse(name, f"has more than {limit} bytes, the limit; save less in it, or leave the file out")
    return data


def _read_object(path: Path, name: str) -> dict[str, Any]:
    """Strict JSON: no key twice, and no values that JSON does not have."""
    try:
        value = json.loads(_read_bytes(path, name), object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise refuse(name, f"is not valid JSON: {str(error)[:200]}; save it again, or leave the file out") from error
    if not isinstance(value, dict):
        raise refuse(name, f"holds a value of type {type(value).__name__}; it must hold a JSON object")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = next(key for index, (key, _) in enumerate(pairs) if any(key == other for other, _ in pairs[:index]))
        raise ValueError(f"the key {twice[:60]!r} appears twice")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")
