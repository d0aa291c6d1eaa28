"""Which form the completions of a chat have, and what of it a request wants read.

Forms are kept for each version, which never changes. Which version a name stands for is kept for a moment, for the same
key: Motet judges at every request what the caller may see, and the first chunk says which version responds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from motet import AsyncClient, Chunk, InvalidArgument, Lark
from motet.inputs.constraints import Constraint
from motet.model.calls import ModelFacts, facts_call
from motet.responses import ResponseForm, ResponseParser, TemplateError, find_form_async

from gateway.http.keys import current_owner
from gateway.openai.chats.tool_choice import ToolChoice, grammar_of, grammar_of_content, refusal_of_grammar
from gateway.openai.chats.turns import Turn
from gateway.openai.errors import refused
from gateway.openai.formats import field_of_constraint
from gateway.openai.messages import ChatBody
from gateway.openai.models import KEPT_S, Source
from gateway.openai.replies import Reply

logger = logging.getLogger(__name__)

MAX_FORMS = 1024  # the oldest is found again
MAX_FACTS = 1024  # the oldest are read again


class Forms:
    """Forms by version and arguments of the chat template."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._forms: dict[tuple[str, str, str], ResponseForm | None] = {}
        # By owner of the key, adapter and digest: the facts, and when they were read. Oldest first.
        self._facts: dict[tuple[str, str, str], tuple[ModelFacts, float]] = {}

    async def find(
        self, source: Source, template_kwargs: Mapping[str, Any], client: AsyncClient
    ) -> tuple[ResponseForm | None, str]:
        """The form, if there is one, and the digest of the version that has it. Raises MotetError.

        Another version may have become active up to KEPT_S ago.
        """
        facts = await self._facts_of(source, client)
        key = (facts.fingerprint, facts.adapter_digest, json.dumps(template_kwargs, sort_keys=True))
        if key not in self._forms:
            try:
                form = await find_form_async(
                    client, facts.adapter, adapter_digest=facts.adapter_digest, template_kwargs=template_kwargs
                )
            except TemplateError as error:
                logger.warning("response template not used adapter=%s: %s", facts.adapter or "(base)", error)
                form = None  # its chat stays text
            self._forms[key] = form
            if len(self._forms) > MAX_FORMS:
                del self._forms[next(iter(self._forms))]
        return self._forms[key], facts.adapter_digest

    async def _facts_of(self, source: Source, client: AsyncClient) -> ModelFacts:
        """A call before every generation would cost each conversation a round trip: 1.0 ms of its first token."""
        key = (current_owner(), source.adapter, source.digest)
        facts, read_s = self._facts.pop(key, (None, 0.0))
        if facts is None or self._clock() - read_s >= KEPT_S:
            facts, read_s = await client.send(facts_call(source.adapter, source.digest)), self._clock()
        self._facts[key] = facts, read_s
        if len(self._facts) > MAX_FACTS:
            del self._facts[next(iter(self._facts))]
        return facts


