"""Finds the form that a chat's completions have, and what of it is to be read for a request.

Forms are kept for each version, which never changes. Which version a name stands for is kept for a moment, for the same
key: Motet judges at every request what the caller may see, and the first chunk says which version responds. If that is
another one, whose form differs, the generation begins again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from motet import AsyncClient, Chunk, GenerateOptions, InvalidArgument, Lark, NotFound
from motet.inputs.constraints import Constraint
from motet.model.calls import ModelFacts, facts_call
from motet.responses import ResponseForm, ResponseParser, TemplateError, find_form_async

from gateway.http.errors import Refusal
from gateway.http.keys import current_owner
from gateway.openai.chats.tool_choice import ToolChoice, grammar_of, grammar_of_content, refusal_of_grammar
from gateway.openai.chats.turns import Turn
from gateway.openai.errors import FieldRefusal, refused
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

    def forget(self, source: Source) -> bool:
        """Read again which version the name stands for; False if that was not kept."""
        return self._facts.pop((current_owner(), source.adapter, source.digest), None) is not None

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


@dataclass(frozen=True, slots=True)
class _VersionForm:
    """How the completions of a request are made and read where one version responds."""

    digest: str  # of the version; empty for the base model
    form: ResponseForm | None  # without calls where the request offers no tools; None if only content is left of it
    constraint: Lark | None  # the grammar of calls, and of reasoning before calls or content. None: as the request says

    @property
    def options(self) -> GenerateOptions:
        """What it adds to the options of the generation."""
        options = GenerateOptions()
        if self.form is not None:
            options["skip_special_tokens"] = False
        if self.constraint is not None:
            options["constraint"] = self.constraint
        return options


Item = tuple[int, Chunk, str]  # as chunks_of has it
Begin = Callable[[Source, GenerateOptions], AsyncGenerator[Item, None]]


class Reading:
    """How one request's completions are read."""

    def __init__(
        self, body: ChatBody, choice: ToolChoice, source: Source, forms: Forms, constraint: Constraint | None
    ) -> None:
        """`constraint`: what the content has to be."""
        self._body = body
        self._choice = choice
        self._source = source
        self._forms = forms
        self._content = constraint

    async def chunks(self, reply: Reply, begin: Begin, client: AsyncClient) -> AsyncGenerator[Item, None]:
        """Those of the generation, none of which is there yet. Before the first one, `reply` learns how they are read.

        `begin` makes the generation, with these options beside the request's own. If the version that responds turns
        out to need others (a canary, or one that became active a moment ago), it is made again, for this version: none
        of it was seen yet. If the grammar is refused, it is made again for the active version. Raises Refusal,
        MotetError.
        """
        try:
            current = await self._version_form(self._source, client)
        except (Refusal, NotFound):
            if not self._forms.forget(self._source):
                raise
            current = await self._version_form(self._source, client)  # another version may be active now
        return self._chunks(current, reply, begin, client)

    async def _chunks(
        self, current: _VersionForm, reply: Reply, begin: Begin, client: AsyncClient
    ) -> AsyncGenerator[Item, None]:
        source = self._source
        while True:
            async with contextlib.aclosing(self._chunks_of(source, current, begin)) as chunks:
                first, other = await self._first(chunks, source, current, reply, client)
                if other is None:
                    for item in first:
                        yield item
                    async for item in chunks:
                        yield item
                    return
            source, current = self._version(other.digest), other

    async def _first(
        self,
        chunks: AsyncGenerator[Item, None],
        source: Source,
        current: _VersionForm,
        reply: Reply,
        client: AsyncClient,
    ) -> tuple[list[Item], _VersionForm | None]:
        """The first chunk; or none, and the version for which the generation has to begin again."""
        try:
            item = await anext(chunks, None)
        except FieldRefusal:
            if source is not self._source or source.digest or not current.digest:
                raise
            # By a version that has other tokens, perhaps: a canary, or one that became active a moment ago.
            self._forms.forget(source)
            return [], await self._version_form(source, client)
        if item is None:
            return [], None
        digest = item[1].adapter_digest
        found = current if digest == current.digest else await self._version_form(self._version(digest), client)
        if found.options != current.options:
            return [], found
        if (form := found.form) is not None:
            reply.read_with(lambda: Turn(self._parser(form), is_named=self._choice.is_named))
        return [item], None

    async def _chunks_of(self, source: Source, current: _VersionForm, begin: Begin) -> AsyncGenerator[Item, None]:
        """Those of one generation. Raises Refusal about the request's own fields, MotetError."""
        try:
            async with contextlib.aclosing(begin(source, current.options)) as chunks:
                async for item in chunks:
                    yield item
        except InvalidArgument as error:
            is_ours = any(violation.field.startswith("constraint") for violation in error.field_violations)
            if current.constraint is None or not is_ours:
                raise
            grammar, tools = current.constraint.grammar, self._body.tools or ()
            is_content = self._content is not None and not self._choice.is_required
            field = field_of_constraint(self._body) if is_content else "tools"
            raise refusal_of_grammar(error.message, grammar, self._choice, tools, field) from error

    async def _version_form(self, source: Source, client: AsyncClient) -> _VersionForm:
        form, digest = await self._forms.find(source, self._body.chat_template_kwargs or {}, client)
        return _VersionForm(digest, self._wanted(form), _constraint(self._body, self._choice, form, self._content))

    def _version(self, digest: str) -> Source:
        return dataclasses.replace(self._source, adapter=self._source.adapter.partition("@")[0], digest=digest)

    def _wanted(self, form: ResponseForm | None) -> ResponseForm | None:
        if form is None:
            return None
        fields = form.template.fields
        if not self._choice.is_offered:
            fields = {name: field for name, field in fields.items() if field.call is None}
        if all(field is form.template.implicit for field in fields.values()):
            return None
        return dataclasses.replace(form, template=dataclasses.replace(form.template, fields=fields))

    def _parser(self, form: ResponseForm) -> ResponseParser:
        only_first = self._body.parallel_tool_calls is False
        if not self._body.continue_final_message and self._body.add_generation_prompt is not False:
            return form.parser(only_first_call=only_first)
        parser = ResponseParser(form.template, only_first_call=only_first)
        if self._body.continue_final_message:
            parser.skip(_text(self._body.messages[-1].get("content")))
        return parser


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
