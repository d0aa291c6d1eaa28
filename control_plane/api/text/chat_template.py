"""Renders a conversation with the checkpoint's chat template, as transformers' apply_chat_template does.

The template is the checkpoint's code: it runs in jinja2's immutable sandbox, its output is bounded. The caller
keeps it off the event loop.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

MAX_RENDERED_CHARS = 4 * 2**20


class ChatTemplateError(Exception):
    """The template refused the conversation; the message is for the caller."""


class _GenerationBlock(jinja2.ext.Extension):
    """{% generation %} marks the assistant's tokens for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class ChatTemplate:
    """One compiled template. `render` is safe in any thread."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]], time_s: float | None = None) -> str:
        """The prompt for the assistant's next turn. Raises ChatTemplateError.

        `time_s`: the moment, in seconds since 1970, that `strftime_now` prints in local time; None: now.
        """
        moment = datetime.datetime.now() if time_s is None else datetime.datetime.fromtimestamp(time_s)
        parts: list[str] = []
        num_chars = 0
        try:
            for part in self._template.generate(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                strftime_now=moment.strftime,
                **self._special_tokens,
            ):
                num_chars += len(part)
                if num_chars > MAX_RENDERED_CHARS:
                    raise ChatTemplateError(f"the rendered conversation exceeds {MAX_RENDERED_CHARS} characters")
                parts.append(part)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template refuses the conversation: {str(error)[:200]}") from error
        except (
            ArithmeticError,
            LookupError,
            MemoryError,
            OverflowError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise ChatTemplateError(
                f"the chat template fails on this conversation ({type(error).__name__}); check roles and their order"
            ) from error
        return "".join(parts)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which a prompt must not.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def template_source(config: Mapping[str, Any], jinja_file: str | None) -> str | None:
    """The checkpoint's template: chat_template.jinja first, then tokenizer_config.json; None if there is none."""
    if jinja_file is not None:
        return jinja_file
    template = config.get("chat_template")
    if isinstance(template, str):
        return template
    if isinstance(template, list):  # named templates
        by_name = {entry["name"]: entry["template"] for entry in template}
        return cast("str | None", by_name.get("default"))
    return None


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and the like, as text; entries may be strings or {"content": ...}."""
    tokens = {}
    for key, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            tokens[key] = content
    return tokens
