"""Renders a conversation with the checkpoint's chat template, as transformers' apply_chat_template does.

The template is the checkpoint's code: it runs in jinja2's immutable sandbox, its output is bounded. Its time and its
memory are not: it is compiled and run in a process of its own (`render_process.py`).
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

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
    """One compiled template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile it. Raises ChatTemplateError."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # constants are computed now, by whatever code they call
            raise ChatTemplateError(f"it does not compile: {type(error).__name__}: {str(error)[:200]}") from error
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
        except ChatTemplateError:
            raise
        except MemoryError as error:
            raise ChatTemplateError(
                "the chat template takes too much memory for this conversation; shorten it"
            ) from error
        except Exception as error:  # the edge of the checkpoint's code
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