class Reading:
    """How one request's completions are read. Make it with `reading`."""

    def __init__(
        self,
        body: ChatBody,
        choice: ToolChoice,
        source: Source,
        forms: Forms,
        form: ResponseForm | None,
        adapter_digest: str,
        constraint: Constraint | None,
    ) -> None:
        self.adapter_digest = adapter_digest  # of the version whose form was found
        # The grammar of calls, and of reasoning before calls or content, for this version. None: `constraint` says all.
        self.constraint = _constraint(body, choice, form, constraint)
        self._is_content_constrained = constraint is not None and not choice.is_required
        self._body = body
        self._choice = choice
        self._source = source
        self._forms = forms
        self._form = self._wanted(form)

    @property
    def is_needed(self) -> bool:
        """Whether there is anything but content to be read, for which special tokens must be in the text."""
        return self._form is not None

    def source_of(self, source: Source) -> Source:
        """What responds: a constraint is in the form of one version, which is named therefore."""
        if self.constraint is None or not self.adapter_digest:
            return source
        return dataclasses.replace(source, adapter=source.adapter.partition("@")[0], digest=self.adapter_digest)

    async def into(
        self, reply: Reply, chunks: AsyncGenerator[tuple[int, Chunk, str], None], client: AsyncClient
    ) -> AsyncGenerator[tuple[int, Chunk, str], None]:
        """The same chunks; before the first one, `reply` learns how they are read."""
        async with contextlib.aclosing(chunks):
            has_begun = False
            try:
                async for item in chunks:
                    if not has_begun:
                        has_begun = True
                        await self._begin(reply, item[1].adapter_digest, client)
                    yield item
            except InvalidArgument as error:
                is_ours = any(violation.field.startswith("constraint") for violation in error.field_violations)
                if self.constraint is None or not is_ours:
                    raise
                grammar, tools = self.constraint.grammar, self._body.tools or ()
                field = field_of_constraint(self._body) if self._is_content_constrained else "tools"
                raise refusal_of_grammar(error.message, grammar, self._choice, tools, field) from error

    async def _begin(self, reply: Reply, digest: str, client: AsyncClient) -> None:
        if digest != self.adapter_digest:  # a canary, or a version that became active a moment ago
            source = Source(self._source.adapter.partition("@")[0], digest)
            form, _ = await self._forms.find(source, self._body.chat_template_kwargs or {}, client)
            self._form = self._wanted(form)
        if (form := self._form) is not None:
            only_first = self._body.parallel_tool_calls is False
            reply.read_with(
                lambda: Turn(self._parser(form), only_first_call=only_first, is_named=self._choice.is_named)
            )

    def _wanted(self, form: ResponseForm | None) -> ResponseForm | None:
        """The form without calls where the request offers no tools; None if only content is left of it."""
        if form is None:
            return None
        fields = form.template.fields
        if not self._choice.is_offered:
            fields = {name: field for name, field in fields.items() if field.call is None}
        if all(field is form.template.implicit for field in fields.values()):
            return None
        return dataclasses.replace(form, template=dataclasses.replace(form.template, fields=fields))

    def _parser(self, form: ResponseForm) -> ResponseParser:
        if self._body.continue_final_message:
            parser = ResponseParser(form.template)
            parser.skip(_text(self._body.messages[-1].get("content")))
            return parser
        return ResponseParser(form.template) if self._body.add_generation_prompt is False else form.parser()


async def reading(
    body: ChatBody, choice: ToolChoice, source: Source, forms: Forms, client: AsyncClient, constraint: Constraint | None
) -> Reading:
    """How the completions of a request are read, and what they have to be for it. Raises Refusal, MotetError.

    `constraint`: what their content has to be.
    """
    form, digest = await forms.find(source, body.chat_template_kwargs or {}, client)
    return Reading(body, choice, source, forms, form, digest, constraint)


def _constraint(
    body: ChatBody, choice: ToolChoice, form: ResponseForm | None, constraint: Constraint | None
) -> Lark | None:
    goes_on = {
        "continue_final_message": bool(body.continue_final_message),
        "add_generation_prompt": body.add_generation_prompt is False,
    }
    tools, is_parallel = body.tools or (), body.parallel_tool_calls is not False
    if constraint is None or choice.is_required:  # calls that are required leave no room for content
        grammar = grammar_of(choice, tools, form, is_parallel=is_parallel)
    elif any(goes_on.values()) and not choice.is_offered:
        return None  # where the completion goes on in its text is not known
    else:
        grammar = grammar_of_content(
            constraint, field_of_constraint(body), choice, tools, form, is_parallel=is_parallel
        )
    if grammar is None:
        return None
    for name, is_given in goes_on.items():
        if is_given:
            raise refused(name, "is not served with calls that are required, strict or beside a constraint")
    return Lark(grammar)


def _text(content: object) -> str:
    """The text of a message's content, which may have parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = (part.get("text", "") if isinstance(part, Mapping) else part for part in parts)
    return "".join(text for text in texts if isinstance(text, str))
