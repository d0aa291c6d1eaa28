"""Renders a conversation with the checkpoint's chat template, as transformers' apply_chat_template does.

The template is the checkpoint's code: it runs in jinja2's immutable sandbox, its output is bounded. Its time and its
memory are not: it is compiled and run in a process of its own (`render_process.py`).
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

MAX_RENDERED_CHARS = 4 * 2**20
# Put after the text of the message that stays open: the prompt ends where it appears. A template that strips texts
# strips the space at its end.
_OPEN_END = "MOTET_OPEN_END_OF_THE_LAST_MESSAGE "
_PART = "a part of what is said"


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
        self._parts_are_taken: bool | None = None  # None: not tried yet

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        time_s: float | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] = MappingProxyType({}),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt for the assistant's next turn. Raises ChatTemplateError.

        `time_s`: the moment, in seconds since 1970, that `strftime_now` prints in local time; None: now. With
        `continue_final_message` the prompt ends within the last message.
        """
        moment = datetime.datetime.now() if time_s is None else datetime.datetime.fromtimestamp(time_s)
        given = [dict(message) for message in messages]
        if any(isinstance(message["content"], list) for message in given) and not self._takes_parts():
            for message in given:
                message["content"] = _joined(message["content"])
        if continue_final_message:
            given[-1]["content"] = _with_open_end(given[-1]["content"])
        variables = {
            "tools": [dict(tool) for tool in tools] or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": moment.strftime,
            **self._special_tokens,
            **template_kwargs,
        }
        text = self._rendered(given, variables)
        if not continue_final_message:
            return text
        end = text.rfind(_OPEN_END.rstrip())
        if end < 0:
            raise ChatTemplateError(
                "the chat template leaves the last message out, so it cannot be continued; send another last message"
            )
        return text[:end] if text.startswith(_OPEN_END, end) else text[:end].rstrip()

    def _takes_parts(self) -> bool:
        """Whether a message's content may be a list of parts: tried, since templates do not say."""
        if self._parts_are_taken is None:
            probe: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": _PART}] * 2}]
            variables = {"tools": None, "documents": None, "add_generation_prompt": True, **self._special_tokens}
            try:
                text = self._rendered(probe, {**variables, "strftime_now": datetime.datetime.now().strftime})
            except ChatTemplateError:
                text = ""
            # One that knows no parts prints the list, or nothing of it.
            self._parts_are_taken = _PART in text and "'type'" not in text and '"type"' not in text
        return self._parts_are_taken

    def _rendered(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        parts: list[str] = []
        num_chars = 0
        try:
            for part in self._template.generate(messages=messages, **variables):
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


def _joined(content: Any) -> str:
    """Parts as one text."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _with_open_end(content: Any) -> Any:
    """A message's content with the mark after its text, or after its last part."""
    if isinstance(content, str):
        return content + _OPEN_END
    return [*content[:-1], {**content[-1], "text": content[-1]["text"] + _OPEN_END}]


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
